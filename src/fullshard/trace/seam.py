"""Where the engine reports what it does, to observers.

The engine tests `seam.observers` before it reports anything: an empty tuple costs one look. An
observer that raises is dropped and logged; the step goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

import torch

_log = logging.getLogger(__name__)


class Track(Enum):
    """Where an activity runs: three things that a rank does at the same time."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"


class Activity(Enum):
    """What a rank does for a unit, from a beginning to an end."""

    FORWARD = "forward"
    BACKWARD = "backward"
    GATHER = "gather"
    REDUCE = "reduce"
    AWAIT_GATHER = "waits for its gather"
    AWAIT_REDUCE = "waits for its reduce"
    OPTIMIZER = "optimizer"

    @property
    def track(self) -> Track:
        is_collective = self in (Activity.GATHER, Activity.REDUCE)
        return Track(self.value) if is_collective else Track.COMPUTE

    @property
    def is_exposed(self) -> bool:
        """Whether compute waits for communication, which is then not overlapped."""
        return self in (Activity.AWAIT_GATHER, Activity.AWAIT_REDUCE)


class Observer(Protocol):
    """Receives the engine's reports, as things happen on the host.

    On a device with streams, the current stream is the one that the activity runs on, so that an
    event recorded there times it. On a CPU, the thread that completes a gather or a reduce reports
    its end, by a Python callback on a thread of the process group. An observer that does not need
    these ends sets `wants_collective_ends = False`, and causes no callbacks. One that has a method
    `send(activity, wire, num_bytes)` is told what this rank sends to others, from any thread.
    """

    def begin(self, activity: Activity, unit: str) -> None: ...

    def end(self, activity: Activity, unit: str) -> None: ...

    def hold(self, unit: str, num_bytes: int) -> None:
        """The full parameters of a unit take this much memory from now on; 0 once freed."""


observers: tuple[Observer, ...] = ()
# Reentrant: a garbage collection may run the engine's finalizers, which report, at any time.
_lock = threading.RLock()


def begin(activity: Activity, unit: str) -> None:
    _tell(observers, "begin", activity, unit)


def end(activity: Activity, unit: str) -> None:
    _tell(observers, "end", activity, unit)


def hold(unit: str, num_bytes: int) -> None:
    _tell(observers, "hold", unit, num_bytes)


def send(activity: Activity, wire: object, parts: Iterable[torch.Tensor], num_ranks: int) -> None:
    """Report that this rank exchanges tensors which have a part of each rank, or for each."""
    told = tuple(observer for observer in observers if hasattr(observer, "send"))
    if told:
        num_bytes = sum(each.nbytes // num_ranks * (num_ranks - 1) for each in parts)
        _tell(told, "send", activity, str(wire), num_bytes)


def _tell(told: tuple[Observer, ...], what: str, *about: Any) -> None:
    for observer in told:
        try:
            getattr(observer, what)(*about)
        except Exception:
            _log.exception("%r failed and is told nothing more", observer)
            _drop(observer)


def end_after(futures: Iterable[Any], activity: Activity, unit: str) -> None:
    """Report the end of a collective when all its futures are done, if an observer wants that.

    The thread that completes the last future reports it. Without an observer that wants to know,
    `futures` is not even iterated.
    """
    if not any(getattr(observer, "wants_collective_ends", True) for observer in observers):
        return
    waiting = list(futures)
    if waiting:
        torch.futures.collect_all(waiting).add_done_callback(lambda _: end(activity, unit))
    else:
        end(activity, unit)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Report to `observer` what the engine does, while the block runs."""
    global observers
    with _lock:
        observers = (*observers, observer)
    try:
        yield
    finally:
        _drop(observer)


@contextmanager
def silenced() -> Iterator[None]:
    """Report to nobody while the block runs."""
    global observers
    with _lock:
        before, observers = observers, ()
    try:
        yield
    finally:
        with _lock:
            observers = before


def _drop(observer: Observer) -> None:
    global observers
    with _lock:
        observers = tuple(each for each in observers if each is not observer)


@contextmanager
def doing(activity: Activity, unit: str) -> Iterator[None]:
    """Report an activity from its beginning to its end, for programs around the engine."""
    begin(activity, unit)
    try:
        yield
    finally:
        end(activity, unit)
