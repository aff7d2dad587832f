"""Backward that the caller completes, and memory of full parameters that is kept: torch 2.15's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from fullshard import fully_shard
from fullshard._torch import to_local
from fullshard.testing import Rank, on_ranks

APIS: list[Callable[..., Any]] = [fully_shard]
if hasattr(torch_fsdp.FSDPModule, "finalize_backward"):  # torch 2.15
    APIS.append(torch_fsdp.fully_shard)


def built(shard: Callable[..., Any], rank: Rank) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    for module in (model[0], model[2], model):
        shard(module, mesh=rank.mesh())
    return model


def loss_of(model: Any, rank: Rank, micro_batch: int) -> torch.Tensor:
    torch.manual_seed(10 * rank.rank + micro_batch)
    return model(torch.randn(6, 4)).square().mean()


def grads_of(model: Any) -> list[torch.Tensor]:
    return [to_local(param.grad).clone() for param in model.parameters()]


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(2)
def test_gradients_are_those_of_backwards_that_end_by_themselves(
    rank: Rank, async_op: bool, is_kept: bool
) -> None:
    expected = built(fully_shard, rank)
    for micro_batch in range(2):
        loss_of(expected, rank, micro_batch).backward()
    for shard in APIS:
        model = built(shard, rank)
        model.set_manual_backward_finalization(True)
        for _ in range(2):
            model.zero_grad()
            for micro_batch in range(2):
                model.set_requires_gradient_sync(not is_kept)
                loss_of(model, rank, micro_batch).backward()
                if not is_kept and shard is not fully_shard:
                    model.finalize_backward()  # torch's needs a call for each
            model.set_requires_gradient_sync(True)
            handle = model.finalize_backward(async_op=async_op)
            if async_op:
                handle.wait()
            for found, wanted in zip(grads_of(model), grads_of(expected), strict=True):
                torch.testing.assert_close(found, wanted)


@on_ranks(2)
def test_calls_at_the_wrong_time_are_refused(rank: Rank) -> None:
    for shard in APIS:
        model = built(shard, rank)
        assert model.finalize_backward() is None  # nothing has run
        loss_of(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match="manual"):
            model.finalize_backward()
        with pytest.raises(RuntimeError, match="root"):
            model[0].set_manual_backward_finalization(True)
        model.set_manual_backward_finalization(True)
        loss_of(model, rank, 1).backward()
        with pytest.raises(RuntimeError, match="set_manual_backward_finalization"):
            model.set_manual_backward_finalization(False)
        handle = model.finalize_backward(async_op=True)
        with pytest.raises(RuntimeError, match="wait"):
            model(torch.randn(2, 4))
        with pytest.raises(RuntimeError, match="wait"):
            model.finalize_backward()
        handle.wait()
        handle.wait()  # once more is harmless
        loss_of(model, rank, 2).backward()
        dropped = model.finalize_backward(async_op=True)
        model.reset_iter_state()
        with pytest.raises(RuntimeError, match=r"reset_iter_state|invalidated"):
            dropped.wait()
        model.set_manual_backward_finalization(False)
        model.zero_grad()
        loss_of(model, rank, 0).backward()
        assert all(grad.isfinite().all() for grad in grads_of(model))


@pytest.mark.parametrize("number", range(len(APIS)))
@on_ranks(2)
def test_kept_storage_stays_where_it_was_and_trains_alike(rank: Rank, number: int) -> None:
    expected, model = built(fully_shard, rank), built(APIS[number], rank)
    model.set_keep_unsharded_storage(True)
    pointers = set()
    for step in range(3):
        for each in (expected, model):
            each.zero_grad()
            loss_of(each, rank, step).backward()
            with torch.no_grad():
                for param in each.parameters():
                    to_local(param).sub_(to_local(param.grad))
        for found, wanted in zip(grads_of(model), grads_of(expected), strict=True):
            torch.testing.assert_close(found, wanted)
        model[0].unshard()
        pointers.add(model[0].weight.data_ptr())
        model[0].reshard()
    assert len(pointers) == 1
    model.set_keep_unsharded_storage(False)
    model[0].unshard()
    storage = model[0].weight.untyped_storage()
    model[0].reshard()
    assert storage.size() == 0
