"""If a rank runs out of memory in a guarded step, all ranks leave the step out, and none hangs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import (
    FullyShardedDataParallel,
    OutOfMemoryError,
    RankFailedError,
    ShardingStrategy,
    fully_shard,
    oom_guard,
)
from fullshard._torch import to_local
from fullshard.comm import heap
from fullshard.errors import LifecycleError
from fullshard.resilience import explain_out_of_memory, watcher
from fullshard.testing import Rank, RankPool, RanksFailed, pool
from fullshard.wrap import ModuleWrapPolicy

WIDTH = 16
NUM_BLOCKS = 3


@dataclass
class Planned:
    """Where this rank runs out of memory: in a micro-batch, in a phase of a block; how often."""

    place: tuple[int, str, int] | None = None
    times: int = 0
    micro_batch: int = field(default=0, init=False)

    def reach(self, phase: str, block: int) -> None:
        if self.times and self.place == (self.micro_batch, phase, block):
            self.times -= 1
            torch.empty(1 << 50)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, planned, block):  # type: ignore[no-untyped-def]
        ctx.where = planned, block
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        planned, block = ctx.where
        planned.reach("backward", block)
        return grad, None, None


class Block(nn.Module):
    def __init__(self, planned: Planned, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.planned, self.number = planned, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.planned.reach("forward", self.number)
        return Backward.apply(self.linear(x).tanh(), self.planned, self.number)


def build(planned: Planned) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(planned, number) for number in range(NUM_BLOCKS)])


def sharded(planned: Planned, mesh: DeviceMesh, api: str) -> nn.Module:
    model = build(planned)
    if api == "fully_shard":
        for module in [*model, model]:
            fully_shard(module, mesh=mesh)
        return model
    is_hybrid = mesh.ndim == 2
    strategy = ShardingStrategy.HYBRID_SHARD if is_hybrid else ShardingStrategy.FULL_SHARD
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
    )


# Step, rank, micro-batch, phase, block, how often. The last step has other micro-batches.
FAILURES = [
    (2, 1, 0, "forward", 0, 1),
    (3, 0, 0, "forward", 2, 1),
    (3, 1, 1, "backward", 0, 1),
    (4, 1, 0, "backward", 1, 1),
    (5, 0, 1, "forward", 0, 2),
    (6, 1, 1, "backward", 2, 1),
    (7, 1, 3, "backward", 1, 1),
]
NUM_STEPS = 8


def losses_and_weights(
    rank: Rank, mesh: DeviceMesh, api: str, *, fails: bool, no_sync: bool
) -> tuple[list[float], list[torch.Tensor], list[tuple[int, ...]]]:
    """Train; repeat every step in which a rank ran out of memory."""
    planned = Planned()
    model = sharded(planned, mesh, api)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank.rank)
    losses, ran_out = [], []
    for step in range(NUM_STEPS - no_sync):
        for at, who, micro_batch, phase, block, times in FAILURES if fails else ():
            if at == step and who == rank.rank:
                planned.place, planned.times = (micro_batch, phase, block), times
        number = 4 if step == NUM_STEPS - 1 else 2
        batches = torch.randn(2, 8, WIDTH, generator=generator).flatten(0, 1).chunk(number)
        while True:
            total = 0.0
            with oom_guard(model, optimizer=optimizer, micro_batches=number) as guard:
                for planned.micro_batch, batch in enumerate(batches):
                    if no_sync:
                        model.set_requires_gradient_sync(planned.micro_batch == number - 1)
                    loss = model(batch).square().sum() / 16
                    loss.backward()
                    total += loss.item()
            ran_out.append(guard.ranks)
            if not guard.ran_out:
                break
            assert all(param.grad is None for param in model.parameters())
            assert isinstance(guard.error, torch.OutOfMemoryError)
            assert f"rank {guard.ranks[0]}: " in str(guard.error)
            assert ", optimizer " in str(guard.error)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, [to_local(p).detach() for p in model.parameters()], ran_out


def recovers(rank: Rank, api: str, shape: tuple[int, ...], no_sync: bool) -> None:
    os.environ[heap.SWITCH] = "0" if api == "wrapper" else "1"
    names = ("replicate", "shard")[-len(shape) :]
    mesh = DeviceMesh("cpu", torch.arange(rank.size).view(shape), mesh_dim_names=names)
    try:
        expected = losses_and_weights(rank, mesh, api, fails=False, no_sync=no_sync)
        found = losses_and_weights(rank, mesh, api, fails=True, no_sync=no_sync)
    finally:
        del os.environ[heap.SWITCH]
    assert found[0] == expected[0]
    assert all(torch.equal(*each) for each in zip(found[1], expected[1], strict=True))
    assert expected[2] == [()] * len(expected[0])
    done = [(), (), (1,), (), (0, 1), (), (1,), (), (0,), (0,), (), (1,), (), (1,), ()]
    assert found[2] == (done[:-2] if no_sync else done)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("api", "shape", "no_sync"),
    [
        ("fully_shard", (2,), False),
        ("wrapper", (2,), False),
        ("fully_shard", (2,), True),
        ("wrapper", (2, 2), False),
    ],
)
def test_a_step_in_which_a_rank_ran_out_of_memory_can_be_repeated(
    api: str, shape: tuple[int, ...], no_sync: bool
) -> None:
    pool(2 ** len(shape)).run(recovers, timeout_s=60, api=api, shape=shape, no_sync=no_sync)


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Uneven(nn.Module):
    """Reduces its units in another order in its second step than in its first."""

    def __init__(self, planned: Planned) -> None:
        super().__init__()
        self.first, self.second = Block(planned, 0), Second()
        self.third = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.third(self.second(x, x * 2))


def cannot_finish(rank: Rank) -> None:
    os.environ[watcher.SWITCH] = "1"
    planned = Planned()
    model = Uneven(planned)
    for module in (*model.children(), model):
        fully_shard(module, mesh=rank.mesh())
    for step in range(3):
        if rank.rank == 1 and step == 1:
            planned.place, planned.times = (0, "forward", 0), 1
        with oom_guard(model) as guard:
            model(torch.ones(2, WIDTH)).sum().backward()
        assert not guard.ran_out
        model.zero_grad()


def test_where_the_collectives_of_a_step_are_not_known_the_ranks_are_told_and_none_hangs() -> None:
    with RankPool(2, timeout_s=60) as ranks, pytest.raises(RanksFailed) as failed:
        ranks.run(cannot_finish, expect_failure=True)
    errors = {rank: raised.exception for rank, raised in failed.value.exceptions.items()}
    assert isinstance(errors[1], OutOfMemoryError)
    assert "it is one of the first two, or took another path" in str(errors[1])
    assert isinstance(errors[0], RankFailedError)
    assert str(errors[0]).startswith("rank 1: ")
    assert "can't allocate memory" in str(errors[0])


def passes_and_refuses(rank: Rank) -> None:
    model = sharded(Planned(), rank.mesh(), "fully_shard")
    batch = torch.ones(2, WIDTH)

    def step(error: type[Exception] | None = None) -> None:
        with oom_guard(model) as guard:
            loss = model(batch).sum()
            if error is not None:
                raise error("planned")
            loss.backward()
        assert not guard.ran_out
        assert guard.error is None
        model.zero_grad()

    step()
    step()
    with pytest.raises(ValueError, match="planned"):
        step(ValueError)
    optimizer = torch.optim.SGD(model.parameters())
    explained = explain_out_of_memory(model, optimizer, "Buy memory.")
    with pytest.raises(OutOfMemoryError, match=r"parameter shards .* Buy memory\."), explained:
        raise MemoryError
    with pytest.raises(ValueError, match="planned"), explain_out_of_memory(model):
        raise ValueError("planned")
    step()  # it has left nothing behind
    with pytest.raises(LifecycleError, match="with another block around it"), oom_guard(model):
        step()
    with pytest.raises(LifecycleError, match="with no unit in Linear"), oom_guard(nn.Linear(1, 1)):
        pass
    model(batch).sum().backward()
    with pytest.raises(LifecycleError, match="gradients from before"):
        step()
    model.zero_grad()
    with model.settings(requires_gradient_sync=False):
        model(batch).sum().backward()
    with pytest.raises(LifecycleError, match="gradients from before"):
        step()
    model.zero_grad()
    param = next(model.parameters())
    handle = param.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(LifecycleError, match="with hooks that use gradients"):
        step()
    handle.remove()
    step()
    model.set_all_reduce_hook(lambda _: None)
    with pytest.raises(LifecycleError, match="with custom collectives or comm hooks"):
        step()


def test_other_errors_pass_and_what_cannot_be_left_out_is_refused() -> None:
    pool(2).run(passes_and_refuses, timeout_s=60)
