"""The ranks of one host, as one of them sees the others: heaps, pipes, and what is in flight."""

from __future__ import annotations

import errno
import mmap
import os
import select
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.heap import Block, Heap, array_type, mapped
from fullshard.errors import DisagreementError

_SMALLEST_LEASE_BYTES = 16 << 10  # below, a copy costs less than making a tensor in a block
_LONGEST_SLEEP_S = 0.5  # then the watcher is asked whether there is hope

# A record of a pipe announces one bucket of a collective: the number of the collective, its kind,
# its number of buckets, the bytes of this one, those of an element, and its place in the heap.
# Pipes transfer whole records, as long as nothing larger than a page is written at once.
RECORD = struct.Struct("6q")
_WRITTEN_BYTES = 4096 // RECORD.size * RECORD.size
_READ_BYTES = 512 * RECORD.size
_DONE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = range(4)
NAMES = ("", "all-gather", "reduce-scatter", "all-to-all")

Terms = list[tuple[int, ...]]  # for each bucket, what two ranks must have in common


class Peer:
    """Another rank of the group: the pipes from and to it, and its heap. Nothing here blocks."""

    def __init__(self, rank: int, link: Link) -> None:
        self.rank = rank
        self.inbox = self.outbox = -1
        self.heap: tuple[mmap.mmap, int] | None = None
        self.is_gone = False
        self.is_full = False
        self._link = link
        self._announced: dict[int, list[tuple[int, ...]]] = {}
        self._unread: dict[int, list[Block]] = {}  # blocks of this rank, unread by the other one
        self._done_early: set[int] = set()  # collectives that this rank has not started
        self._unsent = bytearray()

    def announce(self, sequence: int, terms: Terms, places: list[tuple[int, Block]]) -> None:
        if sequence in self._done_early:
            self._done_early.discard(sequence)
            return
        self._unread[sequence] = [block for _, block in places]
        for each, (offset, block) in zip(terms, places, strict=True):
            block.num_uses += 1
            self._unsent += RECORD.pack(sequence, *each, offset)
        self.flush()

    def announced(self, sequence: int) -> tuple[Terms, list[int]] | None:
        """The terms of a collective, and the addresses of its buckets, until it is `done`."""
        records = self._announced.get(sequence)
        if records is None or len(records) < records[0][1] or self.heap is None:
            return None
        return [each[:-1] for each in records], [self.heap[1] + each[-1] for each in records]

    def require_inside(self, terms: Terms, addresses: list[int]) -> None:
        """Copies by address are unchecked: raise unless all buckets lie in the other's heap."""
        assert self.heap is not None
        memory, start = self.heap
        for (_, _, num_bytes, _), address in zip(terms, addresses, strict=True):
            if not start <= address <= start + len(memory) - num_bytes:
                raise dist.DistNetworkError(
                    f"shared memory: rank {self.rank} announced {num_bytes} bytes at "
                    f"{address - start}, outside of its {len(memory)} bytes; its memory is "
                    "damaged. Start the ranks again."
                )

    def done(self, sequence: int) -> None:
        """Acknowledge that this rank is done with a collective; sent with the next `flush`."""
        self._announced.pop(sequence, None)
        self._unsent += RECORD.pack(sequence, _DONE, 0, 0, 0, 0)

    def flush(self) -> None:
        """Send what the pipe has room for."""
        self.is_full = False
        try:
            while self._unsent and not self.is_gone:
                num_bytes = os.write(self.outbox, self._unsent[:_WRITTEN_BYTES])
                del self._unsent[:num_bytes]
        except BlockingIOError:
            self.is_full = True
        except OSError:
            # It is gone, perhaps after it has sent everything: that may still be unread here.
            self._unsent.clear()

    def drain(self) -> None:
        """Process all records that have arrived."""
        while not self.is_gone:
            try:
                data = os.read(self.inbox, _READ_BYTES)
            except BlockingIOError:
                return
            self.is_gone = not data
            for sequence, *record in RECORD.iter_unpack(data):
                if record[0] != _DONE:
                    if sequence > self._link.num_started or sequence in self._link.in_flight:
                        self._announced.setdefault(sequence, []).append(tuple(record))
                elif sequence in self._unread:
                    for block in self._unread.pop(sequence):
                        self._link.heap.release(block)
                else:
                    self._done_early.add(sequence)


