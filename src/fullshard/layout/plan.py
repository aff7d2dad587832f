"""The plan of a unit: how its parameters are cut into lanes and buckets.

Three arrangements come out of one plan and share their offsets:

- the **shard buffer** of a lane: this rank's shards, bucket by bucket. It is the input of the
  all-gather, has the shape of the reduce-scatter's result, and is what the optimizer updates;
- a **bucket**: `num_ranks` segments, one per rank, each a piece of that rank's shard buffer;
- the **full buffer**: the full parameters of the unit, each one contiguous.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from math import gcd
from typing import NamedTuple

import torch

from fullshard._torch import REDUCES_IN_PARAM_DTYPE
from fullshard.errors import ConfigError
from fullshard.layout.split import Split


@dataclass(frozen=True, slots=True)
class DtypePlan:
    """The dtypes of a parameter: stored in, computed in, and its gradient reduced in.

    `wire` is the dtype in which the gradient travels: the same as `reduced`, or narrower. `grad`
    is the dtype of the shard's gradient: usually `stored`; None for whatever backward computes.
    """

    stored: torch.dtype
    computed: torch.dtype
    reduced: torch.dtype
    wire: torch.dtype
    grad: torch.dtype | None

    @classmethod
    def of(
        cls,
        stored: torch.dtype,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> DtypePlan:
        """Apply a precision policy. Parameters that are not floating point keep their dtype.

        `wire_dtype` counts only where it is narrower than the dtype of the reduction.
        """
        if not stored.is_floating_point:
            return cls(stored, stored, stored, stored, stored)
        computed = param_dtype or stored
        reduced = reduce_dtype or computed
        wire = wire_dtype or reduced
        if wire.itemsize >= reduced.itemsize:
            wire = reduced
        return cls(stored, computed, reduced, wire, stored)

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
    def casts_to_gather(self) -> bool:
        return self.stored != self.computed

    @property
    def sums_on_arrival(self) -> bool:
        """Whether ranks sum what they receive in a wider dtype than it travels in (rule 6)."""
        return self.wire != self.reduced

    @property
    def alignment_numel(self) -> int:
        """Elements that fill 16 bytes in the narrowest of these dtypes.

        A bucket has the same number of elements in every dtype, so this keeps all of them
        multiples of 16 bytes; NCCL falls back to element-sized copies otherwise.
        """
        dtypes = (self.stored, self.computed, self.reduced, self.wire, self.grad or self.reduced)
        return max(1, 16 // min(dtype.itemsize for dtype in dtypes))


@dataclass(frozen=True, slots=True)
class CostModel:
    """When a parameter is worth a bucket of its own, or a unit of its own.

    A parameter that shares its bucket is copied out of it after the all-gather. A parameter with
    its own bucket is not, but costs one more collective, whose latency grows with the number of
    ranks. So the parameter has to be large, and each rank's part of it too. A parameter as large
    as an embedding is also gathered and freed by itself (rule 15).
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
            f"{name}: a number of megabytes is expected, found {value!r}; unset it for the default "
            f"of {default}."
        ) from error


FULL_ALIGNMENT_BYTES = 128


class BucketKind(Enum):
    """How a gathered bucket becomes full parameters."""

    IN_PLACE = "in place"  # the bucket is one parameter, as it lies in the full buffer
    SPLIT = "split"  # several parameters share the bucket and are copied out of it
    PERMUTED = "permuted"  # sharded along a dim other than the first: copied out, row by row
    FLAT = "flat"  # all parameters one after another, as they lie in the full buffer

    @property
    def is_copied(self) -> bool:
        """Whether parameters are copied out of the gathered bucket."""
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
    """Where a parameter lies in each rank's segment of its bucket, and in the full buffer.

    In a flat bucket, whose parameters cross segments, `offset` counts from the bucket's start.
    """

    param_index: int
    offset: int
    numel: int
    full_offset_bytes: int


