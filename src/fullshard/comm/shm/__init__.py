"""Collectives between the ranks of one host, through memory that they share.

A rank copies its input into a region of its own, announces it to all others, and goes on. A rank
that waits reads the regions of the others, straight into the output: nothing is done in between,
and no thread does it. So an all-gather costs each rank one copy of what it sends and one of what
it receives. Starting never waits for another rank: where no region is free, one is made.

Sums are done in the order of ranks, those of bfloat16 and float16 in float32 at least: the result
does not depend on which rank computes it.
"""

from __future__ import annotations

import ctypes
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Protocol

import torch
import torch.distributed as dist

from fullshard.comm.shm.handshake import SWITCH, is_without_link, link_of
from fullshard.comm.shm.link import Bucket, Kind, Link, Terms, Waitable
from fullshard.comm.shm.memory import Region, regions
from fullshard.errors import ConfigError

__all__ = [
    "SWITCH",
    "HostWork",
    "all_gather",
    "allocate",
    "link_of",
    "reduce_scatter",
    "sum_in_order",
]

_ALIGNMENT = 64
# Up to here a plain copy is done before torch has found out whether to use its threads.
_PLAIN_COPY_BYTES = 256 << 10
# What is summed at once of three or more ranks: it stays in the caches while ranks are added.
_CHUNK_NUMEL = 256 << 10
# Below, a copy costs less than to make a tensor in a region.
_SMALLEST_LEASE_BYTES = 16 << 10
_LOW_PRECISION = (torch.bfloat16, torch.float16)

Tensors = Sequence[torch.Tensor]


class Gloo(Protocol):
    """What a collective is started with again where ranks run out of shared memory."""

    def all_gather(self, outs: Tensors, ins: Tensors, group: dist.ProcessGroup) -> Waitable: ...

    def reduce_scatter(
        self, outs: Tensors, ins: Tensors, group: dist.ProcessGroup, *, average: bool
    ) -> Waitable: ...


def all_gather(
    outs: Tensors, ins: Tensors, group: dist.ProcessGroup, gloo: Gloo
) -> HostWork | None:
    """An all-gather in flight; None where the ranks of a group use gloo."""
    link = link_of(group)
    if link is None:
        return None
    return _AllGather(link, outs, ins, partial(gloo.all_gather, outs, ins, group))


def reduce_scatter(
    outs: Tensors, ins: Tensors, group: dist.ProcessGroup, gloo: Gloo
) -> HostWork | None:
    """A sum in flight of this rank's segments; None where the ranks of a group use gloo."""
    link = link_of(group)
    if link is None:
        return None
    restart = partial(gloo.reduce_scatter, outs, ins, group, average=False)
    return _ReduceScatter(link, outs, ins, restart)


