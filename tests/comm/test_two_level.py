"""Collectives of ranks on several hosts: every byte crosses to another host once.

The ranks of a test are on one machine; here they say that each pair of them has its own.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import fully_shard
from fullshard.comm import collectives, shm
from fullshard.comm.collectives import GlooCollectives, ShmCollectives
from fullshard.comm.topology import Topology
from fullshard.comm.two_level import TwoLevel, levels_of
from fullshard.layout import Plain
from fullshard.testing import Rank, on_ranks
from fullshard.testing.parity import Training, assert_same_training

NUMEL = 5


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
def sent_between_hosts(levels: TwoLevel) -> Iterator[Counter[str]]:
    """The elements that this rank sends over gloo to ranks of other hosts, by kind."""
    sent: Counter[str] = Counter()
    gather, exchange = collectives.all_gather_single, collectives.all_to_all_single

    def counted_gather(
        group: dist.ProcessGroup, out: Tensor, inp: Tensor, *options: object
    ) -> object:
        assert group == levels.rail
        sent["gathered"] += inp.nbytes // 4
        return gather(group, out, inp, *options)

    def counted_exchange(
        group: dist.ProcessGroup, out: Tensor, inp: Tensor, *rest: object
    ) -> object:
        assert group == levels.rail
        sent["exchanged"] += inp.nbytes // 4 // group.size() * (group.size() - 1)
        return exchange(group, out, inp, *rest)

    module = "fullshard.comm.collectives"
    with (
        patch(f"{module}.all_gather_single", counted_gather),
        patch(f"{module}.all_to_all_single", counted_exchange),
    ):
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
        with sent_between_hosts(levels) as sent:
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
        assert sent == {"gathered": 3 * NUMEL, "exchanged": 3 * NUMEL}


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


@on_ranks(4)
def test_hosts_with_other_numbers_of_ranks_or_one_each_use_gloo(rank: Rank) -> None:
    for hosts in ("aaab", "abab", "abcd"):
        with group_on_hosts(rank, *hosts) as group:
            assert levels_of(group) is None
            out = torch.empty(4)
            ShmCollectives().all_gather([out], [torch.tensor([1.0 * rank.rank])], group).wait()
            assert out.tolist() == [0, 1, 2, 3]


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
        levels = levels_of(group)
        assert levels is not None
        with sent_between_hosts(levels) as sent:
            model = model_of_blocks()
            shard(model)
            model(torch.ones(2, 12)).sum().backward()
        assert set(sent) == {"gathered", "exchanged"}


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
