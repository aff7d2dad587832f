"""The cost of letting ranks run different units: `set_uneven` beside units that all ranks run.

A model of blocks with experts, each a unit, on gloo ranks that share a host. All experts run, or
half of them. Without `set_uneven`, all ranks run the same ones in the same order; with it, they do
the same (the cost of the rounds alone), or each rank draws its own experts and their order. The
same experts must give the same losses. Medians of interleaved steps without an optimizer.

    python benchmarks/bench_uneven.py [--ranks 2] [--widths 64 512] [--experts 8]
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard import fully_shard
from fullshard.testing import Rank, pool
from measuring import (
    Table,
    check_losses,
    interleaved,
    medians,
    parser_for,
    result_for,
    undisturbed,
    without_known_warnings,
)

NUM_BLOCKS, NUM_TOKENS = 2, 64
EVEN, UNEVEN, OWN = "even", "uneven, the same on all ranks", "uneven, each rank its own"
TIMEOUT_S = 900.0


class Experts(nn.Module):
    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        )
        self.chosen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(self.experts[index](x) for index in self.chosen)


def build(rank: Rank, name: str, width: int, num_experts: int, num_run: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Experts(width, num_experts) for _ in range(NUM_BLOCKS)))
    draws = random.Random(rank.rank if name == OWN else 0)
    for block in model:
        block.chosen = draws.sample(range(num_experts), num_run)
        for expert in block.experts:
            fully_shard(expert, mesh=rank.mesh())
        fully_shard(block, mesh=rank.mesh())
        if name != EVEN:
            block.set_uneven()
    return fully_shard(model, mesh=rank.mesh())


def step(model: nn.Module, given: torch.Tensor) -> dict[str, float]:
    dist.barrier()
    start = time.perf_counter()
    loss = model(given).square().mean()
    loss.backward()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return {"seconds": seconds, "loss": loss.item()}


def measure(
    rank: Rank, width: int, num_experts: int, num_run: int, num_rounds: int
) -> dict[str, float]:
    given = torch.randn(NUM_TOKENS, width, generator=torch.Generator().manual_seed(rank.rank))
    runs = {
        name: partial(step, build(rank, name, width, num_experts, num_run), given)
        for name in (EVEN, UNEVEN, OWN)
    }
    with undisturbed():
        spent = interleaved(runs, num_rounds)
    losses = {name: [sample["loss"] for sample in spent[name]] for name in (EVEN, UNEVEN)}
    check_losses(losses, rtol=1e-5)
    return {name: medians(samples)["seconds"] for name, samples in spent.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    result = result_for("uneven", arguments, "cpu")
    with without_known_warnings():
        for num_ranks in options.ranks:
            rows: list[list[Any]] = []
            for width in options.widths:
                for num_run in (options.experts, options.experts // 2):
                    found = pool(num_ranks).run(
                        measure, width, options.experts, num_run, options.rounds,
                        timeout_s=TIMEOUT_S,
                    )[0]  # fmt: skip
                    what = f"{num_run} of {options.experts} experts of width {width}"
                    rows += [
                        [f"{what}, {name}", seconds * 1e3, seconds / found[EVEN]]
                        for name, seconds in found.items()
                    ]
            title = f"{num_ranks} ranks, {NUM_BLOCKS} blocks of {options.experts} experts"
            result.add(Table(title, ["what runs", "step, milliseconds", "ratio"], rows))
    result.write(options.json)


if __name__ == "__main__":
    main()
