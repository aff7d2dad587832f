"""The two levels of a group whose ranks are on several hosts, and who takes the stages there.

What goes to another host is first summed inside this one and then sent once. What arrives is
received once and shared inside the host. So each rank is in two groups: the ranks of its host, and
the ranks with the same place on the other hosts (its rail). A wire says in which form ranks of one
host send to each other (`Wire.inside`), and itself is for other hosts.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from fullshard._torch import is_registered, lifetime_of, local_group, timeout_of
from fullshard.comm import guard
from fullshard.comm.topology import Topology
from fullshard.comm.work import CollectiveWork
from fullshard.layout import Wire

_Stages = Callable[[], None]
_Messages = Sequence[torch.Tensor]


class StagedWork:
    """A collective of several stages, with what is used of a `dist.Work`."""

    def __init__(self, stages: _Stages) -> None:
        self._stages: _Stages | None = stages
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[object] = torch.futures.Future()

    def run(self) -> None:
        stages, self._stages = self._stages, None
        assert stages is not None
        try:
            stages()
        except BaseException as error:
            self._error = error
        self._done.set()
        self._future.set_result(None)

    def is_completed(self) -> bool:
        return self._done.is_set()

    def get_future(self) -> torch.futures.Future[object]:
        return self._future

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("a collective of several hosts has not ended yet")
        if self._error is not None:
            raise self._error


class Rail:
    """A group of ranks on different hosts, to which a program's own collectives do not go.

    Without streams, a thread takes the stages of one collective after another, in the order in
    which the ranks start them, while the program computes.
    """

    def __init__(self, group: dist.ProcessGroup, places: list[int], backend: str) -> None:
        self.rail = _part_of(group, places, backend)
        self._queue: SimpleQueue[StagedWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, stages: _Stages) -> StagedWork:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_take, args=(self._queue,), name="fullshard-hosts", daemon=True
            )
            self._thread.start()
        work = StagedWork(stages)
        self._queue.put(work)
        return work

    def exchange(self, received: Sequence[_Messages], sent: Sequence[_Messages]) -> None:
        """Send messages to all ranks and receive theirs over gloo, in both directions at once.

        `received` and `sent` have one message for each rank, for each bucket. gloo sends a message
        when it is told, over the same connection, that the other rank waits for it. Its own
        collectives send first, so a rank that comes later tells that behind its own message, and
        the directions take turns. Here, all tell it before they send.
        """
        group, own, size = self.rail, self.rail.rank(), self.rail.size()
        others = [(own + each) % size for each in range(1, size)]
        works = [group.recv([each[peer]], peer, 0) for each in received for peer in others]
        works += [group.send([each[peer]], peer, 0) for each in sent for peer in others]
        for into, message in zip(received, sent, strict=True):
            into[own].copy_(message[own])
        CollectiveWork(works).wait()  # all of them, also after an error

    def close(self) -> None:
        self._queue.put(None)
        _destroy(self.rail)


class TwoLevel(Rail):
    """The groups of this rank's host and of its rail."""

    def __init__(self, group: dist.ProcessGroup, by_host: list[list[int]], backend: str) -> None:
        host = next(each for each in by_host if group.rank() in each)
        self.num_hosts = len(by_host)
        self.host = _part_of(group, host, backend)
        place = host.index(group.rank())
        super().__init__(group, [each[place] for each in by_host], backend)

    def close(self) -> None:
        super().close()
        _destroy(self.host)


def _part_of(group: dist.ProcessGroup, places: list[int], backend: str) -> dist.ProcessGroup:
    """A new group of some of the ranks of a group."""
    ranks = dist.get_process_group_ranks(group)
    return local_group([ranks[each] for each in places], timeout_of(group), backend)


def _destroy(group: dist.ProcessGroup) -> None:
    if is_registered(group):
        dist.destroy_process_group(group)


def _take(queue: SimpleQueue[StagedWork | None]) -> None:
    guard.work_in_background()
    while (work := queue.get()) is not None:
        work.run()
        del work  # and its tensors


def packed_wire(wire: Wire, group: dist.ProcessGroup | None) -> Wire:
    """The wire in which the ranks of a group send gradients first.

    The first call for a group is one that all its ranks make.
    """
    inside = wire.inside
    if inside is wire or group is None:
        return wire
    return wire if Topology.of(group).num_hosts == group.size() else inside


_levels: weakref.WeakKeyDictionary[object, dict[str, TwoLevel | None]] = weakref.WeakKeyDictionary()
_rails: weakref.WeakKeyDictionary[object, Rail | None] = weakref.WeakKeyDictionary()


def levels_of(group: dist.ProcessGroup, backend: str = "gloo") -> TwoLevel | None:
    """The levels of a group, if its hosts have equally many of its ranks, more than one, in order.

    The first call for a group and backend is one that all its ranks make.
    """
    if not is_registered(group):
        return None
    lifetime = lifetime_of(group)
    known = _levels.setdefault(lifetime, {})
    if backend not in known:
        by_host, found = Topology.of(group).by_host, None
        size = len(by_host[0])
        in_order = [rank for host in by_host for rank in host] == list(range(group.size()))
        if len(by_host) > 1 and size > 1 and in_order and all(len(h) == size for h in by_host):
            found = TwoLevel(group, by_host, backend)
            weakref.finalize(lifetime, found.close).atexit = False
        known[backend] = found
    return known[backend]


def rail_of(group: dist.ProcessGroup) -> Rail | None:
    """The rail of a gloo group whose ranks are all on different hosts.

    The first call for a group is one that all its ranks make.
    """
    if not is_registered(group):
        return None
    lifetime = lifetime_of(group)
    if lifetime not in _rails:
        found, size = None, group.size()
        if size > 1 and Topology.of(group).num_hosts == size:
            found = Rail(group, [*range(size)], "gloo")
            weakref.finalize(lifetime, found.close).atexit = False
        _rails[lifetime] = found
    return _rails[lifetime]
