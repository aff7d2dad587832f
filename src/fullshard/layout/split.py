"""How one tensor is cut over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class RankRun:
    """Neighbouring ranks that hold the same number of rows."""

    first_rank: int
    num_ranks: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Split:
    """How a tensor of `shape` is cut along `dim`, as DTensor's `Shard(dim)` cuts it.

    Every rank but the last ones holds `chunk_rows` rows; of the last ones one may hold fewer and
    the others none. With `dim=None` every rank holds the whole tensor, as `Replicate()` does:
    that is how a 0-dim tensor, which has no rows, is kept.
    """

    shape: tuple[int, ...]
    dim: int | None
    num_ranks: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_rows(self) -> int:
        return 1 if self.dim is None else self.shape[self.dim]

    @property
    def chunk_rows(self) -> int:
        return 1 if self.dim is None else -(-self.num_rows // self.num_ranks)

    @property
    def outer(self) -> int:
        """Elements of the dims before `dim`: how many runs a rank's rows fall into."""
        return 1 if self.dim is None else prod(self.shape[: self.dim])

    @property
    def inner(self) -> int:
        """Elements of one row of one run."""
        return self.numel if self.dim is None else prod(self.shape[self.dim + 1 :])

    @property
    def slot_numel(self) -> int:
        """Elements that a rank sends: its shard, padded to the largest shard."""
        return self.outer * self.chunk_rows * self.inner

    @property
    def is_stacked(self) -> bool:
        """Whether the shards, laid one after another, are the whole tensor as it lies in memory."""
        return self.dim is not None and self.outer == 1

    def rows(self, rank: int) -> range:
        """The rows that `rank` holds."""
        if self.dim is None:
            return range(1)
        start = min(rank * self.chunk_rows, self.num_rows)
        return range(start, min(start + self.chunk_rows, self.num_rows))

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], len(self.rows(rank)), *self.shape[self.dim + 1 :])

    def shard_numel(self, rank: int) -> int:
        return prod(self.shard_shape(rank))

    def blocks(self) -> Iterator[RankRun]:
        """The ranks that hold something, in at most two blocks: the full chunks, the rest."""
        if self.dim is None or self.chunk_rows == 0:
            return
        num_full, rest = divmod(self.num_rows, self.chunk_rows)
        if num_full:
            yield RankRun(0, num_full, self.chunk_rows)
        if rest:
            yield RankRun(num_full, 1, rest)


@dataclass(frozen=True, slots=True)
class FlatSplit:
    """Where a parameter of `shape` lies in a flat message.

    The message has `num_ranks` segments of `segment_numel` elements, one per rank; the parameter
    takes the elements from `start` on, and so may lie in one, several or all segments.
    """

    shape: tuple[int, ...]
    start: int
    segment_numel: int
    num_ranks: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def elements(self, rank: int) -> range:
        """The elements of the flattened parameter that `rank` holds."""
        first = rank * self.segment_numel - self.start
        begin = min(max(first, 0), self.numel)
        end = min(max(first + self.segment_numel, 0), self.numel)
        return range(begin, end)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """A slice has no shape but its length; what is not split keeps its own."""
        return self.shape if self.num_ranks == 1 else (len(self.elements(rank)),)


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: from `offsets` on, `sizes` long in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes_of_range(shape: Sequence[int], elements: range) -> Iterator[Box]:
    """The blocks that neighbouring elements of a contiguous tensor fall into, in their order.

    A run begins and ends somewhere in a row: it is the rest of a row, whole rows, and the
    beginning of a row; in each further dim the same again. So there are at most two per dim and
    one, and each one's elements are neighbours, too.
    """
    yield from _cut((), tuple(shape), elements.start, elements.stop)


def _cut(outer: tuple[int, ...], shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Blocks of one entry of the outer dims."""
    if begin >= end:
        return
    ones = (1,) * len(outer)
    if not shape:
        yield Box(outer, ones)
        return
    row = prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:
        yield from _cut((*outer, last), shape[1:], begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from _cut((*outer, first - 1), shape[1:], begin - (first - 1) * row, row)
    if first < last:
        inner = (0,) * (len(shape) - 1)
        yield Box((*outer, first, *inner), (*ones, last - first, *shape[1:]))
    if last * row < end:
        yield from _cut((*outer, last), shape[1:], 0, end - last * row)


def tiles(shape: Sequence[int], blocks: Sequence[Box]) -> bool:
    """Whether blocks cover a tensor: every element once, none twice."""
    if sum(block.numel for block in blocks) != prod(shape):
        return False
    for block in blocks:
        ends = (o + s for o, s in zip(block.offsets, block.sizes, strict=True))
        if any(o < 0 for o in block.offsets) or any(
            end > size for end, size in zip(ends, shape, strict=True)
        ):
            return False
    filled = sorted((block for block in blocks if block.numel), key=lambda b: b.offsets)
    # As many elements as there are, all inside: it is a cover if no two blocks meet.
    return not any(_meet(a, b) for a, b in _neighbours(filled))


def _neighbours(blocks: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs that may meet: in the first dim, those that begin before the other one ends."""
    for index, block in enumerate(blocks):
        for other in blocks[index + 1 :]:
            if block.offsets and other.offsets[0] >= block.offsets[0] + block.sizes[0]:
                break
            yield block, other


def _meet(a: Box, b: Box) -> bool:
    return all(
        x < y + t and y < x + s
        for x, s, y, t in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
