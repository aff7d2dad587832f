"""Collectives of ranks on several hosts: every byte crosses to another host once.

The ranks of a test are on one machine; here they say that each pair of them has its own.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.comm import collectives, shm
from fullshard.comm.collectives import Collectives, GlooCollectives, ShmCollectives, all_reduce
from fullshard.comm.heap import SWITCH
from fullshard.comm.topology import Topology
from fullshard.comm.two_level import Rail, levels_of, packed_wire, rail_of
from fullshard.layout import Int4, Int8, Plain, Wire
from fullshard.testing import Rank, on_ranks
from fullshard.testing.parity import Training, assert_same_training
from fullshard.trace import record

NUMEL = 5
Messages = Sequence[Sequence[Tensor]]


@contextmanager
def group_on_hosts(rank: Rank, *hosts: str) -> Iterator[dist.ProcessGroup]:
    """A group of all ranks, each on the host of its number."""
    group = dist.new_group()
    with patch("fullshard.comm.topology.machine_id", lambda: hosts[rank.rank]):
        assert Topology.of(group).machines == hosts
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


@contextmanager
def sent_over_rails() -> Iterator[list[tuple[int, int]]]:
    """The ranks of each exchange of a rail, and the bytes that this rank sends to the others."""
    sent: list[tuple[int, int]] = []
    exchange = Rail.exchange

    def counted(rail: Rail, received: Messages, messages: Messages) -> None:
        size, own = rail.rail.size(), rail.rail.rank()
        others = [each for bucket in messages for n, each in enumerate(bucket) if n != own]
        sent.append((size, sum(each.nbytes for each in others)))
        exchange(rail, received, messages)

    with patch.object(Rail, "exchange", counted):
        yield sent


@on_ranks(4)
def test_all_gather_and_reduce_scatter_send_each_byte_to_another_host_once(rank: Rank) -> None:
    hosts = "one", "one", "two", "two"
    with group_on_hosts(rank, *hosts) as group:
        levels = levels_of(group)
        assert levels is not None
        assert shm.link_of(group) is None
        assert shm.link_of(levels.host) is not None
        assert dist.get_process_group_ranks(levels.rail) == [rank.rank % 2, rank.rank % 2 + 2]
        ins = [torch.arange(n) + 100.0 * rank.rank for n in (NUMEL, 2 * NUMEL)]
        outs = [each.new_empty(4 * each.numel()) for each in ins]
        with sent_over_rails() as sent:
            work = ShmCollectives().all_gather(outs, ins, group)
            full = [torch.arange(4.0 * n) * (rank.rank + 1) for n in (NUMEL, 2 * NUMEL)]
            sums = [torch.empty(n) for n in (NUMEL, 2 * NUMEL)]
            other = ShmCollectives().reduce_scatter(sums, full, group, average=False)
            other.wait()  # in another order than they were started
            work.wait()
        for out, inp in zip(outs, ins, strict=True):
            expected = torch.stack([torch.arange(inp.numel()) + 100.0 * r for r in range(4)])
            assert torch.equal(out.view(4, -1), expected)
        for total, n in zip(sums, (NUMEL, 2 * NUMEL), strict=True):
            assert torch.equal(total, 10 * (torch.arange(n) + 1.0 * n * rank.rank))
        assert sent == 2 * [(2, 4 * 3 * NUMEL)]


@on_ranks(4)
def test_sums_of_hosts_travel_in_the_wire(rank: Rank) -> None:
    with group_on_hosts(rank, "one", "one", "two", "two") as group:
        torch.manual_seed(rank.rank)
        full, wire = torch.randn(4 * NUMEL).bfloat16(), Plain(torch.bfloat16)
        found, flat = torch.empty(NUMEL), torch.empty(NUMEL)
        ShmCollectives().reduce_scatter([found], [full], group, average=False, wire=wire).wait()
        GlooCollectives().reduce_scatter([flat], [full], group, average=False, wire=wire).wait()
        assert torch.allclose(found, flat, rtol=2**-7, atol=2**-7)
        assert found.dtype == torch.float32


WIRE = Int4(block=16)


def encoded(wire: Wire, segments: Tensor) -> Tensor:
    shape = len(segments), wire.message_numel(segments.size(1))
    messages = torch.empty(shape, dtype=wire.dtype)
    wire.encode(segments, messages)
    return messages


def sum_of(wire: Wire, segments: Tensor) -> Tensor:
    """Segments sent in a wire, and added up, in rows of the last dims."""
    found = torch.zeros(segments.shape[1:])
    for each in segments:
        arrived = torch.empty_like(each)
        wire.decode(encoded(wire, each), arrived)
        found += arrived
    return found


@contextmanager
def exchanged_bytes() -> Iterator[list[tuple[int, int]]]:
    """The ranks of each exchange on this thread or another one, and its bytes on this rank."""
    sent: list[tuple[int, int]] = []
    exchange, between_hosts = collectives.all_to_all_single, Rail.exchange

    def counted(group: dist.ProcessGroup, out: Tensor, inp: Tensor, *rest: object) -> object:
        sent.append((group.size(), inp.nbytes))
        return exchange(group, out, inp, *rest)

    def counted_between_hosts(rail: Rail, received: Messages, messages: Messages) -> None:
        size = sum(each.nbytes for bucket in messages for each in bucket)
        sent.append((rail.rail.size(), size))
        between_hosts(rail, received, messages)

    with (
        patch("fullshard.comm.collectives.all_to_all_single", counted),
        patch.object(Rail, "exchange", counted_between_hosts),
    ):
        yield sent


@pytest.mark.parametrize("kind", [Collectives, ShmCollectives])
@on_ranks(4)
def test_ranks_of_one_host_send_eight_bits_and_their_sums_travel_in_four(
    rank: Rank, kind: type[Collectives]
) -> None:
    """With `Collectives`, as NCCL does it; `tests/gpu/test_nccl_wires.py` is the same there."""
    numel = 3 * WIRE.alignment_numel
    full = torch.randn(4, 4, numel, generator=torch.Generator().manual_seed(1))
    with (
        patch.dict(os.environ, {SWITCH: "0"}),
        group_on_hosts(rank, "one", "one", "two", "two") as group,
    ):
        assert packed_wire(WIRE, group) == WIRE.inside == Int8(block=16)
        out, sent = torch.empty(numel), encoded(WIRE.inside, full[rank.rank])
        with exchanged_bytes() as num_bytes, record() as recording:
            kind().reduce_scatter([out], [sent.view(-1)], group, average=False, wire=WIRE).wait()
        # By sender and receiver. Each host adds up what it sends to each rank of the other one.
        by_host = [sum_of(WIRE.inside, full[first : first + 2]) for first in (0, 2)]
        expected = sum_of(WIRE, torch.stack(by_host))[rank.rank]
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        low = torch.empty(numel, dtype=torch.bfloat16)  # what hosts add up is rounded once
        kind().reduce_scatter([low], [sent.view(-1)], group, average=False, wire=WIRE).wait()
        assert torch.equal(low, out.bfloat16())
        ranks, sizes = zip(*num_bytes, strict=True)
        assert set(ranks) == {2}
        assert sum(sizes) == sent.nbytes + 2 * WIRE.message_numel(numel)
        # Half of what is exchanged stays on this rank.
        reported = {each.wire: each.num_bytes for each in recording.timeline.sent}
        assert reported == {
            str(WIRE.inside): sent.nbytes // 2,
            str(WIRE): WIRE.message_numel(numel),
        }
        full[3, :, 5] = torch.nan  # of one rank, for all
        sent = encoded(WIRE.inside, full[rank.rank])
        kind().reduce_scatter([out], [sent.view(-1)], group, average=False, wire=WIRE).wait()
        assert torch.equal(out.isnan(), torch.arange(numel) < WIRE.block)


@on_ranks(4)
def test_what_ranks_pack_depends_on_who_is_on_their_host(rank: Rank) -> None:
    numel = WIRE.alignment_numel
    full = torch.randn(4, 4, numel, generator=torch.Generator().manual_seed(1))
    # The last two are groups without levels: nobody adds up what a host sends.
    cases = {"abcd": WIRE, "aaaa": WIRE.inside, "aaab": WIRE.inside, "abab": WIRE.inside}
    for hosts, packed in cases.items():
        with patch.dict(os.environ, {SWITCH: "0"}), group_on_hosts(rank, *hosts) as group:
            assert packed_wire(WIRE, group) == packed
            expected = sum_of(packed, full)[rank.rank]
            for kind in (Collectives, GlooCollectives, ShmCollectives):
                out, sent = torch.empty(numel), encoded(packed, full[rank.rank])
                args = [out], [sent.view(-1)], group
                kind().reduce_scatter(*args, average=False, wire=WIRE).wait()
                torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_sums_of_replicas_travel_in_four_bits_once(rank: Rank) -> None:
    both = torch.randn(2, 700, generator=torch.Generator().manual_seed(1))
    for hosts, packed in (("ab", WIRE), ("aa", WIRE.inside)):
        with group_on_hosts(rank, *hosts) as group:
            found = both[rank.rank].clone()
            all_reduce(found, group, average=False, wire=WIRE)
            segments = torch.zeros(2, 768)
            segments[:, :700] = both
            rows = segments.view(2, 2, -1)
            expected = sum_of(WIRE.inside, sum_of(packed, rows)[None]).view(-1)[:700]
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            others = [torch.empty_like(found) for _ in range(2)]
            dist.all_gather(others, found)
            assert torch.equal(*others)


@on_ranks(4)
def test_replicas_send_in_their_wire_and_shards_in_theirs(rank: Rank) -> None:
    hosts = "one", "one", "two", "two"
    with patch("fullshard.comm.topology.machine_id", lambda: hosts[rank.rank]):
        mesh = rank.mesh((2, 2), ("hosts", "ranks"))
        groups = mesh.get_all_groups()
        assert [Topology.of(group).num_hosts for group in groups] == [2, 1]
    model = nn.Linear(64, 64, bias=False)
    policy = MixedPrecisionPolicy(reduce_wire=Plain(torch.bfloat16), replica_wire=Int4(block=16))
    fully_shard(model, mesh=mesh, mp_policy=policy)
    wire = Int4(block=16)
    with exchanged_bytes() as num_bytes, record() as recording:
        model(torch.randn(2, 64)).sum().backward()
    exchanged = wire.message_numel(64 * 32)
    gathered = wire.inside.message_numel(32 * 32)
    assert num_bytes == [(2, exchanged), (2, 2 * gathered)]
    reported = {
        s.wire: s.num_bytes for s in recording.timeline.sent if s.activity.value == "reduce"
    }
    assert reported == {
        "bfloat16": 2 * 64 * 32,
        str(wire): wire.message_numel(64 * 16),
        str(wire.inside): wire.inside.message_numel(64 * 16),
    }


def losses(rank: Rank, mesh: DeviceMesh, **wires: Wire) -> list[float]:
    torch.manual_seed(0)
    layers = nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False)
    model = nn.Sequential(*layers).to(rank.device)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**wires))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank.rank)).to(rank.device)
    found = []
    for _ in range(12):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@on_ranks(4)
def test_training_with_sums_in_four_bits_is_nearly_the_same(rank: Rank) -> None:
    with group_on_hosts(rank, "one", "one", "two", "two") as group:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("four_bits",))
        expected = torch.tensor(losses(rank, mesh))
        for kind in (ShmCollectives, Collectives):
            with patch("fullshard.unit.unit.collectives_for", lambda *_, kind=kind: kind()):
                found = losses(rank, mesh, gather_wire=Int8(block=16), reduce_wire=WIRE)
            torch.testing.assert_close(torch.tensor(found), expected, rtol=0.02, atol=0)
            assert not torch.equal(torch.tensor(found), expected)


@on_ranks(4)
def test_hosts_with_other_numbers_of_ranks_use_gloo_and_those_with_one_a_rail(rank: Rank) -> None:
    for hosts, has_rail in (("aaab", False), ("abab", False), ("abcd", True)):
        with group_on_hosts(rank, *hosts) as group, sent_over_rails() as sent:
            assert levels_of(group) is None
            assert (rail_of(group) is not None) == has_rail
            out, total = torch.empty(4), torch.empty(1)
            ShmCollectives().all_gather([out], [torch.tensor([1.0 * rank.rank])], group).wait()
            assert out.tolist() == [0, 1, 2, 3]
            work = ShmCollectives().reduce_scatter([total], [out], group, average=False)
            work.wait()
            assert total.item() == 4 * rank.rank
            assert sent == (2 * [(4, 12)] if has_rail else [])


def model_of_blocks() -> nn.Module:
    return nn.Sequential(*(nn.Linear(12, 12) for _ in range(3)), nn.Tanh(), nn.Linear(12, 5))


def batch_of_rows(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 12, generator=generator)


@on_ranks(4)
def test_training_on_two_hosts_is_that_of_one_process(rank: Rank) -> None:
    with group_on_hosts(rank, "one", "one", "two", "two") as group:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("hosts",))

        def shard(model: nn.Module) -> None:
            for block in model[:3]:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)

        assert_same_training(model_of_blocks, shard, Training(batch_of_rows))
        with sent_over_rails() as sent:
            model = model_of_blocks()
            shard(model)
            model(torch.ones(2, 12)).sum().backward()
        assert {size for size, _ in sent} == {2}


@on_ranks(4)
def test_an_error_in_a_stage_is_raised_where_the_collective_is_waited_for(rank: Rank) -> None:
    with group_on_hosts(rank, "one", "one", "two", "two") as group:
        levels = levels_of(group)
        assert levels is not None

        def fails() -> None:
            raise ZeroDivisionError("planned")

        work = levels.start(fails)
        with pytest.raises(ZeroDivisionError, match="planned"):
            work.wait()
        assert work.is_completed()
        out = torch.empty(4)
        ShmCollectives().all_gather([out], [torch.tensor([1.0])], group).wait()
        assert out.tolist() == [1, 1, 1, 1]
