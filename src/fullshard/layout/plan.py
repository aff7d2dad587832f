"""The dtypes that a parameter passes through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from fullshard.layout.split import Split


@dataclass(frozen=True, slots=True)
class DtypePlan:
    """The dtypes a parameter passes through: stored, computed in, reduced in.

    `wire` is what its gradient travels in to be reduced: the same as `reduced`, or narrower.
    """

    stored: torch.dtype
    computed: torch.dtype
    reduced: torch.dtype
    wire: torch.dtype

    @classmethod
    def of(
        cls,
        stored: torch.dtype,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> DtypePlan:
        """Apply a precision policy; parameters that are not floating point keep their dtype.

        A gradient that is reduced in something as narrow as `wire_dtype` travels in that.
        """
        if not stored.is_floating_point:
            return cls(stored, stored, stored, stored)
        computed = param_dtype or stored
        reduced = reduce_dtype or computed
        wire = wire_dtype or reduced
        return cls(stored, computed, reduced, wire if wire.itemsize < reduced.itemsize else reduced)

    @property
    def casts_to_gather(self) -> bool:
        return self.stored != self.computed

    @property
    def sums_on_arrival(self) -> bool:
        """Whether gradients are added up in a wider dtype than they travel in (rule 6)."""
        return self.wire != self.reduced

    @property
    def alignment_numel(self) -> int:
        """Elements that fill 16 bytes in the narrowest of the four dtypes.

        A message has one element count in every stage, so this keeps each of them a multiple of
        16 bytes; NCCL falls back to element-sized copies otherwise.
        """
        dtypes = (self.stored, self.computed, self.reduced, self.wire)
        return max(1, 16 // min(dtype.itemsize for dtype in dtypes))


@dataclass(frozen=True, slots=True)
class CostModel:
    """When a parameter is worth a message of its own.

    A parameter that shares its message is copied out of it once it has arrived, which reads and
    writes it; one that has its own is not, but one more message has to be started.
    """

    message_s: float
    copy_bytes_per_s: float

    def deserves_message(self, full_bytes: int) -> bool:
        return 2 * full_bytes / self.copy_bytes_per_s >= self.message_s

    @classmethod
    def of_device(cls, device_type: str) -> CostModel:
        """The model of a device: gloo between CPUs, NCCL and its like between accelerators.

        Sources: benchmarks/bench_collectives.py. A further message inside one coalesced call
        costs an accelerator a few microseconds; gloo runs it as a collective of its own.
        """
        if device_type == "cpu":
            return cls(message_s=150e-6, copy_bytes_per_s=30e9)
        return cls(message_s=5e-6, copy_bytes_per_s=3e12)


FULL_ALIGNMENT_BYTES = 128


class BucketKind(Enum):
    """How a gathered message becomes full parameters."""

    IN_PLACE = "in place"  # the message is the parameter, as it lies in the slab
    SPLIT = "split"  # the message is shared: copied out, parameter by parameter
    PERMUTED = "permuted"  # cut along a dim other than the first: copied out, row by row
    FLAT = "flat"  # the message is all its parameters, one after another, as they lie in the slab

    @property
    def is_copied(self) -> bool:
        """Whether what arrives has to be copied out of the message."""
        return self in (BucketKind.SPLIT, BucketKind.PERMUTED)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, as the plan sees it."""

    name: str
    split: Split
    dtypes: DtypePlan
    is_trainable: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter lies in each rank's segment of its message, and in the slab.

    In a flat message, which segments mean nothing to, where it lies in the whole message.
    """

    param_index: int
    offset: int
    numel: int
    full_offset_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A contiguous region that travels in one collective.

    `segment_numel` is one rank's part; `padding_offset_bytes` is where in the slab the padding at
    the end of the segments of a split message is dropped.
    """

    slots: tuple[Slot, ...]
    segment_numel: int
    buffer_offset: int
    kind: BucketKind
    padding_offset_bytes: int = 0

    def shard_offset(self, slot: Slot, rank: int) -> int:
        """Where in its segment a rank's shard of a parameter starts."""
        if self.kind is not BucketKind.FLAT:
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

    dtypes: DtypePlan
    is_trainable: bool
    buckets: tuple[Bucket, ...]

    @property
    def shard_numel(self) -> int:
        return sum(bucket.segment_numel for bucket in self.buckets)


