"""Which elements of which tensors are which elements of a bucket.

A bucket is one segment per rank. Whatever the splits of its tensors are, it is described by a
`CopyTable`: strided copies between each tensor, flattened, and the bucket. Where a table is the
identity, tensors lie in the bucket as they are, and nothing has to be copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from fullshard.layout.split import Split

NO_TENSOR = -1


class Dim(NamedTuple):
    """A dim of a copy: its size, and its strides in the bucket and in the tensor."""

    size: int
    in_bucket: int
    in_tensor: int


class Copy(NamedTuple):
    """A strided block of elements that a tensor and a bucket have in common.

    They begin at element `at` of the bucket and `first` of the tensor. The last of `dims` is
    consecutive in both. Elements of no tensor (padding, and what some ranks lack of an unevenly
    split tensor) are a copy of `NO_TENSOR`.
    """

    tensor: int
    at: int
    first: int
    dims: tuple[Dim, ...]

    @property
    def is_consecutive(self) -> bool:
        return len(self.dims) == 1

    @property
    def numel(self) -> int:
        total = 1
        for dim in self.dims:
            total *= dim.size
        return total


@dataclass(frozen=True, slots=True)
class CopyTable:
    """The copies of a bucket, in the order in which they lie there: every element once."""

    copies: tuple[Copy, ...]
    numels: tuple[int, ...]
    """The sizes of the tensors."""

    @classmethod
    def of(
        cls, slots: Sequence[tuple[Split, int]], segment_numel: int, columns: range | None = None
    ) -> CopyTable:
        """The table of a bucket, or of some columns of all its segments.

        Each slot is a tensor's split, and where in a segment its slot begins.
        """
        return _table(tuple(slots), segment_numel, columns or range(segment_numel))

    @property
    def offsets(self) -> tuple[int, ...] | None:
        """Where in the bucket each tensor lies; None unless all of them lie there as they are."""
        found = dict.fromkeys(range(len(self.numels)), 0)
        for copy in self.copies:
            if copy.tensor != NO_TENSOR:
                if not copy.is_consecutive or copy.numel != self.numels[copy.tensor]:
                    return None
                found[copy.tensor] = copy.at
        return tuple(found.values())

    @property
    def filling(self) -> tuple[Copy, ...]:
        """The copies that fill the tensors: no padding, and one of those that all ranks hold."""
        return tuple(
            copy._replace(dims=tuple(dim for dim in copy.dims if dim.in_tensor))
            for copy in self.copies
            if copy.tensor != NO_TENSOR
        )


@cache
def _table(slots: tuple[tuple[Split, int], ...], segment_numel: int, columns: range) -> CopyTable:
    num_ranks = slots[0][0].num_ranks
    blocks: list[_Block] = []
    last: dict[_Columns, _Block] = {}
    for rank in range(num_ranks):
        for each, first in _columns(slots, segment_numel, rank):
            for part, part_first in _clipped(each, first, columns):
                block = last.get(part)
                if block is None or not block.takes(rank, part_first):
                    block = last[part] = _Block(part, rank, part_first)
                    blocks.append(block)
    copies = sorted((block.copy(columns) for block in blocks), key=lambda copy: copy.at)
    return CopyTable(tuple(_joined(copies)), tuple(split.numel for split, _ in slots))


class _Columns(NamedTuple):
    """Columns of a rank's segment: `num` runs of `numel` elements, `stride` apart in a tensor."""

    tensor: int
    column: int
    numel: int
    num: int
    stride: int


def _columns(
    slots: Sequence[tuple[Split, int]], segment_numel: int, rank: int
) -> Iterator[tuple[_Columns, int]]:
    """What a rank's segment consists of, in order, and where each part begins in its tensor."""
    parts: list[tuple[_Columns, int]] = []
    for tensor, (split, offset) in enumerate(slots):
        column = offset + split.slot_offset(rank)
        for run in split.runs(rank):
            if run.numel and run.num:
                parts.append((_Columns(tensor, column, run.numel, run.num, run.stride), run.first))
                column += run.numel * run.num
    end = 0
    for part, first in sorted(parts):
        if part.column > end:
            yield _Columns(NO_TENSOR, end, part.column - end, 1, 0), 0
        yield part, first
        end = part.column + part.numel * part.num
    if end < segment_numel:
        yield _Columns(NO_TENSOR, end, segment_numel - end, 1, 0), 0


def _clipped(part: _Columns, first: int, columns: range) -> Iterator[tuple[_Columns, int]]:
    """Those of a part's elements that lie in some columns: an end of a run, runs, a beginning."""
    begin = max(columns.start - part.column, 0)
    end = min(columns.stop - part.column, part.numel * part.num)
    while begin < end:
        index, skipped = divmod(begin, part.numel)
        num_whole = (end - begin) // part.numel if not skipped else 0
        numel = part.numel if num_whole else min(part.numel - skipped, end - begin)
        place = part.column + begin, numel, max(num_whole, 1), part.stride
        yield _Columns(part.tensor, *place), first + index * part.stride + skipped
        begin += numel * max(num_whole, 1)


class _Block:
    """The same columns of neighboring ranks, whose elements are equally far apart in a tensor."""

    def __init__(self, columns: _Columns, rank: int, first: int) -> None:
        self._columns = columns
        self._rank, self._first, self._num_ranks = rank, first, 1
        self._stride = 0

    def takes(self, rank: int, first: int) -> bool:
        """Take another rank, if it continues the block."""
        if self._num_ranks == 1:
            self._stride = first - self._first
        expected = self._first + self._num_ranks * self._stride
        if rank != self._rank + self._num_ranks or first != expected or self._stride < 0:
            return False
        self._num_ranks += 1
        return True

    def copy(self, within: range) -> Copy:
        tensor, column, numel, num, stride = self._columns
        at = self._rank * len(within) + column - within.start
        dims = [
            Dim(self._num_ranks, len(within), self._stride),
            Dim(num, numel, stride),
            Dim(numel, 1, 1),
        ]
        if tensor == NO_TENSOR:
            dims = [Dim(size, in_bucket, in_bucket) for size, in_bucket, _ in dims]
        return Copy(tensor, at, self._first, _simplified(dims))


def _simplified(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Dims without those of one element; neighbors that are consecutive are one."""
    found = [dims[-1]]
    for dim in reversed(dims[:-1]):
        inner = found[0]
        if dim.size == 1:
            continue
        if dim[1:] == (inner.size * inner.in_bucket, inner.size * inner.in_tensor):
            found[0] = inner._replace(size=dim.size * inner.size)
        else:
            found.insert(0, dim)
    return tuple(found)


def _joined(copies: Sequence[Copy]) -> Iterator[Copy]:
    """Copies, with those that continue each other made one."""
    before: Copy | None = None
    for copy in copies:
        if before is not None:
            if before.is_consecutive and copy.is_consecutive and before.tensor == copy.tensor:
                is_next = copy.first == before.first + before.numel or copy.tensor == NO_TENSOR
                if is_next and copy.at == before.at + before.numel:
                    before = before._replace(dims=(Dim(before.numel + copy.numel, 1, 1),))
                    continue
            yield before
        before = copy
    if before is not None:
        yield before
