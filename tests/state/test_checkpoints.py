"""Checkpoints: saved with one kind of sharding on some ranks, loaded with another on others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from fullshard.state import load, save
from fullshard.state.checkpoint.manifest import read_manifest
from fullshard.state.checkpoint.reader import open_checkpoint
from fullshard.testing import Rank, pool
from fullshard.wrap import ModuleWrapPolicy

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH + 1)
        self.norm = nn.BatchNorm1d(WIDTH + 1)
        self.down = nn.Linear(WIDTH + 1, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.norm(self.up(x))))


class Model(nn.Module):
    """Tied weights, a frozen part, buffers, a scalar, sizes that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x))


KINDS = [
    "whole", "rows", "rows of a mesh", "flat", "slices", "slices by block", "replicated",
    "hybrid", "offloaded", "a mixture", "low precision",
]  # fmt: skip


def built(rank: Rank, kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = Model()
    policy = ModuleWrapPolicy({Block})
    mesh = {"device_mesh": rank.mesh((2, rank.size // 2), ("r", "s"))} if rank.size % 2 == 0 else {}
    if kind == "whole":
        return model
    if kind.startswith("rows"):
        two = kind == "rows of a mesh" and rank.size % 2 == 0
        rows = rank.mesh((2, rank.size // 2), ("r", "s")) if two else rank.mesh()
        for block in model.blocks:
            fully_shard(block, mesh=rows)
        return fully_shard(model, mesh=rows)
    if kind == "a mixture":
        model.blocks[0] = FullyShardedDataParallel(model.blocks[0])
        fully_shard(model.blocks[1], mesh=rank.mesh())
        return model
    options: dict[str, dict[str, Any]] = {
        "flat": {"auto_wrap_policy": policy},
        "slices": {"use_orig_params": True},
        "slices by block": {"use_orig_params": True, "auto_wrap_policy": policy},
        "replicated": {"sharding_strategy": ShardingStrategy.NO_SHARD},
        "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, **mesh} if mesh else {},
        "offloaded": {"cpu_offload": CPUOffload(offload_params=True)},
        "low precision": {
            "mixed_precision": MixedPrecision(
                reduce_dtype=torch.bfloat16, _module_classes_to_ignore=()
            )
        },
    }
    return FullyShardedDataParallel(model, **options[kind])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """On the same data on every rank, so that the world does not matter."""
    losses = []
    for step in steps:
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def uninterrupted() -> list[float]:
    torch.manual_seed(0)
    model = Model()
    return train(model, optimizer_of(model), range(4))


def save_after_two(rank: Rank, path: str, kind: str) -> list[float]:
    model = built(rank, kind)
    optimizer = optimizer_of(model)
    losses = train(model, optimizer, range(2))
    save(path, model, optimizer, step=2)
    return losses + train(model, optimizer, range(2, 4))


def load_and_go_on(rank: Rank, path: str, kind: str, again: str) -> list[float]:
    model = built(rank, kind, seed=1)
    optimizer = optimizer_of(model)
    loaded = load(path, model, optimizer)
    assert loaded.step == 2
    assert loaded.missing == loaded.unexpected == ()
    # Saving again at once writes the same content, to the last bit.
    save(again, model, optimizer, step=2)
    return train(model, optimizer, range(2, 4))


def contents(path: Path) -> dict[str, tuple[Any, ...]]:
    return {
        key: (tensor.shape, tensor.dtype, tensor.checksum)
        for key, tensor in read_manifest(path).tensors.items()
    }


# (how many ranks save, as what, how many ranks load, as what)
PAIRS = [
    (4 if kind in ("rows of a mesh", "hybrid", "flat") else 2, kind, loading, other)
    for kind, loading, other in zip(KINDS, [1, 2, 3, 4] * 3, [*KINDS[5:], *KINDS[:5]], strict=False)
] + [(2, "whole", 1, "whole"), (1, "slices", 4, "hybrid"), (3, "flat", 2, "rows")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_ranks", [2, 1, 3, 4])
def test_what_is_saved_one_way_goes_on_in_another(tmp_path: Path, num_ranks: int) -> None:
    expected = uninterrupted()
    for number, (saving, kind, loading, other) in enumerate(PAIRS):
        if loading != num_ranks:
            continue
        path, again = tmp_path / str(number) / "step_2", tmp_path / str(number) / "again"
        tolerance = {"rel": 2e-2} if "low precision" in (kind, other) else {"rel": 1e-4}
        for losses in pool(saving).run(save_after_two, str(path), kind):
            assert losses == pytest.approx(expected, **tolerance), kind
        for losses in pool(loading).run(load_and_go_on, str(path), other, str(again)):
            assert losses == pytest.approx(expected[2:], **tolerance), (kind, other)
        assert contents(path) == contents(again)
        assert set(open_checkpoint(path).keys) == contents(path).keys()


def go_back(rank: Rank, path: str, kind: str) -> None:
    model = built(rank, kind)
    optimizer = optimizer_of(model)
    save(path, model, optimizer)
    losses = train(model, optimizer, range(2))
    load(path, model, optimizer)
    assert not optimizer.state
    assert train(model, optimizer, range(2)) == losses


@pytest.mark.parametrize("kind", ["whole", "rows", "flat", "slices"])
def test_an_optimizer_that_was_saved_before_its_first_step_has_no_state_again(
    tmp_path: Path, kind: str
) -> None:
    pool(2).run(go_back, str(tmp_path / "start"), kind)
