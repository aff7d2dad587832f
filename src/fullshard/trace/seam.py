"""Where the engine says what it does, to whoever listens.

The engine asks `seam.observers` before it says anything: an empty tuple costs one look. An
observer that raises is dropped and logged; the step goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from fullshard.trace.activities import Activity

_log = logging.getLogger(__name__)
_lock = threading.Lock()


class Observer(Protocol):
    """Is told what happens, when it happens on the host.

    On a device with streams the current stream is the one that the activity runs on, so that an
    event recorded there times it. On a CPU the end of a gather or a reduce is told by the thread
    that ends it.
    """

    def begin(self, activity: Activity, unit: str) -> None: ...

    def end(self, activity: Activity, unit: str) -> None: ...

    def hold(self, unit: str, num_bytes: int) -> None:
        """Full parameters of a unit take memory from now on: 0 when they are let go."""


observers: tuple[Observer, ...] = ()


def begin(activity: Activity, unit: str) -> None:
    _tell(lambda observer: observer.begin(activity, unit))


def end(activity: Activity, unit: str) -> None:
    _tell(lambda observer: observer.end(activity, unit))


def hold(unit: str, num_bytes: int) -> None:
    _tell(lambda observer: observer.hold(unit, num_bytes))


def end_after(futures: Sequence[Any], activity: Activity, unit: str) -> None:
    """Tell of an end when all futures are done, in the thread that completes the last one."""
    if futures:
        torch.futures.collect_all(list(futures)).add_done_callback(lambda _: end(activity, unit))
    else:
        end(activity, unit)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """While this lasts, the engine tells `observer` what it does."""
    _change(lambda before: (*before, observer))
    try:
        yield
    finally:
        _drop(observer)


@contextmanager
def doing(activity: Activity, unit: str) -> Iterator[None]:
    """An activity from its beginning to its end, for programs around the engine."""
    begin(activity, unit)
    try:
        yield
    finally:
        end(activity, unit)


def _tell(say: Callable[[Observer], None]) -> None:
    for observer in observers:
        try:
            say(observer)
        except Exception:
            _log.exception("%r failed and is told nothing more", observer)
            _drop(observer)


def _drop(observer: Observer) -> None:
    _change(lambda before: tuple(each for each in before if each is not observer))


def _change(changed: Callable[[tuple[Observer, ...]], tuple[Observer, ...]]) -> None:
    global observers
    with _lock:
        observers = changed(observers)
