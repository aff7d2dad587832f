"""Reads from a trace of torch's profiler when a GPU was busy, and with what."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Busy:
    """Microseconds: anything at all, collectives, and collectives while nothing else ran."""

    busy_us: float
    communication_us: float
    exposed_us: float


def busy_during(run: Callable[[], object]) -> Busy:
    """Run something on the device and read the trace of it."""
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return busy_in(json.loads(path.read_text())["traceEvents"])


def busy_in(events: list[dict[str, object]]) -> Busy:
    """Sort the device's work in a trace into collectives and the rest."""
    compute: list[Interval] = []
    communication: list[Interval] = []
    for event in events:
        if event.get("cat") not in _DEVICE_WORK:
            continue
        start = float(str(event["ts"]))
        interval = (start, start + float(str(event["dur"])))
        is_collective = "nccl" in str(event["name"]).lower()
        (communication if is_collective else compute).append(interval)
    busy = _total(compute + communication)
    return Busy(busy, _total(communication), busy - _total(compute))


def _total(intervals: list[Interval]) -> float:
    """The time during which at least one of them ran."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
