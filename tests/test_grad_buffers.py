"""Gradients are the same tensors in every step, unless someone keeps one; and units that listen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.comm.placement import full_tensor
from fullshard.device import ResizableBuffer
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, on_ranks

WIDTH = 8


def rows(rank: Rank) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for layer in model:
        fully_shard(layer, mesh=rank.mesh())
    return fully_shard(model, mesh=rank.mesh())


def slices(rank: Rank) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return FullyShardedDataParallel(model, use_orig_params=True)


def flat(rank: Rank) -> nn.Module:
    return FullyShardedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))


DOORS = {"rows": rows, "slices": slices, "flat": flat}


def run(model: nn.Module, scale: float) -> None:
    batch = torch.arange(2.0 * WIDTH).view(2, WIDTH)
    (model(batch).sum() * scale).backward()


def local(grad: Tensor) -> Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def first(model: nn.Module) -> nn.Parameter:
    return next(p for p in model.parameters() if p.grad is not None and p.grad.numel())


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_gradients_are_the_same_tensors_in_every_step(rank: Rank, door: str) -> None:
    torch.manual_seed(0)
    model = DOORS[door](rank)
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
    """Nothing in Python refers to what this keeps."""
    other = nn.Parameter(torch.empty_like(local(grad)))
    other.grad = local(grad)
    return other


KEPT = {f.__name__: f for f in (as_it_is, as_its_memory, as_a_view, as_another_ones_gradient)}


def value_of(kept: Tensor) -> Tensor:
    return local(kept if kept.grad is None else kept.grad).detach()


@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_gradient_that_someone_keeps_is_left_alone(rank: Rank, door: str, how: str) -> None:
    torch.manual_seed(0)
    model = DOORS[door](rank)
    for _ in range(2):
        run(model, 1.0)
        kept = KEPT[how](first(model).grad)
        before = value_of(kept).clone()
        model.zero_grad()
        run(model, 3.0)
        torch.testing.assert_close(value_of(kept), before, rtol=0, atol=0)
        expected = 3 * before.view(-1)
        found = local(first(model).grad).view(-1)[: expected.numel()]
        torch.testing.assert_close(found, expected)
        model.zero_grad()


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_gradients_that_are_not_dropped_accumulate(rank: Rank, door: str) -> None:
    torch.manual_seed(0)
    model = DOORS[door](rank)
    run(model, 1.0)
    before = [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
    run(model, 2.0)
    after = [local(p.grad) for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(after, [3 * value for value in before])


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_dropped_gradients_take_no_memory_while_the_next_pass_computes(
    rank: Rank, door: str
) -> None:
    model = DOORS[door](rank)
    run(model, 1.0)
    storage = local(first(model).grad).untyped_storage()
    model.zero_grad()
    sizes = []
    model.register_forward_pre_hook(lambda *_: sizes.append(storage.size()))
    run(model, 1.0)
    assert sizes == [0]
    assert storage.size() > 0


class Watched(nn.Module):
    """Gradients reach `inner` through both, one or none of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.inner = Inner()

    def forward(self, x: Tensor, give: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        return self.inner(*give(self.outer(x))).sum()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, used: Tensor, ignored: Tensor) -> Tensor:
        return self.layer(used)


def followed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.detach()


def without_gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.detach(), x.detach()


def unreached(x: Tensor) -> tuple[Tensor, Tensor]:
    """An input takes a gradient and gets none, which is known when the first backward has ended."""
    return x.detach().requires_grad_(), x


@pytest.mark.parametrize(
    ("give", "listens"), [(followed, False), (without_gradients, True), (unreached, True)]
)
@on_ranks(2)
def test_only_a_unit_whose_inputs_do_not_tell_listens_to_its_parameters(
    rank: Rank, give: Callable[[Tensor], tuple[Tensor, Tensor]], listens: bool
) -> None:
    torch.manual_seed(0)
    model = Watched()
    fully_shard(model.inner, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    (unit,) = hooks_of(model.inner).units
    found = []
    for _ in range(2):
        model(torch.ones(2, WIDTH), give).backward()
        found.append(all(member.is_hooked for member in unit.params))
        weight = model.inner.layer.weight.grad
        assert isinstance(weight, DTensor)
        assert bool((full_tensor(weight) != 0).any())
        model.zero_grad()
    assert found == [listens, listens]


def test_memory_that_is_there_stays_where_it_is() -> None:
    """A slab that moved would be where the gather has waited for nobody."""
    slab = ResizableBuffer(1 << 16, torch.device("cpu"))
    slab.free()
    slab.allocate()
    view = slab.view(0, (1 << 14,), torch.float32)
    before = slab.address_range
    others = [torch.empty(1 << 16, dtype=torch.uint8) for _ in range(3)]
    slab.allocate()
    assert slab.address_range == before
    assert view.data_ptr() == before[0]
    assert all(other.data_ptr() != before[0] for other in others)
