"""Collectives between the ranks of one host, through memory that they share.

A rank lays its input into a region of its own, announces it to all others, and goes on. Whoever
waits reads the regions of the others, straight into the output: nothing is done in between, and no
thread does it. So a gather costs each rank one copy of what it sends and one of what it receives.

`start` never waits for another rank: where no region is free, one is made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist

from fullshard.comm.handshake import is_without_link, link_of
from fullshard.comm.links import Link
from fullshard.comm.mailboxes import Kind, Laid, Terms
from fullshard.comm.regions import Region, regions
from fullshard.comm.transfer import Collectives, CollectiveWork
from fullshard.errors import ConfigError

_ALIGNMENT = 64
# Up to here a plain copy is done before torch has found out whether to use its threads.
_PLAIN_COPY_BYTES = 256 << 10
# What is summed at once of three or more ranks: it stays in the caches while ranks are added.
_CHUNK_NUMEL = 256 << 10
# Below, a copy costs less than to make a tensor in a region.
_SMALLEST_LEASE_BYTES = 16 << 10
# Below, every rank sums for itself: one exchange instead of two.
_SMALLEST_SCATTER_BYTES = 64 << 10
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class ShmCollectives(Collectives):
    """Gathers and reduces between CPU ranks of one host; `otherwise` where a group has no link.

    Sums are done in the order of ranks, those of bfloat16 and float16 in float32 at least: the
    result does not depend on which rank computes it.
    """

    def __init__(self, group: dist.ProcessGroup, otherwise: Collectives) -> None:
        self._group = group
        self._otherwise = otherwise

    def all_gather(
        self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> CollectiveWork:
        link = link_of(group)
        if link is None:
            return self._otherwise.all_gather(outs, ins, group)
        _require_sizes(Kind.GATHER, outs, ins, link.size)
        return _Gathering(link, outs, ins)

    def reduce_scatter(
        self,
        outs: Sequence[torch.Tensor],
        ins: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        *,
        average: bool,
    ) -> CollectiveWork:
        link = link_of(group)
        if link is None:
            return self._otherwise.reduce_scatter(outs, ins, group, average=average)
        _require_sizes(Kind.REDUCE, ins, outs, link.size)
        return _Reducing(link, outs, ins)

    def allocate_bucket(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory in a region: `reduce` does not copy what lies there.

        Other ranks read it, perhaps after this one has waited for its own part: it must not be
        written to again. Let go of it and ask for another one.
        """
        if numel * dtype.itemsize < _SMALLEST_LEASE_BYTES or is_without_link(self._group):
            return super().allocate_bucket(numel, dtype, device)
        return regions.lease(numel, dtype)


def all_reduce_through(link: Link, tensor: torch.Tensor) -> None:
    """Sum a tensor over the ranks of a link, in place."""
    flat = tensor.detach().view(-1)
    segment_numel = flat.numel() // link.size
    if flat.nbytes <= _SMALLEST_SCATTER_BYTES:
        segment_numel = 0
    head, tail = flat.tensor_split([link.size * segment_numel])
    if segment_numel:
        own = head.view(link.size, -1)[link.rank]
        _Reducing(link, [own], [head]).wait()
        _Gathering(link, [head], [own]).wait()
    if tail.numel():
        everyone = tail.new_empty(link.size, tail.numel())
        _Gathering(link, [everyone], [tail]).wait()
        _sum(tail, list(everyone.unbind()))


class _Reading(CollectiveWork):
    """A collective of which the messages of some ranks are still to be read."""

    _is_over = True  # until it was announced

    def __init__(self, link: Link, terms: Terms, messages: list[Laid]) -> None:
        super().__init__()
        self._link = link
        self._terms = terms
        self._future: torch.futures.Future[object] | None = None
        self._unread = link.others
        self._sequence = link.announce(terms, messages)
        self._is_over = False

    @property
    def futures(self) -> list[torch.futures.Future[object]]:
        if self._is_over:
            return []
        if self._future is None:
            self._future = torch.futures.Future()
        return [self._future]

    def wait(self) -> None:
        with self._link.lock:
            if self._is_over:
                return
            self._is_over = True
            try:
                self._read()
            finally:
                self._end()

    def _read(self) -> None:
        raise NotImplementedError

    def _acknowledge(self, other: int) -> None:
        self._unread.remove(other)
        self._link.acknowledge(self._sequence, other, self._terms.num_bytes)

    def _end(self) -> None:
        if self._unread:
            self._link.drop(self._sequence, self._unread)
            self._unread = []
        if self._future is not None:
            self._future.set_result(None)
            self._future = None

    def __del__(self) -> None:
        # Whoever sent something must know that it will not be read.
        if not self._is_over:
            self._is_over = True
            self._end()


