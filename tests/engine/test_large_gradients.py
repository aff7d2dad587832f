"""Large gradients on a device with streams, played by a CPU that does everything at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fullshard import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from fullshard.comm.collectives import ShmCollectives
from fullshard.comm.work import CollectiveWork
from fullshard.device import Device
from fullshard.layout import CostModel
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from fullshard.wrap import ModuleWrapPolicy

WIDTH = 16


class Passed:
    """An event on a device that does everything at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Ordered(Device):
    """A CPU as one stream: a collective is waited for as soon as it is issued."""

    has_streams = True

    def record(self) -> Passed:
        return Passed()


@contextmanager
def ordered_and_small() -> Iterator[None]:
    with patch("fullshard.runtime.build.device_for", Ordered), small_buckets():
        yield


@contextmanager
def small_buckets() -> Iterator[None]:
    """Buckets are large from 1 KiB on, and every parameter has one."""
    lanes, free = "fullshard.unit.grad_lane", CostModel(0.0, 0.0, 1024)
    with (
        patch(f"{lanes}.PIECE_BYTES", 512),
        patch(f"{lanes}.FEW_RANKS_FACTOR", 1),
        patch(f"{lanes}.SMALLEST_PIECE_PART_BYTES", 64),
        patch.object(CostModel, "of_device", lambda _: free),
    ):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), Block(), Block())


def batch(generator: torch.Generator) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reduced", [torch.float32, torch.float64, torch.bfloat16])
@on_ranks(4)
def test_large_gradients_that_are_reduced_early_and_by_pieces_train_alike(
    rank: Rank, reduced: torch.dtype
) -> None:
    def shard(model: nn.Module) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=reduced)
        for module in (model[2], model[3], model):
            fully_shard(module, mesh=rank.mesh(), mp_policy=policy)

    def torchs(model: nn.Module) -> None:
        policy = TorchPrecision(reduce_dtype=reduced)
        for module in (model[2], model[3], model):
            torch_fully_shard(module, mesh=rank.mesh(), mp_policy=policy)

    is_low = reduced is torch.bfloat16
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if is_low else {"rtol": 1e-4, "atol": 1e-5}
    with ordered_and_small():
        # torch's `fully_shard` cannot reduce in a wider dtype than it keeps.
        oracle = None if reduced is torch.float64 else torchs
        assert_same_training(build, shard, Training(batch, steps=3), oracle=oracle, **tolerance)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(4)
