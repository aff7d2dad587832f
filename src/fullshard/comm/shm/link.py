"""The ranks of one process group on one host, as each of them sees the others.

Each two ranks have a socket between them. Packets go over it, and file descriptors with them.
Sending and receiving is also what orders memory between the two processes: what was copied into a
region before a packet was sent is there for the rank that has received it.
"""

from __future__ import annotations

import array
import enum
import marshal
import os
import select
import socket
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from fullshard.comm.shm.memory import Mapped, Region, Regions
from fullshard.errors import DisagreementError

# From here on it is worth a system call to have the memory back before the next collective.
_PROMPT_BYTES = 1 << 20
_LONGEST_SLEEP_S = 3600.0  # `poll` counts milliseconds in 32 bits
_PACKET_BYTES = 1 << 18  # more than a socket sends at once
_FILE_BYTES = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(_FILE_BYTES)


class Kind(enum.IntEnum):
    ALL_GATHER = 1
    REDUCE_SCATTER = 2

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


class Terms(NamedTuple):
    """What must be the same on all ranks of a collective."""

    kind: Kind
    num_buckets: int
    num_bytes: int
    fingerprint: int

    def __str__(self) -> str:
        count = f"{self.num_buckets} bucket{'s' if self.num_buckets != 1 else ''}"
        return f"{self.kind} of {count} with {self.num_bytes} bytes"


class Bucket(NamedTuple):
    """An input of this rank in one of its regions."""

    region: Region
    offset: int

    @property
    def address(self) -> int:
        return self.region.mapped.address + self.offset


class Announced(NamedTuple):
    """A collective of another rank, and the addresses of its buckets in this process.

    They are valid until it is acknowledged: only then may their owner close a region.
    """

    terms: Terms
    addresses: list[int]


class Failure(NamedTuple):
    """A rank that announces no more: why (0: because another one failed), and after how many."""

    error: int
    num_announced: int


class Waitable(Protocol):
    def wait(self) -> object: ...


class Peer:
    """Another rank of the group, and the socket to it. Nothing here ever blocks."""

    def __init__(self, rank: int, connected: socket.socket, link: Link) -> None:
        self.rank = rank
        self.announced: dict[int, Announced] = {}
        self.unread: dict[int, tuple[Region, ...]] = {}  # of this rank, by the other one
        self.failed: Failure | None = None
        self.is_gone = False
        self._socket = connected
        self._link = link
        self._opened: dict[int, Mapped] = {}
        self._unwanted: set[int] = set()
        self._acknowledged: list[int] = []
        self._unsent: deque[tuple[bytes, list[Any]]] = deque()
        connected.setblocking(False)
        # As much as the system allows: a rank may be far ahead of one that computes.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_backlogged(self) -> bool:
        return bool(self._unsent)

    def send(
        self,
        *,
        collective: tuple[Any, ...] = (),
        opened: Region | None = None,
        closed: int = -1,
        failed: tuple[int, ...] = (),
    ) -> None:
        """Send a packet, with the acknowledgements that were waiting for one."""
        region: tuple[int, ...] = ()
        files: list[Any] = []
        if opened is not None:
            region = (opened.number, opened.mapped.num_bytes)
            descriptors = array.array("i", [opened.descriptor])
            files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        packet = marshal.dumps((self._acknowledged, region, closed, collective, failed))
        self._acknowledged = []
        self._unsent.append((packet, files))
        self.flush()

    def flush(self) -> None:
        """Send what the socket had no room for so far."""
        while self._unsent:
            packet, files = self._unsent[0]
            try:
                self._socket.sendmsg([packet], files)
            except BlockingIOError:
                return
            except OSError:
                # It has gone, perhaps after all that it had to say: that may still be unread here.
                self._unsent.clear()
                return
            self._unsent.popleft()

    def acknowledge(self, sequence: int, *, at_once: bool) -> None:
        """A collective was read: tell its owner now, or with the next packet."""
        del self.announced[sequence]
        self._acknowledged.append(sequence)
        if at_once:
            self.send()

    def refuse(self, sequence: int) -> None:
        """Nobody here will read a collective, whether or not it was announced yet."""
        if sequence in self.announced:
            self.acknowledge(sequence, at_once=True)
        else:
            self._unwanted.add(sequence)

    def drain(self) -> None:
        """Process all packets that have arrived."""
        while not self.is_gone:
            try:
                packet, descriptor = self._link.receive_from(self._socket)
            except BlockingIOError:
                return
            except ConnectionError:
                packet = b""
            if not packet:
                self.is_gone = True
                return
            reads, region, closed, collective, failed = marshal.loads(packet)
            for sequence in reads:
                self._link.was_read(self, sequence)
            if region:
                self._open(region[0], region[1], descriptor)
            if closed >= 0:
                del self._opened[closed]
            if collective:
                self._learn(*collective)
            if failed:
                self.failed = Failure(*failed)
                self._link.fail(0)

    def _open(self, number: int, num_bytes: int, descriptor: int) -> None:
        try:
            self._opened[number] = Mapped(descriptor, num_bytes)
        except OSError as error:
            raise dist.DistNetworkError(
                f"rank {self.rank}: its memory must be opened here to be read, found no file "
                f"descriptor or memory left ({error}); raise the limit (ulimit -n), or set "
                "FULLSHARD_SHARED_MEMORY=0."
            ) from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _learn(self, sequence: int, terms: tuple[Any, ...], places: list[tuple[int, int]]) -> None:
        kind, *others = terms
        addresses = [self._opened[number].address + offset for number, offset in places]
        self.announced[sequence] = Announced(Terms(Kind(kind), *others), addresses)
        if sequence in self._unwanted:
            self._unwanted.discard(sequence)
            self.acknowledge(sequence, at_once=True)

    def close(self) -> None:
        self.is_gone = True
        self._socket.close()
        self._opened.clear()
        self.announced.clear()
        self._unsent.clear()