_WORDS = {16: torch.complex128, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class CopyIndex:
    """An index for `torch.gather` that copies memory by words of `num_bytes`."""

    num_bytes: int
    index: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """A dtype as large as a word. Memory is copied as this dtype, whatever it holds."""
        return _WORDS[self.num_bytes]


class Rows(NamedTuple):
    """Elements of a tensor that lie in the same columns of several ranks' segments.

    `first` is where they begin in the tensor; each next rank's elements begin `stride` later.
    """

    slot: int
    rank: int
    num_ranks: int
    column: int
    width: int
    first: int
    stride: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A contiguous region that travels in one collective.

    `segment_numel` is one rank's part, at `buffer_offset` of its shard buffer. The padding at the
    end of the segments of a split bucket is copied to `padding_offset_bytes` of the full buffer.
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

    def columns(
        self, start: int, stop: int, num_ranks: int, numels: Sequence[int]
    ) -> Iterator[Rows]:
        """Yield which parts of each slot's tensor lie in columns `start` to `stop` of all segments.

        `numels` are the tensors' sizes. Elements of no tensor count as one more slot: padding, and
        what the last ranks lack of a tensor that is split unevenly. Not for permuted buckets.
        """
        none, size, used = len(self.slots), self.segment_numel, self.used_numel
        both = list(enumerate(zip(self.slots, numels, strict=True)))
        # Slot, first column, stride to the next rank's elements, and where they begin and end.
        if self.kind is BucketKind.FLAT:
            places = [(i, 0, size, slot.offset, slot.offset + numel) for i, (slot, numel) in both]
            places.append((none, 0, size, used, num_ranks * size))
        else:
            places = [(i, slot.offset, slot.numel, 0, numel) for i, (slot, numel) in both]
            places.append((none, used, size - used, 0, 0))
            places += [(none, col, gap, end, num_ranks * gap) for _, col, gap, _, end in places]
        for index, column, stride, begin, end in places:
            low, high = max(start - column, 0), min(stop - column, stride)
            if low >= high:
                continue
            # Ranks that have all of these columns; the ones before and after have only some.
            first, after = -((low - begin) // stride), (end - high) // stride + 1
            for rank, num in dict.fromkeys(((first - 1, 1), (first, after - first), (after, 1))):
                at = rank * stride
                start_at, stop_at = max(at + low, begin), min(at + high, end)
                if num > 0 and start_at < stop_at:
                    place = column + start_at - at, stop_at - start_at
                    yield Rows(index, rank, num, *place, start_at - begin, stride)

    def copy_out_index(
        self, num_ranks: int, itemsize: int, device: torch.device
    ) -> CopyIndex | None:
        """Which words of a gathered split bucket go into the full buffer, from the first slot on.

        None if parameters do not consist of whole words. Words between two of them are arbitrary.
        """
        word = self._word_bytes(itemsize)
        if not word:
            return None
        slots = [slot for slot in self.slots if slot.numel]
        start, last = slots[0].full_offset_bytes, slots[-1]
        end = last.full_offset_bytes + num_ranks * last.numel * itemsize
        index = torch.zeros((end - start) // word, dtype=torch.int32, device=device)
        num_words = num_ranks * self.segment_numel * itemsize // word
        bucket = torch.arange(num_words, dtype=torch.int32, device=device).view(num_ranks, -1)
        for slot in slots:
            first, width = slot.offset * itemsize // word, slot.numel * itemsize // word
            part = bucket[:, first : first + width].reshape(-1)
            index[(slot.full_offset_bytes - start) // word :][: part.numel()] = part
        return CopyIndex(word, index)

    def copy_in_index(
        self, num_ranks: int, itemsize: int, device: torch.device
    ) -> CopyIndex | None:
        """Which words of the full tensors, lying one after another, go into a split bucket.

        None if the tensors do not consist of whole words, or if segments have padding.
        """
        word = self._word_bytes(itemsize)
        if not word or self.padding_numel:
            return None
        num_words = num_ranks * self.segment_numel * itemsize // word
        widths = [num_ranks * slot.numel * itemsize // word for slot in self.slots]
        parts = torch.arange(num_words, dtype=torch.int32, device=device).split(widths)
        return CopyIndex(word, torch.cat([part.view(num_ranks, -1) for part in parts], 1).view(-1))

    def _word_bytes(self, itemsize: int) -> int:
        """The size of the words that all parts of a split bucket are made of; 0 if too small."""
        numels = [numel for slot in self.slots for numel in (slot.offset, slot.numel)]
        word = gcd(16, *(numel * itemsize for numel in (*numels, self.segment_numel)))
        return word if word in _WORDS else 0

    @property
    def used_numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def padding_numel(self) -> int:
        """Unused elements at the end of each segment, for buckets that are not flat."""
        return self.segment_numel - self.used_numel


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
        return self.num_ranks == 1 and all(
            bucket.kind is BucketKind.FLAT and not lane.dtypes.casts_to_gather
            for lane in self.lanes
            for bucket in lane.buckets
        )


def plan_unit(
    params: Sequence[ParamSpec], num_ranks: int, cost: CostModel, *, is_flat: bool
) -> UnitLayout:
    """The layout of a unit, with lanes in the order of their first parameters.

    With `is_flat`, parameters are cut as one, otherwise each by itself. On one rank nothing is cut,
    so the flat layout serves both APIs: it needs no copy per parameter, and none at all where
    nothing is cast.
    """
    by_lane: dict[tuple[DtypePlan, bool], list[int]] = {}
    for index, param in enumerate(params):
        by_lane.setdefault((param.dtypes, param.is_trainable), []).append(index)
    full = _FullBuffer()
    lanes = []
    for (dtypes, is_trainable), indices in by_lane.items():
        splits = {index: params[index].split for index in indices}
        if is_flat or num_ranks == 1:
            buckets = [_flat_bucket(splits, dtypes, num_ranks, full)]
        else:
            buckets = list(_buckets(splits, dtypes, num_ranks, full, cost))
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


def _flat_bucket(
    splits: dict[int, Split], dtypes: DtypePlan, num_ranks: int, full: _FullBuffer
) -> Bucket:
    """Put parameters one after another, and cut them evenly.

    Parameters whose size keeps the next one aligned come first: kernels are slower on weights
    that do not start at a multiple of 16 bytes.
    """
    alignment, itemsize = dtypes.alignment_numel, dtypes.computed.itemsize
    total = sum(split.numel for split in splits.values())
    segment_numel = _aligned(-(-total // num_ranks), alignment)
    full_start = full.take(num_ranks * segment_numel * itemsize)
    slots: list[Slot] = []
    start = 0
    for index, split in sorted(splits.items(), key=lambda item: item[1].numel % alignment != 0):
        slots.append(Slot(index, start, split.numel, full_start + start * itemsize))
        start += split.numel
    return Bucket(tuple(slots), segment_numel, 0, BucketKind.FLAT)


def _buckets(
    splits: dict[int, Split], dtypes: DtypePlan, num_ranks: int, full: _FullBuffer, cost: CostModel
) -> Iterator[Bucket]:
    """Buckets of single parameters, then the one bucket that all other parameters share."""
    alignment, itemsize = dtypes.alignment_numel, dtypes.computed.itemsize
    own = {index: _own_kind(split, dtypes, num_ranks, cost) for index, split in splits.items()}
    buffer_offset = 0
    for index, kind in own.items():
        if kind is not None:
            split = splits[index]
            segment_numel = _aligned(split.slot_numel, alignment)
            kept_numel = num_ranks * segment_numel if kind is BucketKind.IN_PLACE else split.numel
            slot = Slot(index, 0, split.slot_numel, full.take(kept_numel * itemsize))
            yield Bucket((slot,), segment_numel, buffer_offset, kind)
            buffer_offset += segment_numel
    # Parameters of one size lie side by side, so that a run of them is copied out at once.
    shared = [(index, splits[index].slot_numel) for index, kind in own.items() if kind is None]
    if not shared:
        return
    slots: list[Slot] = []
    offset = 0
    for index, numel in sorted(shared, key=lambda item: -item[1]):
        slots.append(Slot(index, offset, numel, full.take(num_ranks * numel * itemsize)))
        offset += numel
    segment_numel = _aligned(offset, alignment)
    padding_offset = full.take(num_ranks * (segment_numel - offset) * itemsize)
    yield Bucket(tuple(slots), segment_numel, buffer_offset, BucketKind.SPLIT, padding_offset)


def _own_kind(
    split: Split, dtypes: DtypePlan, num_ranks: int, cost: CostModel
) -> BucketKind | None:
    """The kind of the bucket that a parameter has to itself; None if it shares one."""
    if split.slot_numel == 0 or split.dim is None:
        return None
    if not split.is_stacked:
        return BucketKind.PERMUTED
    full_bytes = split.numel * dtypes.computed.itemsize
    if split.slot_numel % dtypes.alignment_numel:
        return None
    if not cost.deserves_bucket(full_bytes, num_ranks):
        return None
    return BucketKind.IN_PLACE
