"""The plan of a unit: how its parameters are cut into lanes and buckets.

Three arrangements come out of one plan and share their offsets:

- the **shard buffer** of a lane: this rank's shards, bucket by bucket. It is the input of the
  all-gather, has the shape of the reduce-scatter's result, and is what the optimizer updates;
- a **bucket**: `num_ranks` segments, one per rank, each a piece of that rank's shard buffer;
- the **full buffer**: the full parameters of the unit, each one contiguous.

A bucket's `CopyTable` says how the last two are related.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from math import lcm
from typing import NamedTuple

import torch

from fullshard._torch import REDUCES_IN_PARAM_DTYPE
from fullshard.errors import ConfigError
from fullshard.layout.copies import CopyTable
from fullshard.layout.split import FlatSplit, Split
from fullshard.layout.wire import Plain, Wire


@dataclass(frozen=True, slots=True)
class DtypePlan:
    """The dtypes of a parameter: stored in, computed in, and its gradient reduced in.

    `gather_wire` and `reduce_wire` say how it and its gradient travel, and `replica_wire` how sums
    of this travel between replicas. `grad` is the dtype of the
    shard's gradient: usually `stored`; None for whatever backward computes.
    """

    stored: torch.dtype
    computed: torch.dtype
    reduced: torch.dtype
    gather_wire: Wire
    reduce_wire: Wire
    replica_wire: Wire
    grad: torch.dtype | None

    @classmethod
    def of(
        cls,
        stored: torch.dtype,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        gather_wire: Wire | None = None,
        reduce_wire: Wire | None = None,
        replica_wire: Wire | None = None,
    ) -> DtypePlan:
        """Apply a precision policy. Parameters that are not floating point keep their dtype.

        A plain wire of gradients counts only where it is narrower than the dtype of the reduction.
        Replicas use the same, unless they are given another or it is float16, which may not hold
        sums.
        """
        if not stored.is_floating_point:
            plain = Plain(stored)
            return cls(stored, stored, stored, plain, plain, plain, stored)
        computed = param_dtype or stored
        reduced = reduce_dtype or computed
        if reduce_wire is None or reduce_wire.dtype.itemsize >= reduced.itemsize:
            reduce_wire = Plain(reduced)
        between = replica_wire or reduce_wire
        if not between.holds_sums or between.dtype.itemsize >= reduced.itemsize:
            between = Plain(reduced)
        gather_wire = gather_wire or Plain(computed)
        return cls(stored, computed, reduced, gather_wire, reduce_wire, between, stored)

    @staticmethod
    def unit_reduce_dtype(
        given: torch.dtype | None, trained: Iterable[torch.dtype], *, is_flat: bool
    ) -> torch.dtype | None:
        """The `reduce_dtype` of a unit's parameters; None for the dtype they are computed in.

        If the policy sets none, the installed torch decides: since 2.15 `fully_shard` reduces in
        the dtype that the gradients of a unit's trained parameters promote to.
        """
        if given is not None or is_flat or REDUCES_IN_PARAM_DTYPE:
            return given
        floats = [dtype for dtype in trained if dtype.is_floating_point]
        return reduce(torch.promote_types, floats) if floats else None

    @property
    def arrives_as_computed(self) -> bool:
        """Whether what is gathered can be read as it is."""
        return self.gather_wire == Plain(self.computed)

    @property
    def sums_on_arrival(self) -> bool:
        """Whether ranks sum what they receive, instead of the backend (rule 6: local sum)."""
        return self.reduce_wire != Plain(self.reduced)

    @property
    def alignment_numel(self) -> int:
        """Segments consist of so many elements, or a multiple: the most that any wire asks for.

        A bucket has the same number of elements in every dtype, so this keeps all of them
        multiples of 16 bytes.
        """
        dtypes = (self.stored, self.computed, self.reduced, self.grad or self.reduced)
        wires = (self.gather_wire, self.reduce_wire, *map(Plain, dtypes))
        return lcm(*(wire.alignment_numel for wire in wires))


@dataclass(frozen=True, slots=True)
class CostModel:
    """When a parameter is worth a bucket of its own, or a unit of its own.

    A parameter that shares its bucket is copied out of it after the all-gather. A parameter with
    its own bucket is not, but costs one more collective, whose latency grows with the number of
    ranks. So the parameter has to be large, and each rank's part of it too. A parameter as large
    as an embedding is also gathered and freed by itself (rule 15: large ones alone).
    """

    own_bucket_bytes: float
    own_segment_bytes: float
    own_unit_bytes: float = 64e6

    def deserves_bucket(self, full_bytes: int, num_ranks: int) -> bool:
        return (
            full_bytes >= self.own_bucket_bytes and full_bytes >= num_ranks * self.own_segment_bytes
        )

    def deserves_unit(self, full_bytes: int, num_ranks: int) -> bool:
        return full_bytes >= self.own_unit_bytes and self.deserves_bucket(full_bytes, num_ranks)

    @classmethod
    def of_device(cls, device_type: str) -> CostModel:
        """The model of a device: gloo between CPUs, NCCL and its like between accelerators.

        On a CPU a collective of gloo takes as long as copying 2 MB twice. On an accelerator a copy
        is some thirty times as fast and a collective has to cross a fabric; there a parameter
        shares its bucket unless it is as large as an embedding. `FULLSHARD_OWN_BUCKET_MB` and
        `FULLSHARD_OWN_SEGMENT_MB` replace these figures, which
        `benchmarks/bench_collectives.py` prints for a machine.
        """
        bucket_mb, segment_mb = (2.25, 0.0) if device_type == "cpu" else (64.0, 2.0)
        return cls(
            1e6 * _number_from_environment("FULLSHARD_OWN_BUCKET_MB", bucket_mb),
            1e6 * _number_from_environment("FULLSHARD_OWN_SEGMENT_MB", segment_mb),
        )


def _number_from_environment(name: str, default: float) -> float:
    value = os.environ.get(name)
    try:
        return default if value is None else float(value)
    except ValueError as error:
        raise ConfigError(
            f"{name} must be a number of megabytes, not {value!r}; unset it for the default of "
            f"{default}."
        ) from error


FULL_ALIGNMENT_BYTES = 128


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, as the plan sees it."""

    name: str
    split: Split
    dtypes: DtypePlan
    is_trainable: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter lies in each rank's segment of its bucket, and in the full buffer."""

    param_index: int
    split: Split
    offset: int
    full_offset_bytes: int

    def in_segment(self, rank: int) -> int:
        """Where in its segment a rank's shard begins."""
        return self.offset + self.split.slot_offset(rank)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A contiguous region that travels in one collective.

    `segment_numel` is one rank's part, at `buffer_offset` of its shard buffer. `table` says which
    elements of which parameters it consists of. If the parameters lie in it as they are, it is
    gathered into the full buffer, at `full_offset_bytes`; otherwise this is None, and parameters
    are copied out of it.
    """

    slots: tuple[Slot, ...]
    segment_numel: int
    buffer_offset: int
    table: CopyTable
    full_offset_bytes: int | None

    @property
    def is_copied(self) -> bool:
        return self.full_offset_bytes is None

    def piece(self, columns: range) -> CopyTable:
        """The table of some columns of all segments."""
        return CopyTable.of(_placed(self.slots), self.segment_numel, columns)


def _placed(slots: Sequence[Slot]) -> list[tuple[Split, int]]:
    return [(slot.split, slot.offset) for slot in slots]


@dataclass(frozen=True, slots=True)
class Lane:
    """The buckets of parameters with the same dtypes that are all trainable, or all frozen."""

    dtypes: DtypePlan
    is_trainable: bool
    buckets: tuple[Bucket, ...]

    @property
    def shard_numel(self) -> int:
        return sum(bucket.segment_numel for bucket in self.buckets)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The plan of one unit."""

    params: tuple[ParamSpec, ...]
    lanes: tuple[Lane, ...]
    num_ranks: int
    full_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether the shard buffers are the full parameters as forward needs them."""
        return self.num_ranks == 1 and not any(
            bucket.is_copied or lane.dtypes.stored != lane.dtypes.computed
            for lane in self.lanes
            for bucket in lane.buckets
        )


def plan_unit(
    params: Sequence[ParamSpec], num_ranks: int, cost: CostModel, *, is_flat: bool
) -> UnitLayout:
    """The layout of a unit, with lanes in the order of their first parameters.

    With `is_flat`, parameters are split as one, otherwise each by itself. On one rank nothing is
    split, so the flat layout serves both APIs: it needs no copy per parameter, and none at all
    where nothing is cast.
    """
    by_lane: dict[tuple[DtypePlan, bool], list[int]] = {}
    for index, param in enumerate(params):
        by_lane.setdefault((param.dtypes, param.is_trainable), []).append(index)
    full = _FullBuffer()
    lanes = []
    for (dtypes, is_trainable), indices in by_lane.items():
        splits = {index: params[index].split for index in indices}
        if is_flat or num_ranks == 1:
            groups = [_flat(splits, dtypes, num_ranks)]
        else:
            groups = _grouped(splits, dtypes, num_ranks, cost)
        buckets: list[Bucket] = []
        for group in groups:
            offset = sum(bucket.segment_numel for bucket in buckets)
            buckets.append(_bucket(group, dtypes, num_ranks, offset, full))
        lanes.append(Lane(dtypes, is_trainable, tuple(buckets)))
    return UnitLayout(tuple(params), tuple(lanes), num_ranks, full.num_bytes)


class _FullBuffer:
    """Hands out aligned regions of the full buffer."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def take(self, num_bytes: int) -> int:
        start = _aligned(self.num_bytes, FULL_ALIGNMENT_BYTES)
        self.num_bytes = start + num_bytes
        return start


