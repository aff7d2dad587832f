"""How one tensor is split over ranks: the values of `Split`, and the boxes that they consist of.

Whoever needs to know which elements a rank holds asks `runs(rank)`, the elements as they lie in the
flattened tensor, or `boxes(rank)`, rectangles of the tensor itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from operator import add
from typing import NamedTuple


class Run(NamedTuple):
    """`num` runs of `numel` consecutive elements, each `stride` after the one before."""

    first: int
    numel: int
    num: int = 1
    stride: int = 0


class Split(ABC):
    """Which elements of a tensor of `shape` each of `num_ranks` ranks holds.

    A rank's elements lie in its shard in the order of `runs`, and of `boxes`. Its shard takes
    `slot_numel` elements of a bucket's segment, on every rank alike.
    """

    __slots__ = ()

    shape: tuple[int, ...]
    num_ranks: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @abstractmethod
    def runs(self, rank: int) -> tuple[Run, ...]:
        """The elements of a rank, counted in the flattened tensor."""

    @abstractmethod
    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The elements of a rank, as rectangles of the tensor."""

    @abstractmethod
    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard."""

    def shard_numel(self, rank: int) -> int:
        return prod(self.shard_shape(rank))

    @property
    def slot_numel(self) -> int:
        """Elements of a segment that a shard takes: those of the largest shard."""
        return max(self.shard_numel(rank) for rank in range(self.num_ranks))

    def slot_offset(self, rank: int) -> int:
        """Where in its slot a rank's shard begins."""
        return 0


@dataclass(frozen=True, slots=True)
class Whole(Split):
    """Every rank holds the whole tensor, as with DTensor's `Replicate()`."""

    shape: tuple[int, ...]
    num_ranks: int

    def runs(self, rank: int) -> tuple[Run, ...]:
        return (Run(0, self.numel),)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return (Box.whole(self.shape),)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        return self.shape

    @property
    def slot_numel(self) -> int:
        return self.numel


@dataclass(frozen=True, slots=True)
class RowSplit(Split):
    """Rows along `dim`, as DTensor's `Shard(dim)` and `torch.chunk` split them.

    The first ranks hold `chunk_rows` rows each; the next one may hold fewer, and the rest none.
    """

    shape: tuple[int, ...]
    dim: int
    num_ranks: int

    @property
    def num_rows(self) -> int:
        return self.shape[self.dim]

    @property
    def chunk_rows(self) -> int:
        return -(-self.num_rows // self.num_ranks)

    def rows(self, rank: int) -> range:
        """The rows that `rank` holds."""
        start = min(rank * self.chunk_rows, self.num_rows)
        return range(start, min(start + self.chunk_rows, self.num_rows))

    def runs(self, rank: int) -> tuple[Run, ...]:
        rows, row_numel = self.rows(rank), prod(self.shape[self.dim + 1 :])
        outer = prod(self.shape[: self.dim])
        return (
            Run(rows.start * row_numel, len(rows) * row_numel, outer, self.num_rows * row_numel),
        )

    def boxes(self, rank: int) -> tuple[Box, ...]:
        offsets = [0] * len(self.shape)
        offsets[self.dim] = self.rows(rank).start
        return (Box(tuple(offsets), self.shard_shape(rank)),)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], len(self.rows(rank)), *self.shape[self.dim + 1 :])

    @property
    def slot_numel(self) -> int:
        return self.shard_numel(0)


@dataclass(frozen=True, slots=True)
class FlatSplit(Split):
    """A tensor whose elements lie in a flat bucket, from `start` on, which is split evenly.

    The bucket has `num_ranks` segments of `segment_numel` elements, so the tensor may lie in one,
    several or all of them.
    """

    shape: tuple[int, ...]
    start: int
    segment_numel: int
    num_ranks: int

    def elements(self, rank: int) -> range:
        """The elements of the flattened tensor that `rank` holds."""
        first = rank * self.segment_numel - self.start
        begin = min(max(first, 0), self.numel)
        end = min(max(first + self.segment_numel, 0), self.numel)
        return range(begin, end)

    def runs(self, rank: int) -> tuple[Run, ...]:
        elements = self.elements(rank)
        return (Run(elements.start, len(elements)),)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return tuple(boxes_of_range(self.shape, self.elements(rank)))

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """A slice is one-dimensional; a tensor that is not split keeps its shape."""
        return self.shape if self.num_ranks == 1 else (len(self.elements(rank)),)

    @property
    def slot_numel(self) -> int:
        return self.segment_numel

    def slot_offset(self, rank: int) -> int:
        return min(max(self.start - rank * self.segment_numel, 0), self.segment_numel)


