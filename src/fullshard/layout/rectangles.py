"""A run of elements of a tensor, as rectangles: what checkpoints are written and read in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A block of a tensor: from `offsets` on, `sizes` long in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def rectangles(shape: Sequence[int], elements: range) -> Iterator[Rectangle]:
    """The blocks that neighbouring elements of a contiguous tensor fall into, in their order.

    A run begins and ends somewhere in a row: it is the rest of a row, whole rows, and the
    beginning of a row; in each further dim the same again. So there are at most two per dim and
    one, and each one's elements are neighbours, too.
    """
    yield from _cut((), tuple(shape), elements.start, elements.stop)


def _cut(
    outer: tuple[int, ...], shape: tuple[int, ...], begin: int, end: int
) -> Iterator[Rectangle]:
    """Blocks of one entry of the outer dims."""
    if begin >= end:
        return
    ones = (1,) * len(outer)
    if not shape:
        yield Rectangle(outer, ones)
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
        yield Rectangle((*outer, first, *inner), (*ones, last - first, *shape[1:]))
    if last * row < end:
        yield from _cut((*outer, last), shape[1:], 0, end - last * row)


def tiles(shape: Sequence[int], blocks: Sequence[Rectangle]) -> bool:
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


def _neighbours(blocks: Sequence[Rectangle]) -> Iterator[tuple[Rectangle, Rectangle]]:
    """Pairs that may meet: in the first dim, those that begin before the other one ends."""
    for index, block in enumerate(blocks):
        for other in blocks[index + 1 :]:
            if block.offsets and other.offsets[0] >= block.offsets[0] + block.sizes[0]:
                break
            yield block, other


def _meet(a: Rectangle, b: Rectangle) -> bool:
    return all(
        x < y + t and y < x + s
        for x, s, y, t in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