def _aligned(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


class _Group(NamedTuple):
    """The parameters of a bucket: their splits, and where in a segment the slot of each begins."""

    splits: dict[int, Split]
    offsets: tuple[int, ...]
    segment_numel: int

    @property
    def table(self) -> CopyTable:
        return CopyTable.of(
            [*zip(self.splits.values(), self.offsets, strict=True)], self.segment_numel
        )


def _bucket(
    group: _Group, dtypes: DtypePlan, num_ranks: int, buffer_offset: int, full: _FullBuffer
) -> Bucket:
    table, itemsize = group.table, dtypes.computed.itemsize
    in_bucket = table.offsets
    if in_bucket is None:
        start = None
        offsets = [full.take(split.numel * itemsize) for split in group.splits.values()]
    else:
        start = full.take(num_ranks * group.segment_numel * itemsize)
        offsets = [start + offset * itemsize for offset in in_bucket]
    slots = tuple(
        Slot(index, split, offset, full_offset)
        for (index, split), offset, full_offset in zip(
            group.splits.items(), group.offsets, offsets, strict=True
        )
    )
    return Bucket(slots, group.segment_numel, buffer_offset, table, start)


def _flat(splits: dict[int, Split], dtypes: DtypePlan, num_ranks: int) -> _Group:
    """Parameters one after another, split evenly.

    Those whose size keeps the next one aligned come first: kernels are slower on weights that do
    not start at a multiple of 16 bytes.
    """
    alignment = dtypes.alignment_numel
    total = sum(split.numel for split in splits.values())
    segment_numel = _aligned(-(-total // num_ranks), alignment)
    flat: dict[int, Split] = {}
    start = 0
    for index, split in sorted(splits.items(), key=lambda item: item[1].numel % alignment != 0):
        flat[index] = FlatSplit(split.shape, start, segment_numel, num_ranks)
        start += split.numel
    return _Group(flat, (0,) * len(flat), segment_numel)


def _grouped(
    splits: dict[int, Split], dtypes: DtypePlan, num_ranks: int, cost: CostModel
) -> list[_Group]:
    """Parameters that have a bucket to themselves, and all others in one.

    One by itself needs no copy, if its shards are whole rows; it has to be worth a collective.
    """
    groups, shared = [], {}
    for index, split in splits.items():
        full_bytes = split.numel * dtypes.computed.itemsize
        alone = _Group({index: split}, (0,), _aligned(split.slot_numel, dtypes.alignment_numel))
        is_worth_it = split.numel > 0 and cost.deserves_bucket(full_bytes, num_ranks)
        if is_worth_it and alone.table.offsets is not None:
            groups.append(alone)
        else:
            shared[index] = split
    if shared:
        # Larger ones first: what follows them stays aligned.
        shared = dict(sorted(shared.items(), key=lambda item: -item[1].slot_numel))
        ends = list(accumulate(split.slot_numel for split in shared.values()))
        groups.append(_Group(shared, (0, *ends[:-1]), _aligned(ends[-1], dtypes.alignment_numel)))
    return groups