def split_rows(shape: Sequence[int], dim: int | None, num_ranks: int) -> Split:
    """Rows along a dim; without one, as for a tensor that has no dims, the whole on every rank."""
    shape = tuple(shape)
    return Whole(shape, num_ranks) if dim is None else RowSplit(shape, dim, num_ranks)


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: from `offsets` on, `sizes` long in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def is_within(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of `shape` has all of this box."""
        if {len(self.offsets), len(self.sizes)} != {len(shape)}:
            return False
        extents = zip(self.offsets, self.sizes, shape, strict=True)
        return all(o >= 0 and s >= 0 and o + s <= size for o, s, size in extents)


def intersection(a: Box, b: Box) -> Box | None:
    """The box of elements that two boxes share, if there are any."""
    begins, sizes = [], []
    for x, s, y, t in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        begins.append(max(x, y))
        sizes.append(min(x + s, y + t) - begins[-1])
    return Box(tuple(begins), tuple(sizes)) if all(size > 0 for size in sizes) else None


def slices(box: Box, within: Box) -> tuple[slice, ...]:
    """The index of a box into a tensor that holds the values of a larger box."""
    return tuple(
        slice(offset - begin, offset - begin + size)
        for offset, size, begin in zip(box.offsets, box.sizes, within.offsets, strict=True)
    )


def pieces(box: Box, max_numel: int) -> Iterator[Box]:
    """A box in pieces of at most `max_numel` elements, in the order of its elements."""
    if box.numel == 0:
        return
    if box.numel <= max_numel:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    num_rows = max(1, max_numel * box.sizes[dim] // box.numel)
    begin, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    for row in range(begin, end, num_rows):
        offsets = (*box.offsets[:dim], row, *box.offsets[dim + 1 :])
        sizes = (*box.sizes[:dim], min(num_rows, end - row), *box.sizes[dim + 1 :])
        yield from pieces(Box(offsets, sizes), max_numel)


def element_span(shape: Sequence[int], box: Box) -> range:
    """The elements of a contiguous tensor from the first to the last one of a box."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    dims = list(zip(box.offsets, box.sizes, strides, strict=True))
    first = sum(offset * stride for offset, _, stride in dims)
    return range(first, first + sum((size - 1) * stride for _, size, stride in dims) + 1)


def element_ranges(shape: Sequence[int], box: Box) -> Iterator[range]:
    """The runs of consecutive elements of a contiguous tensor that make up a box, in order."""
    inner = max(len(shape) - 1, 0)
    while inner > 0 and box.sizes[inner] == shape[inner]:
        inner -= 1  # whole rows are consecutive
    for index in product(*(range(size) for size in box.sizes[:inner])):
        offsets = (*map(add, box.offsets, index), *box.offsets[inner:])
        yield element_span(shape, Box(offsets, (*(1 for _ in index), *box.sizes[inner:])))


def row_chunks(shape: Sequence[int], num_parts: int) -> list[Box]:
    """A tensor split along its first dim as `torch.chunk` does it, into at most `num_parts`."""
    if not shape or not shape[0]:
        return [Box.whole(shape)]
    num_rows = -(-shape[0] // num_parts)
    inner = (0,) * (len(shape) - 1)
    return [
        Box((row, *inner), (min(num_rows, shape[0] - row), *shape[1:]))
        for row in range(0, shape[0], num_rows)
    ]


def boxes_of_range(shape: Sequence[int], elements: range) -> Iterator[Box]:
    """The boxes that consecutive elements of a contiguous tensor fill, in their order.

    A range begins and ends anywhere in a row: it is the rest of a row, whole rows, and the
    beginning of a row, and the same again in each further dim. So there are at most two boxes per
    dim plus one, and the elements of each are consecutive, too.
    """
    begin, end = elements.start, elements.stop
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while begin < end:
        offsets = [begin // stride % size for stride, size in zip(strides, shape, strict=True)]
        dim = 0  # the first dim in which whole rows begin here
        while dim < len(shape) and (begin % strides[dim] or begin + strides[dim] > end):
            dim += 1
        sizes = [1] * dim + list(shape[dim:])
        if shape:
            sizes[dim] = min((end - begin) // strides[dim], shape[dim] - offsets[dim])
        yield Box(tuple(offsets), tuple(sizes))
        begin += prod(sizes)


def tiles(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes cover a tensor: every element once, none twice.

    A sum of boxes is determined by its corners: each lower bound counts 1, each upper one -1, and a
    corner their product. The boxes tile the tensor if their corners add up to those of the whole.
    """
    if sum(box.numel for box in boxes) != prod(shape):
        return False
    if not all(box.is_within(shape) for box in boxes):
        return False
    # In the other dims, all boxes have the same bounds.
    cut = [d for d, size in enumerate(shape) if any(box.sizes[d] != size for box in boxes)]
    if 2 ** len(cut) > len(boxes):  # a few boxes of a tensor with many dims
        pairs = combinations((box for box in boxes if box.numel), 2)
        return all(intersection(box, other) is None for box, other in pairs)
    corners: Counter[tuple[int, ...]] = Counter()
    for box, sign in [*((box, 1) for box in boxes), (Box.whole(shape), -1)]:
        bounds = (((box.offsets[d], 1), (box.offsets[d] + box.sizes[d], -1)) for d in cut)
        for corner in product(*bounds):
            corners[tuple(place for place, _ in corner)] += sign * prod(s for _, s in corner)
    return not any(corners.values())