class _Gathering(_Reading):
    """Copies what the others have laid out, as each of them comes."""

    def __init__(
        self, link: Link, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]
    ) -> None:
        self._outs = list(outs)
        with link.lock:
            region = link.take(sum(_aligned(inp.nbytes) for inp in ins))
            laid = _laid_into(region, ins)
            for message, inp in zip(laid, ins, strict=True):
                _copy(_address(message), inp.data_ptr(), inp.nbytes)
            super().__init__(link, _terms(Kind.GATHER, ins, [1] * len(ins)), laid)
            link.regions.release([region])
        for out, inp in zip(outs, ins, strict=True):
            own = out.data_ptr() + link.rank * inp.nbytes
            if own != inp.data_ptr():
                _copy(own, inp.data_ptr(), inp.nbytes)

    def _read(self) -> None:
        size = self._link.size
        for other, announced in self._link.receive(self._sequence, self._terms, self._unread):
            for out, address in zip(self._outs, announced.addresses, strict=True):
                num_bytes = out.nbytes // size
                _copy(out.data_ptr() + other * num_bytes, address, num_bytes)
            self._acknowledge(other)


class _Reducing(_Reading):
    """Sums this rank's segments once all have come, so that the order is that of ranks."""

    def __init__(
        self, link: Link, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]
    ) -> None:
        self._outs = list(outs)
        self._ins = list(ins)
        found = [regions.find(inp) for inp in ins]
        staged = [inp for inp, region in zip(ins, found, strict=True) if region is None]
        with link.lock:
            region = link.take(sum(_aligned(inp.nbytes) for inp in staged)) if staged else None
            copies = iter(_laid_into(region, staged) if region is not None else [])
            laid = []
            for inp, leased in zip(ins, found, strict=True):
                if leased is not None:
                    offset = inp.data_ptr() - leased.mapped.address
                    laid.append(Laid(leased, offset, inp.nbytes))
                else:
                    laid.append(next(copies))
                    _copy_for_others(laid[-1], inp, link)
            terms = _terms(Kind.REDUCE, ins, [inp.itemsize for inp in ins])
            super().__init__(link, terms, laid)
            if region is not None:
                link.regions.release([region])

    def _read(self) -> None:
        link = self._link
        announced = dict(link.receive(self._sequence, self._terms, self._unread))
        for number, (out, inp) in enumerate(zip(self._outs, self._ins, strict=True)):
            addresses = [
                inp.data_ptr() if other == link.rank else announced[other].addresses[number]
                for other in range(link.size)
            ]
            numel, dtype = out.numel(), inp.dtype
            if numel:
                own = link.rank * numel * dtype.itemsize
                segments = [_tensor_at(address + own, numel, dtype) for address in addresses]
                _sum(_tensor_at(out.data_ptr(), numel, out.dtype), segments)
        for other in announced:
            self._acknowledge(other)

    def _end(self) -> None:
        super()._end()
        self._ins.clear()


def _require_sizes(
    kind: Kind, fulls: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], size: int
) -> None:
    """Bytes are copied by address: what is not as large as it must be would be other memory."""
    for full, part in zip(fulls, parts, strict=True):
        # A sum may have another dtype than what is added up.
        part_bytes = part.numel() * full.itemsize if kind is Kind.REDUCE else part.nbytes
        if full.nbytes != size * part_bytes:
            raise ConfigError(
                f"{kind.name.lower()}: a message of {size} ranks must have {size} times the bytes "
                f"of a segment, found {full.nbytes} and {part_bytes}; give it a tensor for all "
                "ranks and one for this rank."
            )
        if not (full.is_contiguous() and part.is_contiguous()):
            raise ConfigError(
                f"{kind.name.lower()}: messages must be contiguous, found strides {full.stride()} "
                f"and {part.stride()}; call contiguous() on them."
            )


def _terms(kind: Kind, ins: Sequence[torch.Tensor], itemsizes: Sequence[int]) -> Terms:
    sizes = [inp.nbytes for inp in ins]
    # Numbers have the same hash in every process, unlike strings.
    fingerprint = hash((*sizes, *itemsizes)) & 0xFFFF_FFFF_FFFF_FFFF
    return Terms(kind, len(sizes), sum(sizes), fingerprint)


def _laid_into(region: Region, ins: Sequence[torch.Tensor]) -> list[Laid]:
    """Places in a region, one after another."""
    laid, offset = [], 0
    for inp in ins:
        laid.append(Laid(region, offset, inp.nbytes))
        offset += _aligned(inp.nbytes)
    return laid


def _copy_for_others(laid: Laid, inp: torch.Tensor, link: Link) -> None:
    """Copy a message without this rank's segment, which nobody else reads."""
    to, start = _address(laid), inp.data_ptr()
    segment_bytes = inp.nbytes // link.size
    before = link.rank * segment_bytes
    after = before + segment_bytes
    _copy(to, start, before)
    _copy(to + after, start + after, inp.nbytes - after)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _address(laid: Laid) -> int:
    return laid.region.mapped.address + laid.offset


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


def _sum(out: torch.Tensor, segments: list[torch.Tensor]) -> None:
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
