"""Ranks that do not run the same program learn of it: an error on every rank, never a hang."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import DisagreementError, MixedPrecisionPolicy, fully_shard
from fullshard.testing import Rank, pool

WIDTH = 8
LIMIT_S = 30.0  # mostly for starting the ranks and for a loaded machine


class PlannedError(Exception):
    """Raised by the tests' models."""


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise PlannedError("on this rank only")
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.order = [0, 1, 2]
        self.fails_at_the_end = False

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        if self.fails_at_the_end:
            raise PlannedError("after everything was gathered")
        return self.last(x)


Change = Callable[[Model, DeviceMesh], None]


def shard_all(model: Model, mesh: DeviceMesh, but: int | None = None, **settings: Any) -> None:
    for index, block in enumerate(model.blocks):
        if index != but:
            fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)


def fewer_units(model: Model, mesh: DeviceMesh) -> None:
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model.blocks[2], mesh=mesh)
    fully_shard(model, mesh=mesh)


def one_unit_less_at_the_end(model: Model, mesh: DeviceMesh) -> None:
    model.blocks.append(Block())
    shard_all(model, mesh)


def other_shape(model: Model, mesh: DeviceMesh) -> None:
    model.blocks[1].linear = nn.Linear(WIDTH, WIDTH + 2)
    shard_all(model, mesh)


def other_dtype(model: Model, mesh: DeviceMesh) -> None:
    model.blocks[1].double()
    shard_all(model, mesh)


def frozen_here(model: Model, mesh: DeviceMesh) -> None:
    model.blocks[1].linear.weight.requires_grad_(False)
    shard_all(model, mesh)


def other_name(model: Model, mesh: DeviceMesh) -> None:
    block = model.blocks[1]
    block.line = block.linear
    del block.linear
    block.forward = lambda x: torch.tanh(block.line(x))
    shard_all(model, mesh)


def other_policy(model: Model, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model.blocks[1], mesh=mesh, mp_policy=policy)
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model.blocks[2], mesh=mesh)
    fully_shard(model, mesh=mesh)


def other_buckets(model: Model, mesh: DeviceMesh) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FULLSHARD_OWN_BUCKET_MB", "0")
        fully_shard(model.blocks[1], mesh=mesh)
    shard_all(model, mesh, but=1)


def other_order(model: Model, mesh: DeviceMesh) -> None:
    model.order = [0, 2, 1]
    shard_all(model, mesh)


def shorter_way(model: Model, mesh: DeviceMesh) -> None:
    model.order = [0, 1]
    shard_all(model, mesh)


def longer_way(model: Model, mesh: DeviceMesh) -> None:
    model.order = [0, 1, 2, 0]
    shard_all(model, mesh)


def fails_in_a_block(model: Model, mesh: DeviceMesh) -> None:
    shard_all(model, mesh)
    model.blocks[1].fails = True


def fails_in_the_last_block(model: Model, mesh: DeviceMesh) -> None:
    shard_all(model, mesh)
    model.blocks[2].fails = True


def fails_in_the_root(model: Model, mesh: DeviceMesh) -> None:
    shard_all(model, mesh)
    model.fails_at_the_end = True


CHANGES: dict[str, Change] = {
    change.__name__: change
    for change in (
        fewer_units, one_unit_less_at_the_end, other_shape, other_dtype, frozen_here, other_name,
        other_policy, other_buckets, other_order, shorter_way, longer_way, fails_in_a_block,
        fails_in_the_last_block, fails_in_the_root,
    )
}  # fmt: skip


def train_with_one_odd_rank(
    rank: Rank, change: str, odd: int, shape: tuple[int, ...], names: tuple[str, ...] | None
) -> tuple[str, str, float]:
    """Run one step, in which rank `odd` has another program; what it raised, and how fast."""
    mesh = rank.mesh(shape, names)
    model = Model()
    (CHANGES[change] if rank.rank == odd else shard_all)(model, mesh)
    dist.barrier()
    began = time.monotonic()
    try:
        model(torch.ones(2, WIDTH)).sum().backward()
        raised: tuple[str, str] = ("nothing", "")
    except Exception as error:
        raised = (type(error).__name__, str(error))
    took_s = time.monotonic() - began
    # All are in step again: they can talk, and a model that agrees can be trained.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == rank.size
    again = Model()
    shard_all(again, mesh)
    again(torch.ones(2, WIDTH)).sum().backward()
    return (*raised, took_s)


def everyone(
    change: str, odd: int = 1, shape: tuple[int, ...] = (2,), names: tuple[str, ...] | None = None
) -> list[tuple[str, str, float]]:
    num_ranks = 2 if len(shape) == 1 else 4
    results = pool(num_ranks).run(
        train_with_one_odd_rank, change, odd, shape, names, timeout_s=LIMIT_S
    )
    assert all(took_s < 10 for *_, took_s in results), results
    return results


@pytest.mark.parametrize(
    "change, module",
    [
        ("fewer_units", "blocks.1"),
        ("one_unit_less_at_the_end", "blocks.3"),
        ("other_shape", "blocks.1"),
        ("other_dtype", "blocks.1"),
        ("frozen_here", "blocks.1"),
        ("other_name", "blocks.1"),
        ("other_policy", "blocks.1"),
        ("other_buckets", "blocks.1"),
        ("other_order", "blocks.2"),
        ("shorter_way", "blocks.2"),
        ("longer_way", "blocks.0"),
    ],
)
def test_ranks_with_different_units_or_ways_are_told_on_every_rank(
    change: str, module: str
) -> None:
    for kind, message, _ in everyone(change):
        assert kind == DisagreementError.__name__, message
        for word in ("rank 0", "rank 1", module, ";"):
            assert word in message


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    "change", ["fails_in_a_block", "fails_in_the_last_block", "fails_in_the_root"]
)
def test_a_rank_that_fails_alone_tells_the_others(change: str, odd: int) -> None:
    results = everyone(change, odd)
    for number, (kind, message, _) in enumerate(results):
        if number == odd:
            assert kind == PlannedError.__name__, message
        else:
            assert kind == DisagreementError.__name__, message
            assert f"rank {odd}" in message
            assert "failure in the user's code" in message
            assert ";" in message


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("change", ["fewer_units", "other_order", "fails_in_the_last_block"])
def test_ranks_of_a_mesh_with_two_axes_are_all_told(change: str, odd: int) -> None:
    results = everyone(change, odd, (2, 2), ("replicate", "shard"))
    for number, (kind, message, _) in enumerate(results):
        if change.startswith("fails") and number == odd:
            assert kind == PlannedError.__name__
        else:
            assert kind == DisagreementError.__name__, message
            assert f"rank {odd}" in message


def fail_on_all_alike(rank: Rank) -> list[str]:
    model = Model()
    fails_in_a_block(model, rank.mesh())
    kinds = []
    for _ in range(2):
        try:
            model(torch.ones(2, WIDTH)).sum().backward()
        except Exception as error:
            kinds.append(type(error).__name__)
    return kinds


def test_ranks_that_fail_alike_raise_their_own_error() -> None:
    name = PlannedError.__name__
    assert pool(2).run(fail_on_all_alike, timeout_s=LIMIT_S) == [[name, name]] * 2
