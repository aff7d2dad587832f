"""Sums of gradients between hosts over NCCL: four ranks on one GPU say that they are on two hosts.

To run on a machine with a GPU: `pytest tests/gpu/test_nccl_wires.py`. The same reductions, over
gloo, are in `tests/comm/test_two_level.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.comm.collectives import Collectives
from fullshard.comm.two_level import levels_of, packed_wire
from fullshard.testing import Rank, on_ranks
from fullshard.wire import Int4, Int8
from tests.comm.test_two_level import encoded, group_on_hosts, sum_of


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
    def losses(mesh: DeviceMesh, **wires: Any) -> list[float]:
        torch.manual_seed(0)
        layers = [nn.Linear(256, 256, device=rank.device) for _ in range(3)]
        model: Any = nn.Sequential(*layers)
        for layer in (*layers, model):
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**wires))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.randn(16, 256, generator=torch.Generator().manual_seed(rank.rank)).cuda()
        found = []
        for _ in range(12):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    with group_on_hosts(rank, "one", "one", "two", "two") as group:
        mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("hosts",))
        expected = losses(mesh)
        found = losses(mesh, gather_wire=Int8(), reduce_wire=Int4())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0.05, atol=0)
