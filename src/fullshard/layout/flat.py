"""The flat arrangement: parameters one after another, and an equal slice of them on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fullshard.layout.messages import (
    Entry,
    Landing,
    Lane,
    Message,
    SlabCursor,
    Slot,
    UnitLayout,
    aligned,
    entries_by_lane,
)


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


def plan_flat_layout(entries: Sequence[Entry], num_ranks: int) -> UnitLayout:
    """Lay the parameters of every lane one after another, in one message.

    Parameters whose size keeps the next one aligned come first: kernels are slower on weights
    that do not start at a multiple of 16 bytes.
    """
    slab = SlabCursor()
    lanes = []
    for (stages, is_trainable), members in entries_by_lane(entries).items():
        alignment, itemsize = stages.alignment_numel, stages.computed.itemsize
        ordered = sorted(members, key=lambda index: entries[index].split.numel % alignment != 0)
        total = sum(entries[index].split.numel for index in members)
        segment_numel = aligned(-(-total // num_ranks), alignment)
        slab_start = slab.take(num_ranks * segment_numel * itemsize)
        slots: list[Slot] = []
        start = 0
        for index in ordered:
            numel = entries[index].split.numel
            slots.append(Slot(index, start, numel, slab_start + start * itemsize))
            start += numel
        message = Message(tuple(slots), segment_numel, 0, Landing.FLAT)
        lanes.append(Lane(stages, is_trainable, (message,)))
    return UnitLayout(tuple(entries), tuple(lanes), num_ranks, slab.num_bytes)
