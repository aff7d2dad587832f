"""Sums of gradients between hosts over NCCL: four ranks on one GPU say that they are on two hosts.

To run on a machine with a GPU: `pytest tests/gpu/test_nccl_wires.py`. The same reductions, over
gloo, are in `tests/comm/test_two_level.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm.collectives import Collectives
from fullshard.comm.two_level import levels_of, packed_wire
from fullshard.testing import Rank, on_ranks
from fullshard.wire import Int4, Int8
from tests.comm.test_two_level import encoded, group_on_hosts, losses, sum_of


@pytest.mark.parametrize("wire", [Int4(), Int8()], ids=str)
@on_ranks(4, backend="nccl")
def test_sums_of_hosts_travel_in_the_wire_over_nccl(rank: Rank, wire: Any) -> None:
    numel = 3 * wire.alignment_numel
    full = torch.randn(4, 4, numel, generator=torch.Generator().manual_seed(1))
    with group_on_hosts(rank, "one", "one", "two", "two") as group:
        assert packed_wire(wire, group) == wire.inside
        sent = encoded(wire.inside, full[rank.rank]).view(-1).to(rank.device)
        out = torch.empty(numel, device=rank.device)
        Collectives().reduce_scatter([out], [sent], group, average=False, wire=wire).wait()
        assert levels_of(group, "nccl") is not None
        by_host = [sum_of(wire.inside, full[first : first + 2]) for first in (0, 2)]
        expected = sum_of(wire, torch.stack(by_host))[rank.rank]
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)


@on_ranks(4, backend="nccl")
def test_a_model_trains_with_gradients_of_four_bits_between_hosts(rank: Rank) -> None:
    with group_on_hosts(rank, "one", "one", "two", "two") as group:
        mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("hosts",))
        expected = losses(rank, mesh)
        found = losses(rank, mesh, gather_wire=Int8(block=16), reduce_wire=Int4(block=16))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0.02, atol=0)
