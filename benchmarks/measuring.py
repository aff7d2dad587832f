"""Measuring and reporting for the benchmarks: interleaved runs, medians, tables, JSON."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Cell = str | float | None


@dataclass(frozen=True)
class Table:
    """Numbers as they are printed here and shown in the documentation."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]

    def text(self) -> str:
        cells = [self.columns, *([shown(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in cells
        ]
        return "\n".join([self.title, *lines])

    def markdown(self) -> str:
        head = f"| {' | '.join(self.columns)} |"
        rule = f"| --- |{' ---: |' * (len(self.columns) - 1)}"
        rows = [f"| {' | '.join(shown(cell) for cell in row)} |" for row in self.rows]
        return "\n".join([f"{self.title}:", "", head, rule, *rows])


@dataclass
class Result:
    """What one run of a benchmark found. `details` has what the tables leave out."""

    benchmark: str
    command: str
    machine: str
    tables: list[Table] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, table: Table) -> None:
        self.tables.append(table)
        print(f"\n{table.text()}", flush=True)

    def write(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        values = json.loads(path.read_text())
        values["tables"] = [Table(**table) for table in values["tables"]]
        return cls(**values)


def shown(cell: Cell) -> str:
    """A number with as many digits as a measurement is good for."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    size = abs(cell)
    if isinstance(cell, int) or size >= 100:
        return f"{cell:.0f}"
    return f"{cell:.1f}" if size >= 10 else f"{cell:.2f}"


def parser_for(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    return parser


def result_for(
    benchmark: str, arguments: Sequence[str] | None, device: str | torch.device = "cpu"
) -> Result:
    """An empty result with the command that repeats it and what it was measured on."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--json" in given:
        place = given.index("--json")
        del given[place : place + 2]
    settings = [f"{name}={value}" for name, value in os.environ.items() if _is_setting(name)]
    command = shlex.join([*sorted(settings), "python", f"benchmarks/bench_{benchmark}.py", *given])
    if torch.device(device).type == "cuda":
        hardware = torch.cuda.get_device_name()
    else:
        hardware = f"{os.cpu_count()} cores of {_processor()}"
    machine = f"{hardware}, torch {torch.__version__}, Python {platform.python_version()}"
    return Result(benchmark, command, machine)


def _is_setting(name: str) -> bool:
    """Whether an environment variable changes what is measured, and is no place or description."""
    is_ours = name == "DEVICE" or name.startswith(("NCCL_", "FULLSHARD_"))
    return is_ours and name not in ("NCCL_VERSION", "FULLSHARD_CACHE")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def interleaved(
    runs: Mapping[str, Callable[[], T]], num_rounds: int, num_warm: int = 2
) -> dict[str, list[T]]:
    """Run each once per round, in rotating order, and return the results after warm-up.

    A temporary disturbance of the machine then affects all variants alike.
    """
    names = list(runs)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(num_rounds + num_warm):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            value = runs[name]()
            if number >= num_warm:
                found[name].append(value)
    return found


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each named number over all samples."""
    return {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def undisturbed(num_threads: int | None = None) -> Iterator[None]:
    """Disable garbage collection and slow denormal numbers, and set the number of threads if given.

    A simulated world computes with whatever is in memory; denormal numbers among it would take a
    hundred times as long as others.
    """
    before = torch.get_num_threads()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    torch.set_flush_denormal(True)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """Ignore torch's known warnings about one rank, slow bf16, views and old names."""
    with warnings.catch_warnings():
        for text in (
            "FSDP is switching to use `NO_SHARD`",
            "mkldnn_matmul failed",
            r"`torch.distributed.\w+` is deprecated",
            "FSDP2-wrapped module .* returned a view",
        ):
            warnings.filterwarnings("ignore", text)
        yield


def check_losses(losses: Mapping[str, Sequence[float]], rtol: float, atol: float = 1e-5) -> None:
    """Refuse to time variants that do not compute the same."""
    reference_name, *others = losses
    reference = torch.tensor(losses[reference_name], dtype=torch.float64)
    for name in others:
        found = torch.tensor(losses[name], dtype=torch.float64)
        if not torch.allclose(found, reference, rtol=rtol, atol=atol):
            raise RuntimeError(
                f"{name}: must have the losses of {reference_name}, {reference.tolist()}, found "
                f"{found.tolist()}; its times would mean nothing."
            )
