"""What two ranks of a host say to each other about the regions that they read.

Records of one size go over a connected socket, and files with them. Writing and reading a socket
is also what orders memory between the two processes: what was laid into a region before a record
was sent is there for whoever has received it.
"""

from __future__ import annotations

import array
import enum
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

from fullshard.comm.regions import Mapped, Region

_RECORD = struct.Struct("<IIQQQ")
_READ_BYTES = 128 * _RECORD.size
_FILE_BYTES = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(_FILE_BYTES)


class _Saying(enum.IntEnum):
    """What a record says. A collective is followed by a record per message."""

    OPEN = 1  # a file comes along: region number, bytes
    CLOSE = 2  # region number
    READ = 3  # sequence number of a collective of which all has been read
    COLLECTIVE = 4
    MESSAGE = 5  # region number, offset, bytes


class Kind(enum.IntEnum):
    """What is done with the messages of a collective."""

    GATHER = 1
    REDUCE = 2


class Terms(NamedTuple):
    """What must be the same on all ranks of a collective."""

    kind: Kind
    num_buckets: int
    num_bytes: int
    fingerprint: int

    def __str__(self) -> str:
        count = f"{self.num_buckets} message{'s' if self.num_buckets != 1 else ''}"
        return f"a {self.kind.name.lower()} of {count} with {self.num_bytes} bytes"


class Laid(NamedTuple):
    """A message of this rank, and where it lies."""

    region: Region
    offset: int
    num_bytes: int


@dataclass(slots=True)
class Announced:
    """A collective as another rank announced it, and where its messages are in memory here.

    They stay there until it is acknowledged: only then may their owner close a region.
    """

    terms: Terms
    addresses: list[int] = field(default_factory=list)


def announcement(sequence: int, terms: Terms, messages: list[Laid]) -> bytes:
    """The records that say that a collective has begun."""
    shape = terms.kind << 24 | terms.num_buckets
    records = [
        _RECORD.pack(_Saying.COLLECTIVE, shape, sequence, terms.num_bytes, terms.fingerprint)
    ]
    for laid in messages:
        number, offset = laid.region.number, laid.offset
        records.append(_RECORD.pack(_Saying.MESSAGE, 0, number, offset, laid.num_bytes))
    return b"".join(records)


def opening(region: Region) -> bytes:
    return _RECORD.pack(_Saying.OPEN, 0, region.number, region.mapped.num_bytes, 0)


def closing(number: int) -> bytes:
    return _RECORD.pack(_Saying.CLOSE, 0, number, 0, 0)


class Mailbox:
    """This rank's end of the socket between it and one other rank. Nothing here ever blocks.

    `on_read` is told the sequence number of each collective that the other rank has read.
    """

    def __init__(self, rank: int, door: socket.socket, on_read: Callable[[int], None]) -> None:
        self.rank = rank
        self.announced: dict[int, Announced] = {}
        self.is_gone = False
        self._door = door
        self._on_read = on_read
        self._opened: dict[int, Mapped] = {}
        self._unwanted: set[int] = set()
        self._incomplete: Announced | None = None
        self._incomplete_sequence = 0
        self._rest = b""
        self._files: deque[int] = deque()
        self._parcels: deque[tuple[bytes, int | None]] = deque()
        self._reads: list[int] = []
        door.setblocking(False)
        # As far as the system allows: a rank may be far ahead of one that computes.
        door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)

    def fileno(self) -> int:
        return self._door.fileno()

    @property
    def is_backlogged(self) -> bool:
        return bool(self._parcels)

    # Sending

    def send(self, records: bytes, file: int | None = None) -> None:
        """Send records, and before them what was still to be said about reading."""
        if self._reads:
            records = (
                b"".join(_RECORD.pack(_Saying.READ, 0, s, 0, 0) for s in self._reads) + records
            )
            self._reads.clear()
        self._parcels.append((records, file))
        self.flush()

    def flush(self) -> None:
        """Send what the socket had no room for so far."""
        while self._parcels:
            records, file = self._parcels[0]
            try:
                if file is None:
                    num_sent = self._door.send(records)
                else:
                    num_sent = socket.send_fds(self._door, [records], [file])
            except BlockingIOError:
                return
            except OSError:
                # It has gone, perhaps after all that it had to say: that may still be unread here.
                self._parcels.clear()
                return
            if num_sent < len(records):
                self._parcels[0] = (records[num_sent:], None)
            else:
                self._parcels.popleft()

    def acknowledge(self, sequence: int, *, at_once: bool) -> None:
        """The messages of a collective were read: now, or with the next record, say so."""
        del self.announced[sequence]
        self._reads.append(sequence)
        if at_once:
            self.send(b"")

    def refuse(self, sequence: int) -> None:
        """Nobody here will read a collective, whether or not it was announced yet."""
        if sequence in self.announced:
            self.acknowledge(sequence, at_once=True)
        else:
            self._unwanted.add(sequence)

    # Receiving

    def drain(self) -> None:
        """Take in all that has arrived."""
        while not self.is_gone:
            try:
                received, ancillary, flags, _ = self._door.recvmsg(_READ_BYTES, _ANCILLARY_BYTES)
            except BlockingIOError:
                return
            except OSError:
                received, ancillary, flags = b"", [], 0
            if not received:
                self.is_gone = True
                return
            for _, _, packed in ancillary:
                files = array.array("i")
                files.frombytes(packed[: len(packed) // _FILE_BYTES * _FILE_BYTES])
                self._files.extend(files)
            if flags & socket.MSG_CTRUNC:
                raise dist.DistNetworkError(
                    f"rank {self.rank}: its memory must be opened here to be read, found no file "
                    "descriptor left; raise the limit (ulimit -n), or set "
                    "FULLSHARD_SHARED_MEMORY=0."
                )
            self._take_in(received)
            if len(received) < _READ_BYTES and not ancillary:
                return

    def _take_in(self, received: bytes) -> None:
        received = self._rest + received
        num_whole = len(received) // _RECORD.size * _RECORD.size
        self._rest = received[num_whole:]
        for saying, shape, first, second, third in _RECORD.iter_unpack(received[:num_whole]):
            if saying == _Saying.COLLECTIVE:
                terms = Terms(Kind(shape >> 24), shape & 0xFFFFFF, second, third)
                self._incomplete, self._incomplete_sequence = Announced(terms), first
                self._complete()
            elif saying == _Saying.MESSAGE:
                assert self._incomplete is not None
                self._incomplete.addresses.append(self._opened[first].address + second)
                self._complete()
            elif saying == _Saying.READ:
                self._on_read(first)
            elif saying == _Saying.OPEN:
                descriptor = self._files.popleft()
                try:
                    self._opened[first] = Mapped(descriptor, second)
                finally:
                    os.close(descriptor)
            else:
                del self._opened[first]

    def _complete(self) -> None:
        """Make an announcement known once all of it is there."""
        announced, sequence = self._incomplete, self._incomplete_sequence
        assert announced is not None
        if len(announced.addresses) < announced.terms.num_buckets:
            return
        self._incomplete = None
        self.announced[sequence] = announced
        if sequence in self._unwanted:
            self._unwanted.discard(sequence)
            self.acknowledge(sequence, at_once=True)

    def close(self) -> None:
        self.is_gone = True
        self._door.close()
        for descriptor in self._files:
            os.close(descriptor)
        self._files.clear()
        self._opened.clear()
        self.announced.clear()
        self._parcels.clear()
