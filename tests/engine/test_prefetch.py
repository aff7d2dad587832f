"""Units are gathered before they are needed, in the expected order, and not too many at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import UnshardHandle, fully_shard
from fullshard.comm.placement import full_tensor
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, on_ranks
from fullshard.unit.state import Absent, Arriving, Leaving, Present
from fullshard.unit.unit import Unit
from tests.support.counted import CountedGather
from tests.support.wrapped import held_bytes

WIDTH = 6
Log = list[tuple[str, str]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, num_blocks: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.order = list(range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order:
            x = self.blocks[index](x)
        return x


class LoggingGather(CountedGather):
    """Says when it gathers."""

    def __init__(self, name: str, log: Log) -> None:
        super().__init__()
        self.name = name
        self.log = log

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        self.log.append(("gather", self.name))
        return super().__call__(*args, **kwargs)


def unit_of(module: nn.Module) -> Unit:
    (unit,) = hooks_of(module).units
    return unit


def is_filled(module: nn.Module) -> bool:
    return held_bytes(unit_of(module)) > 0


def batch() -> Tensor:
    return torch.ones(2, WIDTH)


def sharded(rank: Rank, **settings: Any) -> Model:
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=rank.mesh(), **settings)
    fully_shard(model, mesh=rank.mesh(), **settings)
    return model


def logged(model: Model) -> Log:
    """A log of what happens from now on: gathers, and forwards and backwards of blocks."""
    log: Log = []
    model.set_custom_all_gather(LoggingGather("root", log))
    for index, block in enumerate(model.blocks):
        name = str(index)
        block.set_custom_all_gather(LoggingGather(name, log))

        def before(_: Any, args: Any, name: str = name) -> None:
            log.append(("forward", name))

        def after(_: Any, args: Any, output: Tensor, name: str = name) -> None:
            if output.requires_grad:
                output.grad_fn.register_prehook(lambda _: log.append(("backward", name)))

        block.register_forward_pre_hook(before)
        block.linear.register_forward_hook(after)
    return log


def train(model: Model) -> None:
    model(batch()).sum().backward()


def indices(log: Log, what: str) -> list[str]:
    return [name for kind, name in log if kind == what]


# The default order


@on_ranks(2)
def test_the_first_forward_gathers_each_unit_when_it_runs(rank: Rank) -> None:
    model = sharded(rank)
    log = logged(model)
    with torch.no_grad():
        model(batch())
    expected = [("gather", "root")]
    for name in "01234":
        expected += [("gather", name), ("forward", name)]
    assert log == expected


@on_ranks(2)
def test_from_the_second_forward_on_the_next_unit_is_gathered_while_one_runs(rank: Rank) -> None:
    model = sharded(rank)
    log = logged(model)
    train(model)
    log.clear()
    output = model(batch())
    expected = [("gather", "root"), ("gather", "0")]
    for name, following in zip("01234", ["1", "2", "3", "4", None], strict=True):
        expected += [("gather", following)] if following else []
        expected += [("forward", name)]
    assert log == expected
    output.sum().backward()


@on_ranks(2)
def test_backward_gathers_the_unit_before_while_one_runs(rank: Rank) -> None:
    model = sharded(rank)
    log = logged(model)
    for step in range(2):
        output = model(batch())
        log.clear()
        output.sum().backward()
        # The root and the last block are still there from forward; all else is gathered once,
        # one unit ahead of the one that computes.
        assert sorted(indices(log, "gather")) in (["0", "1", "2", "3"], ["0", "1", "2", "3", "4"])
        assert indices(log, "backward") == list("43210"), step
        for name, before in zip("4321", "3210", strict=True):
            assert log.index(("gather", before)) < log.index(("backward", name)), log
        for name, later in zip("432", "210", strict=True):
            assert log.index(("backward", name)) < log.index(("gather", later)), log


@on_ranks(2)
def test_the_next_units_gather_is_under_way_when_a_unit_runs(rank: Rank) -> None:
    model = sharded(rank)
    train(model)
    seen: list[tuple[type, type]] = []

    def look(block: nn.Module, args: Any) -> None:
        position = list(model.blocks).index(block)
        following = model.blocks[(position + 1) % len(model.blocks)]
        seen.append((type(unit_of(block).state), type(unit_of(following).state)))

    for block in model.blocks:
        block.register_forward_pre_hook(look)
    model(batch())
    assert seen[:-1] == [(Present, Arriving)] * 4
    assert seen[-1] == (Present, Absent)


@on_ranks(2)
def test_a_forward_that_takes_another_way_gathers_nothing_for_nobody(rank: Rank) -> None:
    model = sharded(rank)
    log = logged(model)
    train(model)
    model.order = [0, 3, 1]
    for _ in range(2):
        log.clear()
        train(model)
        assert indices(log, "forward") == ["0", "3", "1"]
        for block in model.blocks:
            assert isinstance(unit_of(block).state, Absent)
            assert not is_filled(block)
    # By now this is the expected order, in which nothing is gathered in vain.
    log.clear()
    model(batch())
    assert indices(log, "gather") == ["root", "0", "3", "1"]


def run_parts_alone(model: Model) -> None:
    model.blocks[4](batch()).sum().backward()
    with torch.no_grad():
        model.blocks[2](batch())


def fail_in_forward(model: Model) -> None:
    order, model.order = model.order, [0, 1, 99]
    with pytest.raises(IndexError):
        model(batch())
    model.order = order


@pytest.mark.parametrize("disturb", [run_parts_alone, fail_in_forward])
@on_ranks(2)
def test_what_is_not_a_whole_forward_does_not_spoil_the_order(
    rank: Rank, disturb: Callable[[Model], None]
) -> None:
    model = sharded(rank)
    log = logged(model)
    train(model)
    disturb(model)
    log.clear()
    model(batch())
    assert log[:4] == [("gather", "root"), ("gather", "0"), ("gather", "1"), ("forward", "0")]


# Explicit lists


@on_ranks(2)
def test_explicit_forward_prefetch_is_followed_from_the_first_forward_on(rank: Rank) -> None:
    model = sharded(rank)
    log = logged(model)
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch([blocks[0], blocks[1]])
    for position in range(3):
        blocks[position].set_modules_to_forward_prefetch([blocks[position + 2]])
    for _ in range(2):
        log.clear()
        output = model(batch())
        assert log == [
            ("gather", "root"),
            ("gather", "0"),
            ("gather", "1"),
            ("gather", "2"),
            ("forward", "0"),
            ("gather", "3"),
            ("forward", "1"),
            ("gather", "4"),
            ("forward", "2"),
            ("forward", "3"),
            ("forward", "4"),
        ]
        output.sum().backward()


@on_ranks(2)
def test_explicit_backward_prefetch_is_followed(rank: Rank) -> None:
    model = sharded(rank)
    log = logged(model)
    blocks = list(model.blocks)
    blocks[4].set_modules_to_backward_prefetch([blocks[3], blocks[2]])
    blocks[3].set_modules_to_backward_prefetch([blocks[1]])
    for _ in range(2):
        output = model(batch())
        log.clear()
        output.sum().backward()
        at_four = log[: log.index(("backward", "4"))]
        assert indices(at_four, "gather")[-2:] == ["3", "2"]
        at_three = log[len(at_four) + 1 : log.index(("backward", "3"))]
        assert at_three == [("gather", "1")]
        assert sorted(indices(log, "gather")) in (["0", "1", "2", "3"], ["0", "1", "2", "3", "4"])


@on_ranks(2)
def test_what_was_prefetched_in_vain_is_let_go_at_the_end_of_forward(rank: Rank) -> None:
    model = sharded(rank)
    model.order = [0, 1]
    model.blocks[1].set_modules_to_forward_prefetch([model.blocks[3]])
    seen: list[type] = []
    model.blocks[1].register_forward_hook(
        lambda *_: seen.append(type(unit_of(model.blocks[3]).state))
    )
    with torch.no_grad():
        model(batch())
    assert seen == [Arriving]
    assert isinstance(unit_of(model.blocks[3]).state, Absent)
    assert not any(is_filled(block) for block in model.blocks)


# How many at once


@pytest.mark.parametrize("recorded", [False, True], ids=["first step", "later step"])
@on_ranks(2)
def test_no_more_than_two_units_are_held_while_one_computes(rank: Rank, recorded: bool) -> None:
    model = sharded(rank)
    if recorded:
        train(model)
    in_forward: list[int] = []
    in_backward: list[int] = []

    def count() -> int:
        return sum(is_filled(block) for block in model.blocks)

    def inside(_: Any, args: Any, output: Tensor) -> None:
        in_forward.append(count())
        output.register_hook(lambda grad: in_backward.append(count()))
        output.grad_fn.next_functions[0][0].register_hook(lambda *_: in_backward.append(count()))

    for block in model.blocks:
        block.linear.register_forward_hook(inside)
    model(batch()).sum().backward()
    assert len(in_forward) == len(model.blocks)
    assert len(in_backward) == 2 * len(model.blocks)
    assert max(in_forward) <= 2, in_forward
    assert max(in_backward) <= 2, in_backward


class CountingGather(LoggingGather):
    """Counts the blocks that hold memory at the moment when one more is gathered."""

    def __init__(self, model: Model, counts: list[int]) -> None:
        super().__init__("", [])
        self.model = model
        self.counts = counts

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        self.counts.append(sum(is_filled(block) for block in self.model.blocks))
        return super().__call__(*args, **kwargs)


@on_ranks(2)
def test_no_more_than_two_units_are_held_at_the_moment_of_a_gather(rank: Rank) -> None:
    """The unit being gathered, and the one that computes or is about to be released."""
    model = sharded(rank)
    counts: list[int] = []
    for block in model.blocks:
        block.set_custom_all_gather(CountingGather(model, counts))
    for _ in range(3):
        train(model)
    assert counts
    assert max(counts) <= 2, counts


@on_ranks(2)
def test_without_reshard_after_forward_nothing_is_gathered_in_backward(rank: Rank) -> None:
    model = sharded(rank, reshard_after_forward=False)
    log = logged(model)
    for _ in range(2):
        output = model(batch())
        assert len(indices(log, "gather")) == 6
        log.clear()
        output.sum().backward()
        assert indices(log, "gather") == []
        assert not any(is_filled(block) for block in model.blocks)
        log.clear()


# By hand


@on_ranks(2)
def test_an_asynchronous_unshard_returns_a_handle(rank: Rank) -> None:
    model = sharded(rank)
    block = model.blocks[1]
    shard = block.linear.weight
    handle = block.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    assert isinstance(unit_of(block).state, Arriving)
    assert block.linear.weight is shard
    handle.wait()
    assert isinstance(unit_of(block).state, Present)
    whole = block.linear.weight
    assert not isinstance(whole, DTensor)
    handle.wait()  # a second time: nothing happens
    assert block.linear.weight is whole
    block.reshard()
    torch.testing.assert_close(full_tensor(shard).detach(), full_of(rank, 1))
    assert block.linear.weight is shard
    assert not is_filled(block)


def full_of(rank: Rank, index: int) -> Tensor:
    torch.manual_seed(0)
    return Model().blocks[index].linear.weight.detach()


@on_ranks(2)
def test_a_synchronous_unshard_returns_nothing(rank: Rank) -> None:
    model = sharded(rank)
    block = model.blocks[1]
    assert block.unshard() is None
    torch.testing.assert_close(block.linear.weight.detach(), full_of(rank, 1))
    handle = block.unshard(async_op=True)  # there already
    assert handle is not None
    handle.wait()
    assert isinstance(unit_of(block).state, Present)


@on_ranks(2)
def test_forward_waits_for_an_unshard_that_nobody_waited_for(rank: Rank) -> None:
    model = sharded(rank)
    log = logged(model)
    train(model)
    log.clear()
    handles = [block.unshard(async_op=True) for block in model.blocks]
    assert indices(log, "gather") == list("01234")
    found = model(batch())
    assert indices(log, "gather") == [*"01234", "root"], "none is gathered twice"
    for handle in handles:
        handle.wait()  # after the unit was resharded: nothing happens
    assert all(isinstance(unit_of(block).state, (Absent, Leaving)) for block in model.blocks)
    again = model(batch())
    torch.testing.assert_close(found, again)


@on_ranks(2)
def test_a_handle_that_is_dropped_holds_nothing_up(rank: Rank) -> None:
    model = sharded(rank)
    block = model.blocks[0]
    block.unshard(async_op=True)
    block.reshard()
    assert isinstance(unit_of(block).state, Absent)
    assert not is_filled(block)
    train(model)
