"""A unit's parameters, cut into messages.

Three arrangements come out of one plan, and share their offsets:

- the **home** of a lane: this rank's shards, one after another, message by message. It is what is
  sent to gather, what comes back from a reduce, and where the optimizer works;
- a **message**: `num_ranks` segments, one per rank, each a piece of that rank's home;
- the **slab**: the full parameters of the unit, each one contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from fullshard.layout.cost import CostModel
from fullshard.layout.split import Split
from fullshard.layout.stages import Stages

SLAB_ALIGNMENT_BYTES = 128


class Landing(Enum):
    """How a gathered message becomes full parameters."""

    IN_PLACE = "in place"  # the message is the parameter, as it lies in the slab
    SPLIT = "split"  # the message is shared: copied out, parameter by parameter
    PERMUTED = "permuted"  # cut along a dim other than the first: copied out, row by row
    FLAT = "flat"  # the message is all its parameters, one after another, as they lie in the slab

    @property
    def is_copied(self) -> bool:
        """Whether what arrives has to be copied out of the message."""
        return self in (Landing.SPLIT, Landing.PERMUTED)


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter, as the plan sees it."""

    name: str
    split: Split
    stages: Stages
    is_trainable: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter lies in each rank's segment of its message, and in the slab.

    In a flat message, which segments mean nothing to, where it lies in the whole message.
    """

    entry: int
    offset: int
    numel: int
    slab_offset_bytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """A contiguous region that travels in one collective.

    `segment_numel` is one rank's part; `padding_offset_bytes` is where in the slab the padding at
    the end of the segments of a split message is dropped.
    """

    slots: tuple[Slot, ...]
    segment_numel: int
    home_offset: int
    landing: Landing
    padding_offset_bytes: int = 0

    def shard_offset(self, slot: Slot, rank: int) -> int:
        """Where in its segment a rank's shard of a parameter starts."""
        if self.landing is not Landing.FLAT:
            return slot.offset
        return min(max(slot.offset - rank * self.segment_numel, 0), self.segment_numel)

    @property
    def used_numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def padding_numel(self) -> int:
        """Of a message by rows: what each segment has at its end."""
        return self.segment_numel - self.used_numel


@dataclass(frozen=True, slots=True)
class Lane:
    """The messages of the parameters that pass through the same dtypes and are trained alike."""

    stages: Stages
    is_trainable: bool
    messages: tuple[Message, ...]

    @property
    def home_numel(self) -> int:
        return sum(message.segment_numel for message in self.messages)


@dataclass(frozen=True, slots=True, repr=False)
class UnitLayout:
    """The plan of one unit; `repr` is a table."""

    entries: tuple[Entry, ...]
    lanes: tuple[Lane, ...]
    num_ranks: int
    slab_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether a rank's homes are the full parameters as they compute."""
        return self.num_ranks == 1 and all(
            message.landing is Landing.FLAT and not lane.stages.casts_to_gather
            for lane in self.lanes
            for message in lane.messages
        )

    def __repr__(self) -> str:
        header = ("parameter", "shape", "dim", "dtypes", "message", "lands", "offset", "slot")
        rows = [header, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
        return "\n".join(line.rstrip() for line in lines)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        number = 0
        for lane in self.lanes:
            stages = lane.stages
            passed = [stages.kept, stages.computed, stages.reduced]
            if stages.sums_on_arrival:
                passed.append(stages.wire)
            dtypes = "/".join(str(dtype).removeprefix("torch.") for dtype in passed)
            for message in lane.messages:
                for slot in message.slots:
                    entry = self.entries[slot.entry]
                    yield (
                        entry.name,
                        "x".join(map(str, entry.split.shape)) or "scalar",
                        "-" if entry.split.dim is None else str(entry.split.dim),
                        dtypes,
                        str(number),
                        message.landing.value,
                        str(message.home_offset + slot.offset),
                        str(slot.numel),
                    )
                number += 1


class SlabCursor:
    """Hands out regions of the slab, each aligned."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def take(self, num_bytes: int) -> int:
        start = aligned(self.num_bytes, SLAB_ALIGNMENT_BYTES)
        self.num_bytes = start + num_bytes
        return start


def plan_layout(entries: Sequence[Entry], num_ranks: int, cost: CostModel) -> UnitLayout:
    """Cut the parameters of a unit into messages.

    Lanes come in the order in which their first parameter does; in a lane, parameters with a
    message of their own come first, then the one message that all the others share.
    """
    slab = SlabCursor()
    lanes = tuple(
        Lane(stages, is_trainable, tuple(_messages(entries, members, num_ranks, cost, slab)))
        for (stages, is_trainable), members in entries_by_lane(entries).items()
    )
    return UnitLayout(tuple(entries), lanes, num_ranks, slab.num_bytes)


def entries_by_lane(entries: Sequence[Entry]) -> dict[tuple[Stages, bool], list[int]]:
    """Which entries share a lane, in the order in which lanes first appear."""
    by_lane: dict[tuple[Stages, bool], list[int]] = {}
    for index, entry in enumerate(entries):
        by_lane.setdefault((entry.stages, entry.is_trainable), []).append(index)
    return by_lane


def _messages(
    entries: Sequence[Entry],
    members: Sequence[int],
    num_ranks: int,
    cost: CostModel,
    slab: SlabCursor,
) -> Iterator[Message]:
    stages = entries[members[0]].stages
    itemsize = stages.computed.itemsize
    home_offset = 0
    shared: list[int] = []
    for index in members:
        split = entries[index].split
        landing = _own_landing(split, stages, cost)
        if landing is None:
            shared.append(index)
            continue
        segment_numel = aligned(split.slot_numel, stages.alignment_numel)
        kept_numel = num_ranks * segment_numel if landing is Landing.IN_PLACE else split.numel
        slot = Slot(index, 0, split.slot_numel, slab.take(kept_numel * itemsize))
        yield Message((slot,), segment_numel, home_offset, landing)
        home_offset += segment_numel
    if not shared:
        return
    # Neighbours of one size: where a device copies them out one by one, a run of them is one copy.
    shared.sort(key=lambda index: -entries[index].split.slot_numel)
    slots: list[Slot] = []
    offset = 0
    for index in shared:
        numel = entries[index].split.slot_numel
        slots.append(Slot(index, offset, numel, slab.take(num_ranks * numel * itemsize)))
        offset += numel
    segment_numel = aligned(offset, stages.alignment_numel)
    padding_offset = slab.take(num_ranks * (segment_numel - offset) * itemsize)
    yield Message(tuple(slots), segment_numel, home_offset, Landing.SPLIT, padding_offset)


def _own_landing(split: Split, stages: Stages, cost: CostModel) -> Landing | None:
    """How a parameter lands if it gets a message of its own; None if it shares one."""
    if split.slot_numel == 0 or split.dim is None:
        return None
    if not split.is_stacked:
        return Landing.PERMUTED
    full_bytes = split.numel * stages.computed.itemsize
    if split.slot_numel % stages.alignment_numel or not cost.deserves_message(full_bytes):
        return None
    return Landing.IN_PLACE


def aligned(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
