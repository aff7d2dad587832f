"""A step in torch's profiler, with what the engine does for each unit on tracks of its own."""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import profile, record_function

from fullshard.trace.recording import record
from fullshard.trace.seam import Activity, Track

_STEP = "fullshard step"
_NAMES = {Activity.GATHER: "all_gather", Activity.REDUCE: "reduce_scatter"}


@contextmanager
def profiled(file: Path, device: torch.device, rank: int) -> Iterator[None]:
    """Write the trace of the block, for Perfetto: all_gather layers.3, forward layers.3, ...

    Collectives last from issue to completion, and overlap what runs meanwhile.
    """
    # The profiler of torch 2.13 prints when it starts and stops, whatever it is asked.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with (
        profile(acc_events=True) as profiler,
        record(device, rank) as recording,
        record_function(_STEP),
    ):
        yield
    file.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(file))
    with gzip.open(file, "rt", encoding="utf-8") as trace:
        found = json.load(trace)
    events = found["traceEvents"]
    zero = min(float(each["ts"]) for each in events if each.get("name") == _STEP)
    ends: defaultdict[Track, list[float]] = defaultdict(list)
    for span in sorted(recording.timeline.spans, key=lambda span: span.start_s):
        # Collectives that overlap are drawn in rows of their own; what computes is nested.
        track, rows = span.activity.track, ends[span.activity.track]
        is_nested = track is Track.COMPUTE
        row = next((n for n, end in enumerate(rows) if is_nested or end <= span.start_s), len(rows))
        rows[row : row + 1] = [span.end_s]
        where = {"pid": "fullshard", "tid": f"{track.value} {row}"}
        name = f"{_NAMES.get(span.activity, span.activity.value)} {span.unit}"
        when = {"ts": zero + span.start_s * 1e6, "dur": span.duration_s * 1e6}
        events.append({"ph": "X", "cat": "fullshard", "name": name, **where, **when})
    with gzip.open(file, "wt", encoding="utf-8") as trace:
        json.dump(found, trace)