@dataclass(frozen=True, slots=True, repr=False)
class UnitLayout:
    """The plan of one unit; `repr` is a table."""

    params: tuple[ParamSpec, ...]
    lanes: tuple[Lane, ...]
    num_ranks: int
    full_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether a rank's homes are the full parameters as they compute."""
        return self.num_ranks == 1 and all(
            bucket.kind is BucketKind.FLAT and not lane.dtypes.casts_to_gather
            for lane in self.lanes
            for bucket in lane.buckets
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
            dtypes = lane.dtypes
            passed = [dtypes.stored, dtypes.computed, dtypes.reduced]
            if dtypes.sums_on_arrival:
                passed.append(dtypes.wire)
            names = "/".join(str(dtype).removeprefix("torch.") for dtype in passed)
            for bucket in lane.buckets:
                for slot in bucket.slots:
                    param = self.params[slot.param_index]
                    yield (
                        param.name,
                        "x".join(map(str, param.split.shape)) or "scalar",
                        "-" if param.split.dim is None else str(param.split.dim),
                        names,
                        str(number),
                        bucket.kind.value,
                        str(bucket.buffer_offset + slot.offset),
                        str(slot.numel),
                    )
                number += 1


class OffsetAllocator:
    """Hands out regions of the slab, each aligned."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def take(self, num_bytes: int) -> int:
        start = aligned(self.num_bytes, FULL_ALIGNMENT_BYTES)
        self.num_bytes = start + num_bytes
        return start


def plan_layout(params: Sequence[ParamSpec], num_ranks: int, cost: CostModel) -> UnitLayout:
    """Cut the parameters of a unit into messages.

    Lanes come in the order in which their first parameter does; in a lane, parameters with a
    message of their own come first, then the one message that all the others share.
    """
    full = OffsetAllocator()
    lanes = tuple(
        Lane(dtypes, is_trainable, tuple(_messages(params, indices, num_ranks, cost, full)))
        for (dtypes, is_trainable), indices in params_by_lane(params).items()
    )
    return UnitLayout(tuple(params), lanes, num_ranks, full.num_bytes)


def params_by_lane(params: Sequence[ParamSpec]) -> dict[tuple[DtypePlan, bool], list[int]]:
    """Which entries share a lane, in the order in which lanes first appear."""
    by_lane: dict[tuple[DtypePlan, bool], list[int]] = {}
    for index, param in enumerate(params):
        by_lane.setdefault((param.dtypes, param.is_trainable), []).append(index)
    return by_lane


def _messages(
    params: Sequence[ParamSpec],
    indices: Sequence[int],
    num_ranks: int,
    cost: CostModel,
    full: OffsetAllocator,
) -> Iterator[Bucket]:
    dtypes = params[indices[0]].dtypes
    itemsize = dtypes.computed.itemsize
    buffer_offset = 0
    shared: list[int] = []
    for index in indices:
        split = params[index].split
        kind = _own_landing(split, dtypes, cost)
        if kind is None:
            shared.append(index)
            continue
        segment_numel = aligned(split.slot_numel, dtypes.alignment_numel)
        kept_numel = num_ranks * segment_numel if kind is BucketKind.IN_PLACE else split.numel
        slot = Slot(index, 0, split.slot_numel, full.take(kept_numel * itemsize))
        yield Bucket((slot,), segment_numel, buffer_offset, kind)
        buffer_offset += segment_numel
    if not shared:
        return
    # Neighbours of one size: where a device copies them out one by one, a run of them is one copy.
    shared.sort(key=lambda index: -params[index].split.slot_numel)
    slots: list[Slot] = []
    offset = 0
    for index in shared:
        numel = params[index].split.slot_numel
        slots.append(Slot(index, offset, numel, full.take(num_ranks * numel * itemsize)))
        offset += numel
    segment_numel = aligned(offset, dtypes.alignment_numel)
    padding_offset = full.take(num_ranks * (segment_numel - offset) * itemsize)
    yield Bucket(tuple(slots), segment_numel, buffer_offset, BucketKind.SPLIT, padding_offset)


def _own_landing(split: Split, dtypes: DtypePlan, cost: CostModel) -> BucketKind | None:
    """How a parameter lands if it gets a message of its own; None if it shares one."""
    if split.slot_numel == 0 or split.dim is None:
        return None
    if not split.is_stacked:
        return BucketKind.PERMUTED
    full_bytes = split.numel * dtypes.computed.itemsize
    if split.slot_numel % dtypes.alignment_numel or not cost.deserves_message(full_bytes):
        return None
    return BucketKind.IN_PLACE


def aligned(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def plan_flat_layout(params: Sequence[ParamSpec], num_ranks: int) -> UnitLayout:
    """Lay the parameters of every lane one after another, in one message.

    Parameters whose size keeps the next one aligned come first: kernels are slower on weights
    that do not start at a multiple of 16 bytes.
    """
    full = OffsetAllocator()
    lanes = []
    for (dtypes, is_trainable), indices in params_by_lane(params).items():
        alignment, itemsize = dtypes.alignment_numel, dtypes.computed.itemsize
        ordered = sorted(indices, key=lambda index: params[index].split.numel % alignment != 0)
        total = sum(params[index].split.numel for index in indices)
        segment_numel = aligned(-(-total // num_ranks), alignment)
        slab_start = full.take(num_ranks * segment_numel * itemsize)
        slots: list[Slot] = []
        start = 0
        for index in ordered:
            numel = params[index].split.numel
            slots.append(Slot(index, start, numel, slab_start + start * itemsize))
            start += numel
        bucket = Bucket(tuple(slots), segment_numel, 0, BucketKind.FLAT)
        lanes.append(Lane(dtypes, is_trainable, (bucket,)))
    return UnitLayout(tuple(params), tuple(lanes), num_ranks, full.num_bytes)


def plan_unit(
    params: Sequence[ParamSpec], num_ranks: int, cost: CostModel, *, is_flat: bool
) -> UnitLayout:
    """The layout of a unit; `is_flat` if its parameters are to be cut as one.

    On one rank nothing is cut, and rows lie one after another anyway: a flat message needs no copy
    of its own for each parameter, and none at all where nothing is cast.
    """
    if is_flat or num_ranks == 1:
        return plan_flat_layout(params, num_ranks)
    return plan_layout(params, num_ranks, cost)
