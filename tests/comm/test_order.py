"""Ranks predict what comes next, and compare only what they did not expect."""

import socket
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import DisagreementError, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from fullshard.comm.order import Pass, PassOrder
from fullshard.testing import Rank, on_ranks

WIDTH = 8


class Counting:
    """Counts what ranks compare, in the place of `PassOrder.compare`, which it calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._compare = PassOrder.compare

    def __get__(self, order: Any, kind: Any) -> Callable[..., None]:
        def compare(found: str, *others: Any) -> None:
            self.asked.append(found)
            self._compare(order, found, *others)

        return compare


def model_on(rank: Rank, api: str = "fully_shard", **settings: Any) -> Any:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    if api == "wrapper":
        return FullyShardedDataParallel(model, use_orig_params=True)
    for module in [*model, model]:
        fully_shard(module, mesh=rank.mesh(), **settings)
    return model


def loss_of(model: Any) -> Tensor:
    return model(torch.ones(2, WIDTH)).square().mean()


def accumulate(models: list[Any], optimizers: list[Any], step: int) -> None:
    for number in range(4):
        with models[0].no_sync() if number < 3 else nullcontext():
            loss_of(models[0]).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()


def take_turns(models: list[Any], optimizers: list[Any], step: int) -> None:
    """As a generator and its critic do."""
    for _ in range(3):
        (loss_of(models[1]) - loss_of(models[1])).backward()
        optimizers[1].step()
    loss_of(models[0]).backward()
    optimizers[0].step()
    with torch.no_grad():
        loss_of(models[0])


@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
@pytest.mark.parametrize("take_step", [accumulate, take_turns])
@on_ranks(2)
def test_a_program_that_repeats_itself_asks_nobody(
    rank: Rank, api: str, take_step: Callable[..., None]
) -> None:
    models = [model_on(rank, api) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    with patch.object(PassOrder, "compare", Counting()) as counting:
        for step in range(6):
            if step == 4:
                assert counting.asked  # it has learned what this program does
                counting.asked.clear()
            take_step(models, optimizers, step)
    assert not counting.asked


@on_ranks(2)
def test_a_program_without_an_optimizer_asks_nobody_after_a_while(rank: Rank) -> None:
    model = model_on(rank)
    with patch.object(PassOrder, "compare", Counting()) as counting:
        for step in range(70):
            if step == 60:
                counting.asked.clear()
            loss_of(model).backward()
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
    assert not counting.asked


@on_ranks(2)
def test_a_program_that_changes_for_a_while_asks_a_few_times(rank: Rank) -> None:
    model = model_on(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with patch.object(PassOrder, "compare", Counting()) as counting:
        for step in range(24):
            loss_of(model).backward()
            optimizer.step()
            for _ in range(50 if step % 8 == 7 else 0):
                with torch.no_grad():
                    loss_of(model)
    assert len(counting.asked) < 20, counting.asked


@on_ranks(2)
def test_a_forward_that_needs_no_collective_may_be_run_by_one_rank_alone(rank: Rank) -> None:
    model = model_on(rank, reshard_after_forward=False)
    for _ in range(3):
        loss_of(model)
        if rank.rank == 1:
            with torch.no_grad():
                loss_of(model)
        loss_of(model).backward()


SETTINGS: dict[str, dict[str, Any]] = {
    "reshard_after_forward": {"reshard_after_forward": False},
    "output_dtype": {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float64)},
}


@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(2)
def test_a_setting_that_differs_is_named_with_both_values_and_places(rank: Rank, name: str) -> None:
    model = model_on(rank, **(SETTINGS[name] if rank.rank == 1 else {}))
    host = socket.gethostname()
    value = next(iter(SETTINGS[name].values()))
    value = getattr(value, name, value)
    with pytest.raises(DisagreementError) as raised:
        loss_of(model)
    assert f"{name} is {value} on rank 1 ({host}), but None on rank 0 ({host})" in str(raised.value)


OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "SGD, group 0, lr is 0.1 on": (
        lambda params: torch.optim.SGD(params, 0.1),
        lambda params: torch.optim.SGD(params, 0.2),
    ),
    "AdamW, group 0, betas is (0.9, 0.999) on": (
        lambda params: torch.optim.AdamW(params),
        lambda params: torch.optim.AdamW(params, betas=(0.9, 0.95)),
    ),
    "class is SGD on": (
        lambda params: torch.optim.SGD(params),
        lambda params: torch.optim.AdamW(params),
    ),
}


@pytest.mark.parametrize("found", OPTIMIZERS)
@on_ranks(2)
def test_hyperparameters_that_differ_are_named(rank: Rank, found: str) -> None:
    model = model_on(rank)
    optimizer = OPTIMIZERS[found][rank.rank](model.parameters())
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(DisagreementError) as raised:
        loss_of(model)
    for part in ("optimizer: ", "rank 0 (", "rank 1 (", found if rank.rank == 0 else " is "):
        assert part in str(raised.value)
    dist.barrier()
    again = model_on(rank)  # a model that agrees can be trained
    loss_of(again).backward()


def test_a_pass_is_described_by_what_makes_it_special() -> None:
    forward = Pass(1, "forward", "Model", takes_grad=True)
    assert str(forward._replace(num_steps=2)) == "forward of Model after 2 optimizer steps"
    assert str(forward._replace(takes_grad=False)) == "forward of Model without gradients"
    assert str(forward.usual_next) == "backward of Model (pass 2 of a step)"
