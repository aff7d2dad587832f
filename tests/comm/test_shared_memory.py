"""Ranks of one host read each other's memory: like gloo, and with nothing left behind."""

import fcntl
import gc
import itertools
import logging
import os
import random
import resource
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import ConfigError, DisagreementError, fully_shard
from fullshard.comm import heap
from fullshard.comm.collectives import Collectives, GlooCollectives, all_reduce, collectives_for
from fullshard.comm.heap import SWITCH
from fullshard.comm.link import ALL_GATHER, RECORD, Link
from fullshard.comm.shm import link_of
from fullshard.testing import Rank, RankPool, RanksFailed, Training, assert_same_training, on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
CPU = torch.device("cpu")


def drawn(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 200, (numel,), generator=generator, dtype=dtype)


def link_of_group(group: dist.ProcessGroup) -> Link:
    link = link_of(group)
    assert link is not None, "otherwise this proves nothing"
    return link


def chosen(rank: Rank, group: dist.ProcessGroup | None = None) -> tuple[Any, Collectives]:
    """A group, and the collectives that go over shared memory there."""
    group = rank.mesh().get_group() if group is None else group
    link_of_group(group)
    return group, collectives_for(group, CPU)


@contextmanager
def new_group(**settings: Any) -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(**settings)
    try:
        yield group
    finally:
        dist.barrier()
        dist.destroy_process_group(group)


def gather(rank: Rank, collectives: Collectives, group: Any, numel: int, seed: int = 0) -> Any:
    """A gather under way, its output, and the expected output."""
    out = torch.full((rank.size * numel,), -1.0)
    transfer = collectives.all_gather([out], [drawn(numel, out.dtype, seed + rank.rank)], group)
    parts = [drawn(numel, out.dtype, seed + other) for other in range(rank.size)]
    return transfer, out, torch.cat(parts)


def reduce(rank: Rank, collectives: Collectives, group: Any, numel: int, seed: int = 0) -> Any:
    out = torch.full((numel,), -1.0)
    inputs = [drawn(rank.size * numel, out.dtype, seed + other) for other in range(rank.size)]
    transfer = collectives.reduce_scatter([out], [inputs[rank.rank]], group, average=False)
    segments = [inp.view(rank.size, -1)[rank.rank] for inp in inputs]
    return transfer, out, torch.stack(segments).sum(0)