class Link:
    """The ranks of one group on one host, as this one sees the others.

    Collectives are matched by their number: the n-th that a rank starts is the n-th of all others,
    in whatever order they are waited for. Use it under `lock`; only `close` may be called, and
    `ended` be appended to, at any point.
    """

    heap: Heap

    def __init__(self, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.timeout_s = timeout_s
        self.lock = threading.RLock()
        self.keep_waiting: Callable[[], None] = lambda: None
        self.ended: deque[int] = deque()  # collectives that this rank is done with
        self.peers = {each: Peer(r, self) for each, r in enumerate(ranks) if each != rank}
        self.offer = [-1] * (self.size + 1)  # descriptors of the heap, and of the pipe to each rank
        self._ranks = list(ranks)
        self.num_started = 0
        self.in_flight: set[int] = set()

    def open(self, token: int) -> None:
        """Make what others need to connect."""
        self.offer[-1] = heap = os.memfd_create(f"fullshard-{token:x}")
        os.ftruncate(heap, 4 * os.sysconf("SC_PHYS_PAGES") // self.size * mmap.PAGESIZE)
        self.heap = Heap(*mapped(heap))
        for other, peer in self.peers.items():
            self.offer[other], peer.outbox = os.pipe()
            os.set_blocking(peer.outbox, False)

    def connect(self, offers: Sequence[Sequence[int]]) -> None:
        """Open what others offer; each offer begins with the process and its token."""
        for other, peer in self.peers.items():
            process, token, *ends, heap = offers[other]
            folder = f"/proc/{process}/fd"
            # If the rank is on another host, this may be any process here: the token, which came
            # through the group, tells. The kernel refuses what belongs to another user.
            if not os.readlink(f"{folder}/{heap}").startswith(f"/memfd:fullshard-{token:x}"):
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
            peer.inbox = os.open(f"{folder}/{ends[self.rank]}", os.O_RDONLY | os.O_NONBLOCK)
            descriptor = os.open(f"{folder}/{heap}", os.O_RDWR)
            try:
                peer.heap = mapped(descriptor)
            finally:
                os.close(descriptor)

    def withdraw_offer(self) -> None:
        """Close what others have opened by now, so that the end of a reader is noticed, too."""
        offer, self.offer = self.offer, []
        close_all(offer)

    def close(self) -> None:
        """Release all memory and all pipes; also used in a forked process."""
        self.withdraw_offer()
        for peer in self.peers.values():
            ends = [peer.inbox, peer.outbox]
            peer.is_gone, peer.heap, peer.inbox, peer.outbox = True, None, -1, -1
            close_all(ends)
        self.__dict__.pop("heap", None)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor in the heap, which a reduce-scatter does not copy; None where that is no gain.

        Other ranks read it, perhaps after this one has waited for its own part: it must not be
        written to again. Drop it and allocate another one.
        """
        num_bytes = numel * dtype.itemsize
        if num_bytes < _SMALLEST_LEASE_BYTES:
            return None
        with self.lock:
            heap = self.heap
            block = heap.take(num_bytes, self.drain)
        block.num_uses = 1  # until the tensor and all views of it are gone
        memory: Any = array_type(num_bytes).from_address(heap.address + block.offset)
        memory.mapped = heap.memory  # kept as long as the tensor
        weakref.finalize(memory, heap.lapsed.append, block).atexit = False
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=dtype)

    def announce(
        self,
        terms: Terms,
        places: list[tuple[int, Block]],
        to_peer: Callable[[int], tuple[Terms, list[tuple[int, Block]]]] | None = None,
    ) -> int:
        """Tell all others of a new collective and where its buckets are; return its number.

        `to_peer` returns what a peer is told, if not all are told the same.
        """
        self.settle()
        self.num_started += 1
        self.in_flight.add(self.num_started)
        for _, block in places:
            block.num_uses += 1  # until all others are told
        for other, peer in self.peers.items():
            told = (terms, places) if to_peer is None else to_peer(other)
            peer.announce(self.num_started, *told)
        for _, block in places:
            self.heap.release(block)
        return self.num_started

    def receive(
        self, sequence: int, terms_of: Callable[[int], Terms]
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield ranks as they announce a collective, with the addresses of their buckets."""
        terms = terms_of(self.rank)
        missing = dict(self.peers)
        deadline = time.monotonic() + self.timeout_s
        while missing:
            for other, peer in list(missing.items()):
                if peer.announced(sequence) is None:
                    peer.drain()
                found = peer.announced(sequence)
                if found is not None:
                    self._require_same(terms_of(other), found[0], peer.rank)
                    peer.require_inside(found[0], found[1])
                    del missing[other]
                    yield other, found[1]
            if missing:
                self._sleep(missing.values(), terms, deadline)
        # Send what is unsent: others may need it, and it may be long until this rank is back.
        while full := [p for p in self.peers.values() if p.is_full and not p.is_gone]:
            self._sleep(full, terms, deadline)

    def settle(self, *, at_once: bool = False) -> None:
        """Tell others which collectives have ended: at once, or with what is sent next."""
        while self.ended:
            sequence = self.ended.popleft()
            self.in_flight.discard(sequence)
            for peer in self.peers.values():
                peer.done(sequence)
        for peer in self.peers.values() if at_once else ():
            peer.flush()

    def drain(self) -> None:
        for peer in self.peers.values():
            peer.drain()

    def _sleep(self, missing: Iterable[Peer], terms: Terms, deadline: float) -> None:
        """Sleep until a rank has sent something, or has room for what it is to be sent.

        Everything that arrives is processed, so that no rank finds a pipe full because of this one.
        """
        self.keep_waiting()
        subject = f"{NAMES[terms[0][0]]} over ranks {self._ranks}"
        gone = [peer.rank for peer in missing if peer.is_gone]
        if gone:
            raise dist.DistNetworkError(
                f"{subject}: rank {gone[0]} is gone (Connection closed by peer); look at what it "
                "said last, and start the ranks again."
            )
        poll = select.poll()
        here = [peer for peer in self.peers.values() if not peer.is_gone]
        for peer in here:
            poll.register(peer.inbox, select.POLLIN)
            if peer.is_full:
                poll.register(peer.outbox, select.POLLOUT)
        left_s = max(deadline - time.monotonic(), 0.0)
        if not poll.poll(min(left_s, _LONGEST_SLEEP_S) * 1e3) and time.monotonic() >= deadline:
            names = ", ".join(f"rank {peer.rank}" for peer in missing)
            raise dist.DistNetworkError(
                f"{subject}: nothing came from {names} within {self.timeout_s:g} s, the timeout "
                "of the process group; look where they are (py-spy dump), or give "
                "init_process_group a longer timeout."
            )
        for peer in here:
            peer.drain()
            if peer.is_full:
                peer.flush()

    def _require_same(self, own: Terms, theirs: Terms, rank: int) -> None:
        if own == theirs:
            return
        detail = " of other sizes or dtypes" if _described(own) == _described(theirs) else ""
        raise DisagreementError(
            f"{NAMES[own[0][0]]} over ranks {self._ranks}: rank {self._ranks[self.rank]} runs "
            f"{_described(own)}, but rank {rank} runs {_described(theirs)}{detail}; all ranks must "
            "run the same collectives in the same order. Make the model take the same path on "
            "every rank."
        )


def _described(terms: Terms) -> str:
    count = f"{len(terms)} bucket{'s' if len(terms) != 1 else ''}"
    name = dict(enumerate(NAMES)).get(terms[0][0], "no collective")
    return f"{name} of {count} with {sum(each[2] for each in terms)} bytes"


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)
