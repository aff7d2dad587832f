"""Host time per unit and step: what sharding costs the CPU that drives it.

One process plays the first rank of a world whose collectives return at once and copy nothing. 48
units of 8 small Linears; for each way to shard, (its time - that of the unsharded model) / units,
of forward and of backward. The optimizer step is timed apart, as a whole. Variants are interleaved,
and must have the losses of the unsharded model in a world of one before anything is timed.

    python benchmarks/bench_host_time.py [--worlds 8 64] [--device cuda] [--json PATH]
    python benchmarks/bench_host_time.py --profile "fullshard fully_shard"

On CUDA a time ends when the call returns; the device is synchronized before and after.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

import fullshard
from fullshard.testing import Rank, quiet_world
from measuring import (
    Result,
    Table,
    check_losses,
    interleaved,
    medians,
    parser_for,
    result_for,
    synchronize,
    undisturbed,
    without_known_warnings,
)
from models import Linears, many_units
from variants import BASE, SHARDED, UNSHARDED, Sharding, shard
from worlds import device_of, one_rank

STAGES = ("forward", "backward")
FUSED, FOREACH, BY_UNIT = "fused", "foreach", "fused, by unit"
OURS_ONLY = "fullshard"


def optimizers_of(variant: str, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """The optimizers that are timed. Without a call of `by_unit`, it may apply automatically."""
    made: dict[str, torch.optim.Optimizer] = {
        FUSED: torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True),
        FOREACH: torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True),
    }
    for optimizer in made.values():
        fullshard.by_unit(optimizer, enabled=False)
    if variant.startswith(OURS_ONLY):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        made[BY_UNIT] = fullshard.by_unit(optimizer)
    return made


class Stepping:
    """A model with its optimizers; `step` times the stages of one step."""

    def __init__(self, variant: str, options: argparse.Namespace, rank: Rank) -> None:
        torch.manual_seed(0)
        model = many_units(options.units, options.width).to(rank.device)
        self.model = shard(variant, model, Sharding(Linears, rank.mesh(), rank.device))
        self.optimizers = optimizers_of(variant, self.model)
        self.device = rank.device
        self.batch = torch.randn(4, options.width, device=rank.device)

    def _timed(self, deed: Callable[[], object]) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        deed()
        spent = time.perf_counter() - start
        synchronize(self.device)
        return spent

    def step(self) -> dict[str, float]:
        kept: list[torch.Tensor] = []
        times = {
            "forward": self._timed(lambda: kept.append(self.model(self.batch).sum())),
            "backward": self._timed(lambda: kept.pop().backward()),
        }
        for name, optimizer in self.optimizers.items():
            times[name] = self._timed(optimizer.step)
        self.model.zero_grad()
        return times

    def losses(self, num_steps: int = 3) -> list[float]:
        optimizer = self.optimizers[FUSED]
        optimizer.param_groups[0]["lr"] = 1e-2
        found = []
        for _ in range(num_steps):
            loss = self.model(self.batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found


def check(options: argparse.Namespace) -> None:
    """Check that every variant trains like the unsharded model in a world of one rank."""
    small = argparse.Namespace(**{**vars(options), "units": 2})
    with one_rank(options.device) as rank, without_known_warnings():
        check_losses(
            {name: Stepping(name, small, rank).losses() for name in (UNSHARDED, *SHARDED)},
            rtol=1e-4,
        )


def profile(options: argparse.Namespace) -> None:
    with quiet_world(options.worlds[0], device=options.device) as rank, undisturbed(1):
        stepping = Stepping(options.profile, options, rank)
        for _ in range(3):
            stepping.step()
        profiler = cProfile.Profile()
        for _ in range(options.steps):
            with torch.autograd.set_multithreading_enabled(False):  # backward in this thread
                profiler.runcall(stepping.step)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def measure(world: int, options: argparse.Namespace, result: Result) -> None:
    with quiet_world(world, device=options.device) as rank, undisturbed(1):
        made = {name: Stepping(name, options, rank) for name in (UNSHARDED, *options.variants)}
        runs = {name: stepping.step for name, stepping in made.items()}
        found = interleaved(runs, options.steps, num_warm=4)
    times = {name: medians(samples) for name, samples in found.items()}
    result.details[f"world_{world}_median_s"] = times
    unsharded = times.pop(UNSHARDED)
    rows = {
        name: [(spent[key] - unsharded[key]) / options.units * 1e6 for key in STAGES]
        for name, spent in times.items()
    }
    base = sum(rows[BASE])
    result.add(
        Table(
            f"World of {world}: microseconds of host time per unit and step",
            ["variant", "forward", "backward", "both", "ratio"],
            [[name, *spent, sum(spent), sum(spent) / base] for name, spent in rows.items()],
        )
    )
    stepped = [
        (f"{name}, {way}", spent[way])
        for name, spent in {UNSHARDED: unsharded, **times}.items()
        for way in (FUSED, FOREACH, BY_UNIT)
        if way in spent
    ]
    fused = times[BASE][FUSED]
    result.add(
        Table(
            f"World of {world}: milliseconds of an optimizer step, {options.units * 16} parameters",
            ["variant", "ms", "ratio"],
            [[name, spent * 1e3, spent / fused] for name, spent in stepped],
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--device", type=device_of, default="cpu")
    parser.add_argument("--units", type=int, default=48)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--variants", nargs="+", default=list(SHARDED), choices=SHARDED, metavar="NAME"
    )
    parser.add_argument(
        "--profile", metavar="NAME", choices=(UNSHARDED, *SHARDED), help="profile one variant"
    )
    options = parser.parse_args(arguments)
    if BASE not in options.variants:
        options.variants.insert(0, BASE)
    if options.profile:
        profile(options)
        return
    result = result_for("host_time", arguments, options.device)
    check(options)
    for world in options.worlds:
        measure(world, options, result)
    result.write(options.json)


if __name__ == "__main__":
    main()
