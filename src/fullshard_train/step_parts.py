"""Where the time of a step goes, by torch's profiler: attention, matrix products, loss, .."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

OTHER = "other"
# Parts by what the names of operations contain; an operation is part of what it runs in, too.
_PARTS = {
    "optimizer": ("Optimizer.step", "fullshard optimizer", "_fused_adam"),
    "loss": ("LinearCrossEntropy", "cross_entropy", "LogSoftmax", "NllLoss"),
    "attention": ("attention",),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "_scaled_mm"),
}


@contextmanager
def timed_parts(device: torch.device) -> Iterator[dict[str, float]]:
    """Fill a dict with the seconds of each part of what runs in the context.

    They are those of kernels on a GPU, without collectives, and of operations on a CPU.
    """
    found: dict[str, float] = {}
    is_on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_on_gpu]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler of torch 2.13 prints
    with profile(activities=activities, acc_events=True) as profiler:
        yield found
        if is_on_gpu:
            torch.cuda.synchronize(device)
    parts = dict.fromkeys((*_PARTS, OTHER), 0.0)
    for event in profiler.events() or ():
        kernels = [each for each in event.kernels if "nccl" not in each.name]
        spent = sum(each.duration for each in kernels) if is_on_gpu else event.self_cpu_time_total
        # What calls operations, as Python code that waits does, is none.
        if is_on_gpu or event.name.startswith(("aten::", "fullshard::")):
            parts[_part_of(event)] += spent / 1e6
    found.update({name: spent for name, spent in parts.items() if spent})


def _part_of(event: Any) -> str:
    """Return the part of an operation: that of the outermost one around it which has any."""
    part = OTHER
    while event is not None:
        known = (name for name, words in _PARTS.items() if any(w in event.name for w in words))
        part = next(known, part)
        event = event.cpu_parent
    return part
