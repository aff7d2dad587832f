"""Observers that turn what the engine reports into a timeline, or into the times of steps."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.errors import LifecycleError
from fullshard.trace import seam
from fullshard.trace.seam import Activity
from fullshard.trace.timeline import MemorySample, SentBytes, Span, Timeline


class Clock:
    """Takes stamps while a step runs, and says afterwards when they were.

    On CUDA, and every device whose torch module has the same events, a stamp is an event on the
    current stream. Work on a CPU is done when the call returns: a stamp is a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)

    def stamp(self) -> Any:
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        """Wait until every stamp has passed."""
        if self._module is not None:
            self._module.synchronize(self._device)

    def wait_for(self, stamp: Any) -> None:
        """Wait until a stamp has passed."""
        if self._module is not None:
            stamp.synchronize()

    def between(self, first: Any, second: Any) -> float:
        """Seconds from one stamp to another, once both have passed."""
        if self._module is None:
            return float(second - first)
        return float(first.elapsed_time(second)) / 1000

    def allocated_bytes(self) -> int:
        """Memory in use; on a CPU, the memory of the process, if the system reports it."""
        if self._module is not None:
            return int(self._module.memory_allocated(self._device))
        try:
            with open("/proc/self/statm", "rb") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0


class Recording:
    """Records everything that happens on this rank, and makes a `Timeline` of it at the end."""

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        self._rank = rank
        self._clock = Clock(device)
        # Other threads report, and so do finalizers during a report: `append` needs no lock.
        self._edges: list[tuple[Any, Activity, str, bool]] = []
        self._samples: list[tuple[float, int, dict[str, int]]] = []
        self._sent: list[tuple[Activity, str, int]] = []
        self._timeline: Timeline | None = None
        self._clock.synchronize()
        self._zero = self._clock.stamp()
        self._began_s = time.perf_counter()

    def begin(self, activity: Activity, unit: str) -> None:
        self._edges.append((self._clock.stamp(), activity, unit, True))
        self._sample({})

    def end(self, activity: Activity, unit: str) -> None:
        self._edges.append((self._clock.stamp(), activity, unit, False))
        self._sample({})

    def hold(self, unit: str, num_bytes: int) -> None:
        self._sample({unit: num_bytes})

    def send(self, activity: Activity, wire: str, num_bytes: int) -> None:
        self._sent.append((activity, wire, num_bytes))

    def _sample(self, held: dict[str, int]) -> None:
        at_s = time.perf_counter() - self._began_s
        self._samples.append((at_s, self._clock.allocated_bytes(), held))

    def finish(self) -> None:
        """Make the timeline of what was recorded; waits for the device."""
        last = self._clock.stamp()
        self._clock.synchronize()
        duration_s = max(self._clock.between(self._zero, last), 0.0)
        spans, memory = tuple(self._spans(duration_s)), tuple(self._memory())
        sums: Counter[tuple[Activity, str]] = Counter()
        for activity, wire, num_bytes in self._sent:
            sums[activity, wire] += num_bytes
        sent = tuple(SentBytes(*key, num_bytes) for key, num_bytes in sums.items())
        self._timeline = Timeline(self._rank, duration_s, spans, memory, sent)

    @property
    def timeline(self) -> Timeline:
        if self._timeline is None:
            raise LifecycleError(
                "timeline: the recording is still going on; read it after the 'with "
                "record(...)' block."
            )
        return self._timeline

    def _spans(self, duration_s: float) -> Iterator[Span]:
        """Pair each begin with the end that follows it, or with the end of the recording."""
        open_s: dict[tuple[Activity, str], list[float]] = {}
        # Other threads report ends, so edges are not in chronological order.
        edges = [(self._clock.between(self._zero, edge[0]), *edge[1:]) for edge in self._edges]
        for at_s, activity, unit, is_begin in sorted(edges, key=lambda edge: edge[0]):
            begun = open_s.setdefault((activity, unit), [])
            if is_begin:
                begun.append(at_s)
            elif begun:
                yield Span(activity, unit, begun.pop(0), at_s)
        for (activity, unit), begun in open_s.items():
            yield from (Span(activity, unit, start_s, duration_s) for start_s in begun)

    def _memory(self) -> Iterator[MemorySample]:
        held: dict[str, int] = {}
        for at_s, allocated_bytes, change in sorted(self._samples, key=lambda sample: sample[0]):
            held.update(change)
            yield MemorySample(at_s, sum(held.values()), allocated_bytes)


@contextmanager
def record(device: torch.device | str = "cpu", rank: int = 0) -> Iterator[Recording]:
    """Record what the engine does on this rank while the block runs.

    Args:
        device: Where the model computes. On a CUDA device, spans are times of its streams.
        rank: Noted in the timeline.
    """
    recording = Recording(torch.device(device), rank)
    with seam.observed(recording):
        yield recording
    recording.finish()


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step of this rank, which may still be running: to read a time waits for the step's end."""

    _clock: Clock
    _start: Any
    _end: Any
    _waits: tuple[tuple[Any, Any], ...]

    @property
    def duration_s(self) -> float:
        """How long the step took, on the device if it has streams."""
        self._clock.wait_for(self._end)
        return self._clock.between(self._start, self._end)

    @property
    def exposed_s(self) -> float:
        """How long compute waited for communication in it."""
        self._clock.wait_for(self._end)
        return sum(self._clock.between(*wait) for wait in self._waits)


class StepTimes:
    """Times every step of a run: an observer whose cost is two stamps for each wait of compute.

    times = StepTimes(device)
    with observed(times):
        for batch in batches:
            train(batch)
            step = times.end_step()  # what follows belongs to the next step
    """

    wants_collective_ends = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._clock = Clock(torch.device(device))
        self._begun: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._start = self._clock.stamp()

    def begin(self, activity: Activity, unit: str) -> None:
        if activity.is_exposed:
            self._begun = self._clock.stamp()

    def end(self, activity: Activity, unit: str) -> None:
        if activity.is_exposed and self._begun is not None:
            self._waits.append((self._begun, self._clock.stamp()))
            self._begun = None

    def hold(self, unit: str, num_bytes: int) -> None:
        """Ignore memory."""

    def end_step(self) -> StepTime:
        """End a step here, and begin the next; reads nothing, so that the device need not wait."""
        start, waits = self._start, tuple(self._waits)
        self._start, self._waits = self._clock.stamp(), []
        return StepTime(self._clock, start, self._start, waits)
