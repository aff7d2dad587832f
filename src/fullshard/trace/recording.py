"""Observers that turn what the engine tells into a timeline, or into one number."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.errors import LifecycleError
from fullshard.trace import seam
from fullshard.trace.activities import Activity
from fullshard.trace.clocks import Clock, clock_for
from fullshard.trace.timeline import MemorySample, Span, Timeline


@dataclass(frozen=True, slots=True)
class _Edge:
    activity: Activity
    unit: str
    is_begin: bool
    stamp: Any


class Recording:
    """Everything that happens on this rank, until it is ended. Gives a `Timeline` then."""

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        self._rank = rank
        self._clock = clock_for(device)
        self._edges: list[_Edge] = []
        self._memory: list[MemorySample] = []
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()
        self._timeline: Timeline | None = None
        self._clock.start()
        self._began_s = time.perf_counter()

    def begin(self, activity: Activity, unit: str) -> None:
        self._note(_Edge(activity, unit, True, self._clock.stamp()))

    def end(self, activity: Activity, unit: str) -> None:
        self._note(_Edge(activity, unit, False, self._clock.stamp()))

    def hold(self, unit: str, num_bytes: int) -> None:
        with self._lock:
            self._held[unit] = num_bytes
            self._sample()

    def _note(self, edge: _Edge) -> None:
        with self._lock:
            self._edges.append(edge)
            self._sample()

    def _sample(self) -> None:
        at_s = time.perf_counter() - self._began_s
        full_bytes = sum(self._held.values())
        self._memory.append(MemorySample(at_s, full_bytes, self._clock.allocated_bytes()))

    def finish(self) -> None:
        """Make the timeline of what was recorded; waits for the device."""
        last = self._clock.stamp()
        self._clock.settle()
        duration_s = max(self._clock.seconds(last), 0.0)
        with self._lock:
            spans = self._spans(duration_s)
        self._timeline = Timeline(self._rank, duration_s, tuple(spans), tuple(self._memory))

    @property
    def timeline(self) -> Timeline:
        if self._timeline is None:
            raise LifecycleError(
                "timeline: the recording must have ended, found it going on; read it after the "
                "'with record(...)' block."
            )
        return self._timeline

    def _spans(self, duration_s: float) -> Iterator[Span]:
        """Each begin with the end that follows it; what never ended, ends with the recording."""
        open_s: dict[tuple[Activity, str], list[float]] = {}
        seconds = self._clock.seconds
        # Threads tell of ends: in the order of time, not of arrival.
        times = [(seconds(edge.stamp), edge) for edge in self._edges]
        for at_s, edge in sorted(times, key=lambda each: each[0]):
            begun = open_s.setdefault((edge.activity, edge.unit), [])
            if edge.is_begin:
                begun.append(at_s)
            elif begun:
                yield Span(edge.activity, edge.unit, begun.pop(0), at_s)
        for (activity, unit), begun in open_s.items():
            for start_s in begun:
                yield Span(activity, unit, start_s, duration_s)


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
class Waits:
    """Moments at which compute began and ceased to stand still."""

    clock: Clock
    stamps: tuple[tuple[Any, Any], ...]

    def seconds(self) -> float:
        """Their sum, once the device has passed the last of them."""
        # Not by their distance from the beginning: milliseconds of a long run do not fit a float.
        return sum(self.clock.between(begin, end) for begin, end in self.stamps)


class Exposure:
    """For how long compute stands still for communication: an observer that runs all the time."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_for(device)
        self._clock.start()
        self._begun: Any = None
        self._stamps: list[tuple[Any, Any]] = []

    def begin(self, activity: Activity, unit: str) -> None:
        if activity.is_exposed:
            self._begun = self._clock.stamp()

    def end(self, activity: Activity, unit: str) -> None:
        if activity.is_exposed and self._begun is not None:
            self._stamps.append((self._begun, self._clock.stamp()))
            self._begun = None

    def hold(self, unit: str, num_bytes: int) -> None:
        """Memory is not its business."""

    def taken(self) -> Waits:
        """Everything since this was last asked."""
        stamps, self._stamps = self._stamps, []
        return Waits(self._clock, tuple(stamps))
