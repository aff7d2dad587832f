"""Gradients are the same tensors in every step, unless someone keeps one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.device import ResizableBuffer
from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import shard_parts

WIDTH = 8


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


APIS: dict[str, Callable[[Rank], nn.Module]] = {
    "fully_shard": lambda rank: shard_parts(
        partial(fully_shard, mesh=rank.mesh()), layers(), "0", "1"
    ),
    "orig": lambda rank: FullyShardedDataParallel(layers(), use_orig_params=True),
    "flat": lambda rank: FullyShardedDataParallel(layers()),
}


def run(model: nn.Module, scale: float) -> None:
    batch = torch.arange(2.0 * WIDTH).view(2, WIDTH)
    (model(batch).sum() * scale).backward()


def local(grad: Tensor) -> Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def first(model: nn.Module) -> nn.Parameter:
    return next(p for p in model.parameters() if p.grad is not None and p.grad.numel())


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_gradients_are_the_same_tensors_in_every_step(rank: Rank, api: str) -> None:
    torch.manual_seed(0)
    model = APIS[api](rank)
    found = []
    for scale in (1.0, 2.0):
        run(model, scale)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append(([id(grad) for grad in grads], [local(grad).clone() for grad in grads]))
        del grads
        model.zero_grad()
    (first_ids, first_values), (ids, values) = found
    assert ids == first_ids
    torch.testing.assert_close(values, [2 * value for value in first_values])


def as_it_is(grad: Tensor) -> Tensor:
    return grad


def as_its_memory(grad: Tensor) -> Tensor:
    return local(grad)


def as_a_view(grad: Tensor) -> Tensor:
    return local(grad).view(-1)[:1]


def as_another_ones_gradient(grad: Tensor) -> nn.Parameter:
    """Keep the gradient so that nothing in Python refers to it."""
    other = nn.Parameter(torch.empty_like(local(grad)))
    other.grad = local(grad)
    return other


def value_of(kept: Tensor) -> Tensor:
    return local(kept if kept.grad is None else kept.grad).detach()


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_a_gradient_that_someone_keeps_is_left_alone(rank: Rank, api: str) -> None:
    for keep in (as_it_is, as_its_memory, as_a_view, as_another_ones_gradient):
        torch.manual_seed(0)
        model = APIS[api](rank)
        for _ in range(2):
            run(model, 1.0)
            kept = keep(first(model).grad)
            before = value_of(kept).clone()
            model.zero_grad()
            run(model, 3.0)
            torch.testing.assert_close(value_of(kept), before, rtol=0, atol=0)
            expected = 3 * before.view(-1)
            found = local(first(model).grad).view(-1)[: expected.numel()]
            torch.testing.assert_close(found, expected, msg=keep.__name__)
            model.zero_grad()


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_dropped_gradients_take_no_memory_while_the_next_pass_computes(
    rank: Rank, api: str
) -> None:
    model = APIS[api](rank)
    run(model, 1.0)
    storage = local(first(model).grad).untyped_storage()
    model.zero_grad()
    sizes = []
    model.register_forward_pre_hook(lambda *_: sizes.append(storage.size()))
    run(model, 1.0)
    assert sizes == [0]
    assert storage.size() > 0


def test_memory_that_is_there_stays_where_it_is() -> None:
    """A buffer that moved would be in memory that the gather has not waited for."""
    buffer = ResizableBuffer(1 << 16, torch.device("cpu"))
    buffer.free()
    buffer.allocate()
    view = buffer.view(0, (1 << 14,), torch.float32)
    before = buffer.address_range
    others = [torch.empty(1 << 16, dtype=torch.uint8) for _ in range(3)]
    buffer.allocate()
    assert buffer.address_range == before
    assert view.data_ptr() == before[0]
    assert all(other.data_ptr() != before[0] for other in others)