def test_flat_gradients_that_are_reduced_by_pieces_train_alike(
    rank: Rank, use_orig_params: bool
) -> None:
    torch.manual_seed(0)
    expected = build()
    with ordered_and_small(), watched_reduces() as calls:
        wrapper = FullyShardedDataParallel(
            deepcopy(expected),
            process_group=rank.mesh().get_group(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(reduce_dtype=torch.float64),
            use_orig_params=use_orig_params,
        )
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (expected, wrapper)]
        for step in range(3):
            x = torch.randn(rank.size, 4, WIDTH, generator=torch.Generator().manual_seed(step))
            expected(x).square().mean().backward()
            wrapper(x[rank.rank]).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    # Both blocks and the root in each step, each by several pieces.
    assert len(calls) >= 3 * 3 * 4
    assert all(numel < 128 for (numel,) in calls)
    with FullyShardedDataParallel.summon_full_params(wrapper):
        for ours, theirs in zip(wrapper.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


@contextmanager
def watched_reduces() -> Iterator[list[list[int]]]:
    """The elements of every segment that is reduced, by call."""
    calls: list[list[int]] = []
    reduce = ShmCollectives.reduce_scatter

    def watched(
        self: ShmCollectives, outs: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> CollectiveWork:
        calls.append([out.numel() for out in outs])
        return reduce(self, outs, *args, **kwargs)

    with patch.object(ShmCollectives, "reduce_scatter", watched):
        yield calls


WEIGHT = 2 * WIDTH * WIDTH // 2  # a rank's part, of two


BF16, BY_PIECES = torch.bfloat16, [[WEIGHT // 2]] * 4


@pytest.mark.parametrize(
    ("precision", "weights"),
    [
        ({}, [[WEIGHT]] * 2),
        ({"param_dtype": BF16, "reduce_dtype": torch.float32}, [[WEIGHT // 4]] * 8),
        ({"wire_dtype": BF16}, BY_PIECES),
        # Its received data would be as large once more.
        ({"param_dtype": BF16, "reduce_dtype": torch.float32, "wire_dtype": BF16}, BY_PIECES),
    ],
    ids=["in_place", "cast", "cast_to_travel", "added_up_on_arrival"],
)
@on_ranks(2)
def test_a_large_gradient_does_not_wait_for_its_unit_and_if_cast_goes_by_pieces(
    rank: Rank, precision: dict[str, torch.dtype], weights: list[list[int]]
) -> None:
    model = nn.Sequential(Block(), Block())
    policy = MixedPrecisionPolicy(**precision)
    with ordered_and_small(), watched_reduces() as calls:
        for module in (*model, model):
            fully_shard(module, mesh=rank.mesh(), mp_policy=policy)
        model(batch(torch.Generator()).requires_grad_()).sum().backward()
    biases = [WIDTH, WIDTH // 2]
    assert calls == [*weights, biases] * 2


@contextmanager
def shared_pieces(piece_bytes: int) -> Iterator[None]:
    """Buckets that parameters share are cut."""
    module = "fullshard.unit.grad_lane"
    with (
        patch("fullshard.runtime.build.device_for", Ordered),
        patch(f"{module}.PIECE_BYTES", piece_bytes),
        patch(f"{module}.SMALLEST_PIECE_PART_BYTES", 256),
        patch(f"{module}.FEWEST_CUT_RANKS", 1),
    ):
        yield


@pytest.mark.parametrize("precision", [{}, {"param_dtype": BF16, "reduce_dtype": torch.float32}])
@on_ranks(2)
def test_gradients_that_share_a_bucket_are_reduced_by_pieces(
    rank: Rank, precision: dict[str, torch.dtype]
) -> None:
    """The gradients of a pair of matrices that do not divide evenly, and of biases."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 33), nn.Linear(33, WIDTH), nn.Linear(WIDTH, WIDTH))

    def shard(model: nn.Module) -> None:
        fully_shard(model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(**precision))

    def torchs(model: nn.Module) -> None:
        torch_fully_shard(model, mesh=rank.mesh(), mp_policy=TorchPrecision(**precision))

    training = Training(batch, steps=3)
    with shared_pieces(2048), watched_reduces() as calls:
        assert_same_training(build, shard, training, oracle=torchs, rtol=0.0, atol=0.0)
    # Two matrices in 17 and 16 rows of the larger dim for each rank, one of 8, biases of 17, 8, 8.
    segment = 17 * WIDTH + 33 * WIDTH // 2 + WIDTH * WIDTH // 2 + 17 + 8 + 8
    alignment = 8 if precision else 4
    segment = -(-segment // alignment) * alignment
    num_pieces = 2 * 4 * segment // 2048
    step = -(-segment // (num_pieces * alignment)) * alignment
    assert calls == 3 * [*[[step]] * (num_pieces - 1), [segment - (num_pieces - 1) * step]]
    # So small a bucket is not worth it.
    with patch("fullshard.runtime.build.device_for", Ordered), watched_reduces() as calls:
        shard(model := build())
        model(batch(torch.Generator())).sum().backward()
    assert len(calls) == 1


@on_ranks(2)
def test_few_ranks_reduce_by_larger_pieces(rank: Rank) -> None:
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
    counts = []
    for factor in (1, 4):
        with ordered_and_small(), patch("fullshard.unit.grad_lane.FEW_RANKS_FACTOR", factor):
            model = FullyShardedDataParallel(build(), mixed_precision=precision)
            with watched_reduces() as calls:
                model(batch(torch.Generator())).sum().backward()
        counts.append(len(calls))
    assert counts == [23, 6]  # of 512 and of 2,048 bytes, each rounded up to whole vectors


@on_ranks(2)
def test_pieces_have_scalars_and_leave_out_what_has_no_gradient(rank: Rank) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.5))
            self.first, self.unused, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu()) * self.gain

    def shard(model: nn.Module) -> None:
        fully_shard(model, mesh=rank.mesh())

    with shared_pieces(1024), watched_reduces() as calls:
        assert_same_training(Scaled, shard, Training(batch, steps=4))
    assert len(calls) == 4 * 3


@on_ranks(4)
def test_large_gradients_travel_by_pieces_as_they_do_at_once(rank: Rank) -> None:
    def shard(model: nn.Module) -> None:
        policy = MixedPrecisionPolicy(wire_dtype=BF16)
        for module in (model[2], model[3], model):
            fully_shard(module, mesh=rank.mesh(), mp_policy=policy)

    training, tolerance = Training(batch, steps=3), {"rtol": 2e-2, "atol": 1e-3}
    at_once = assert_same_training(build, shard, training, **tolerance)
    with ordered_and_small():
        by_pieces = assert_same_training(build, shard, training, **tolerance)
    assert by_pieces.losses == at_once.losses
    pairs = zip(by_pieces.sharded.parameters(), at_once.sharded.parameters(), strict=True)
    assert all(torch.equal(found.to_local(), expected.to_local()) for found, expected in pairs)
