"""A rank that runs units in another order than before is told so, and no rank hangs."""

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import DisagreementError, FullyShardedDataParallel, fully_shard
from fullshard.testing import Rank, RankPool, RanksFailed, pool
from fullshard.wrap import ModuleWrapPolicy

WIDTH = 6
PATIENCE = "FULLSHARD_PATIENCE_S"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return self.last(x)


def sharded(api: str) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    if api == "fully_shard":
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=api == "orig"
    )


@contextmanager
def debug_level(level: dist.DebugLevel) -> Iterator[None]:
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    try:
        yield
    finally:
        dist.set_debug_level(before)


def step(model: nn.Module, order: list[int]) -> float:
    (model.module if isinstance(model, FullyShardedDataParallel) else model).order = order
    loss = model(torch.ones(2, WIDTH)).square().sum()
    loss.backward()
    return loss.item()


ORDERS = [[0, 1, 2], [2, 1, 0], [0], [0, 1, 2, 0, 1], [0, 1, 2]]


def change_order_on_all_ranks(rank: Rank, api: str) -> tuple[list[float], list[float]]:
    model = sharded(api)
    torch.manual_seed(0)
    whole = Model()
    return [step(model, order) for order in ORDERS], [step(whole, order) for order in ORDERS]


@pytest.mark.parametrize("api", ["fully_shard", "flat", "orig"])
def test_all_ranks_may_take_another_way(api: str) -> None:
    for found, expected in pool(2).run(change_order_on_all_ranks, api):
        assert found == pytest.approx(expected)


def hear_of_another_order(rank: Rank) -> list[str]:
    with debug_level(dist.DebugLevel.INFO):
        model = sharded("flat")
        step(model, [0, 1, 2])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(model, [1, 0, 2])
    return [str(each.message) for each in caught]


def test_with_debug_information_another_order_is_a_warning_that_names_units_and_rank() -> None:
    for number, messages in enumerate(pool(2).run(hear_of_another_order)):
        assert len(messages) == 1
        assert "blocks.1" in messages[0]
        assert "blocks.0" in messages[0]
        assert f"rank {number}" in messages[0]


def compare_always(rank: Rank) -> tuple[str, str]:
    with debug_level(dist.DebugLevel.DETAIL):
        model = sharded("flat")
        step(model, [0, 1, 2])
        step(model, [0, 1, 2])
        os.environ[PATIENCE] = "1"
        try:
            step(model, [0, 1, 2] if rank.rank == 0 else [0, 2, 1])
        except Exception as error:
            return type(error).__name__, str(error)
        finally:
            del os.environ[PATIENCE]
    return "nothing", ""


def test_with_debug_detail_every_rank_gets_an_error_that_names_units_and_ranks() -> None:
    for kind, message in pool(2).run(compare_always):
        assert kind == DisagreementError.__name__, message
        assert "blocks.1" in message
        assert "blocks.2" in message
        assert "rank 1" in message


def leave_the_order_alone(rank: Rank) -> None:
    os.environ[PATIENCE] = "1"
    model = sharded("flat")
    step(model, [0, 1, 2])
    step(model, [0, 1, 2] if rank.rank == 0 else [0, 2, 1])


def test_a_rank_that_leaves_the_order_alone_gets_an_error_and_nobody_hangs() -> None:
    began = time.monotonic()
    with RankPool(2) as ranks, pytest.raises(RanksFailed) as failed:
        ranks.run(leave_the_order_alone, timeout_s=120)
    assert time.monotonic() - began < 60
    message = str(failed.value)
    assert DisagreementError.__name__ in message
    assert "blocks.2: gather in forward" in message
    assert "blocks.1: gather in forward" in message
    assert "rank 1" in message
