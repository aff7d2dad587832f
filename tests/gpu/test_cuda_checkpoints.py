"""Checkpoints of models on CUDA, over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fullshard import CPUOffload, FullyShardedDataParallel, fully_shard
from fullshard.state import latest, load, save, save_async, verify
from fullshard.testing import Rank, on_ranks
from fullshard.wrap import ModuleWrapPolicy
from tests.gpu.transformer import Block, Transformer, shard_blocks

KINDS = ["rows", "flat", "slices", "offloaded"]


def built(rank: Rank, kind: str, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = Transformer(num_blocks=2).to(rank.device)
    if kind == "rows":
        shard_blocks(model, fully_shard, mesh=rank.mesh())
        return model
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=kind == "slices",
        cpu_offload=CPUOffload(offload_params=kind == "offloaded"),
    )


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, 512, (2, 32), generator=generator).cuda()
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@on_ranks(2, backend="nccl")
def test_what_is_saved_one_way_goes_on_in_another(rank: Rank, tmp_path: Path) -> None:
    for kind, other in zip(KINDS, [*KINDS[1:], KINDS[0]], strict=True):
        path = tmp_path / kind
        model = built(rank, kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=kind != "offloaded")
        train(model, optimizer, range(2))
        save(path, model, optimizer, step=2)
        expected = train(model, optimizer, range(2, 4))
        again = built(rank, other, seed=1)
        optimizer = torch.optim.AdamW(again.parameters(), lr=1.0, fused=other != "offloaded")
        assert load(path, again, optimizer).step == 2
        assert train(again, optimizer, range(2, 4)) == pytest.approx(expected, rel=1e-3)
        assert verify(path) == []


@on_ranks(2, backend="nccl")
def test_training_goes_on_while_a_checkpoint_is_written(rank: Rank, tmp_path: Path) -> None:
    model = built(rank, "flat")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, range(2))
    handle = save_async(tmp_path / "a", model, optimizer, step=2)
    expected = train(model, optimizer, range(2, 6))
    assert handle.wait() == latest(tmp_path)
    again = built(rank, "rows", seed=1)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-3)
    load(tmp_path / "a", again, optimizer)
    assert train(again, optimizer, range(2, 6)) == pytest.approx(expected, rel=1e-3)
