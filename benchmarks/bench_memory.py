"""Bytes copied in a step beyond casts, and transient memory.

One process plays a rank; the model is a row of units of 8 Linears and little else, on a batch of a
few rows, so that parameters make up the memory.

Copied: what operators write only to move data (copies, concatenations, copy-outs of gathers), as a
multiple of the parameters in their compute dtype. Copies that cast are not counted, nor copies of
the unsharded model. Forward gathers once, backward gathers once and reduces.

Transient: the peak allocation of a step, minus what was there before it (shards), minus the
gradients' shards, minus the activations (of the unsharded model's forward), in units of the
largest unit; and the same for a forward alone, under `no_grad`. In backward it includes a unit's
full gradients and the memory that they are reduced from.

    python benchmarks/bench_memory.py [--device cuda] [--units 8] [--width 256]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.testing import Rank, quiet_world
from measuring import (
    Table,
    check_losses,
    parser_for,
    result_for,
    undisturbed,
    without_known_warnings,
)
from memory import CopiedBytes, allocated_peak_bytes
from models import Linears, many_units, num_parameters
from variants import BASE, SHARDED, UNSHARDED, Sharding, shard
from worlds import device_of, one_rank

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
NUM_LOSSES = 3


class Step:
    """A model of a variant; forward and backward without an optimizer."""

    def __init__(self, variant: str, dtype: torch.dtype, options: Any, rank: Rank) -> None:
        torch.manual_seed(0)
        model = many_units(options.units, options.width).to(rank.device)
        self.num_parameters = num_parameters(model)
        how = Sharding(Linears, rank.mesh(), rank.device, dtype)
        self.model: nn.Module = shard(variant, model, how)
        self.batch = torch.randn(2, options.width, device=rank.device, dtype=dtype)

    def forward(self) -> Tensor:
        loss: Tensor = self.model(self.batch).square().mean()
        return loss

    def run(self) -> None:
        self.forward().backward()
        self.model.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.forward()

    def gradient_bytes(self) -> int:
        """The bytes of the gradients that this rank keeps."""
        self.forward().backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        found = sum(g.to_local().nbytes if isinstance(g, DTensor) else g.nbytes for g in grads)
        self.model.zero_grad()
        return found

    def losses(self) -> list[float]:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        found = []
        for _ in range(NUM_LOSSES):
            loss = self.forward()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found


def check(options: argparse.Namespace) -> None:
    """Check that every variant trains like the unsharded model in a world of one rank."""
    small = argparse.Namespace(**{**vars(options), "units": 2, "width": 32})
    with one_rank(options.device) as rank:
        losses = {
            name: Step(name, torch.float32, small, rank).losses() for name in (UNSHARDED, *SHARDED)
        }
    check_losses(losses, rtol=1e-4)


def copied_bytes(step: Step) -> tuple[int, int]:
    """The bytes copied in forward and in backward."""
    step.run()
    with CopiedBytes() as forward:
        loss = step.forward()
    with CopiedBytes() as backward:
        loss.backward()
    step.model.zero_grad()
    return forward.total, backward.total


def measure_copies(options: argparse.Namespace, dtype: str) -> Table:
    rows: list[list[Any]] = []
    with quiet_world(options.world, device=options.device) as rank, undisturbed():
        base = copied_bytes(Step(UNSHARDED, DTYPES[dtype], options, rank))
        for name in SHARDED:
            step = Step(name, DTYPES[dtype], options, rank)
            whole = step.num_parameters * DTYPES[dtype].itemsize
            found = copied_bytes(step)
            times = [(a - b) / whole for a, b in zip(found, base, strict=True)]
            rows.append([name, *times, sum(times)])
    by_name = {row[0]: row[-1] for row in rows}
    for row in rows:
        row.append(row[-1] / by_name[BASE] if by_name[BASE] else None)
    columns = ["variant", "forward", "backward", "both", "ratio"]
    return Table(f"{dtype}: bytes copied beyond casts, times the parameters", columns, rows)


def measure_transient(options: argparse.Namespace, dtype: str) -> Table:
    rows: list[list[Any]] = []
    device = options.device
    with quiet_world(options.large_world, device=device) as rank, undisturbed():
        plain = Step(UNSHARDED, DTYPES[dtype], options, rank)
        kept: list[Tensor] = []
        activations = allocated_peak_bytes(
            lambda: kept.append(plain.forward()), device, before=plain.run
        )
        unit_bytes = plain.num_parameters // options.units * DTYPES[dtype].itemsize
        for name in SHARDED:
            step = Step(name, DTYPES[dtype], options, rank)
            step.run()
            evaluated = allocated_peak_bytes(step.evaluate, device, before=step.evaluate)
            trained = allocated_peak_bytes(step.run, device, before=step.run)
            trained -= activations + step.gradient_bytes()
            rows.append([name, evaluated / unit_bytes, trained / unit_bytes])
    base = next(row for row in rows if row[0] == BASE)
    cells = [[name, a, a / base[1], b, b / base[2]] for name, a, b in rows]
    title = f"{dtype}: transient memory, in units of the largest unit"
    return Table(title, ["variant", "forward", "ratio", "with backward", "ratio"], cells)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--device", type=device_of, default="cpu")
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--world", type=int, default=8, help="where copies are counted")
    parser.add_argument(
        "--large-world", type=int, default=64, help="where memory is: gradients' shards are small"
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    options = parser.parse_args(arguments)
    result = result_for("memory", arguments, options.device)
    with without_known_warnings():
        check(options)
        for dtype in options.dtypes:
            result.add(measure_copies(options, dtype))
            result.add(measure_transient(options, dtype))
    result.write(options.json)


if __name__ == "__main__":
    main()
