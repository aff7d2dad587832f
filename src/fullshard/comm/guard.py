"""Where the engine says that it waits, fails or issues a collective, to whoever guards it.

Two guards listen here, and the engine knows neither. A `Watcher` follows schedulers, and raises an
error in a rank that waits for another one in vain. A `StepGuard` lets a rank that has failed finish
the collectives of its step. Without them, ranks wait as long as the process group does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from math import inf
from typing import Any, NoReturn, Protocol

from fullshard.errors import FullshardError

PATIENCE = "FULLSHARD_PATIENCE_S"

_DEFAULT_PATIENCE_S = 60.0
_SLICE_S = 0.5


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is, and for how long it has waited there for other ranks.

    `line` is the program's line; `ended` says why the rank will not get any further. `limit_s` is
    how long it may wait there: the timeout of the process group. `doing` says what it waits to do:
    a collective of the program, or what it does in the place of what it did before.
    """

    step: int = 0
    forward: int = 0
    phase: str = "idle"
    unit: str = ""
    num_collectives: int = 0
    waited_s: float = 0.0
    line: str = ""
    ended: str = ""
    limit_s: float = inf
    doing: str = ""

    @property
    def spot(self) -> tuple[object, ...]:
        """The part of a place that ranks which wait for each other have in common."""
        return self.forward, self.phase, self.unit, self.num_collectives, self.doing

    def __str__(self) -> str:
        where = f"{self.phase} of {self.unit}" if self.unit else self.phase
        text = f"step {self.step}, {where}, after {self.num_collectives} collectives"
        if self.ended:
            return f"{text}: {self.ended}"
        text = f"{text}, about to do '{self.doing}'" if self.doing else text
        text = f"{text}, {self.line}" if self.line else text
        return f"{text}, waiting for {self.waited_s:.0f} s" if self.waited_s else text


class Watched(Protocol):
    """A scheduler, as another thread sees it; `waited_s` says whether its device is behind."""

    def place(self) -> Place: ...


class Watcher(Protocol):
    """Knows what the other ranks do, for as long as the default process group lives."""

    @property
    def is_running(self) -> bool: ...

    def follow(self, watched: Watched) -> None: ...

    def check(self) -> None:
        """Raise the failure that the ranks were told of, if there is one."""

    def begin_waiting(self, doing: str) -> None: ...

    def keep_waiting(self, since: float) -> None:
        """Raise if there is no hope; called again and again by code that waits for others."""

    def stop_waiting(self) -> None: ...

    def explained(self, error: BaseException) -> BaseException:
        """The reason for a failed collective, if the ranks learn of one soon."""

    def note_failure(self, text: str, error: BaseException | None) -> None: ...


class StepGuard(Protocol):
    """Guards one step against an error on this rank that the other ranks need not know of.

    `may_ask` says whether ranks may wait for each other outside of the step's own collectives.
    """

    may_ask: bool

    def issued(self, collective: Any) -> None: ...

    def can_finish(self, error: BaseException) -> bool:
        """Whether this rank will issue what is left of the step, so that no other is told."""


_ROOM = "fullshard.resilience"  # its import sets `make_watcher`

make_watcher: Callable[[], Watcher | None] | None = None
_watcher: Watcher | None = None
_step: StepGuard | None = None
_thread = threading.local()


def patience_s() -> float:
    """How long ranks wait for others before they report it, or take it for a disagreement."""
    return float(os.environ.get(PATIENCE, _DEFAULT_PATIENCE_S))


def watch(watched: Watched) -> None:
    """Have a scheduler watched; the first one of a default process group makes the watcher."""
    global _watcher
    if make_watcher is None and find_spec(_ROOM) is not None:
        import_module(_ROOM)
    if current() is None and make_watcher is not None:
        _watcher = make_watcher()
    if _watcher is not None:
        _watcher.follow(watched)


def current() -> Watcher | None:
    """The watcher of this process, while its process group lives."""
    return _watcher if _watcher is not None and _watcher.is_running else None


def check() -> None:
    """Raise the failure, if the ranks were told to give up."""
    if _watcher is not None and _watcher.is_running:
        _watcher.check()


def note_failure(text: str, error: BaseException | None = None) -> None:
    """Note a failed step, whose error the program may catch; no text: all ranks went on."""
    if error is not None and _step is not None and _step.can_finish(error):
        return  # no other rank will wait for this one
    if _watcher is not None:
        _watcher.note_failure(text, error)


@contextmanager
def waiting(doing: str = "") -> Iterator[Callable[[], None]]:
    """Wait for other ranks in the block, which calls the given function again and again.

    An error in the block is explained by that of another rank, if there is one. `doing` says what
    this rank waits to do, if that is not what all ranks are about to do.
    """
    watcher, since = current(), time.monotonic()
    if watcher is None or _is_in_background():
        try:
            yield check
        except RuntimeError as error:
            raise_explained(error)
        return
    try:
        watcher.begin_waiting(doing)
        yield lambda: watcher.keep_waiting(since)
    except RuntimeError as error:
        raise_explained(error)
    finally:
        watcher.stop_waiting()


def wait_for(work: Any) -> None:
    """Wait for a collective on the host, as long as there is hope."""
    if current() is None:
        work.wait()
        return
    with waiting() as keep_waiting:
        while True:
            # The timeout of a slice says nothing about the work, which may have ended since.
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=_SLICE_S))
            if work.is_completed():
                work.wait()
                return
            keep_waiting()


def work_in_background() -> None:
    """Note that this thread is not the program's: its waits say nothing about where the rank is."""
    _thread.is_in_background = True


def _is_in_background() -> bool:
    return getattr(_thread, "is_in_background", False)


def join(thread: threading.Thread, timeout_s: float | None = None) -> None:
    """Wait for a thread that waits for other ranks, as long as there is hope."""
    with waiting() as keep_waiting:
        deadline = inf if timeout_s is None else time.monotonic() + timeout_s
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(min(_SLICE_S, max(0.0, deadline - time.monotonic())))
            keep_waiting()


def raise_explained(error: BaseException) -> NoReturn:
    """Raise the reason for a failed collective: what ranks are told soon, or its own error."""
    watcher, found = current(), error
    if watcher is not None and not isinstance(error, FullshardError):
        found = watcher.explained(error)
    if found is error:
        raise error
    raise found from error


# A guarded step


@contextmanager
def guarding(step: StepGuard) -> Iterator[None]:
    """Let a guard hear of the collectives that are issued in the block, and of errors."""
    global _step
    _step = step
    try:
        yield
    finally:
        _step = None


def is_guarded() -> bool:
    return _step is not None


def may_ask() -> bool:
    """Whether ranks may wait for each other outside of the collectives of a step."""
    return _step is None or _step.may_ask


def note_issued(collective: Callable[[], Any]) -> None:
    """Describe a collective that was issued, if somebody asks. The stages of one do not count."""
    if _step is not None and not _is_in_background():
        _step.issued(collective())


def _after_fork() -> None:
    global _watcher
    _watcher = None  # a child, such as a data loader's worker, is not the rank


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
