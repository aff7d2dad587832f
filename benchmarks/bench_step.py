"""Step time on real ranks: unsharded, torch's `fully_shard`, ours, in one run.

A byte-level transformer on gloo ranks of this machine (or, with `--backend nccl`, on ranks that
share one GPU). Variants are interleaved and medians taken; the losses of all must agree before
any time is printed. The unsharded model runs this rank's batch with no communication at all: the
time that sharding adds to.

    python benchmarks/bench_step.py [--ranks 2] [--blocks 6] [--width 384] [--bf16] [--backend nccl]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional as F

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.testing import Rank, RankPool

VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    num_blocks: int
    width: int
    length: int
    batch: int
    bf16: bool
    steps: int


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, width // 64, 64)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.num_blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return F.cross_entropy(logits, tokens.flatten())


class Variant:
    """A model with its optimizer, and the times and losses of its steps."""

    def __init__(self, rank: Rank, size: Size, shard: Callable[[Transformer], None] | None) -> None:
        torch.manual_seed(0)
        self.model = Transformer(size).to(rank.device)
        if shard is not None:
            shard(self.model)
        elif size.bf16:
            self.model.bfloat16()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.losses: list[float] = []
        self.times: list[float] = []

    def step(self, tokens: torch.Tensor) -> None:
        start = time.perf_counter()
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.times.append(time.perf_counter() - start)


def measure(rank: Rank, numbers: dict[str, int]) -> dict[str, tuple[float, float]]:
    """For each variant, the median seconds of a step and the last loss."""
    size = Size(**numbers)

    def with_door(door: Callable[..., object], policy: object) -> Callable[[Transformer], None]:
        def shard(model: Transformer) -> None:
            for block in model.blocks:
                door(block, mesh=rank.mesh(), mp_policy=policy)
            door(model, mesh=rank.mesh(), mp_policy=policy)

        return shard

    types = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if size.bf16 else {}
    variants = {
        "unsharded": Variant(rank, size, None),
        "torch fully_shard": Variant(
            rank, size, with_door(torch_fully_shard, TorchPrecision(**types))
        ),
        "fullshard": Variant(rank, size, with_door(fully_shard, MixedPrecisionPolicy(**types))),
    }
    tokens = torch.randint(0, VOCABULARY, (size.batch, size.length), device=rank.device)
    for _ in range(size.steps + 2):
        for variant in variants.values():
            variant.step(tokens)
    theirs, ours = variants["torch fully_shard"].losses, variants["fullshard"].losses
    torch.testing.assert_close(ours, theirs, rtol=5e-2 if size.bf16 else 1e-4, atol=1e-4)
    return {
        name: (statistics.median(variant.times[2:]), variant.losses[-1])
        for name, variant in variants.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    size = Size(
        options.blocks, options.width, options.length, options.batch, options.bf16, options.steps
    )
    with RankPool(options.ranks, options.backend, timeout_s=600) as ranks:
        rows = ranks.run(measure, vars(size))[0]
    torch_s = rows["torch fully_shard"][0]
    print(f"{'':20}{'ms a step':>12}{'ratio':>8}")
    for name, (seconds, _) in rows.items():
        print(f"{name:20}{seconds * 1e3:12.1f}{seconds / torch_s:8.2f}")
    print(json.dumps({"ranks": options.ranks, "size": vars(size), "seconds_and_loss": rows}))


if __name__ == "__main__":
    main()