# Like gloo


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """The expected sum, to the last bit; gloo does not always sum in the order of ranks."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)


@on_ranks(2, 4)
def test_gathers_and_sums_are_those_of_gloo_whatever_the_sizes(rank: Rank) -> None:
    group, shared = chosen(rank)
    draw = random.Random(0)
    for case, dtype in enumerate(DTYPES * 2):
        sizes = [draw.choice([0, 1, 3, 17, 64, 1001, 9000]) for _ in range(draw.randint(1, 4))]
        if case == 0:
            sizes = [300_001]  # more than is copied, or summed, at once
        ins = [drawn(numel, dtype, case + rank.rank) for numel in sizes]
        outs = [inp.new_zeros(rank.size * inp.numel()) for inp in ins]
        shared.all_gather(outs, ins, group).wait()
        by_gloo = [torch.zeros_like(out) for out in outs]
        filled = [index for index, numel in enumerate(sizes) if numel]
        GlooCollectives().all_gather(
            [by_gloo[i] for i in filled], [ins[i] for i in filled], group
        ).wait()
        for found, expected in zip(outs, by_gloo, strict=True):
            assert torch.equal(found, expected), (sizes, dtype)

        fulls = [
            [drawn(rank.size * numel, dtype, case + 7 * other) for numel in sizes]
            for other in range(rank.size)
        ]
        sums = [torch.zeros_like(inp) for inp in ins]
        own = fulls[rank.rank]
        shared.reduce_scatter(sums, own, group, average=False).wait()
        by_gloo = [torch.zeros_like(inp) for inp in ins]
        pairs = [by_gloo[i] for i in filled], [own[i] for i in filled]
        GlooCollectives().reduce_scatter(*pairs, group, average=False).wait()
        for index, found in enumerate(sums):
            parts = [full[index].view(rank.size, -1)[rank.rank] for full in fulls]
            assert torch.equal(found, sum_in_order(parts)), (sizes, dtype)
            torch.testing.assert_close(found, by_gloo[index])


@on_ranks(2, 4)
def test_segments_of_any_size_go_to_their_ranks_as_over_gloo(rank: Rank) -> None:
    group, shared = chosen(rank)
    for case, largest in enumerate((3, 100, 40_000, 300_000)):
        draw = random.Random(case)  # alike on all ranks
        numel = [[draw.randint(0, largest) for _ in range(rank.size)] for _ in range(rank.size)]
        ins, outs = numel[rank.rank], [row[rank.rank] for row in numel]
        sent = drawn(sum(ins), torch.bfloat16, case + rank.rank)
        found, expected = (torch.zeros(sum(outs), dtype=torch.bfloat16) for _ in range(2))
        work = shared.all_to_all(found, sent, outs, ins, group)
        again = torch.zeros_like(found)
        later = shared.all_to_all(again, sent, outs, ins, group)
        GlooCollectives().all_to_all(expected, sent, outs, ins, group).wait()
        later.wait()  # in another order than they began
        work.wait()
        assert torch.equal(found, expected)
        assert torch.equal(again, expected)


@on_ranks(2, 4)
def test_a_gather_in_place_sends_its_segment_of_the_output(rank: Rank) -> None:
    group, shared = chosen(rank)
    for numel in (5, 200_000):
        out = torch.full((rank.size, numel), -1.0)
        out[rank.rank] = rank.rank
        shared.all_gather([out.view(-1)], [out[rank.rank]], group).wait()
        expected = torch.arange(rank.size, dtype=torch.float32)[:, None].expand_as(out)
        assert torch.equal(out, expected)


@on_ranks(2, 4)
def test_a_sum_may_replace_the_segment_of_its_input(rank: Rank) -> None:
    group, shared = chosen(rank)
    inp = torch.full((rank.size, 300_000), float(rank.rank + 1))
    shared.reduce_scatter([inp[rank.rank]], [inp.view(-1)], group, average=False).wait()
    assert inp[rank.rank].eq(sum(range(rank.size + 1))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2, 4)
def test_sums_over_replicas_are_the_same_on_all_of_them(rank: Rank, dtype: torch.dtype) -> None:
    group, _ = chosen(rank)
    for numel in (1, 7, 4096, 100_003):
        parts = [drawn(numel, dtype, other) for other in range(rank.size)]
        found = parts[rank.rank].clone()
        all_reduce(found, group, average=False)
        assert torch.equal(found, sum_in_order(parts)), numel


@on_ranks(2)
def test_messages_of_a_wrong_size_are_refused_before_anything_is_read(rank: Rank) -> None:
    group, shared = chosen(rank)
    with pytest.raises(ConfigError, match=r"has 32 bytes and strides .* for this rank 12 and"):
        shared.all_gather([torch.empty(8)], [torch.empty(3)], group)
    with pytest.raises(ConfigError, match=r"has 32 bytes .* for this rank 12"):
        shared.reduce_scatter([torch.empty(3)], [torch.empty(8)], group, average=False)
    with pytest.raises(ConfigError, match="pass contiguous ones"):
        shared.all_gather([torch.empty(8, 2)[:, 0]], [torch.empty(4)], group)
    transfer, out, expected = gather(rank, shared, group, 4)
    transfer.wait()
    assert torch.equal(out, expected)


# Under way


@pytest.mark.sampled(2)
@on_ranks(2, 4)
def test_collectives_under_way_may_be_waited_for_in_any_order(rank: Rank) -> None:
    group, shared = chosen(rank)
    for number, order in enumerate(itertools.permutations(range(3))):
        started = [
            gather(rank, shared, group, 1000, number),
            reduce(rank, shared, group, 70_000, number),
            gather(rank, shared, group, 3, number),
        ]
        # Ranks need not agree on the order either.
        for index in order if rank.rank % 2 else reversed(order):
            transfer, out, expected = started[index]
            transfer.wait()
            torch.testing.assert_close(out, expected)
            transfer.wait()  # once more changes nothing
            torch.testing.assert_close(out, expected)


@on_ranks(4)
def test_several_groups_at_once_do_not_meet(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    world, shared = chosen(rank)
    for step in range(3):
        started = [gather(rank, shared, world, 500, step)]
        for axis in (0, 1):
            group = mesh.get_group(axis)
            link_of_group(group)
            members = dist.get_process_group_ranks(group)
            out = torch.empty(2 * 9)
            own = torch.full((9,), float(rank.rank + 10 * step))
            expected = torch.tensor(members).repeat_interleave(9) + 10.0 * step
            started.append((shared.all_gather([out], [own], group), out, expected))
        for transfer, out, expected in reversed(started):
            transfer.wait()
            assert torch.equal(out, expected)


@on_ranks(2)
def test_a_rank_may_be_ahead_by_more_than_a_pipe_holds(rank: Rank) -> None:
    with new_group() as group:
        _, shared = chosen(rank, group)
        (peer,) = link_of_group(group).peers.values()
        fcntl.fcntl(peer.outbox, fcntl.F_SETPIPE_SZ, 4096)
        started = []
        if rank.rank == 0:  # the other one is in the barrier, and reads nothing
            started = [gather(rank, shared, group, 3, number) for number in range(200)]
            assert peer.is_full
        dist.barrier()
        if rank.rank == 1:
            started = [gather(rank, shared, group, 3, number) for number in range(200)]
        for transfer, out, expected in started:
            transfer.wait()
            assert torch.equal(out, expected)


@on_ranks(2)
def test_a_collective_may_have_more_buckets_than_a_pipe_takes_at_once(rank: Rank) -> None:
    group, shared = chosen(rank)
    ins = [torch.full((3,), float(number + rank.rank)) for number in range(300)]
    outs = [torch.empty(6) for _ in ins]
    shared.all_gather(outs, ins, group).wait()
    for number, out in enumerate(outs):
        assert out.tolist() == [number] * 3 + [number + 1] * 3


@on_ranks(2)
def test_another_thread_may_wait(rank: Rank) -> None:
    group, shared = chosen(rank)
    started = [gather(rank, shared, group, 20_000, number) for number in range(8)]
    threads = [threading.Thread(target=transfer.wait) for transfer, *_ in started]
    for thread in threads:
        thread.start()
    more = [reduce(rank, shared, group, 50, number) for number in range(8)]
    for thread in threads:
        thread.join()
    for transfer, out, expected in (*more, *started):
        transfer.wait()
        torch.testing.assert_close(out, expected)


@on_ranks(2)
def test_a_future_is_done_when_the_collective_has_been_waited_for(rank: Rank) -> None:
    group, shared = chosen(rank)
    transfer, *_ = gather(rank, shared, group, 10)
    (future,) = transfer.futures
    (same,) = transfer.futures
    dist.barrier()
    assert same is future
    assert not future.done(), "nothing is read before someone waits"
    transfer.wait()
    assert future.done()
    assert transfer.futures == []


# Memory


@pytest.mark.sampled(2)
@on_ranks(2, 4)
def test_memory_is_used_again_and_no_more_is_taken_in_a_steady_state(rank: Rank) -> None:
    group, shared = chosen(rank)
    heap = link_of_group(group).heap

    def step(number: int) -> None:
        for numel in (10, 70_000):
            first = gather(rank, shared, group, numel, number)
            second = gather(rank, shared, group, numel, number + 1)
            for transfer, out, expected in (first, second):
                transfer.wait()
                assert torch.equal(out, expected)
            buffer = shared.allocate_bucket(rank.size * numel, torch.float32, CPU, group).fill_(
                number
            )
            total = torch.empty(numel)
            shared.reduce_scatter([total], [buffer], group, average=False).wait()
            assert total.eq(rank.size * number).all()

    for number in range(6):
        step(number)
    num_bytes = heap.num_bytes
    # A rank that falls behind may make the others take one more of a size, not more with time.
    for number in range(16):
        step(number)
    assert heap.num_bytes <= 2 * num_bytes


def heaps() -> list[int]:
    """The used bytes of the heaps that this process has mapped: its own, and others'."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "memfd:fullshard" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(512 * os.stat(f"/proc/self/fd/{name}").st_blocks)
    return found


