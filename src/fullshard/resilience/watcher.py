"""The watcher: tells every rank when another one fails, ends, stops, or takes another path.

A thread of each process looks where its rank is, writes that to the store when it has changed, and
reads whether the ranks were told to give up. A step does nothing for it. The rank that first learns
of a reason to give up writes it to the store (the verdict):

- a rank whose program raises;
- a rank that sees another process of its machine gone, or stopped while it waits for it;
- the first rank, which compares the places of all, and finds ranks waiting for one that has left,
  for one that does not come within the timeout of the process group, or for each other.

A rank raises the verdict where it waits for a collective, and otherwise when it next enters the
engine. On NCCL, where compute waits and not the program, communicators are aborted first.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from fullshard._torch import all_groups, default_store, lifetime_of
from fullshard.comm import guard
from fullshard.comm.guard import Place, Watched, patience_s
from fullshard.errors import DisagreementError, FullshardError
from fullshard.processes import is_stopped, machine_id, start_of
from fullshard.resilience.places import (
    SHORT_PATIENCE_S,
    OwnPlace,
    are_deadlocked,
    late_rank,
    rank_to_give_up,
    table,
    write_places,
)

SWITCH = "FULLSHARD_WATCH"
FILE = "FULLSHARD_WATCH_FILE"

_log = logging.getLogger(__name__)

_PERIOD_S = 1.0
_RANKS_PER_PERIOD = 2048  # more ranks ask less often: the store answers all of them
_STORE_TIMEOUT_S = 5.0
_SLICE_S = 0.5
_SHOWN_FRAMES = 3
_LEFT = "it has left"


class RankFailedError(FullshardError, dist.DistBackendError):
    """A rank has failed, ended or stopped, and the others cannot go on without it."""


def period_s(num_ranks: int) -> float:
    """How long each rank waits between two looks, for a number of ranks."""
    return max(1.0, num_ranks / _RANKS_PER_PERIOD) * _PERIOD_S


class Watcher:
    """The thread of one process, for as long as its default process group lives.

    `failure` is what the ranks were told. `_neighbours` are the processes of other ranks on this
    machine: rank to process id and start.
    """

    def __init__(self, store: Any) -> None:
        assert dist.group.WORLD is not None
        self.failure: FullshardError | None = None
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.own = OwnPlace()
        self._store = store
        self._lock = threading.Lock()
        self._stopped = stopped = threading.Event()
        self._lifetime = weakref.ref(lifetime_of(dist.group.WORLD), lambda _: stopped.set())
        self._path = f"fullshard/watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{_count()}"
        self._written: Place | None = None
        self._neighbours: dict[int, tuple[str, str]] = {}
        self._num_stopped: dict[int, int] = {}
        self._lost_since: float | None = None
        self._is_complete = False
        self._has_verdict = self._has_raised = False
        self._told: set[str] = set()
        threading.Thread(target=self._run, name="watcher", daemon=True).start()

    @property
    def is_running(self) -> bool:
        return self._lifetime() is not None and not self._stopped.is_set()

    def follow(self, watched: Watched) -> None:
        self.own.watched.add(watched)

    # Called by the program's thread

    def begin_waiting(self, doing: str) -> None:
        self.own.doing = doing

    def keep_waiting(self, since: float) -> None:
        if time.monotonic() - since > _PERIOD_S:
            self.own.waiting_since = since
        self.check()

    def stop_waiting(self) -> None:
        self.own.waiting_since, self.own.doing = None, ""

    def report(self, error: BaseException) -> None:
        """Tell all ranks that the program of this one has failed."""
        self._has_raised = True
        if self.failure is None:
            if not self.own.ended:
                self.own.ended = f"it raised {_described(error)}"
            self._give_up(self.rank, self.own.look())
        self._explain(error)

    def _explain(self, error: BaseException) -> None:
        """Add to an error what the ranks were told, if that was something else."""
        if self.failure is not None and str(self.failure) != str(error):
            error.add_note(str(self.failure))

    def leave(self) -> None:
        """Tell others not to wait for this process: it ends, or its process group does."""
        if not self.own.ended:
            self.own.ended = _LEFT
            with suppress(Exception), self._lock:
                self._write(self.own.look())
        deadline = time.monotonic() + SHORT_PATIENCE_S
        # This process may host the store.
        while self._has_verdict and self._store is not None and time.monotonic() < deadline:
            with suppress(Exception):
                if self._num_heard() >= self.size - 1:
                    break
            self._stopped.wait(_SLICE_S / 5)
        self._stopped.set()

    def note_failure(self, text: str, error: BaseException | None) -> None:
        """A step has failed here, and the program may go on, but others may wait for it."""
        if isinstance(error, RankFailedError):
            return
        text = text if error is None else f"{text} with {_described(error)}"
        was_noted, self.own.ended = self.own.ended, text
        if text and not was_noted:
            with suppress(Exception), self._lock:
                self._write(self.own.look())

    def explained(self, error: BaseException) -> BaseException:
        """The reason for a failed collective, if the ranks learn of one soon."""
        before = self.own.waiting_since
        self.own.waiting_since = before or time.monotonic()
        deadline = time.monotonic() + 2 * SHORT_PATIENCE_S
        while self.failure is None and self.is_running and time.monotonic() < deadline:
            self._stopped.wait(_SLICE_S / 5)
        self.own.waiting_since = before
        return error if self.failure is None else self._raised()

    def check(self) -> None:
        """Raise the failure that the ranks were told of, if there is one."""
        if self.failure is not None:
            raise self._raised()

    def _raised(self) -> FullshardError:
        assert self.failure is not None
        return type(self.failure)(str(self.failure))

    def _num_heard(self, more: int = 0) -> int:
        """How many ranks have heard of the verdict."""
        with self._lock:
            return int(self._store.add(f"{self._path}/heard", more))

    # The thread

    def _run(self) -> None:
        with suppress(Exception):
            self._register()
        while self.failure is None and not self._stopped.wait(period_s(self.size)):
            try:
                self._look()
                self._lost_since = None
            except Exception as error:  # the store is gone, or does not answer
                if isinstance(error, dist.DistNetworkError):
                    self._store = None  # c10d would print a stack trace with every attempt
                self._on_lost_store()
        if self._stopped.is_set():
            self.leave()
            with self._lock:
                self._store = None  # closes the connection

    def _register(self) -> None:
        own = [self.rank, os.getpid(), start_of(os.getpid())]
        with self._lock:
            self._write(self.own.look())
            self._store.append(f"{self._path}/{machine_id()}", json.dumps(own) + "\n")
            self._store.add(f"{self._path}/registered", 1)

    def _look(self) -> None:
        place = self.own.look()
        verdict = ""
        with self._lock:
            if place != self._written:
                self._write(place)
            if self._store.check([f"{self._path}/verdict"]):
                verdict = self._store.get(f"{self._path}/verdict").decode()
            elif not self._is_complete:
                self._find_neighbours()
        if verdict:
            self._deliver(verdict)
            return
        self._look_at_neighbours(place)
        if self._is_complete and self.rank == 0:
            self._compare()
        elif place.waited_s > SHORT_PATIENCE_S and self._place_of(0).ended:
            self._give_up(0, self._place_of(0))

    def _write(self, place: Place) -> None:
        self._written = place
        self._store.set(f"{self._path}/place/{self.rank}", json.dumps(asdict(place)))

    def _place_of(self, rank: int) -> Place:
        key = f"{self._path}/place/{rank}"
        with self._lock:
            known: dict[str, Any] = {}
            if self._store.check([key]):
                known = json.loads(self._store.get(key))
        return Place(**known)

    def _find_neighbours(self) -> None:
        said = self._store.get(f"{self._path}/{machine_id()}").decode()
        for rank, pid, start in map(json.loads, said.splitlines()):
            if rank != self.rank:
                self._neighbours[rank] = str(pid), str(start)
        self._is_complete = self._store.add(f"{self._path}/registered", 0) >= self.size

    def _look_at_neighbours(self, own: Place) -> None:
        for rank, (pid, start) in list(self._neighbours.items()):
            is_waited_for = own.waited_s >= SHORT_PATIENCE_S and is_stopped(pid)
            self._num_stopped[rank] = self._num_stopped.get(rank, 0) + 1 if is_waited_for else 0
            if start_of(pid) != start:
                del self._neighbours[rank]
                place = self._place_of(rank)
                if place.ended != _LEFT:  # otherwise nobody may need it
                    ended = place.ended or "its process is gone"
                    self._give_up(rank, replace(place, ended=ended))
            elif self._num_stopped[rank] > 1:
                place = replace(self._place_of(rank), ended="its process is stopped")
                self._give_up(rank, place)

    def _compare(self) -> None:
        with self._lock:
            keys = [f"{self._path}/place/{rank}" for rank in range(self.size)]
            places = [Place(**json.loads(text)) for text in self._store.multi_get(keys)]
        if FILE in os.environ:
            write_places(Path(os.environ[FILE]), places)
        lost, patience = rank_to_give_up(places), patience_s()
        if lost is not None:
            self._give_up(lost, places[lost])
        elif (late := late_rank(places)) is not None:
            self._give_up(*late)
        elif are_deadlocked(places, patience):
            self._tell(
                DisagreementError(
                    "all ranks must run the same collectives in the same order, found that they "
                    f"have waited for each other for {patience:g} s:\n{table(places)}\nMake the "
                    "program take the same path on every rank."
                )
            )
        elif max(place.waited_s for place in places) >= patience:
            self._warn_once(f"ranks have waited for others for {patience:g} s:\n{table(places)}")

    def _warn_once(self, text: str) -> None:
        kind = text.partition(":")[0]
        if kind not in self._told:
            self._told.add(kind)
            _log.warning("fullshard: %s", text)

    def _on_lost_store(self) -> None:
        now = time.monotonic()
        self._lost_since = self._lost_since or now
        is_waiting = self.own.look().waited_s >= SHORT_PATIENCE_S
        if self.is_running and is_waiting and now - self._lost_since > _PERIOD_S:
            self._tell(
                RankFailedError(
                    "the store: the process that has it (of rank 0, or the launcher) must answer, "
                    "found that it does not; look at its output, and start the ranks again."
                )
            )

    # Giving up

    def _give_up(self, rank: int, place: Place) -> None:
        """Tell all ranks that one is lost."""
        self._tell(
            RankFailedError(
                f"rank {rank}: all ranks must go on together, found it at {place}; look at its own "
                "output, and start the ranks again."
            )
        )

    def _tell(self, failure: FullshardError) -> None:
        verdict = json.dumps([type(failure).__name__, str(failure)])
        with suppress(Exception), self._lock:
            verdict = self._store.compare_set(f"{self._path}/verdict", "", verdict).decode()
        self._deliver(verdict)

    def _deliver(self, verdict: str) -> None:
        self._has_verdict = True
        name, text = json.loads(verdict)
        is_own = self._has_raised and text.startswith(f"rank {self.rank}:")
        if is_own or self.failure is not None:
            return  # this rank raises its own error
        kind = DisagreementError if name == DisagreementError.__name__ else RankFailedError
        self.failure = kind(text)
        with suppress(Exception):
            self._num_heard(more=1)
        # A wait in a collective of the program's own is not ended by raising this.
        if self.rank == 0 or (self.own.look().doing and not self.own.doing):
            _log.error("fullshard: %s", text)
        # All at once: an abort waits for the device, which may wait for another group's collective.
        aborts = [threading.Thread(target=self._abort, args=(each,)) for each in all_groups()]
        for abort in aborts:
            abort.daemon = True
            abort.start()
        for abort in aborts:
            abort.join()

    def _abort(self, group: dist.ProcessGroup) -> None:
        with suppress(Exception):
            # A group that the program destroys meanwhile must not be aborted.
            if self.is_running and "nccl" in dist.get_backend(group):
                group.abort()


def _described(error: BaseException) -> str:
    """An error and the last lines of the program on the way to it."""
    frames = traceback.extract_tb(error.__traceback__)[-_SHOWN_FRAMES:]
    lines = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    return f"{type(error).__name__}: {error} ({', '.join(lines)})"


# The watcher of this process

_last: Watcher | None = None
_num_started = 0


def _count() -> int:
    """Number the default groups: those that share a store must not read each other's keys."""
    global _num_started
    _num_started += 1
    return _num_started


