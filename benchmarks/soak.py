"""Kills ranks of `fullshard train` at random moments; the losses must be those without faults.

    python benchmarks/soak.py --kills 100

A rank is killed, or stopped so that the others have to notice, at any time after its start:
while it loads, connects, computes, saves, or restarts after the previous fault. The run goes on
by itself. In the end no step may be missing or counted twice, and every loss must be equal to the
last bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from measuring import Table, parser_for, result_for

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)
LONGEST_S = 4.0  # from one fault to the next: about two restarts
TIMEOUT_S = 120.0


def command(text: Path, out: Path, num_steps: int, *more: str) -> list[str]:
    run = ["--model", "tiny", "--sequence", "32", "--batch", "2", "--steps", str(num_steps)]
    run += ["--save-every", "2", "--sample-tokens", "0", "--no-report", "--device", "cpu"]
    run += ["--data", str(text), "--out", str(out)]
    return [sys.executable, "-m", "fullshard", "train", *run, *more]


def children_of(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    found: list[int] = []
    for task in tasks:
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def ranks_of(launcher: int) -> list[int]:
    """The ranks that a launcher has started: forks of its server, which is a child of its own."""
    return [rank for child in children_of(launcher) for rank in children_of(child)]


def disturb(
    process: subprocess.Popen[Any],
    num_faults: int,
    seed: int,
    signals: Sequence[signal.Signals] = SIGNALS,
    longest_s: float = LONGEST_S,
) -> Iterator[str]:
    """Kill or stop ranks again and again while there are any; yields what was done."""
    moments = random.Random(seed)
    for _ in range(num_faults):
        with suppress(subprocess.TimeoutExpired):
            process.wait(moments.uniform(0.0, longest_s))
        deadline = time.monotonic() + TIMEOUT_S
        while not (ranks := ranks_of(process.pid)) and process.poll() is None:
            assert time.monotonic() < deadline, "no rank was started again"
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        if process.poll() is not None:
            return
        what = moments.choice(signals)
        with suppress(ProcessLookupError):  # it may just have ended
            os.kill(moments.choice(ranks), what)
            yield what.name


def soak(folder: Path, num_steps: int, num_faults: int, seed: int) -> tuple[Counter[str], float]:
    """Disturb a run until it is done; what was done to it, and how long it took."""
    text = folder / "text.txt"
    text.write_text("".join(f"line {n}: {n * n % 97} dogs\n" for n in range(2000)))
    reference = command(text, folder / "reference", num_steps)
    subprocess.run(reference, check=True, stdout=subprocess.DEVNULL)
    start = time.perf_counter()
    more = ("--max-restarts", str(2 * num_faults + 2))
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command(text, folder / "run", num_steps, *more), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            found = Counter(disturb(process, num_faults, seed))
            code = process.wait(timeout=TIMEOUT_S * (1 + num_steps / 100))
        finally:
            process.kill()
            process.wait()
    assert code == 0, (folder / "log").read_text()[-3000:]
    ours, theirs = ((folder / name / "metrics.jsonl") for name in ("run", "reference"))
    assert losses_of(ours) == losses_of(theirs), "a loss differs from that of the undisturbed run"
    return found, time.perf_counter() - start


def losses_of(metrics: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, metrics.read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--kills", type=int, default=100, help="faults in all")
    parser.add_argument("--steps", type=int, default=400, help="steps of the run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    result = result_for("soak", arguments)
    result.command = result.command.replace("bench_soak", "soak")
    with tempfile.TemporaryDirectory() as folder:
        found, seconds = soak(Path(folder), options.steps, options.kills, options.seed)
    assert sum(found.values()) == options.kills, f"the run was done after {found}: more --steps"
    rows = [[name, number] for name, number in sorted(found.items())]
    rows += [["steps", options.steps], ["losses that differ", 0], ["minutes", seconds / 60]]
    result.add(Table("A run whose ranks are killed and stopped", ["what", "number"], rows))
    result.write(options.json)


if __name__ == "__main__":
    main()
