"""The cost of a message by its size, by the number per call, and by what moves it.

Gathers and reduces 64 KB to 256 MB (the full message, over all ranks), as one message or as eight
with the same bytes together: with gloo's own collectives (native), composed of what gloo does well,
and through memory that ranks on one host share. With `--backend nccl`, native on ranks that share
one GPU. Every way must deliver the right values before it is timed. Medians, in milliseconds.

The last table gives the size from which a parameter is worth its own bucket on this machine, as
`FULLSHARD_OWN_BUCKET_MB` takes it.

    python benchmarks/bench_collectives.py [--ranks 2 4] [--backend nccl] [--sizes-kb 64 1024]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.collectives import Collectives, GlooCollectives, ShmCollectives
from fullshard.testing import Rank, pool
from measuring import (
    Table,
    interleaved,
    medians,
    parser_for,
    result_for,
    synchronize,
    undisturbed,
    without_known_warnings,
)

SIZES_KB = [64, 256, 1024, 4096, 16 << 10, 64 << 10, 256 << 10]
NUM_MESSAGES = [1, 8]
COPY = "copy"
NATIVE, COMPOSED, SHARED = "native", "composed", "shared memory"
TIMEOUT_S = 900.0


def ways_for(device: torch.device) -> dict[str, Collectives]:
    if device.type != "cpu":
        return {NATIVE: Collectives()}
    return {NATIVE: Collectives(), COMPOSED: GlooCollectives(), SHARED: ShmCollectives()}


def check(rank: Rank, name: str, way: Collectives, group: dist.ProcessGroup) -> None:
    """Two messages arrive, in the order of ranks, and are summed."""
    own = [torch.arange(4.0, device=rank.device) + 10 * rank.rank + 100 * i for i in range(2)]
    fulls = [torch.empty(4 * rank.size, device=rank.device) for _ in own]
    way.all_gather(fulls, own, group).wait()
    sums = [torch.empty(4, device=rank.device) for _ in own]
    way.reduce_scatter(sums, fulls, group, average=False).wait()
    for i in range(2):
        offsets = 10.0 * torch.arange(rank.size, device=rank.device).repeat_interleave(4)
        expected = torch.arange(4.0, device=rank.device).repeat(rank.size) + offsets + 100 * i
        if not torch.equal(fulls[i], expected) or not torch.equal(sums[i], rank.size * own[i]):
            raise RuntimeError(f"{name}: delivers wrong values; its times would mean nothing.")


def timed(rank: Rank, deed: Callable[[], object]) -> dict[str, float]:
    dist.barrier()
    synchronize(rank.device)
    start = time.perf_counter()
    deed()
    synchronize(rank.device)
    return {"seconds": time.perf_counter() - start}


def waited_for(collective: Callable[..., Any], *arguments: object) -> None:
    collective(*arguments).wait()


def measure(rank: Rank, sizes_kb: list[int], num_rounds: int) -> list[tuple[str, int, int, float]]:
    """(what, KB of the full message, number of messages, median seconds) on one rank."""
    group = rank.mesh().get_group()
    ways = ways_for(rank.device)
    for name, way in ways.items():
        check(rank, name, way, group)
    found = []
    for size_kb in sizes_kb:
        full = torch.randn(size_kb * 256, device=rank.device)
        own = torch.empty(full.numel() // rank.size, device=rank.device)
        other = torch.empty_like(full)
        for count in NUM_MESSAGES:
            fulls, owns = list(full.chunk(count)), list(own.chunk(count))
            runs: dict[str, Callable[[], object]] = {}
            for name, way in ways.items():
                reduce = partial(way.reduce_scatter, average=False)
                runs[f"gather, {name}"] = partial(waited_for, way.all_gather, fulls, owns, group)
                runs[f"reduce, {name}"] = partial(waited_for, reduce, owns, fulls, group)
            if count == 1:
                runs[COPY] = partial(other.copy_, full)
            timed_runs = {name: partial(timed, rank, run) for name, run in runs.items()}
            with undisturbed():
                # Sums of sums overflow to infinity after many rounds; that takes no longer.
                spent = interleaved(timed_runs, num_rounds)
            found += [
                (name, size_kb, count, medians(samples)["seconds"])
                for name, samples in spent.items()
            ]
    return found


def constants(rows: Sequence[tuple[str, int, int, float]], way: str) -> list[Any]:
    """The cost of one more message, the copy speed, and the size at which both take as long."""
    seconds = {(what, size, count): spent for what, size, count, spent in rows}
    sizes = sorted({size for _, size, _, _ in rows})
    few, many = NUM_MESSAGES
    more = seconds[f"gather, {way}", sizes[0], many] - seconds[f"gather, {way}", sizes[0], few]
    middle = sizes[len(sizes) // 2]  # the smallest fit in caches
    copied = 2 * middle * 1024 / seconds[COPY, middle, 1]
    message_s = max(more, 0.0) / (many - few)
    # A parameter that shares a bucket is copied out of it: read and written once.
    return [message_s * 1e6, copied / 1e9, message_s * copied / 2 / 1e6]


def tables_of(
    rows: Sequence[tuple[str, int, int, float]], names: list[str], where: str
) -> list[Table]:
    """One table for each number of messages, one row for each size."""
    seconds = {(what, size, count): spent for what, size, count, spent in rows}
    sizes = sorted({size for _, size, _, _ in rows})
    found = []
    for count in NUM_MESSAGES:
        shown = [name for name in names if (name, sizes[0], count) in seconds]
        cells: list[list[Any]] = []
        for size in sizes:
            label = f"{size} KB" if size < 1024 else f"{size >> 10} MB"
            cells.append([label, *(seconds[name, size, count] * 1e3 for name in shown)])
        title = f"{where}, {count} message{'s' * (count > 1)}: milliseconds"
        found.append(Table(title, ["size", *shown], cells))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--sizes-kb", type=int, nargs="+", default=SIZES_KB)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    device = "cuda" if "nccl" in options.backend else "cpu"
    result = result_for("collectives", arguments, device)
    models: list[list[Any]] = []
    with without_known_warnings():
        for num_ranks in options.ranks:
            ranks = pool(num_ranks, options.backend)
            rows = ranks.run(measure, options.sizes_kb, options.rounds, timeout_s=TIMEOUT_S)[0]
            result.details[f"ranks_{num_ranks}"] = rows
            names = list(dict.fromkeys(what for what, _, _, _ in rows))
            for table in tables_of(rows, names, f"{num_ranks} {options.backend} ranks"):
                result.add(table)
            for name in names:
                if name.startswith("gather, "):
                    way = name.removeprefix("gather, ")
                    models.append([f"{num_ranks} ranks, {way}", *constants(rows, way)])
    columns = ["measured on", "a message, microseconds", "copies, GB/s", "own bucket from, MB"]
    result.add(Table("Constants of the cost model", columns, models))
    result.write(options.json)


if __name__ == "__main__":
    main()