@on_ranks(2)
def test_memory_that_nobody_uses_for_long_is_given_back(rank: Rank) -> None:
    limit, large = heap.IDLE_COLLECTIVES, 6 << 20
    heap.IDLE_COLLECTIVES = 300
    try:
        with new_group() as group:
            _, shared = chosen(rank, group)
            before = sum(heaps())
            assert_right(gather(rank, shared, group, large // 4))
            dist.barrier()
            assert sum(heaps()) - before >= 2 * large, "its own, and that of the other rank"
            for _ in range(600):
                gather(rank, shared, group, 1)[0].wait()
            dist.barrier()
            assert sum(heaps()) < before + large
            assert_right(gather(rank, shared, group, large // 4))
    finally:
        heap.IDLE_COLLECTIVES = limit


@on_ranks(2)
def test_a_message_buffer_is_not_copied_and_is_free_again_when_no_view_is_left(rank: Rank) -> None:
    group, shared = chosen(rank)
    heap = link_of_group(group).heap
    numel = 100_000
    buffer = shared.allocate_bucket(2 * numel, torch.bfloat16, CPU, group)
    assert (buffer.shape, buffer.dtype, buffer.device) == ((2 * numel,), torch.bfloat16, CPU)
    block = heap.find(buffer)
    assert block is not None
    view = buffer.view(2, -1)[1]
    del buffer
    gc.collect()
    other = shared.allocate_bucket(2 * numel, torch.bfloat16, CPU, group)
    assert heap.find(other) is not block, "a view of the first one is alive"
    other.fill_(1)
    num_taken = heap._num_taken
    total = torch.empty(numel, dtype=torch.bfloat16)
    transfer = shared.reduce_scatter([total], [other], group, average=False)
    assert heap._num_taken == num_taken, "nothing was copied"
    del other, view
    transfer.wait()
    assert total.eq(2).all()
    del transfer
    again = shared.allocate_bucket(2 * numel, torch.bfloat16, CPU, group)
    assert heap.find(again) is block
    # For few bytes, a copy is cheaper than a tensor of that kind.
    assert heap.find(shared.allocate_bucket(10, torch.float32, CPU, group)) is None


@on_ranks(2)
def test_a_buffer_that_was_sent_is_not_lent_again_before_the_other_has_read_it(rank: Rank) -> None:
    group, shared = chosen(rank)
    numel = 100_000
    transfers, totals = [], []
    for number in range(6):
        buffer = shared.allocate_bucket(2 * numel, torch.float32, CPU, group).fill_(
            number + rank.rank
        )
        totals.append(torch.empty(numel))
        transfers.append(shared.reduce_scatter([totals[-1]], [buffer], group, average=False))
        del buffer
    for number, (transfer, total) in enumerate(zip(transfers, totals, strict=True)):
        transfer.wait()
        assert total.eq(2 * number + 1).all()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@on_ranks(2)
def test_groups_that_are_destroyed_and_made_again_leave_nothing_open(rank: Rank) -> None:
    def train_on_a_new_group() -> None:
        with new_group() as group:
            _, shared = chosen(rank, group)
            for numel in (10, 500_000):
                for started in (gather, reduce):
                    transfer, out, expected = started(rank, shared, group, numel)
                    transfer.wait()
                    torch.testing.assert_close(out, expected)
            gather(rank, shared, group, 500_000)  # nobody waits for this one

    def settled() -> tuple[int, int]:
        gc.collect()
        return open_files(), len(heaps())

    train_on_a_new_group()
    first = settled()
    for _ in range(5):
        train_on_a_new_group()
    files, num_heaps = settled()
    assert files <= first[0] + 2
    assert num_heaps == first[1]


@on_ranks(2)
def test_a_process_that_was_forked_has_none_of_the_pipes(rank: Rank) -> None:
    group, _ = chosen(rank)
    pipes = [peer.outbox for peer in link_of_group(group).peers.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a process with threads forks: the child only looks
        child = os.fork()
    if child == 0:
        os._exit(sum(os.path.exists(f"/proc/self/fd/{each}") for each in pipes))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(os.path.exists(f"/proc/self/fd/{each}") for each in pipes)


# Failures


@pytest.mark.sampled(2)
@on_ranks(2, 4)
def test_collectives_that_nobody_waits_for_leave_the_next_ones_right(rank: Rank) -> None:
    group, shared = chosen(rank)
    heap, num_bytes = link_of_group(group).heap, []
    for number in range(9):
        kept = gather(rank, shared, group, 9000, number)
        dropped = [reduce(rank, shared, group, 9000), gather(rank, shared, group, 9000)]
        if rank.rank == number % rank.size:
            (future,) = dropped[0][0].futures
            del dropped
            gc.collect()
            assert future.done()
        else:
            for transfer, out, expected in dropped:
                transfer.wait()
                torch.testing.assert_close(out, expected)
        transfer, out, expected = kept
        transfer.wait()
        assert torch.equal(out, expected)
        num_bytes.append(heap.num_bytes)
        dist.barrier()
    assert num_bytes[-1] <= 2 * num_bytes[5], "what was not read was still said to be"


@on_ranks(2, 4)
def test_ranks_that_start_different_collectives_are_told_of_both(rank: Rank) -> None:
    group, shared = chosen(rank)
    odd = rank.rank == 1
    full, piece = torch.zeros(rank.size * 8), torch.zeros(8)
    if odd:
        transfer = shared.reduce_scatter([piece], [full], group, average=False)
    else:
        transfer = shared.all_gather([full], [piece], group)
    with pytest.raises(DisagreementError) as raised:
        transfer.wait()
    message = str(raised.value)
    assert "runs all-gather of 1 bucket with 32 bytes" in message
    assert f"rank 1 runs reduce-scatter of 1 bucket with {rank.size * 32} bytes" in message or odd
    assert "Make the model take the same path" in message

    numel = 16 if odd else 8
    transfer, *_ = gather(rank, shared, group, numel)
    with pytest.raises(DisagreementError, match=r"with 32 bytes.*with 64|with 64.*with 32"):
        transfer.wait()
    outs = [torch.zeros(rank.size * 4), torch.zeros(rank.size * 12)]
    ins = [out[: out.numel() // rank.size].clone() for out in outs]
    if odd:
        outs, ins = outs[::-1], ins[::-1]
    with pytest.raises(DisagreementError, match="of other sizes or dtypes; all"):
        shared.all_gather(outs, ins, group).wait()
    # All are at the same place still.
    transfer, out, expected = gather(rank, shared, group, 50)
    transfer.wait()
    assert torch.equal(out, expected)


@on_ranks(2)
def test_memory_outside_of_a_heap_is_not_read(rank: Rank) -> None:
    with new_group() as group:
        _, shared = chosen(rank, group)
        link = link_of_group(group)
        (peer,) = link.peers.values()
        end = len(link.heap.memory)
        offsets = [-1, -(2**40), end - 39, end, 2**62]
        if rank.rank == 1:  # announces what it has no memory for
            for number, offset in enumerate(offsets, start=link.num_started + 1):
                os.write(peer.outbox, RECORD.pack(number, ALL_GATHER, 1, 40, 1, offset))
            os.write(peer.outbox, RECORD.pack(number + 1, 99, 1, 40, 1, 0))
        dist.barrier()
        if rank.rank == 0:
            for offset in offsets:
                transfer, *_ = gather(rank, shared, group, 10)
                with pytest.raises(RuntimeError, match=rf"rank 1 announced 40 bytes at {offset}, "):
                    transfer.wait()
            transfer, *_ = gather(rank, shared, group, 10)
            with pytest.raises(DisagreementError, match="no collective of 1 bucket"):
                transfer.wait()


def test_a_process_without_the_token_of_a_rank_is_not_connected_to() -> None:
    heap = os.memfd_create("fullshard-5")
    try:
        with pytest.raises(ProcessLookupError):
            Link(0, [0, 1], 1.0).connect([[], [os.getpid(), 7, 0, 0, heap]])
    finally:
        os.close(heap)


@on_ranks(2)
def test_a_rank_that_does_not_come_in_time_is_named(rank: Rank) -> None:
    with new_group(timeout=timedelta(seconds=77)) as group:
        _, shared = chosen(rank, group)
        link = link_of_group(group)
        assert link.timeout_s == 77
        link.timeout_s = 0.05 if rank.rank == 0 else 77
        if rank.rank == 0:
            transfer, *_ = gather(rank, shared, group, 100)
            with pytest.raises(RuntimeError, match=r"nothing came from rank 1 within 0\.05 s"):
                transfer.wait()
        dist.barrier()
        if rank.rank == 1:
            transfer, out, expected = gather(rank, shared, group, 100)
            transfer.wait()
            assert torch.equal(out, expected)
        link.timeout_s = 77
        transfer, out, expected = gather(rank, shared, group, 200)
        transfer.wait()
        assert torch.equal(out, expected)


@on_ranks(2)
def test_what_a_rank_has_sent_is_read_after_it_has_left(rank: Rank) -> None:
    with new_group() as group:
        _, shared = chosen(rank, group)
        started = [gather(rank, shared, group, 400_000, number) for number in range(3)]
        if rank.rank == 1:
            for transfer, *_ in started:
                transfer.wait()
            link_of_group(group).close()
        dist.barrier()
        if rank.rank == 0:
            for transfer, out, expected in started:
                transfer.wait()
                assert torch.equal(out, expected)
            transfer, *_ = gather(rank, shared, group, 10)
            with pytest.raises(RuntimeError, match="rank 1 is gone"):
                transfer.wait()


def die_between_two_gathers(rank: Rank) -> None:
    group, shared = chosen(rank)
    gather(rank, shared, group, 1000)[0].wait()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gather(rank, shared, group, 1000)[0].wait()


def test_a_rank_that_is_killed_is_named_at_once_on_all_others() -> None:
    with RankPool(3) as ranks, pytest.raises(RanksFailed) as failed:
        ranks.run(die_between_two_gathers, timeout_s=60)
    # A rank that had not answered a few seconds after the death would count as silent, too.
    assert sorted(failed.value.silent) == [1]
    for other in failed.value.exceptions.values():
        assert isinstance(other.exception, RuntimeError)
        assert ": rank 1 is gone (Connection closed by peer)" in other.message


# Exhausted


@contextmanager
def no_descriptors() -> Iterator[None]:
    """No file can be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, before[1]))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def one_warning(rank: Rank) -> Iterator[None]:
    """All ranks are told once, and about the same rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(each.message) for each in caught]
    assert len(messages) == 1, messages
    assert (
        "rank 1 has no memory or file descriptor left for shared memory (Too many open files)"
        in messages[0]
    )


def assert_right(*started: Any) -> None:
    for transfer, out, expected in started:
        transfer.wait()
        torch.testing.assert_close(out, expected)


@on_ranks(2, 4)
def test_a_rank_that_cannot_connect_for_lack_of_descriptors_makes_all_use_gloo(rank: Rank) -> None:
    with new_group() as group:
        dist.barrier(group)  # gloo has its own connections now
        shared = collectives_for(group, CPU)
        num_open = open_files()
        with one_warning(rank), no_descriptors() if rank.rank == 1 else nullcontext():
            assert_right(gather(rank, shared, group, 1000), reduce(rank, shared, group, 1000))
        assert link_of(group) is None
        assert open_files() <= num_open


@on_ranks(2)
def test_ranks_that_have_connected_need_no_more_descriptors(rank: Rank) -> None:
    with new_group() as group:
        _, shared = chosen(rank, group)
        with no_descriptors():
            for numel in (3, 40_000, 1_000_000):
                assert_right(gather(rank, shared, group, numel), reduce(rank, shared, group, numel))


# Without


class Said(logging.Handler):
    """What was logged while it lasts."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def without_shared_memory() -> Iterator[dist.ProcessGroup]:
    """A new group whose first collective is to come, and the switch set."""
    os.environ[SWITCH] = "0"
    try:
        with new_group() as group:
            yield group
    finally:
        del os.environ[SWITCH]


@on_ranks(2, 4)
def test_a_switch_on_one_rank_makes_all_of_them_use_gloo(rank: Rank) -> None:
    log, said = logging.getLogger("fullshard.comm.shm"), Said()
    log.addHandler(said)
    log.setLevel(logging.DEBUG)
    try:
        with without_shared_memory() if rank.rank == 1 else new_group() as group:
            shared = collectives_for(group, CPU)
            for started in (gather, reduce):
                transfer, out, expected = started(rank, shared, group, 1000)
                transfer.wait()
                torch.testing.assert_close(out, expected)
            assert link_of(group) is None
            assert shared.allocate_bucket(100_000, torch.float32, CPU, group).is_contiguous()
            total = torch.ones(3)
            all_reduce(total, group, average=False)
            assert total.eq(rank.size).all()
    finally:
        log.removeHandler(said)
        log.setLevel(logging.NOTSET)
    assert len(said.lines) == 1, said.lines
    assert (
        "ranks [1] of the group cannot, or FULLSHARD_SHARED_MEMORY=0 is set there" in said.lines[0]
    )


def model_of_blocks() -> nn.Module:
    return nn.Sequential(*(nn.Linear(12, 12) for _ in range(3)), nn.Tanh(), nn.Linear(12, 5))


def batch_of_rows(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 12, generator=generator)


@on_ranks(2)
def test_training_is_the_same_with_and_without_shared_memory(rank: Rank) -> None:
    def losses(group: dist.ProcessGroup, name: str) -> tuple[float, ...]:
        # Meshes of the same ranks and names are the same mesh to torch, whatever the group.
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))

        def shard(model: nn.Module) -> None:
            for block in model[:3]:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)

        return assert_same_training(model_of_blocks, shard, Training(batch_of_rows)).losses

    with without_shared_memory() as group:
        without = losses(group, "without")
        assert link_of(group) is None
    with new_group() as group:
        assert losses(group, "with") == without
        link_of_group(group)
