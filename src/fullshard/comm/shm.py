"""Collectives between the ranks of one host, through shared memory.

Each rank of a group has a heap: an anonymous file (`memfd_create`) that all ranks map when they
connect. It is larger than anything that will be in flight, and takes memory only where it was
written, so later on only memory itself can run out. A rank copies its input into a block of its
heap, announces it to all others, and goes on: starting never waits for another rank. A rank that
waits copies the blocks of the others straight into its output, and acknowledges them. So an
all-gather costs each rank one copy of what it sends and one of what it receives.

Announcements and acknowledgements go through a pipe from each rank to each other one. The pipe also
orders memory between two processes: what was copied before a record was written is visible to the
rank that has read the record. When a process ends, its pipes are closed.

Values are summed in the order of ranks, bfloat16 and float16 in float32 at least: the result does
not depend on which rank computes it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import secrets
import select
import struct
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from fullshard._torch import is_registered, lifetime_of, timeout_of
from fullshard.comm import guard
from fullshard.comm.agreement import Agreement
from fullshard.comm.mesh import Axis
from fullshard.comm.topology import Topology
from fullshard.errors import ConfigError, DisagreementError
from fullshard.layout import Wire

SWITCH = "FULLSHARD_SHARED_MEMORY"

# A free block gives its memory back after so many collectives; a step of a large model has fewer.
IDLE_COLLECTIVES = 4096
_COLLECTIVES_PER_SWEEP = 256
_SMALLEST_BLOCK_BITS = 16
_SMALLEST_LEASE_BYTES = 16 << 10  # below, a copy costs less than making a tensor in a block
_PLAIN_COPY_BYTES = 256 << 10  # above, torch may use its threads
_PROMPT_BYTES = 1 << 20  # from here on, having memory back at once is worth a system call
_LONGEST_SLEEP_S = 0.5  # then the watcher is asked whether there is hope

_CPU = torch.device("cpu")
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)

# A record of a pipe announces one bucket of a collective: the number of the collective, its kind,
# its number of buckets, the bytes of this one, those of an element, and its place in the heap.
# Pipes transfer whole records, as long as nothing larger than a page is written at once.
_RECORD = struct.Struct("6q")
_WRITTEN_BYTES = 4096 // _RECORD.size * _RECORD.size
_READ_BYTES = 512 * _RECORD.size
_DONE, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL = range(4)
_NAMES = ("", "all-gather", "reduce-scatter", "all-to-all")

Tensors = Sequence[torch.Tensor]
Terms = list[tuple[int, ...]]  # for each bucket, what two ranks must have in common

_log = logging.getLogger(__name__)


def _mapped(descriptor: int) -> tuple[mmap.mmap, int]:
    """Map a file into memory, until the first result is deleted; return it and its address."""
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    memory.madvise(mmap.MADV_DONTDUMP)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


@dataclass(slots=True, eq=False)
class _Block:
    """A part of this rank's heap that holds one bucket at a time.

    `num_uses` counts what still needs its content: the tensor that lies in it, and every rank that
    has not read it yet.
    """

    offset: int
    num_bytes: int
    num_uses: int = 0
    last_used: int = 0


class _Heap:
    """The memory of this rank in one group. Blocks have sizes that are powers of two."""

    def __init__(self, memory: mmap.mmap, address: int) -> None:
        self.address = address
        self.num_bytes = 0  # of all blocks, in use or free
        self.memory = memory
        self._blocks: dict[int, _Block] = {}  # by address
        self._free: dict[int, list[_Block]] = {}  # by size
        # Blocks of tensors that are gone: finalizers append at any time, so without the lock.
        self.lapsed: deque[_Block] = deque()
        self._num_taken = 0

    def take(self, num_bytes: int, look_for_free: Callable[[], None]) -> _Block:
        """A block that is not in use; `look_for_free` is called before one is made."""
        size = 1 << max(_SMALLEST_BLOCK_BITS, (num_bytes - 1).bit_length())
        while self.lapsed:
            self.release(self.lapsed.popleft())
        free = self._free.setdefault(size, [])
        if not free:
            look_for_free()
        if free:
            block = free.pop()  # the one that became free last is in the caches
        elif self.num_bytes + size > len(self.memory):
            raise MemoryError(
                f"shared memory: what is in flight must fit in {len(self.memory)} bytes, found "
                f"{self.num_bytes} in use and {num_bytes} more; wait for collectives earlier, or "
                f"set {SWITCH}=0."
            )
        else:
            block = self._blocks[self.address + self.num_bytes] = _Block(self.num_bytes, size)
            self.num_bytes += size
        self._num_taken += 1
        block.last_used = self._num_taken
        if self._num_taken % _COLLECTIVES_PER_SWEEP == 0:
            for idle in [each for blocks in self._free.values() for each in blocks]:
                if idle.last_used < self._num_taken - IDLE_COLLECTIVES:
                    self.memory.madvise(mmap.MADV_REMOVE, idle.offset, idle.num_bytes)
        return block

    def find(self, tensor: torch.Tensor) -> _Block | None:
        """The block that a tensor was allocated in."""
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def release(self, block: _Block) -> None:
        """Drop one use of a block."""
        block.num_uses -= 1
        if block.num_uses == 0:
            self._free[block.num_bytes].append(block)


class _Peer:
    """Another rank of the group: the pipes from and to it, and its heap. Nothing here blocks."""

    def __init__(self, rank: int, link: Link) -> None:
        self.rank = rank
        self.inbox = self.outbox = -1
        self.heap: tuple[mmap.mmap, int] | None = None
        self.is_gone = False
        self.is_full = False
        self._link = link
        self._announced: dict[int, list[tuple[int, ...]]] = {}
        self._unread: dict[int, list[_Block]] = {}  # blocks of this rank, unread by the other one
        self._done_early: set[int] = set()  # collectives that this rank has not started
        self._unsent = bytearray()

    def announce(self, sequence: int, terms: Terms, places: list[tuple[int, _Block]]) -> None:
        if sequence in self._done_early:
            self._done_early.discard(sequence)
            return
        self._unread[sequence] = [block for _, block in places]
        for each, (offset, block) in zip(terms, places, strict=True):
            block.num_uses += 1
            self._unsent += _RECORD.pack(sequence, *each, offset)
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
                    f"shared memory: rank {self.rank} must announce memory inside of its "
                    f"{len(memory)} bytes, found {num_bytes} bytes at {address - start}; its "
                    "memory is damaged: start the ranks again."
                )

    def done(self, sequence: int) -> None:
        """Acknowledge that this rank is done with a collective; sent with the next `flush`."""
        self._announced.pop(sequence, None)
        self._unsent += _RECORD.pack(sequence, _DONE, 0, 0, 0, 0)

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
            for sequence, *record in _RECORD.iter_unpack(data):
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

    heap: _Heap

    def __init__(self, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.timeout_s = timeout_s
        self.lock = threading.RLock()
        self.keep_waiting: Callable[[], None] = lambda: None
        self.ended: deque[int] = deque()  # collectives that this rank is done with
        self.peers = {each: _Peer(r, self) for each, r in enumerate(ranks) if each != rank}
        self.offer = [-1] * (self.size + 1)  # descriptors of the heap, and of the pipe to each rank
        self._ranks = list(ranks)
        self.num_started = 0
        self.in_flight: set[int] = set()

    def open(self, token: int) -> None:
        """Make what others need to connect."""
        self.offer[-1] = heap = os.memfd_create(f"fullshard-{token:x}")
        os.ftruncate(heap, 4 * os.sysconf("SC_PHYS_PAGES") // self.size * mmap.PAGESIZE)
        self.heap = _Heap(*_mapped(heap))
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
                peer.heap = _mapped(descriptor)
            finally:
                os.close(descriptor)

    def withdraw_offer(self) -> None:
        """Close what others have opened by now, so that the end of a reader is noticed, too."""
        offer, self.offer = self.offer, []
        _close_all(offer)

    def close(self) -> None:
        """Release all memory and all pipes; also used in a forked process."""
        self.withdraw_offer()
        for peer in self.peers.values():
            ends = [peer.inbox, peer.outbox]
            peer.is_gone, peer.heap, peer.inbox, peer.outbox = True, None, -1, -1
            _close_all(ends)
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
        memory: Any = _array(num_bytes).from_address(heap.address + block.offset)
        memory.mapped = heap.memory  # kept as long as the tensor
        weakref.finalize(memory, heap.lapsed.append, block).atexit = False
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=dtype)

    def announce(
        self,
        terms: Terms,
        places: list[tuple[int, _Block]],
        to_peer: Callable[[int], tuple[Terms, list[tuple[int, _Block]]]] | None = None,
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
        # Others may need records that are still unsent, and this rank may not be back for long.
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

    def _sleep(self, missing: Iterable[_Peer], terms: Terms, deadline: float) -> None:
        """Sleep until a rank has sent something, or has room for what it is to be sent.

        Everything that arrives is processed, so that no rank finds a pipe full because of this one.
        """
        self.keep_waiting()
        subject = f"{_NAMES[terms[0][0]]} over ranks {self._ranks}"
        gone = [peer.rank for peer in missing if peer.is_gone]
        if gone:
            raise dist.DistNetworkError(
                f"{subject}: all ranks must take part, found that rank {gone[0]} is gone "
                "(Connection closed by peer); look at what it said last, and start the ranks again."
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
                f"{subject}: all ranks must come within the {self.timeout_s:g} s of the process "
                f"group, found nothing of {names}; look where they are (py-spy dump), or give "
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
            f"{_NAMES[own[0][0]]} over ranks {self._ranks}: all ranks must run the same "
            f"collectives in the same order, found {_described(own)} on rank "
            f"{self._ranks[self.rank]} and {_described(theirs)}{detail} on rank {rank}; make the "
            "model take the same path on every rank."
        )


def _described(terms: Terms) -> str:
    count = f"{len(terms)} bucket{'s' if len(terms) != 1 else ''}"
    name = dict(enumerate(_NAMES)).get(terms[0][0], "no collective")
    return f"{name} of {count} with {sum(each[2] for each in terms)} bytes"


class HostWork:
    """A gather or sum in flight, with what CollectiveWork uses of a `dist.Work`.

    With a `wire`, its messages are summed, otherwise bytes are gathered.
    """

    _is_over = True  # until it has a number
    _is_sum = False

    def __init__(self, link: Link, outs: Tensors, ins: Tensors, wire: Wire | None) -> None:
        self._link = link
        self._outs = list(outs)
        self._ins = list(ins)
        self._wire, is_sum = wire, wire is not None
        self._is_sum = is_sum
        self._future: torch.futures.Future[object] | None = None
        kind = _REDUCE_SCATTER if is_sum else _ALL_GATHER
        self._require_matching(_NAMES[kind])
        # Ranks may gather as bytes what others gather as numbers, but they cannot sum it so.
        self._terms: Terms = [
            (kind, len(ins), inp.nbytes, inp.itemsize if is_sum else 1) for inp in ins
        ]
        if not ins:
            return
        with link.lock:
            self._sequence = link.announce(self._terms, [self._place(inp) for inp in ins])
            self._is_over = False
        for out, inp in () if is_sum else zip(outs, ins, strict=True):
            own = out.data_ptr() + link.rank * inp.nbytes
            if own != inp.data_ptr():
                _copy(own, inp.data_ptr(), inp.nbytes)

    def get_future(self) -> torch.futures.Future[object]:
        if self._future is None:
            self._future = torch.futures.Future()
            if self._is_over:
                self._future.set_result(None)
        return self._future

    def wait(self) -> None:
        with self._link.lock:
            if self._is_over:
                return
            try:
                with guard.waiting() as self._link.keep_waiting:
                    if self._is_sum:
                        self._sum()
                    else:
                        self._gather()
            finally:
                self._end()
                self._ins.clear()
                self._link.settle(at_once=sum(each[2] for each in self._terms) >= _PROMPT_BYTES)

    def _end(self) -> None:
        self._is_over = True
        self._link.ended.append(self._sequence)
        if self._future is not None:
            self._future.set_result(None)

    def __del__(self) -> None:
        if not self._is_over:
            self._end()

    def _require_matching(self, name: str) -> None:
        """Copies by address are unchecked: sizes must match, or we corrupt memory."""
        size = self._link.size
        for inp, out in zip(self._ins, self._outs, strict=True):
            full, part = (inp, out) if self._is_sum else (out, inp)
            # A sum may have another dtype than what is added up.
            part_bytes = part.nbytes
            if self._wire is not None:
                part_bytes = self._wire.message_numel(part.numel()) * full.itemsize
            is_contiguous = full.is_contiguous() and part.is_contiguous()
            if full.nbytes != size * part_bytes or not is_contiguous:
                raise ConfigError(
                    f"{name}: tensors must be contiguous, and the one for all {size} ranks must "
                    f"have {size} times the bytes of the one for this rank, found {full.nbytes} "
                    f"and {part_bytes}, strides {full.stride()} and {part.stride()}; pass tensors "
                    "that match."
                )

    def _place(self, inp: torch.Tensor) -> tuple[int, _Block]:
        """Where other ranks can read an input; it is copied there unless it was allocated there."""
        heap, start = self._link.heap, inp.data_ptr()
        block = heap.find(inp) if self._is_sum else None
        if block is not None:
            return start - heap.address, block
        block = heap.take(inp.nbytes, self._link.drain)
        address = heap.address + block.offset
        if self._is_sum:  # nobody else reads this rank's segment
            segment_bytes = inp.nbytes // self._link.size
            before = self._link.rank * segment_bytes
            after = before + segment_bytes
            _copy(address, start, before)
            _copy(address + after, start + after, inp.nbytes - after)
        else:
            _copy(address, start, inp.nbytes)
        return block.offset, block

    def _gather(self) -> None:
        for other, addresses in self._link.receive(self._sequence, lambda _: self._terms):
            for out, address in zip(self._outs, addresses, strict=True):
                num_bytes = out.nbytes // self._link.size
                _copy(out.data_ptr() + other * num_bytes, address, num_bytes)

    def _sum(self) -> None:
        """Sum once all ranks have announced, so that the order is that of ranks."""
        rank, size, wire = self._link.rank, self._link.size, self._wire
        assert wire is not None
        found = dict(self._link.receive(self._sequence, lambda _: self._terms))
        found[rank] = [inp.data_ptr() for inp in self._ins]
        for number, (out, inp) in enumerate(zip(self._outs, self._ins, strict=True)):
            numel, dtype = out.numel(), inp.dtype
            if numel:
                num_sent = wire.message_numel(numel)
                own = rank * num_sent * dtype.itemsize
                starts = [found[other][number] + own for other in range(size)]
                messages = [_tensor_at(start, num_sent, dtype) for start in starts]
                wire.add_up(messages, _tensor_at(out.data_ptr(), numel, out.dtype))


class HostExchange(HostWork):
    """An all-to-all in flight, of bytes: each rank copies its segments out of the others' inputs.

    `out_bytes` and `in_bytes` are the sizes of the segments from and to each rank.
    """

    def __init__(
        self,
        link: Link,
        out: torch.Tensor,
        inp: torch.Tensor,
        out_bytes: Sequence[int],
        in_bytes: Sequence[int],
    ) -> None:
        self._link = link
        self._outs, self._ins = [out], [inp]
        self._future = None
        for tensor, sizes in ((out, out_bytes), (inp, in_bytes)):
            if tensor.nbytes != sum(sizes) or not tensor.is_contiguous():
                raise ConfigError(
                    f"all-to-all: tensors must be contiguous and have the bytes of their segments, "
                    f"found {tensor.nbytes} bytes for {sum(sizes)}; pass tensors that match."
                )
        self._terms = [(_ALL_TO_ALL, 1, inp.nbytes, 1)]
        self._out_bytes, rank = out_bytes, link.rank
        self._out_starts, starts = _starts(out_bytes), _starts(in_bytes)

        def to_peer(other: int) -> tuple[Terms, list[tuple[int, _Block]]]:
            return [(_ALL_TO_ALL, 1, in_bytes[other], 1)], [(place + starts[other], block)]

        with link.lock:
            place, block = self._place(inp)
            self._sequence = link.announce(self._terms, [(place, block)], to_peer)
            self._is_over = False
        _copy(
            out.data_ptr() + self._out_starts[rank], inp.data_ptr() + starts[rank], in_bytes[rank]
        )

    def _gather(self) -> None:
        def terms_of(other: int) -> Terms:
            return [(_ALL_TO_ALL, 1, self._out_bytes[other], 1)]

        (out,) = self._outs
        for other, (address,) in self._link.receive(self._sequence, terms_of):
            _copy(out.data_ptr() + self._out_starts[other], address, self._out_bytes[other])


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][: len(sizes)]


def _copy(to: int, start: int, num_bytes: int) -> None:
    """Copy between addresses; large copies use torch's threads."""
    if num_bytes <= _PLAIN_COPY_BYTES:
        ctypes.memmove(to, start, num_bytes)
    else:
        source = _tensor_at(start, num_bytes, torch.uint8)
        _tensor_at(to, num_bytes, torch.uint8).copy_(source)