class Link:
    """A socket to every other rank of a group, and the collectives in flight over them.

    Collectives are matched by their number: the n-th that a rank starts is the n-th of all others,
    in whatever order they are waited for. Starting waits for nobody. Use it under `lock`; only
    `drop` and `close` may be called at any point.

    A rank that gets no memory for a collective fails: it announces no more, and tells the others
    how many it has announced. They do the same when they hear of it. The smallest count is what is
    still read over this link; the collectives after it are started again over gloo, in order, by
    each rank as soon as it knows all counts.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        sockets: Mapping[int, socket.socket],
        timeout_s: float,
        regions: Regions,
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.regions = regions
        self.lock = threading.RLock()
        self.is_failing = False
        self.is_abandoned = False
        self._ranks = list(ranks)
        self._timeout_s = timeout_s
        self._peers = {each: Peer(ranks[each], sockets[each], self) for each in sorted(sockets)}
        self._told: dict[int, weakref.ref[Region]] = {}
        self._num_retired = regions.num_retired
        self._num_started = 0
        self._num_announced = 0
        self._dropped: deque[tuple[int, tuple[int, ...]]] = deque()
        self._restarts: dict[int, Callable[[], Waitable]] = {}
        self._restarted: dict[int, Waitable] = {}
        self._error = 0
        self._packet = memoryview(bytearray(_PACKET_BYTES))
        self._spare = -1

    @property
    def others(self) -> list[int]:
        """The other ranks, by their number in the group."""
        return list(self._peers)

    # Starting

    def take(self, num_bytes: int) -> Region:
        """A region for the buckets of a collective; never waits for one."""
        return self.regions.take(num_bytes, self._drain)

    def begin(self, restart: Callable[[], Waitable]) -> int:
        """The number of a collective; `restart` starts it over gloo if this link fails."""
        self._settle()
        self._num_started += 1
        self._restarts[self._num_started] = restart
        if self.is_failing:
            self._drain()
            self._agree()
        return self._num_started

    def announce(self, sequence: int, terms: Terms, buckets: list[Bucket]) -> None:
        """Tell all others that a collective has begun."""
        self._num_announced = sequence
        used = tuple({bucket.region.number: bucket.region for bucket in buckets}.values())
        self.regions.hold(used, len(self._peers))
        for region in used:
            if region.number not in self._told:
                self._told[region.number] = weakref.ref(region)
                for peer in self._peers.values():
                    peer.send(opened=region)
        places = [(bucket.region.number, bucket.offset) for bucket in buckets]
        for peer in self._peers.values():
            peer.unread[sequence] = used
            peer.send(collective=(sequence, tuple(map(int, terms)), places))

    # Reading

    def receive(
        self, sequence: int, terms: Terms, others: Sequence[int]
    ) -> Iterator[tuple[int, Announced]]:
        """A collective as the others announce it, in the order in which they come.

        Ends early for a collective that was started again: see `restarted`.
        """
        missing = {other: self._peers[other] for other in others}
        deadline = time.monotonic() + self._timeout_s
        while missing:
            is_announced = sequence <= self._num_announced
            for other, peer in list(missing.items()) if is_announced else ():
                if sequence not in peer.announced:
                    peer.drain()
                announced = peer.announced.get(sequence)
                if announced is not None:
                    self._require_same(terms, announced.terms, peer.rank)
                    del missing[other]
                    yield other, announced
            if missing and self.is_failing:
                if not self._agree():
                    self._await([p for p in self._peers.values() if not p.failed], terms, deadline)
                elif sequence in self._restarted:
                    return
            elif missing:
                self._await(list(missing.values()), terms, deadline)
        # Others may need what they were not sent yet, and this rank may not be back for long.
        while backlogged := self._backlogged():
            self._await(backlogged, terms, deadline)

    def acknowledge(self, sequence: int, other: int, num_bytes: int) -> None:
        """This rank has read the buckets of another one."""
        self._peers[other].acknowledge(sequence, at_once=num_bytes >= _PROMPT_BYTES)

    def restarted(self, sequence: int) -> Waitable | None:
        """The collective over gloo that took the place of one over this link."""
        return self._restarted.get(sequence)

    def end(self, sequence: int) -> None:
        """A collective has been waited for."""
        self._restarts.pop(sequence, None)
        self._restarted.pop(sequence, None)
        if self.is_abandoned and not self._restarts and not self._backlogged():
            self.close()

    def drop(self, sequence: int, others: Sequence[int]) -> None:
        """This rank will not read the buckets of these."""
        self._dropped.append((sequence, tuple(others)))

    def was_read(self, peer: Peer, sequence: int) -> None:
        self.regions.release(peer.unread.pop(sequence, ()))

    def receive_from(self, connected: socket.socket) -> tuple[bytes, int]:
        """A packet, and the file that came along (-1: none). Raises BlockingIOError for none."""
        # A file that finds no free descriptor is lost: one is kept for it.
        if self._spare >= 0:
            os.close(self._spare)
        try:
            size, ancillary, _, _ = connected.recvmsg_into([self._packet], _ANCILLARY_BYTES)
        finally:
            self._spare = _dup(connected)
        files = array.array("i", ancillary[0][2][:_FILE_BYTES]) if ancillary else [-1]
        return bytes(self._packet[:size]), files[0]

    # Failing and closing

    def fail(self, error: int) -> None:
        """Announce no more, and let all ranks go over to gloo."""
        if not self.is_failing:
            self.is_failing = True
            self._error = error
            for peer in self._peers.values():
                peer.send(failed=(error, self._num_announced))

    def _agree(self) -> bool:
        """Go over to gloo, if it is known how much all ranks have announced."""
        failures = [peer.failed for peer in self._peers.values() if peer.failed]
        if len(failures) < len(self._peers):
            return False
        num_read = min([self._num_announced, *(each.num_announced for each in failures)])
        for sequence in [each for each in self._restarts if each > num_read]:
            self._restarted[sequence] = self._restarts.pop(sequence)()
        if self.is_abandoned:
            return True
        self.is_abandoned = True
        for peer in self._peers.values():
            for sequence in [each for each in peer.unread if each > num_read]:
                self.was_read(peer, sequence)
        errors = {self._ranks[self.rank]: self._error}
        errors.update({p.rank: p.failed.error for p in self._peers.values() if p.failed})
        warn_of_gloo(f"ranks {self._ranks}", errors)
        return True

    def close(self) -> None:
        """Let go of sockets and of all memory of others. Regions that were not read stay theirs."""
        self.close_sockets()
        for peer in self._peers.values():
            for used in peer.unread.values():
                self.regions.discard(used)
            peer.unread.clear()

    def close_sockets(self) -> None:
        """Also for a process that was forked: the sockets are not its own."""
        for peer in self._peers.values():
            peer.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _drain(self) -> None:
        for peer in self._peers.values():
            peer.drain()

    def _settle(self) -> None:
        """What callbacks could not do, and what has been waiting since the last collective."""
        while self._dropped:
            sequence, others = self._dropped.popleft()
            for other in others:
                self._peers[other].refuse(sequence)
            if not self.is_failing and not any(sequence in p.unread for p in self._peers.values()):
                self._restarts.pop(sequence, None)
        if self._num_retired != self.regions.num_retired:
            self._num_retired = self.regions.num_retired
            self._close_retired()
        for peer in self._backlogged():
            peer.flush()

    def _close_retired(self) -> None:
        for number, known in list(self._told.items()):
            region = known()
            if region is None or region.is_retired:
                del self._told[number]
                for peer in self._peers.values():
                    peer.send(closed=number)

    def _await(self, missing: Sequence[Peer], terms: Terms, deadline: float) -> None:
        """Sleep until a rank has said something, or has room for what it is to be sent.

        Everything that arrives is processed, so that no rank finds a socket full because of this
        one.
        """
        for peer in missing:
            if peer.is_gone:
                raise dist.DistNetworkError(
                    f"{self._subject(terms)}: all ranks must take part, found that rank "
                    f"{peer.rank} is gone (Connection closed by peer); look at what it said last, "
                    "and start the ranks again."
                )
        poll = select.poll()
        here = {peer.fileno(): peer for peer in self._peers.values() if not peer.is_gone}
        for number, peer in here.items():
            poll.register(number, select.POLLIN | (peer.is_backlogged and select.POLLOUT))
        left_s = max(deadline - time.monotonic(), 0.0)
        ready = poll.poll(min(left_s, _LONGEST_SLEEP_S) * 1e3)
        if not ready and time.monotonic() >= deadline:
            names = ", ".join(f"rank {peer.rank}" for peer in missing)
            raise dist.DistNetworkError(
                f"{self._subject(terms)}: all ranks must come within the {self._timeout_s:g} s of "
                f"the process group, found nothing of {names}; look where they are (py-spy dump), "
                "or give init_process_group a longer timeout."
            )
        for number, _ in ready:
            here[number].drain()
            here[number].flush()

    def _backlogged(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.is_backlogged]

    def _subject(self, terms: Terms) -> str:
        return f"{terms.kind} over ranks {self._ranks}"

    def _require_same(self, own: Terms, theirs: Terms, rank: int) -> None:
        if own == theirs:
            return
        detail = " of other sizes or dtypes" if str(own) == str(theirs) else ""
        raise DisagreementError(
            f"{self._subject(own)}: all ranks must run the same collectives in the same order, "
            f"found {own} on rank {self._ranks[self.rank]} and {theirs}{detail} on rank {rank}; "
            "make the model take the same path on every rank."
        )


def _dup(connected: socket.socket) -> int:
    try:
        return os.dup(connected.fileno())
    except OSError:
        return -1


def warn_of_gloo(subject: str, errors: Mapping[int, int]) -> None:
    """Say on every rank alike why a group goes over gloo; `errors` are error numbers by rank."""
    found = next((f"rank {r} ({os.strerror(error)})" for r, error in errors.items() if error), "")
    warnings.warn(
        f"{subject}: ranks of one host exchange data through shared memory, found no memory or "
        f"file descriptor for it on {found}; they use gloo from here on, which is slower. Raise "
        "the limit of open files (ulimit -n) or free memory.",
        stacklevel=2,
    )
