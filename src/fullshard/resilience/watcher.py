"""The watcher: tells every rank when another one fails, ends, stops, or takes another path.

A thread of each process looks where its rank is, writes that to the store when it has changed, and
reads whether the ranks were told to give up. A step does nothing for it. The rank that first learns
of a reason to give up writes it to the store (the verdict):

- a rank whose program raises;
- a rank that sees another process of its machine gone, or stopped while it waits for it;
- a rank whose link to another host shows a process gone, or no answer for too long (`links.py`);
- the first rank, which compares the places of all, and finds ranks waiting for one that has left,
  for one that does not come within the timeout of the process group, or for each other.

Between hosts, the verdict goes over the links as well, since the store may be on the lost host.

A rank raises the verdict where it waits for a collective, and otherwise when it next enters the
engine. On NCCL, where compute waits and not the program, communicators are aborted first. A
program that waits where no error can reach it is ended.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from fullshard._torch import all_groups, default_store, lifetime_of
from fullshard.comm import guard
from fullshard.comm.guard import Place, Watched, patience_s
from fullshard.errors import DisagreementError, FullshardError
from fullshard.processes import is_stopped, machine_id, start_of
from fullshard.resilience.hosts import Hosts, clock
from fullshard.resilience.links import Links, Peer
from fullshard.resilience.places import (
    LEFT,
    SHORT_PATIENCE_S,
    OwnPlace,
    are_deadlocked,
    late_rank,
    rank_to_give_up,
    table,
    write_places,
)
from fullshard.resilience.store_thread import StoreThread

SWITCH = "FULLSHARD_WATCH"
FILE = "FULLSHARD_WATCH_FILE"

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_PERIOD_S = 1.0
_RANKS_PER_PERIOD = 2048  # more ranks ask less often: the store answers all of them
_STORE_TIMEOUT_S = 5.0
_SHORT_TIMEOUT_S = 2.0  # for what the program waits for
_SLICE_S = 0.5
_END_S = 4.0
_SHOWN_FRAMES = 3


class RankFailedError(FullshardError, dist.DistBackendError):
    """A rank has failed, ended or stopped, and the others cannot go on without it."""


def period_s(num_ranks: int) -> float:
    """How long each rank waits between two looks, for a number of ranks."""
    return max(1.0, num_ranks / _RANKS_PER_PERIOD) * _PERIOD_S


class Watcher:
    """The thread of one process, for as long as its default process group lives.

    `failure` is what the ranks were told. `_neighbors` are the processes of other ranks on this
    machine: rank to process id and start. `_links` and `_hosts` are about the other ones.
    """

    def __init__(self, store: Any, address: tuple[str, int]) -> None:
        assert dist.group.WORLD is not None
        self.failure: FullshardError | None = None
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.own = OwnPlace()
        self._store: StoreThread | None = StoreThread(store, address)
        self._lock, self._leaving = threading.Lock(), threading.Lock()
        self._stopped = stopped = threading.Event()
        self._lifetime = weakref.ref(lifetime_of(dist.group.WORLD), lambda _: stopped.set())
        self._path = f"fullshard/watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{_count()}"
        self._written: Place | None = None
        self._neighbors: dict[int, tuple[str, str]] = {}
        self._num_stopped: dict[int, int] = {}
        self._links: Links | None = None
        with suppress(OSError, AttributeError):  # of a system without such sockets
            self._links = Links(self.rank, *address)
        self._hosts: Hosts | None = None
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
        self.own.doing, self.own.asked_at = doing, time.monotonic()

    def keep_waiting(self, since: float) -> None:
        self.own.asked_at = now = time.monotonic()
        if now - since > _PERIOD_S:
            self.own.waiting_since = since
        self.check()

    def stop_waiting(self) -> None:
        self.own.waiting_since, self.own.asked_at, self.own.doing = None, None, ""

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
        with self._leaving:  # the program must not end while the thread says so
            if not self.own.ended:
                self.own.ended = LEFT
                if self.failure is None:  # otherwise all are told to end
                    self._write_soon()
        if self.rank == 0 and self._has_verdict:  # its process may have the store
            with suppress(Exception):
                self._wait_until_all_have_heard()
        if self._links is not None:
            self._links.close()
        self._stopped.set()

    def note_failure(self, text: str, error: BaseException | None) -> None:
        """A step has failed here, and the program may go on, but others may wait for it."""
        if isinstance(error, RankFailedError):
            return
        text = text if error is None else f"{text} with {_described(error)}"
        was_noted, self.own.ended = self.own.ended, text
        if text and not was_noted:
            self._write_soon()

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

    def _wait_until_all_have_heard(self) -> None:
        num_left = self.size - 1  # all but the one that has failed
        if self._hosts is not None:
            num_left = min(num_left, self._hosts.num_reachable())
        deadline = time.monotonic() + SHORT_PATIENCE_S
        while time.monotonic() < deadline and self._num_heard() < num_left:
            self._stopped.wait(_SLICE_S / 5)

    def _num_heard(self, more: int = 0) -> int:
        """How many ranks have heard of the verdict."""
        key = f"{self._path}/heard"
        return int(self._ask(lambda store: store.add(key, more), _SHORT_TIMEOUT_S))

    def _write_soon(self) -> None:
        place = self.own.look()
        with suppress(Exception):
            self._ask(lambda store: self._write(store, place), _SHORT_TIMEOUT_S)

    def _ask(self, what: Callable[[Any], _T], timeout_s: float = _STORE_TIMEOUT_S) -> _T:
        """Ask the store; raises if it is gone or does not answer."""
        with self._lock:
            store = self._store
        if store is None:
            raise ConnectionError("the store is gone")
        return store.call(what, timeout_s)

    # The thread

    def _run(self) -> None:
        with suppress(Exception):
            self._ask(self._register)
        while self.failure is None and not self._stopped.wait(period_s(self.size)):
            try:
                self._look()
                self._lost_since = None
            except TimeoutError:
                continue  # a link may come back: those to other hosts show whether it does
            except Exception as error:
                if isinstance(error, ConnectionError):
                    self._close_store()
                self._on_lost_store()
        self._end_what_hangs()
        self.leave()
        self._close_store()

    def _close_store(self) -> None:
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _register(self, store: Any) -> None:
        own = [self.rank, os.getpid(), start_of(os.getpid())]
        self._write(store, self.own.look())
        store.append(f"{self._path}/{machine_id()}", json.dumps(own) + "\n")
        if self._links is not None:
            found = self._links
            peer = Peer(
                self.rank,
                machine_id(),
                socket.gethostname(),
                found.address,
                found.port,
                found.token,
            )
            store.append(f"{self._path}/peers", json.dumps(asdict(peer)) + "\n")
        store.add(f"{self._path}/registered", 1)

    def _look(self) -> None:
        place = self.own.look()
        if self._hosts is not None and self._links is not None:
            self._links.send_place(asdict(place))
        self._look_at_neighbors(place)
        if self.failure is not None:
            return
        if verdict := self._ask(lambda store: self._exchange(store, place)):
            self._deliver(verdict)
        elif self._is_complete and self.rank == 0:
            self._compare()
        elif place.waited_s > SHORT_PATIENCE_S and self._place_of(0).ended:
            self._give_up(0, self._place_of(0))

    def _exchange(self, store: Any, place: Place) -> str:
        """Write where this rank is, and return the verdict."""
        if place != self._written:
            self._write(store, place)
        if store.check([f"{self._path}/verdict"]):
            return str(store.get(f"{self._path}/verdict").decode())
        if not self._is_complete:
            self._find_others(store)
        return ""

    def _write(self, store: Any, place: Place) -> None:
        self._written = place
        store.set(f"{self._path}/place/{self.rank}", json.dumps(asdict(place)))

    def _place_of(self, rank: int) -> Place:
        key = f"{self._path}/place/{rank}"

        def read(store: Any) -> dict[str, Any]:
            return dict(json.loads(store.get(key))) if store.check([key]) else {}

        return Place(**self._ask(read))

    def _find_others(self, store: Any) -> None:
        said = store.get(f"{self._path}/{machine_id()}").decode()
        for rank, pid, start in map(json.loads, said.splitlines()):
            if rank != self.rank:
                self._neighbors[rank] = str(pid), str(start)
        self._is_complete = store.add(f"{self._path}/registered", 0) >= self.size
        if not self._is_complete or self._links is None:
            return
        if len(self._neighbors) + 1 < self.size:
            rows = map(json.loads, store.get(f"{self._path}/peers").decode().splitlines())
            peers = {row["rank"]: Peer(**row) for row in rows}
            if len(peers) == self.size:  # all hosts have links
                self._hosts = Hosts(self.rank, peers)
                self._links.start(peers, self)
                return
        self._links.close()
        self._links = None

    def _look_at_neighbors(self, own: Place) -> None:
        for rank, (pid, start) in list(self._neighbors.items()):
            is_waited_for = own.waited_s >= SHORT_PATIENCE_S and is_stopped(pid)
            self._num_stopped[rank] = self._num_stopped.get(rank, 0) + 1 if is_waited_for else 0
            if start_of(pid) != start:
                del self._neighbors[rank]
                self.on_gone(rank)
            elif self._num_stopped[rank] > 1:
                self._give_up(rank, self._last_place_of(rank), "its process is stopped")

    def _last_place_of(self, rank: int) -> Place | None:
        """Where a rank was, if the store or a link can say."""
        with suppress(Exception):
            return self._place_of(rank)
        return None if self._links is None else self._links.place_of(rank)

    # Of the links, in their thread

    def on_gone(self, rank: int) -> None:
        place = self._last_place_of(rank)
        if place is None and self._links is not None and not self._links.has(rank):
            return  # the store has ended, too: those that the rank had links to know where it was
        if place is None or place.ended != LEFT:  # otherwise nobody may need it
            self._give_up(rank, place, "its process is gone")

    def on_silent(self, rank: int, since: float) -> None:
        lost_s = time.monotonic() - since
        is_waiting = self.own.look().waited_s >= SHORT_PATIENCE_S
        if self.failure is None and self._hosts and is_waiting and lost_s >= patience_s():
            self._tell(
                RankFailedError(
                    f"{self._hosts.host_of(rank)}: this host has not answered "
                    f"{self._hosts.named(self.rank)} since {clock(time.time() - lost_s)}, for "
                    f"{lost_s:.0f} s; look whether it runs and its link is up, and start the ranks "
                    f"again. {guard.PATIENCE} says how long ranks wait for a link to come back."
                )
            )

    def on_news(self, rank: int, news: Mapping[str, Any]) -> None:
        assert self._hosts is not None
        for line in self._hosts.hear(rank, news.get("silent", {})):
            if self._hosts.is_first_here:
                _log.warning("fullshard: %s", line)
        if "verdict" in news:
            self._deliver(news["verdict"])

    # The thread

    def _compare(self) -> None:
        keys = [f"{self._path}/place/{rank}" for rank in range(self.size)]
        found = self._ask(lambda store: store.multi_get(keys))
        places = [Place(**json.loads(text)) for text in found]
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
                    f"all ranks have waited for each other for {patience:g} s, in different "
                    f"collectives:\n{table(places)}\nMake the program take the same path on every "
                    "rank."
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
                    "the store: the process that has it (of rank 0, or the launcher) does not "
                    "answer; look at its output, and start the ranks again."
                )
            )

    # Giving up

    def _give_up(self, rank: int, place: Place | None, ended: str = "") -> None:
        """Tell all ranks that one is lost, where it was if that is known, and how it ended."""
        what = f"failed, {ended}"
        if place is not None:
            what = f"failed at {replace(place, ended=place.ended or ended)}"
        self._tell(
            RankFailedError(
                f"{self._named(rank)}: {what}; look at its own output, and start the ranks again."
            )
        )

    def _named(self, rank: int) -> str:
        return f"rank {rank}" if self._hosts is None else self._hosts.named(rank)

    def _tell(self, failure: FullshardError) -> None:
        key, verdict = f"{self._path}/verdict", json.dumps([type(failure).__name__, str(failure)])
        with suppress(Exception):
            found = self._ask(lambda store: store.compare_set(key, "", verdict), _SHORT_TIMEOUT_S)
            verdict = found.decode()
        if self._links is not None and self._hosts is not None:
            self._links.tell(verdict=verdict)
        self._deliver(verdict)

    def _deliver(self, verdict: str) -> None:
        self._has_verdict = True
        name, text = json.loads(verdict)
        kind = DisagreementError if name == DisagreementError.__name__ else RankFailedError
        is_own = self._has_raised and text.startswith(f"{self._named(self.rank)}:")
        with self._lock:
            if is_own or self.failure is not None:
                return  # this rank raises its own error
            self.failure = kind(text)
        with suppress(Exception):
            self._num_heard(more=1)
        # A wait in a collective of the program's own is not ended by raising this.
        if self.own.look().doing and not self.own.doing:
            _log.error("fullshard: %s", text)
        # All at once: an abort waits for the device, which may wait for another group's collective.
        aborts = [threading.Thread(target=self._abort, args=(each,)) for each in all_groups()]
        for abort in aborts:
            abort.daemon = True
            abort.start()
        for abort in aborts:
            abort.join()

    def _end_what_hangs(self) -> None:
        """End this process if its program waits where the failure cannot be raised."""
        stuck_since = None
        while not self._stopped.wait(_SLICE_S):
            now = time.monotonic()
            stuck_since = (stuck_since or now) if self.own.is_beyond_reach() else None
            if stuck_since is not None and now - stuck_since > SHORT_PATIENCE_S:
                at = self.own.look()
                _log.error(
                    "fullshard: rank %d ends its process, because it cannot be told of a failure "
                    "while it waits for others at %s",
                    self.rank,
                    at,
                )
                _end()

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
    _last = Watcher(own, (base.host, base.port))
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
        is_given_up = _last is not None and _last.failure is not None
        if is_given_up and not hasattr(sys, "ps1"):  # an interactive interpreter goes on
            _end()

    sys.excepthook = hook
    atexit.register(report_exit)
    Finalize(None, report_exit, exitpriority=100)  # processes of multiprocessing have no atexit


def _end() -> NoReturn:
    """End this process, whose backend may have threads that wait for ranks which never come.

    The interpreter would wait for these threads.
    """
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        faulthandler.dump_traceback_later(_END_S, exit=True, file=nowhere)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _after_fork() -> None:
    global _last
    _last = None  # a child, such as a data loader's worker, is not the rank


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


guard.make_watcher = make