def _tensor_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory that is kept elsewhere; cheaper than a view, and without a history."""
    memory = _array(numel * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


@lru_cache(maxsize=1024)
def _array(num_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * num_bytes


# Connecting the ranks of a group

# A group cannot have attributes. None for a group whose ranks have agreed to use gloo.
_links: weakref.WeakKeyDictionary[dist.ProcessGroup, Link | None] = weakref.WeakKeyDictionary()


# Groups of which a rank has run out of descriptors or memory: no further groups are made for them.
exhausted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def known_link(group: dist.ProcessGroup | None) -> Link | None:
    """The link between the ranks of a group, if `link_of` has found one."""
    return None if group is None else _links.get(group)


def link_of(group: dist.ProcessGroup) -> Link | None:
    """The link between the ranks of a group, None if they use gloo.

    The first call for a group is a collective over it.
    """
    if group not in _links:
        link = _links[group] = _connect(group)
        if link is not None:
            weakref.finalize(lifetime_of(group), _close, link, weakref.ref(group)).atexit = False
    return _links[group]


def _close(link: Link, group: weakref.ref[dist.ProcessGroup]) -> None:
    link.close()
    destroyed = group()
    if destroyed is not None:
        _links.pop(destroyed, None)


def _connect(group: dist.ProcessGroup) -> Link | None:
    """Exchange over the group what to open, open it, and exchange whether that worked."""
    size = group.size()
    if not Topology.of(group).is_one_host:
        _log.debug("process group %s: no shared memory: several hosts", group.group_name)
        return None
    ranks = dist.get_process_group_ranks(group) if is_registered(group) else list(range(size))
    link = Link(group.rank(), ranks, timeout_of(group).total_seconds())
    token = secrets.randbits(62)
    exchange = partial(Agreement.exchanged, axis=Axis(group), device=_CPU)
    is_willing = size > 1 and os.environ.get(SWITCH) != "0" and hasattr(os, "memfd_create")
    is_connected = False
    try:
        error = _error_of(partial(link.open, token)) if is_willing else 0
        said = exchange([int(is_willing), error, os.getpid(), token, *link.offer])
        unwilling = [other for other, card in enumerate(said) if not card[0]]
        obstacle = f"ranks {unwilling} of the group cannot, or {SWITCH}=0 is set there"
        if not unwilling and not any(card[1] for card in said):
            error = _error_of(partial(link.connect, [card[2:] for card in said]))
            said = exchange([1, error])
            obstacle = "its ranks are of several users"
            is_connected = not any(card[1] for card in said)
    finally:
        if not is_connected:
            link.close()
    if is_connected:
        link.withdraw_offer()
        return link
    _log.debug("process group %s: no shared memory: %s", group.group_name, obstacle)
    errors = [(r, card[1]) for r, card in zip(ranks, said, strict=True) if card[1] in _EXHAUSTED]
    if errors:
        exhausted.add(group)
    for rank, error in errors[:1]:
        warnings.warn(
            f"process group {group.group_name}: ranks of one host exchange data through shared "
            f"memory, found no memory or file descriptor for it on rank {rank} "
            f"({os.strerror(error)}); they use gloo, which is slower. Raise the limits "
            "(ulimit -n, ulimit -v) or free memory.",
            stacklevel=2,
        )
    return None


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _error_of(call: Callable[[], None]) -> int:
    """The `errno` of the error that a call raises; 0 for none."""
    try:
        call()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _after_fork() -> None:
    """Close the pipes in a child: while it has them open, the end of this rank is not noticed."""
    for link in list(_links.values()):
        if link is not None:
            link.close()
    _links.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