def make() -> Watcher | None:
    """Start the watcher of the default process group, if there are others to watch."""
    global _last
    if os.environ.get(SWITCH) == "0" or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store: Any = default_store()
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    if not isinstance(base, TCPStore):
        return None  # a store of one process, or one that would grow
    own = store.clone()  # another connection: the program may block the first one
    own.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
    if _num_started == 0:
        _follow_the_end_of_the_process()
    _last = Watcher(own)
    return _last


def report_failure(error: BaseException) -> None:
    """Tell all ranks that the program of this one has failed, and ends.

    An error that ends the program is reported without this call; one that it catches is not.
    """
    if _last is not None and _last.is_running:
        _last.report(error)


def report_exit() -> None:
    """Tell all ranks that this process ends, also if its process group has ended before.

    For programs that call `os._exit`: at a normal exit, this happens by itself.
    """
    if _last is not None:
        _last.leave()


def _follow_the_end_of_the_process() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        report_failure(error)
        before(kind, error, frames)

    sys.excepthook = hook
    atexit.register(report_exit)
    Finalize(None, report_exit, exitpriority=100)  # processes of multiprocessing have no atexit


def _after_fork() -> None:
    global _last
    _last = None  # a child, such as a data loader's worker, is not the rank


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


guard.make_watcher = make
