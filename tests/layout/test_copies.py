"""Splits, copy tables and the programs that follow them: every element arrives where it belongs.

What is expected is computed one element at a time, from `boxes` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.device import ResizableBuffer, device_for
from fullshard.layout import (
    NO_TENSOR,
    Bucket,
    CopyTable,
    DtypePlan,
    FlatSplit,
    RowSplit,
    Run,
    Slot,
    Split,
    Whole,
)
from fullshard.layout.split import Box, slices
from fullshard.unit.context import CommContext
from fullshard.unit.copy_program import Packer, packer, unpacker

many = settings(derandomize=True, deadline=None, max_examples=100)
PLAN = DtypePlan.of(torch.float32)
# Strided views on the one, a kernel on the other.
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_devices = pytest.mark.parametrize("device", DEVICES)


@dataclass(frozen=True, slots=True)
class RowBlocks(Split):
    """Blocks of whole rows in turn, first dim only: a layout that the library does not have."""

    shape: tuple[int, ...]
    block_rows: int
    num_ranks: int

    def _starts(self, rank: int) -> range:
        return range(rank * self.block_rows, self.shape[0], self.num_ranks * self.block_rows)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        rest = self.shape[1:]
        return tuple(
            Box((at, *(0 for _ in rest)), (min(self.block_rows, self.shape[0] - at), *rest))
            for at in self._starts(rank)
        )

    def runs(self, rank: int) -> tuple[Run, ...]:
        row = prod(self.shape[1:])
        return tuple(Run(box.offsets[0] * row, box.numel) for box in self.boxes(rank))

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        return (sum(box.sizes[0] for box in self.boxes(rank)), *self.shape[1:])


@dataclass(frozen=True, slots=True)
class Owned(Split):
    """The whole tensor on one rank: another layout that the library does not have."""

    shape: tuple[int, ...]
    owner: int
    num_ranks: int

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return (Box.whole(self.shape),) if rank == self.owner else ()

    def runs(self, rank: int) -> tuple[Run, ...]:
        return (Run(0, self.numel),) if rank == self.owner else ()

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        return self.shape if rank == self.owner else (0,)


shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def separate_splits(draw: st.DrawFn, num_ranks: int) -> Split:
    shape = draw(shapes)
    return draw(
        st.one_of(
            st.just(Whole((), num_ranks)),
            st.builds(RowSplit, st.just(shape), st.integers(0, len(shape) - 1), st.just(num_ranks)),
            st.builds(RowBlocks, st.just(shape), st.integers(1, 3), st.just(num_ranks)),
            st.builds(Owned, st.just(shape), st.integers(0, num_ranks - 1), st.just(num_ranks)),
        )
    )


@st.composite
def buckets(draw: st.DrawFn) -> Bucket:
    """A bucket of tensors that are split by themselves, or as one."""
    num_ranks = draw(st.integers(1, 5))
    if draw(st.booleans()):
        splits = draw(st.lists(separate_splits(num_ranks), min_size=1, max_size=5))
        ends = list(accumulate(split.slot_numel for split in splits))
        offsets = [0, *ends[:-1]]
        segment_numel = ends[-1] + draw(st.integers(0, 3))
    else:
        drawn = draw(st.lists(shapes, min_size=1, max_size=5))
        ends = list(accumulate(map(prod, drawn)))
        segment_numel = -(-ends[-1] // num_ranks) + draw(st.integers(0, 3))
        starts = [0, *ends[:-1]]
        pairs = zip(drawn, starts, strict=True)
        splits = [FlatSplit(shape, start, segment_numel, num_ranks) for shape, start in pairs]
        offsets = [0] * len(splits)
    slots, at = [], 0
    for index, (split, offset) in enumerate(zip(splits, offsets, strict=True)):
        slots.append(Slot(index, split, offset, 4 * at))
        at += split.numel + draw(st.integers(0, 2))
    table = CopyTable.of([(slot.split, slot.offset) for slot in slots], segment_numel)
    return Bucket(tuple(slots), segment_numel, 0, table, None)


def tensors_of(bucket: Bucket, device: str = "cpu") -> list[torch.Tensor]:
    """Tensors in which every element of the bucket has a number of its own."""
    sizes = [slot.split.numel for slot in bucket.slots]
    parts = torch.arange(1.0, 1.0 + sum(sizes), device=device).split(sizes)
    return [part.view(slot.split.shape) for part, slot in zip(parts, bucket.slots, strict=True)]


def expected_bucket(bucket: Bucket, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """What a bucket holds, on the CPU."""
    num_ranks = bucket.slots[0].split.num_ranks
    segments = torch.zeros(num_ranks, bucket.segment_numel)
    for rank, segment in enumerate(segments):
        for slot, tensor in zip(bucket.slots, tensors, strict=True):
            at = slot.in_segment(rank)
            for box in slot.split.boxes(rank) if tensor is not None else ():
                part = tensor[slices(box, Box.whole(slot.split.shape))].reshape(-1)
                segment[at : at + part.numel()] = part
                at += part.numel()
    return segments.view(-1)


def context(device: str) -> CommContext:
    return CommContext(device_for(torch.device(device)))


def packing(bucket: Bucket, device: str, columns: range | None = None) -> Packer:
    table = bucket.table if columns is None else bucket.piece(columns)
    num_ranks = bucket.slots[0].split.num_ranks
    return packer(table, PLAN, PLAN.reduce_wire, num_ranks, context(device))


@many
@given(st.integers(1, 5).flatmap(separate_splits))
def test_runs_boxes_and_shapes_of_a_split_say_the_same(split: Split) -> None:
    numbers = torch.arange(split.numel)
    for rank in range(split.num_ranks):
        runs = [
            numbers[run.first + index * run.stride :][: run.numel]
            for run in split.runs(rank)
            for index in range(run.num)
        ]
        whole = Box.whole(split.shape)
        boxes = [numbers.view(split.shape)[slices(b, whole)].reshape(-1) for b in split.boxes(rank)]
        held = torch.cat([numbers[:0], *boxes])
        assert sorted(torch.cat([numbers[:0], *runs]).tolist()) == sorted(held.tolist())
        assert split.shard_numel(rank) == held.numel() <= split.slot_numel


@on_devices
@many
@given(buckets())
def test_a_bucket_is_packed_with_every_element_in_its_place(device: str, bucket: Bucket) -> None:
    tensors = tensors_of(bucket, device)
    expected = expected_bucket(bucket, tensors)
    found = torch.full(expected.shape, torch.nan, device=device)
    packing(bucket, device).pack(tensors, found)
    assert torch.equal(found.cpu(), expected)
    assert sum(copy.numel for copy in bucket.table.copies) == expected.numel()


@on_devices
@many
@given(buckets(), st.data())
def test_missing_tensors_are_zeros_and_others_are_cast_and_divided(
    device: str, bucket: Bucket, data: st.DataObject
) -> None:
    tensors = [
        tensor.to(torch.bfloat16) if data.draw(st.booleans()) else None
        for tensor in tensors_of(bucket, device)
    ]
    expected = expected_bucket(bucket, tensors)
    found = torch.full(expected.shape, torch.nan, device=device)
    packing(bucket, device).pack(tensors, found, divisor=4.0)
    assert torch.equal(found.cpu(), expected / 4)


@on_devices
@many
@given(buckets(), st.data())
def test_the_columns_of_a_bucket_are_packed_like_all_of_it(
    device: str, bucket: Bucket, data: st.DataObject
) -> None:
    tensors = tensors_of(bucket, device)
    num_ranks, size = bucket.slots[0].split.num_ranks, bucket.segment_numel
    expected = expected_bucket(bucket, tensors).view(num_ranks, -1)
    width = data.draw(st.integers(1, max(size, 1)))
    for start in range(0, size, width):
        columns = range(start, min(start + width, size))
        found = torch.full((num_ranks * len(columns),), torch.nan, device=device)
        packing(bucket, device, columns).pack(tensors, found)
        assert torch.equal(found.view(num_ranks, -1).cpu(), expected[:, start : columns.stop])


@on_devices
@many
@given(buckets())
def test_tensors_are_unpacked_from_where_they_were_packed(device: str, bucket: Bucket) -> None:
    tensors = tensors_of(bucket, device)
    gathered = expected_bucket(bucket, tensors).to(device)
    last = bucket.slots[-1]
    full = ResizableBuffer(last.full_offset_bytes + 4 * last.split.numel, gathered.device)
    program = unpacker(full, context(device))
    program.add(bucket, gathered)
    full.view(0, (full.num_bytes,), torch.uint8).fill_(0xFF)
    program.run()
    for slot, tensor in zip(bucket.slots, tensors, strict=True):
        found = full.view(slot.full_offset_bytes, slot.split.shape, torch.float32)
        assert torch.equal(found, tensor)


@many
@given(buckets())
def test_offsets_are_where_tensors_lie_in_a_bucket_as_they_are(bucket: Bucket) -> None:
    tensors, offsets = tensors_of(bucket), bucket.table.offsets
    found = expected_bucket(bucket, tensors)
    if offsets is None:
        assert not isinstance(bucket.slots[0].split, FlatSplit)
        return
    for tensor, offset in zip(tensors, offsets, strict=True):
        assert torch.equal(found[offset : offset + tensor.numel()], tensor.view(-1))


def test_a_table_is_as_short_as_the_splits_allow() -> None:
    even, uneven = RowSplit((1024, 3), 0, 64), RowSplit((1000, 3), 0, 64)
    assert len(CopyTable.of([(even, 0)], 48).copies) == 1
    found = [copy.tensor for copy in CopyTable.of([(even, 0), (uneven, 48)], 96).copies]
    # 62 ranks have as much of the second, the next one has less, and the last one nothing.
    assert sorted(found) == [NO_TENSOR, NO_TENSOR, 0, 1, 1]
    columns = RowSplit((16, 1024), 1, 64)
    assert len(CopyTable.of([(columns, 0)], 256).copies) == 1
    flat = [FlatSplit((100,), start, 75, 4) for start in (0, 100, 200)]
    assert CopyTable.of([(split, 0) for split in flat], 75).offsets == (0, 100, 200)


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tensor_that_is_not_contiguous_is_packed_as_it_reads(
    device: str, dtype: torch.dtype
) -> None:
    rows, columns = RowSplit((6, 4), 0, 3), RowSplit((4, 6), 1, 3)
    table = CopyTable.of([(rows, 0), (columns, 8)], 16)
    numbers = torch.arange(24.0, device=device)
    tensors = [numbers.to(dtype).view(4, 6).t(), numbers.view(6, 4).t()]
    found = torch.empty(48, device=device)
    bucket = Bucket((Slot(0, rows, 0, 0), Slot(1, columns, 8, 0)), 16, 0, table, None)
    packing(bucket, device).pack(tensors, found)
    assert torch.equal(found.cpu(), expected_bucket(bucket, tensors))
