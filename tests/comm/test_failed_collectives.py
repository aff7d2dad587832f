"""A collective that fails, when issued or when waited for, costs one step and no more."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from fullshard.comm.collectives import Collectives
from fullshard.comm.work import CollectiveWork
from fullshard.layout import Wire
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, on_ranks
from fullshard.unit.unit import Unit
from fullshard.wrap import ModuleWrapPolicy

WIDTH = 8


class PlannedError(Exception):
    pass


class FailingWork(CollectiveWork):
    """A finished work whose `wait` raises."""

    def __init__(self, work: CollectiveWork) -> None:
        super().__init__()
        self._work = work
        self.num_waits = 0

    def wait(self) -> None:
        self._work.wait()
        self.num_waits += 1
        raise PlannedError("wait")


class Failing(Collectives):
    """The collectives of a unit; the `turn`-th one fails, when issued or at `wait`."""

    def __init__(self, inner: Collectives, op: str, turn: int, at: str) -> None:
        self._inner = inner
        self._op, self._left, self._at = op, turn, at
        self.averages = inner.averages
        self.issued: list[CollectiveWork] = []

    def _failing(self, op: str, work: CollectiveWork) -> CollectiveWork:
        self.issued.append(work)
        if op != self._op:
            return work
        self._left -= 1
        if self._left != 0:
            return work
        if self._at == "issue":
            work.wait()  # on all ranks alike: the others are not left waiting
            raise PlannedError("issue")
        return FailingWork(work)

    def all_gather(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], group: dist.ProcessGroup
    ) -> CollectiveWork:
        return self._failing("all_gather", self._inner.all_gather(outs, ins, group))

    def reduce_scatter(
        self,
        outs: Sequence[Tensor],
        ins: Sequence[Tensor],
        group: dist.ProcessGroup,
        *,
        average: bool,
        wire: Wire | None = None,
    ) -> CollectiveWork:
        work = self._inner.reduce_scatter(outs, ins, group, average=average, wire=wire)
        return self._failing("reduce_scatter", work)

    def allocate_bucket(self, *args: Any) -> Tensor:
        return self._inner.allocate_bucket(*args)


class Block(nn.Module):
    """Two lanes: a frozen weight beside a trainable one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def shard(model: nn.Sequential, api: str, rank: Rank) -> nn.Module:
    if api == "wrapper":
        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True)
    for block in model:
        fully_shard(block, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    model.set_manual_backward_finalization(api == "finalize_backward")
    return model


def units_of(model: nn.Module) -> list[Unit]:
    found = dict.fromkeys(hooks for m in model.modules() if (hooks := hooks_of(m)) is not None)
    return [unit for hooks in found for unit in hooks.units if unit.params]


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    hooks = hooks_of(model)
    assert hooks is not None
    if hooks.ensure_scheduler().finalizes_manually:
        model.finalize_backward(async_op=True).wait()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@contextmanager
def failing(unit: Unit, op: str, turn: int, at: str) -> Iterator[Failing]:
    before = unit.comm.current
    unit.comm.current = collectives = Failing(before, op, turn, at)
    try:
        yield collectives
    finally:
        unit.comm.current = before


@pytest.mark.parametrize("at", ["issue", "wait"])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("api", ["fully_shard", "finalize_backward", "wrapper"])
@on_ranks(2)
def test_the_step_after_a_failed_collective_is_that_of_an_undisturbed_model(
    rank: Rank, api: str, op: str, at: str
) -> None:
    reference, model = make_model(), shard(make_model(), api, rank)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    step(model, optimizers[1], batch_of(rank.rank, 0))
    for failed_unit in units_of(model):
        with failing(failed_unit, op, 1, at), pytest.raises(PlannedError):
            step(model, optimizers[1], batch_of(rank.rank, 9))
        model.zero_grad()
        step(model, optimizers[1], batch_of(rank.rank, 1))
        for unit in units_of(model):
            assert not unit.is_unsharded
    step_batches = [0, *([1] * len(units_of(model)))]
    for index in step_batches:
        halves = [batch_of(r, index) for r in range(2)]
        loss = sum(reference(half).square().mean() for half in halves) / 2
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    last = [batch_of(r, 2) for r in range(2)]
    expected = sum(reference(half).square().mean() for half in last) / 2
    found = model(batch_of(rank.rank, 2)).square().mean().detach()
    dist.all_reduce(found)
    torch.testing.assert_close(found / 2, expected.detach())


@on_ranks(2)
def test_lanes_that_were_issued_before_a_failure_are_waited_for(rank: Rank) -> None:
    model = shard(make_model(), "fully_shard", rank)
    model(batch_of(rank.rank, 0)).sum().backward()
    unit = units_of(model)[0]
    assert len(unit.layout.lanes) == 2
    with failing(unit, "all_gather", 2, "issue") as collectives, pytest.raises(PlannedError):
        model(batch_of(rank.rank, 0))
    assert len(collectives.issued) == 2
    assert all(not work.futures for work in collectives.issued)  # waited for, and forgotten
    model(batch_of(rank.rank, 0)).sum().backward()


@on_ranks(2)
def test_a_failed_work_is_not_waited_for_again(rank: Rank) -> None:
    model = shard(make_model(), "fully_shard", rank)
    model(batch_of(rank.rank, 0)).sum().backward()
    unit = units_of(model)[1]
    with failing(unit, "reduce_scatter", 1, "wait"), pytest.raises(PlannedError):
        model(batch_of(rank.rank, 0)).sum().backward()
    for _ in range(2):
        model(batch_of(rank.rank, 0)).sum().backward()


@pytest.mark.parametrize("change", ["dtype", "assign"])
@on_ranks(4)
def test_sums_that_wait_for_the_replicas_survive_a_new_plan(rank: Rank, change: str) -> None:
    """Hybrid sharding, two micro-batches, and shards that a user replaces between them."""
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
    reference = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.set_requires_all_reduce(False)
    model(batch_of(rank.rank, 0)).sum().backward()
    if change == "dtype":
        model.double()
        reference.double()
    else:
        state = {name: p.detach().clone() for name, p in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    model.set_requires_all_reduce(True)
    dtype = next(model.parameters()).dtype
    model(batch_of(rank.rank, 1).to(dtype)).sum().backward()
    for index in (0, 1):
        for r in range(4):
            reference(batch_of(r, index).to(dtype)).sum().backward()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(found.grad, DTensor)
        rows = found.grad.to_local()
        start = rank.rank % 2 * -(-expected.size(0) // 2)
        wanted = expected.grad[start : start + rows.size(0)] / 4
        torch.testing.assert_close(rows, wanted, rtol=1e-5, atol=1e-5)
