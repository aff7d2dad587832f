"""What a new value costs: a store that the library does not have.

It is defined here, in a few lines, and trains through the engine as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from fullshard import fully_shard
from fullshard.device import Device
from fullshard.runtime.hooks import units_below
from fullshard.testing import Rank, on_ranks
from fullshard.unit.store import HostStore, Store

WIDTH = 24


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


def made(rank: Rank) -> nn.Module:
    torch.manual_seed(0)
    model: Any = Net()
    fully_shard(model, mesh=rank.mesh())
    return model


@on_ranks(2)
def test_shards_in_files_train_like_those_in_memory(rank: Rank, tmp_path: Path) -> None:
    expected = losses(made(rank), rank)
    folder = tmp_path / str(rank.rank)
    folder.mkdir()
    FileStore.folder = folder

    def of(cls: type[Store], policy: object, device: torch.device) -> Store:
        return FileStore(torch.device("cpu", 0))

    with (
        patch.object(Store, "of", classmethod(of)),
        patch("fullshard.runtime.build.device_for", lambda _: Device(torch.device("cpu", 0))),
    ):
        model = made(rank)
        assert losses(model, rank) == expected
    assert not units_below(model)[0].store.is_on_device
    assert sum(path.stat().st_size for path in folder.iterdir()) > 0
