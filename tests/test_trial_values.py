"""What a new value costs: a wire, a layout and a store that the library does not have.

Each is defined here, in a few lines, and trains through the engine as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from fullshard.device import Device
from fullshard.layout import Wire
from fullshard.runtime.hooks import units_below
from fullshard.testing import Rank, on_ranks
from fullshard.unit.store import HostStore, Store
from tests.test_wire import new_group

WIDTH = 24


@dataclass(frozen=True)
class ByteWire(Wire):
    """Blocks of eight bytes with a float32 scale each: the whole of a quantized wire."""

    dtype = torch.uint8
    block = 8

    @property
    def alignment_numel(self) -> int:
        return self.block

    def message_numel(self, numel: int) -> int:
        return numel // self.block * (self.block + 4)

    def encode(self, segments: torch.Tensor, messages: torch.Tensor) -> None:
        blocks = segments.float().unflatten(1, (-1, self.block))
        scales = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        values = (blocks / scales).round().to(torch.int8)
        parts = values.view(torch.uint8), scales.view(torch.uint8)
        messages.copy_(torch.cat(parts, dim=-1).flatten(1))

    def decode(self, messages: torch.Tensor, segments: torch.Tensor) -> None:
        blocks = messages.unflatten(1, (-1, self.block + 4))
        values, scales = blocks.split([self.block, 4], dim=-1)
        floats = values.contiguous().view(torch.int8) * scales.contiguous().view(torch.float32)
        segments.copy_(floats.flatten(1))


class FileStore(HostStore):
    """Shards in a file that is mapped into memory."""

    folder: Path
    num_files = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        FileStore.num_files += 1
        path = self.folder / f"lane{FileStore.num_files}"
        size = max(numel, 1)
        made = torch.from_file(str(path), shared=True, size=size, dtype=dtype)
        return made[:numel].zero_()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()) * self.gain


def losses(model: nn.Module, rank: Rank, steps: int = 20) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(rank.rank))
    found = []
    for _ in range(steps):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def made(group: dist.ProcessGroup, policy: MixedPrecisionPolicy, *, is_wrapped: bool) -> nn.Module:
    torch.manual_seed(0)
    model: Any = Net()
    if is_wrapped:
        model = FullyShardedDataParallel(
            model, group, use_orig_params=True, mixed_precision=MixedPrecision()
        )
        for unit in units_below(model):
            unit.policy = policy
            unit.replan()
        return model
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"), mp_policy=policy)
    return model


@pytest.mark.parametrize("over_gloo", [False, True])
@pytest.mark.parametrize("is_wrapped", [False, True])
@on_ranks(2)
def test_a_wire_with_scales_trains_nearly_like_the_plain_one(
    rank: Rank, is_wrapped: bool, over_gloo: bool
) -> None:
    with new_group(over_gloo=over_gloo) as group:
        plain = made(group, MixedPrecisionPolicy(), is_wrapped=is_wrapped)
        coarse = made(
            group,
            MixedPrecisionPolicy(gather_wire=ByteWire(), reduce_wire=ByteWire()),
            is_wrapped=is_wrapped,
        )
        expected, found = losses(plain, rank), losses(coarse, rank)
    assert expected[-1] < expected[0] / 2
    assert found != expected
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0.03, atol=0)


@on_ranks(2)
def test_shards_in_files_train_like_those_in_memory(rank: Rank, tmp_path: Path) -> None:
    expected = losses(made(rank.mesh().get_group(), MixedPrecisionPolicy(), is_wrapped=False), rank)
    folder = tmp_path / str(rank.rank)
    folder.mkdir()
    FileStore.folder = folder

    def of(cls: type[Store], policy: object, device: torch.device) -> Store:
        return FileStore(torch.device("cpu", 0))

    with (
        patch.object(Store, "of", classmethod(of)),
        patch("fullshard.runtime.build.device_for", lambda _: Device(torch.device("cpu", 0))),
    ):
        model = made(rank.mesh().get_group(), MixedPrecisionPolicy(), is_wrapped=False)
        assert losses(model, rank) == expected
    assert not units_below(model)[0].store.is_on_device
    assert sum(path.stat().st_size for path in folder.iterdir()) > 0
