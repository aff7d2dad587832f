"""Reads from a profiler's trace when a GPU was busy, and with what."""

from __future__ import annotations

import json
from pathlib import Path

Interval = tuple[float, float]


def busy_intervals(path: Path) -> tuple[list[Interval], list[Interval], list[Interval]]:
    """The intervals of compute kernels, gather kernels and reduce kernels, in microseconds."""
    compute: list[Interval] = []
    gathers: list[Interval] = []
    reduces: list[Interval] = []
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") != "kernel":
            continue
        name = event["name"].lower()
        interval = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if "allgather" in name:
            gathers.append(interval)
        elif "reducescatter" in name:
            reduces.append(interval)
        elif "nccl" not in name:
            compute.append(interval)
    return compute, gathers, reduces


def overlap_us(first: list[Interval], second: list[Interval]) -> float:
    """The time during which something of `first` and something of `second` ran."""
    return sum(
        min(end, other_end) - max(start, other_start)
        for start, end in _joined(first)
        for other_start, other_end in _joined(second)
        if start < other_end and other_start < end
    )


def total_us(intervals: list[Interval]) -> float:
    """The time during which anything ran."""
    return sum(end - start for start, end in _joined(intervals))


def _joined(intervals: list[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined
