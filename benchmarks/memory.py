"""Measures memory: of torch's allocators, of a process, and the bytes that are copied."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MARK = "what is measured"


def allocated_peak_bytes(
    run: Callable[[], object], device: torch.device, before: Callable[[], object]
) -> int:
    """The peak memory of tensors while `run` ran, beyond what they took after `before`.

    On a CPU, freeing memory that was allocated before `before` is not seen.
    """
    if device.type == "cuda":
        before()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        base = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - base
    held, peak = _held_and_peak(run, before)
    return peak - held


def held_peak_bytes(run: Callable[[], object], before: Callable[[], object]) -> int:
    """The peak memory of CPU tensors while `run` ran, with what `before` left."""
    return _held_and_peak(run, before)[1]


def _held_and_peak(run: Callable[[], object], before: Callable[[], object]) -> tuple[int, int]:
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        before()
        with record_function(_MARK):
            run()
    results: Any = profiler.profiler
    events = results.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == _MARK)
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    base = held = peak = 0
    for when, num_bytes in sorted(changes, key=lambda change: change[0]):
        held += num_bytes
        if when < start:
            base = peak = held
        peak = max(peak, held)
    return base, peak


class ProcessMemory:
    """The peak memory of this process beyond what it held at first."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        self._before = _status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        return _status_bytes("VmHWM") - self._before


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status")


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that operators write only to move them, not to cast them.

    Where an operator both moves and casts (a copy into another dtype), nothing is counted: the cast
    has to be written somewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.by_operator.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        count = _COPYING.get(func.name().split(".")[0])
        if count is not None:
            self.by_operator[func.name()] += count(args, kwargs or {}, found)
        return found


def _copied(args: Sequence[Any], kwargs: Any, found: Any) -> int:
    target, source = args[0], args[1]
    return target.nbytes if target.dtype == source.dtype else 0


def _all_copied(args: Sequence[Any], kwargs: Any, found: Any) -> int:
    return sum(_copied(pair, kwargs, found) for pair in zip(args[0], args[1], strict=True))


def _concatenated(args: Sequence[Any], kwargs: Any, found: Any) -> int:
    """From the first argument's tensors into the result, or into `out`."""
    out = tree_leaves(kwargs.get("out", found))[0]
    return sum(tensor.nbytes for tensor in args[0] if tensor.dtype == out.dtype)


def _read_whole(args: Sequence[Any], kwargs: Any, found: Any) -> int:
    return int(args[0].nbytes)


def _gathered_in(args: Sequence[Any], kwargs: Any, found: Any) -> int:
    return sum(tensor.nbytes for tensor in args[0])


_COPYING: dict[str, Callable[[Sequence[Any], Any, Any], int]] = {
    "aten::copy_": _copied,
    "aten::_foreach_copy_": _all_copied,
    "aten::cat": _concatenated,
    "aten::_chunk_cat": _concatenated,
    "aten::clone": _read_whole,
    "aten::split_with_sizes_copy": _read_whole,
    "fsdp::all_gather_copy_in": _gathered_in,
    "fsdp::chunk_cat": _concatenated,
    "fsdp::split_with_sizes_copy": _read_whole,
}
