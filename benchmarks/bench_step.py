"""Step time on real ranks: unsharded, torch's two doors, ours, in one run.

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
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import wrap as torch_wrap
from torch.nn import functional as F

import fullshard
from fullshard import wrap as own_wrap
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

    def __init__(
        self, rank: Rank, size: Size, shard: Callable[[Transformer], nn.Module] | None
    ) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Transformer(size).to(rank.device)
        if shard is not None:
            self.model = shard(self.model)
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

    types = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if size.bf16 else {}

    def fully_sharded(package: Any) -> Callable[[Transformer], nn.Module]:
        def shard(model: Transformer) -> nn.Module:
            policy = package.MixedPrecisionPolicy(**types)
            for block in model.blocks:
                package.fully_shard(block, mesh=rank.mesh(), mp_policy=policy)
            package.fully_shard(model, mesh=rank.mesh(), mp_policy=policy)
            return model

        return shard

    def wrapped(package: Any, wrap: Any) -> Callable[[Transformer], nn.Module]:
        def shard(model: Transformer) -> nn.Module:
            wrapper: nn.Module = package.FullyShardedDataParallel(
                model,
                auto_wrap_policy=wrap.ModuleWrapPolicy({Block}),
                mixed_precision=package.MixedPrecision(**types),
                device_id=rank.device,
                use_orig_params=True,
            )
            return wrapper

        return shard

    variants = {
        "unsharded": Variant(rank, size, None),
        "torch fully_shard": Variant(rank, size, fully_sharded(torch_fsdp)),
        "fullshard": Variant(rank, size, fully_sharded(fullshard)),
        "torch wrapper": Variant(rank, size, wrapped(torch_fsdp, torch_wrap)),
        "fullshard wrapper": Variant(rank, size, wrapped(fullshard, own_wrap)),
    }
    tokens = torch.randint(0, VOCABULARY, (size.batch, size.length), device=rank.device)
    for _ in range(size.steps + 2):
        for variant in variants.values():
            variant.step(tokens)
    theirs = variants["torch fully_shard"].losses
    for name in ("fullshard", "torch wrapper", "fullshard wrapper"):
        found = variants[name].losses
        torch.testing.assert_close(found, theirs, rtol=5e-2 if size.bf16 else 1e-4, atol=1e-4)
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
