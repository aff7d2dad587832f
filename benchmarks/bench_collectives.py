"""What a message costs: one against several of the same bytes, composed against native.

The numbers behind `layout/cost.py`. Real ranks on this machine over gloo (or, with
`--backend nccl`, several ranks on one GPU). Medians, in milliseconds.

    python benchmarks/bench_collectives.py [--backend nccl] [--ranks 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from fullshard.comm.collectives import Native, Transfer, collectives_for
from fullshard.testing import Rank, RankPool

SIZES = [64 << 10, 1 << 20, 8 << 20, 32 << 20]
NUM_MESSAGES = [1, 4, 8]


def median_ms(rank: Rank, run: Callable[[], object]) -> float:
    spent = []
    for _ in range(9):
        dist.barrier()
        if rank.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if rank.device.type == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[2:]) * 1e3


def measure(rank: Rank) -> list[tuple[str, int, int, float]]:
    """(collective, bytes of the full message, number of messages, milliseconds)."""
    group = rank.mesh().get_group()
    rows = []
    for num_bytes in SIZES:
        full = torch.randn(num_bytes // 4, device=rank.device)
        piece = torch.empty(full.numel() // rank.size, device=rank.device)
        for count in NUM_MESSAGES:
            fulls, pieces = list(full.chunk(count)), list(piece.chunk(count))
            chosen = collectives_for(group, rank.device)
            for name, ways in {"chosen": chosen, "native": Native()}.items():
                gather = median_ms(rank, partial(run, ways.gather, fulls, pieces, group))
                reduce = partial(ways.reduce, average=False)
                rows.append((f"gather {name}", num_bytes, count, gather))
                spent = median_ms(rank, partial(run, reduce, pieces, fulls, group))
                rows.append((f"reduce {name}", num_bytes, count, spent))
        copy = partial(torch.empty_like(full).copy_, full)
        rows.append(("copy", num_bytes, 1, median_ms(rank, copy)))
    return rows


def run(collective: Callable[..., Transfer], *args: object) -> None:
    collective(*args).wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with RankPool(options.ranks, options.backend) as ranks:
        rows = ranks.run(measure)[0]
    print(f"{'what':18}{'KiB':>10}{'messages':>10}{'ms':>10}")
    for what, num_bytes, count, spent in sorted(rows):
        print(f"{what:18}{num_bytes >> 10:10}{count:10}{spent:10.3f}")


if __name__ == "__main__":
    main()