def allocate(
    numel: int, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> torch.Tensor | None:
    """A tensor in a region, which a reduce-scatter does not copy; None where that is no gain.

    Other ranks read it, perhaps after this one has waited for its own part: it must not be written
    to again. Let go of it and ask for another one.
    """
    if numel * dtype.itemsize < _SMALLEST_LEASE_BYTES or is_without_link(group):
        return None
    try:
        return regions.lease(numel, dtype)
    except OSError:  # the collective will say so, on all ranks
        return None


class HostWork(ABC):
    """A collective in flight, of which the buckets of some ranks are still to be read.

    Has what CollectiveWork uses of a `dist.Work`. `restart` starts it over gloo.
    """

    kind: Kind
    _is_over = True  # until it has a number

    def __init__(
        self, link: Link, outs: Tensors, ins: Tensors, restart: Callable[[], Waitable]
    ) -> None:
        self._link = link
        self._outs = list(outs)
        self._ins = list(ins)
        self._future: torch.futures.Future[object] | None = None
        self._unread = link.others
        self._terms = self._checked_terms()
        with link.lock:
            buckets: list[Bucket] = []
            region: Region | None = None
            try:
                if not link.is_failing:
                    buckets, region = self._stage()
                self._sequence = link.begin(restart)
                self._is_over = False
                if not link.is_failing:
                    link.announce(self._sequence, self._terms, buckets)
            finally:
                if region is not None:
                    regions.release([region])

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
            self._is_over = True
            try:
                self._read()
                restarted = self._link.restarted(self._sequence)
                if restarted is not None:
                    self._unread = []
                    restarted.wait()
            finally:
                self._end()
                self._link.end(self._sequence)
                self._ins.clear()

    def _stage(self) -> tuple[list[Bucket], Region | None]:
        """Copy the inputs to where other ranks can read them: their buckets, and the region used.

        Lets the link fail where there is no memory for them.
        """
        leased = [self._leased(inp) for inp in self._ins]
        copied = [inp for inp, found in zip(self._ins, leased, strict=True) if found is None]
        if not copied:
            return [found for found in leased if found is not None], None
        try:
            region = self._link.take(sum(_aligned(inp.nbytes) for inp in copied))
        except OSError as error:
            self._link.fail(error.errno or errno.EIO)
            return [], None
        buckets, offset = [], 0
        for inp, found in zip(self._ins, leased, strict=True):
            buckets.append(found or Bucket(region, offset))
            if found is None:
                self._copy_in(buckets[-1].address, inp)
                offset += _aligned(inp.nbytes)
        return buckets, region

    def _checked_terms(self) -> Terms:
        """Copies by address are unchecked: sizes must match, or we corrupt memory."""
        is_sum, size = self.kind is Kind.REDUCE_SCATTER, self._link.size
        for inp, out in zip(self._ins, self._outs, strict=True):
            full, part = (inp, out) if is_sum else (out, inp)
            # A sum may have another dtype than what is added up.
            part_bytes = part.numel() * full.itemsize if is_sum else part.nbytes
            if full.nbytes != size * part_bytes:
                raise ConfigError(
                    f"{self.kind}: the tensor for all {size} ranks must have {size} times the "
                    f"bytes of the one for this rank, found {full.nbytes} and {part_bytes}; pass "
                    "tensors that match."
                )
            if not (full.is_contiguous() and part.is_contiguous()):
                raise ConfigError(
                    f"{self.kind}: tensors must be contiguous, found strides {full.stride()} and "
                    f"{part.stride()}; call contiguous() on them."
                )
        sizes = [inp.nbytes for inp in self._ins]
        # Numbers have the same hash in every process, unlike strings. Ranks may gather as bytes
        # what others gather as numbers; they cannot add it up.
        itemsizes = [inp.itemsize if is_sum else 1 for inp in self._ins]
        fingerprint = hash((*sizes, *itemsizes)) & 0x7FFF_FFFF_FFFF_FFFF
        return Terms(self.kind, len(sizes), sum(sizes), fingerprint)

    def _acknowledge(self, other: int) -> None:
        self._unread.remove(other)
        self._link.acknowledge(self._sequence, other, self._terms.num_bytes)

    def _end(self) -> None:
        if self._unread:
            self._link.drop(self._sequence, self._unread)
            self._unread = []
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def __del__(self) -> None:
        # The ranks that sent something must know that it will not be read.
        if not self._is_over:
            self._is_over = True
            self._end()

    def _leased(self, inp: torch.Tensor) -> Bucket | None:
        """Where an input lies that needs no copy."""
        return None

    @abstractmethod
    def _copy_in(self, address: int, inp: torch.Tensor) -> None: ...

    @abstractmethod
    def _read(self) -> None: ...


class _AllGather(HostWork):
    """Copies what the others have announced, as each of them comes."""

    kind = Kind.ALL_GATHER

    def __init__(
        self, link: Link, outs: Tensors, ins: Tensors, restart: Callable[[], Waitable]
    ) -> None:
        super().__init__(link, outs, ins, restart)
        for out, inp in zip(outs, ins, strict=True):
            own = out.data_ptr() + link.rank * inp.nbytes
            if own != inp.data_ptr():
                _copy(own, inp.data_ptr(), inp.nbytes)

    def _copy_in(self, address: int, inp: torch.Tensor) -> None:
        _copy(address, inp.data_ptr(), inp.nbytes)

    def _read(self) -> None:
        for other, announced in self._link.receive(self._sequence, self._terms, self._unread):
            for out, address in zip(self._outs, announced.addresses, strict=True):
                num_bytes = out.nbytes // self._link.size
                _copy(out.data_ptr() + other * num_bytes, address, num_bytes)
            self._acknowledge(other)


class _ReduceScatter(HostWork):
    """Sums this rank's segments once all have come, so that the order is that of ranks."""

    kind = Kind.REDUCE_SCATTER

    def _leased(self, inp: torch.Tensor) -> Bucket | None:
        region = regions.find(inp)
        return None if region is None else Bucket(region, inp.data_ptr() - region.mapped.address)

    def _copy_in(self, address: int, inp: torch.Tensor) -> None:
        """Without this rank's segment, which nobody else reads."""
        start, segment_bytes = inp.data_ptr(), inp.nbytes // self._link.size
        before = self._link.rank * segment_bytes
        after = before + segment_bytes
        _copy(address, start, before)
        _copy(address + after, start + after, inp.nbytes - after)

    def _read(self) -> None:
        link = self._link
        announced = dict(link.receive(self._sequence, self._terms, self._unread))
        if link.restarted(self._sequence) is not None:
            return
        for number, (out, inp) in enumerate(zip(self._outs, self._ins, strict=True)):
            addresses = [
                inp.data_ptr() if other == link.rank else announced[other].addresses[number]
                for other in range(link.size)
            ]
            numel, dtype = out.numel(), inp.dtype
            if numel:
                own = link.rank * numel * dtype.itemsize
                segments = [_tensor_at(address + own, numel, dtype) for address in addresses]
                sum_in_order(_tensor_at(out.data_ptr(), numel, out.dtype), segments)
        for other in announced:
            self._acknowledge(other)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _copy(to: int, start: int, num_bytes: int) -> None:
    """Copy between addresses, with torch's threads if it is much."""
    if num_bytes <= _PLAIN_COPY_BYTES:
        ctypes.memmove(to, start, num_bytes)
    else:
        source = _tensor_at(start, num_bytes, torch.uint8)
        _tensor_at(to, num_bytes, torch.uint8).copy_(source)


def _tensor_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory that someone else keeps; cheaper than a view, and without a history."""
    memory = _array(numel * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


@lru_cache(maxsize=1024)
def _array(num_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * num_bytes


def sum_in_order(out: torch.Tensor, segments: list[torch.Tensor]) -> None:
    """Add up in the order of ranks, in the dtype of `out`, which may be one of the segments."""
    if len(segments) == 1:
        out.copy_(segments[0])
    elif len(segments) == 2 and out.dtype == segments[0].dtype:
        # Of two, an addition is done in float32 anyway, and rounded once.
        torch.add(*segments, out=out)
    else:
        _sum_by_chunks(out, segments)


def _sum_by_chunks(out: torch.Tensor, segments: list[torch.Tensor]) -> None:
    if out.numel() <= _CHUNK_NUMEL:
        _sum_at_once(out, segments)
        return
    parts = zip(*(segment.split(_CHUNK_NUMEL) for segment in segments), strict=True)
    for chunk, chunk_segments in zip(out.split(_CHUNK_NUMEL), parts, strict=True):
        _sum_at_once(chunk, list(chunk_segments))


def _sum_at_once(out: torch.Tensor, segments: list[torch.Tensor]) -> None:
    if out.dtype in _LOW_PRECISION:
        # Two casts and an addition are faster than one addition of two dtypes.
        total = segments[0].float()
        for other in segments[1:]:
            total.add_(other.float())
        out.copy_(total)
    elif segments[0].dtype != out.dtype:
        out.copy_(segments[0])
        for other in segments[1:]:
            out.add_(other.to(out.dtype))
    else:
        first, second, *others, last = segments
        total = torch.add(first, second)
        for other in others:
            total.add_(other)
        torch.add(total, last, out=out)
