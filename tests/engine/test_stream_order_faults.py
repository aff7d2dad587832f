"""The race detector finds the races that are there, and no others.

Small programs on emulated streams, most of them twice: as they should be, and with the one mistake
that makes them race.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from fullshard.device import ResizableBuffer
from tests.engine.test_stream_order import SCENARIOS
from tests.support.stream_order import StreamOrder, emulated_streams


@pytest.fixture
def order() -> Iterator[StreamOrder]:
    with emulated_streams(2) as order:
        yield order


def waits_for_current(order: StreamOrder, stream: object) -> None:
    order.device.wait(order.device.record(), stream)  # type: ignore[arg-type]


# Order


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_read_on_another_stream_has_to_wait_for_the_write(
    order: StreamOrder, is_awaited: bool
) -> None:
    side = order.make_stream("side")
    values = torch.ones(8)
    if is_awaited:
        waits_for_current(order, side)
    with order.on(side):
        values.sum()
    assert bool(order.races) is not is_awaited


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_write_has_to_wait_for_reads_on_another_stream(
    order: StreamOrder, is_awaited: bool
) -> None:
    side = order.make_stream("side")
    values = torch.ones(8)
    waits_for_current(order, side)
    with order.on(side):
        values.sum()
        event = order.device.record()
    if is_awaited:
        order.device.wait(event)
    values.zero_()
    assert bool(order.races) is not is_awaited


def test_reads_need_no_order_among_themselves(order: StreamOrder) -> None:
    streams = [order.make_stream(name) for name in ("one", "other")]
    values = torch.ones(8)
    for stream in streams:
        waits_for_current(order, stream)
    for stream in streams:
        with order.on(stream):
            values.sum()
    assert not order.races


def test_a_wait_of_the_wrong_stream_orders_nothing(order: StreamOrder) -> None:
    side, other = order.make_stream("side"), order.make_stream("other")
    values = torch.ones(8)
    waits_for_current(order, other)
    with order.on(side):
        values.sum()
    assert order.races


def test_an_event_that_was_recorded_before_the_write_orders_nothing(order: StreamOrder) -> None:
    side = order.make_stream("side")
    values = torch.empty(8)
    event = order.device.record()
    values.fill_(1.0)
    order.device.wait(event, side)
    with order.on(side):
        values.sum()
    assert order.races


def test_order_is_passed_on_by_a_third_stream(order: StreamOrder) -> None:
    side, third = order.make_stream("side"), order.make_stream("third")
    values = torch.ones(8)
    waits_for_current(order, third)
    with order.on(third):
        waits_for_current(order, side)
    with order.on(side):
        values.zero_()
    assert not order.races


@pytest.mark.parametrize("start, races", [(4, False), (3, True)])
def test_parts_of_one_storage_race_only_where_they_overlap(
    order: StreamOrder, start: int, races: bool
) -> None:
    side = order.make_stream("side")
    values = torch.empty(8)
    values[:4].fill_(1.0)
    with order.on(side):
        values[start:].fill_(2.0)
    assert bool(order.races) is races


def test_views_touch_nothing(order: StreamOrder) -> None:
    side = order.make_stream("side")
    values = torch.ones(8)
    with order.on(side):
        values.view(2, 4).t()[1:].detach().as_strided((2,), (1,))
    assert not order.races


def test_storages_that_share_memory_are_the_same_memory(order: StreamOrder) -> None:
    side = order.make_stream("side")
    values = torch.ones(8)
    alias = from_dlpack(to_dlpack(values[2:4]))
    with order.on(side):
        values[4:].zero_().sum()
        raced_at_once = len(order.races)
        alias.zero_()
    assert raced_at_once
    assert len(order.races) > raced_at_once


@pytest.mark.parametrize(
    "touch",
    [
        lambda a: torch._foreach_add_([a], 1.0),
        lambda a: torch.add(a, 1.0, out=a),
        lambda a: torch.stack([a, a]),
        lambda a: torch.nn.functional.linear(a.view(1, -1), a.view(1, -1)),
        lambda a: a.requires_grad_().square().sum().backward(),
    ],
)
def test_all_kinds_of_operations_are_seen(
    order: StreamOrder, touch: Callable[[Tensor], object]
) -> None:
    side = order.make_stream("side")
    values = torch.ones(8)
    with order.on(side):
        touch(values)
    assert order.races


def test_what_is_done_to_a_dtensor_is_seen_at_its_local_tensor(order: StreamOrder) -> None:
    side = order.make_stream("side")
    whole = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (2,)), [Shard(0)])
    waits_for_current(order, side)
    with order.on(side):
        whole.add_(1.0)
    assert not order.races
    whole.to_local().sum()
    assert order.races


# Collectives


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_collective_beside_the_stream_has_to_be_waited_for(
    order: StreamOrder, is_awaited: bool
) -> None:
    values = torch.ones(8)
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    if is_awaited:
        work.wait()
    values.sum()
    assert bool(order.races) is not is_awaited


def test_a_collective_runs_on_the_stream_that_calls(order: StreamOrder) -> None:
    side = order.make_stream("side")
    values = torch.ones(8)
    waits_for_current(order, side)
    with order.on(side):
        dist.all_reduce(values)
    assert not order.races
    values.sum()
    assert order.races


def test_a_gather_reads_what_is_sent_and_writes_what_arrives(order: StreamOrder) -> None:
    side = order.make_stream("side")
    sent, arrived = torch.ones(4), torch.zeros(8)
    waits_for_current(order, side)
    with order.on(side):
        group = dist.group.WORLD
        assert group is not None
        group._allgather_base(arrived, sent).wait()
    sent.sum()
    assert not order.races
    arrived.sum()
    assert order.races


# Memory


@pytest.mark.parametrize("is_awaited", [True, False])
def test_memory_that_is_freed_while_another_stream_reads_it_is_given_out_again(
    order: StreamOrder, is_awaited: bool
) -> None:
    side = order.make_stream("side")
    values = torch.ones(8)
    waits_for_current(order, side)
    with order.on(side):
        values.sum()
        event = order.device.record()
    del values
    if is_awaited:
        order.device.wait(event)
    torch.ones(1000)
    assert bool(order.races) is not is_awaited
    assert all(race.is_reuse for race in order.races.values())


def test_memory_goes_back_to_the_stream_that_allocated_it(order: StreamOrder) -> None:
    side = order.make_stream("side")
    with order.on(side):
        values = torch.empty(8)
    values.fill_(1.0)
    del values
    torch.ones(8)
    assert not order.races
    with order.on(side):
        torch.ones(8)
    assert order.races


def test_memory_that_is_given_out_and_not_touched_is_no_race(order: StreamOrder) -> None:
    side = order.make_stream("side")
    values = torch.ones(8)
    waits_for_current(order, side)
    with order.on(side):
        values.sum()
        event = order.device.record()
    del values
    taken = torch.empty(8)
    assert not order.races
    order.device.wait(event)
    taken.zero_()
    assert not order.races


def test_whoever_touches_given_memory_first_has_to_wait(order: StreamOrder) -> None:
    side, other = order.make_stream("side"), order.make_stream("other")
    values = torch.ones(8)
    waits_for_current(order, side)
    with order.on(side):
        values.sum()
        order.device.wait(order.device.record(), order.compute)
    del values
    taken = torch.empty(8)
    with order.on(other):
        taken.zero_()
    assert order.races


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_buffer_that_is_freed_while_it_is_read_is_allocated_with_the_same_memory(
    order: StreamOrder, is_awaited: bool
) -> None:
    gather = order.device.make_streams().all_gather
    with order.on(gather):
        buffer = ResizableBuffer(4096, torch.device("cpu"))
        full = buffer.view(0, (1024,), torch.float32)
        full.fill_(1.0)
        waits_for_current(order, order.compute)
    before = buffer.address_range
    full.sum()
    event = order.device.record()
    buffer.free()
    with order.on(gather):
        buffer.allocate()
        assert buffer.address_range == before
        if is_awaited:
            order.device.wait(event)
        full.fill_(2.0)
    assert bool(order.races) is not is_awaited


def test_gathers_get_the_range_that_fits_best(order: StreamOrder) -> None:
    gather = order.device.make_streams().all_gather
    with order.on(gather):
        sizes = (4096, 512, 1024, 512)
        buffers = [ResizableBuffer(size, torch.device("cpu")) for size in sizes]
        starts = [buffer.address_range[0] for buffer in buffers]
        buffers[0].free()
        buffers[2].free()
        buffers[2].allocate()
        assert buffers[2].address_range[0] == starts[2]
        for buffer in buffers[1:]:
            buffer.free()  # joined with its neighbors
        buffers[0].allocate()
        assert buffers[0].address_range[0] == starts[0]


def test_ranges_that_do_not_overlap_do_not_race(order: StreamOrder) -> None:
    gather = order.device.make_streams().all_gather
    with order.on(gather):
        small, large = (ResizableBuffer(size, torch.device("cpu")) for size in (512, 4096))
        views = [buffer.view(0, (buffer.num_bytes,), torch.uint8) for buffer in (small, large)]
        views[0].zero_()
        large.free()
        kept = torch.empty(4096, dtype=torch.uint8)
        waits_for_current(order, order.compute)
    views[0].sum()
    small.free()
    with order.on(gather):
        large.allocate()
        views[1].zero_()
        assert not order.races
        kept.zero_()
        del kept
        small.allocate()
        views[0].zero_()
    assert order.races


def test_resizing_a_storage_that_has_memory_moves_it(order: StreamOrder) -> None:
    gather = order.device.make_streams().all_gather
    with order.on(gather):
        buffer = ResizableBuffer(4096, torch.device("cpu"))
        before = buffer.address_range
        buffer._storage.resize_(4096)
        assert buffer.address_range != before


# The host


def test_an_event_has_passed_when_the_host_has_seen_it(order: StreamOrder) -> None:
    values = torch.ones(8)
    event = order.device.record()
    assert not event.query()
    order.device.synchronize(event)
    assert event.query()
    side = order.make_stream("side")
    with order.on(side):
        values.sum()
    assert not order.races


def test_reading_a_value_synchronizes_the_host(order: StreamOrder) -> None:
    side = order.make_stream("side")
    values = torch.ones(8)
    values.sum().item()
    with order.on(side):
        values.zero_()
    assert not order.races


@pytest.mark.parametrize("is_awaited", [True, False])
def test_the_host_has_to_wait_for_what_is_copied_to_it(is_awaited: bool) -> None:
    with emulated_streams(1, is_offloading=True) as order:
        values = torch.ones(8, device=torch.device("cpu", 0))
        on_host = torch.empty(8, device="cpu")
        on_host.copy_(values)
        if is_awaited:
            order.device.synchronize(order.device.record())
        on_host.add_(1.0)
    assert bool(order.races) is not is_awaited
    assert order.num_accesses["host"]


# What is said


def test_a_race_is_told_with_its_streams_operations_and_lines(order: StreamOrder) -> None:
    side = order.make_stream("side")
    values = torch.ones(8)
    with order.on(side):
        values.sum()
    (race,) = order.races.values()
    assert race.streams == ("compute", "side")
    assert "read by sum on 'side'" in race.second
    assert "write by ones on 'compute'" in race.first
    assert f"{__name__.rpartition('.')[2]}.py" in race.memory
    assert str(race) in order.report()


def test_what_runs_in_the_engine_is_told_with_the_lines_of_the_engine() -> None:
    order = SCENARIOS["float32"].order(without_wait=["Reduction.start"])
    assert "unit/reduction.py" in order.report()
    assert "on 'reduce'" in order.report()


# Moving memory


def test_a_buffer_that_is_allocated_twice_is_found_where_nobody_waited() -> None:
    def allocate(buffer: ResizableBuffer) -> None:
        buffer._storage.resize_(buffer.num_bytes)

    fault = patch.object(ResizableBuffer, "allocate", allocate)
    assert SCENARIOS["kept storage"].order(fault=fault).races
