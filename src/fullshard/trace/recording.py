"""Observers that turn what the engine reports into a timeline, or into one number."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.errors import LifecycleError
from fullshard.trace import seam
from fullshard.trace.seam import Activity
from fullshard.trace.timeline import MemorySample, Span, Timeline


class Clock:
    """Takes stamps while a step runs and says afterwards when they were: on a CPU.

    Work on a CPU is done when the call returns, so nothing has to be waited for.
    """

    def __init__(self) -> None:
        self.zero: Any = self.stamp()

    def stamp(self) -> Any:
        """Now: on the current stream, where there are streams."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Wait until every stamp has passed."""

    def between(self, first: Any, second: Any) -> float:
        """Seconds from one stamp to another, once both have passed."""
        return float(second - first)

    def seconds(self, stamp: Any) -> float:
        """Seconds from the making of this clock to a stamp that has passed."""
        return self.between(self.zero, stamp)

    def allocated_bytes(self) -> int:
        """Memory in use now, as the host sees it."""
        return resident_bytes()


class StreamClock(Clock):
    """For CUDA, and every device whose torch module has the same events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self.synchronize()
        super().__init__()

    def stamp(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        self._module.synchronize(self._device)

    def between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1000

    def allocated_bytes(self) -> int:
        return int(self._module.memory_allocated(self._device))


def clock_for(device: torch.device) -> Clock:
    return Clock() if device.type == "cpu" else StreamClock(device)


def resident_bytes() -> int:
    """The memory of this process, where the system tells."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class Recording:
    """Everything that happens on this rank until the recording ends. Gives a `Timeline` then."""

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        self._rank = rank
        self._clock = clock_for(device)
        # Other threads report, and finalizers in the middle of a report: `append` needs no lock.
        self._edges: list[tuple[Any, Activity, str, bool]] = []
        self._samples: list[tuple[float, int, dict[str, int]]] = []
        self._timeline: Timeline | None = None
        self._began_s = time.perf_counter()

    def begin(self, activity: Activity, unit: str) -> None:
        self._edges.append((self._clock.stamp(), activity, unit, True))
        self._sample()

    def end(self, activity: Activity, unit: str) -> None:
        self._edges.append((self._clock.stamp(), activity, unit, False))
        self._sample()

    def hold(self, unit: str, num_bytes: int) -> None:
        self._sample({unit: num_bytes})

    def _sample(self, held: dict[str, int] | None = None) -> None:
        at_s = time.perf_counter() - self._began_s
        self._samples.append((at_s, self._clock.allocated_bytes(), held or {}))

    def finish(self) -> None:
        """Make the timeline of what was recorded; waits for the device."""
        last = self._clock.stamp()
        self._clock.synchronize()
        duration_s = max(self._clock.seconds(last), 0.0)
        spans, memory = tuple(self._spans(duration_s)), tuple(self._memory())
        self._timeline = Timeline(self._rank, duration_s, spans, memory)

    @property
    def timeline(self) -> Timeline:
        if self._timeline is None:
            raise LifecycleError(
                "timeline: the recording must have ended, found it going on; read it after the "
                "'with record(...)' block."
            )
        return self._timeline

    def _spans(self, duration_s: float) -> Iterator[Span]:
        """Each begin with the end that follows it, or with the end of the recording."""
        open_s: dict[tuple[Activity, str], list[float]] = {}
        # Threads report ends, so edges are not in the order of time.
        edges = [(self._clock.seconds(edge[0]), *edge[1:]) for edge in list(self._edges)]
        for at_s, activity, unit, is_begin in sorted(edges, key=lambda edge: edge[0]):
            begun = open_s.setdefault((activity, unit), [])
            if is_begin:
                begun.append(at_s)
            elif begun:
                yield Span(activity, unit, begun.pop(0), at_s)
        for (activity, unit), begun in open_s.items():
            for start_s in begun:
                yield Span(activity, unit, start_s, duration_s)

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
class Waits:
    """Moments at which compute began and ceased to wait."""

    clock: Clock
    stamps: tuple[tuple[Any, Any], ...]

    def seconds(self) -> float:
        """Their sum, once the device has passed the last of them."""
        # Not by their distance from the beginning: milliseconds of a long run do not fit a float.
        return sum(self.clock.between(begin, end) for begin, end in self.stamps)


class Exposure:
    """How long compute waits for communication: an observer for every step of a run."""

    wants_collective_ends = False

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_for(device)
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
        """Does not look at memory."""

    def taken(self) -> Waits:
        """Everything since this was last called."""
        stamps, self._stamps = self._stamps, []
        return Waits(self._clock, tuple(stamps))
