"""layout/: where every element lies, checked by carrying numbered elements through the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fullshard.errors import ConfigError
from fullshard.layout import (
    Bucket,
    BucketKind,
    CostModel,
    DtypePlan,
    Lane,
    ParamSpec,
    Split,
    UnitLayout,
    plan_unit,
)
from fullshard.layout.plan import FULL_ALIGNMENT_BYTES
from fullshard.testing import fake_world
from fullshard.unit.all_gather import permuted_pairs

many = settings(derandomize=True, deadline=None, max_examples=80)

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EMPTY = -1  # a place in the full buffer, a shard buffer or a bucket that nobody wrote to
PADDING = -2

SHARES = CostModel(own_bucket_bytes=inf, own_segment_bytes=0.0)
OWNS = CostModel(own_bucket_bytes=0.0, own_segment_bytes=0.0)


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
num_ranks = st.integers(1, 6)
costs = st.one_of(
    st.just(SHARES),
    st.just(OWNS),
    st.builds(CostModel, st.integers(1, 600), st.integers(0, 100)),
)
dtypes = st.builds(
    DtypePlan.of,
    st.sampled_from((*FLOATS, torch.int64, torch.uint8)),
    st.sampled_from((None, *FLOATS)),
    st.sampled_from((None, *FLOATS)),
    st.sampled_from((None, *FLOATS)),
)


@st.composite
def splits(draw: st.DrawFn, size: int | None = None) -> Split:
    shape = draw(shapes)
    dim = draw(st.integers(0, len(shape) - 1)) if shape else None
    return Split(shape, dim, size or draw(num_ranks))


cut_splits = splits().filter(lambda split: split.dim is not None)


def plan_layout(params: Sequence[ParamSpec], num_ranks: int, cost: CostModel) -> UnitLayout:
    return plan_unit(params, num_ranks, cost, is_flat=False)


@st.composite
def plans(draw: st.DrawFn) -> UnitLayout:
    size = draw(st.integers(2, 6))
    few_dtypes = draw(st.lists(dtypes, min_size=1, max_size=3))
    params = [
        ParamSpec(
            f"layers.{index}.weight",
            draw(splits(size)),
            draw(st.sampled_from(few_dtypes)),
            draw(st.booleans()),
        )
        for index in range(draw(st.integers(0, 7)))
    ]
    return plan_layout(params, size, draw(costs))


def all_buckets(layout: UnitLayout) -> Iterator[tuple[Lane, Bucket]]:
    for lane in layout.lanes:
        for bucket in lane.buckets:
            yield lane, bucket


def numbered(layout: UnitLayout) -> list[torch.Tensor]:
    """Full parameters in which every element of the unit has a number of its own."""
    sizes = [param.split.numel for param in layout.params]
    parts = torch.arange(sum(sizes)).split(sizes)
    return [part.view(e.split.shape) for part, e in zip(parts, layout.params, strict=True)]


def shard_of(full: torch.Tensor, split: Split, rank: int) -> torch.Tensor:
    if split.dim is None:
        return full
    rows = split.rows(rank)
    return full.narrow(split.dim, rows.start, len(rows))


def shards_of(layout: UnitLayout, lane: Lane, fulls: list[torch.Tensor], rank: int) -> torch.Tensor:
    """What a rank keeps of a lane, laid out as the plan says."""
    shard_buffer = torch.full((lane.shard_numel,), EMPTY)
    for bucket in lane.buckets:
        for slot in bucket.slots:
            split = layout.params[slot.param_index].split
            shard = shard_of(fulls[slot.param_index], split, rank).reshape(-1)
            place = shard_buffer[bucket.buffer_offset + slot.offset :][: slot.numel]
            assert (place == EMPTY).all(), "two slots of a shard buffer overlap"
            place[: shard.numel()] = shard
            place[shard.numel() :] = PADDING
    return shard_buffer


class FullBuffer:
    """A full buffer with an element's number at its first byte; no byte is written twice."""

    def __init__(self, num_bytes: int) -> None:
        self._numbers = torch.full((num_bytes,), EMPTY)
        self._is_taken = torch.zeros(num_bytes, dtype=torch.bool)

    def write(self, offset_bytes: int, numbers: torch.Tensor, itemsize: int) -> None:
        assert offset_bytes % FULL_ALIGNMENT_BYTES == 0
        num_bytes = numbers.numel() * itemsize
        taken = self._is_taken[offset_bytes:][:num_bytes]
        assert taken.numel() == num_bytes, "a slot reaches past the end of the full buffer"
        assert not taken.any(), "two slots of the full buffer overlap"
        taken.fill_(True)
        self._numbers[offset_bytes:][:num_bytes:itemsize] = numbers.reshape(-1)

    def read(self, offset_bytes: int, shape: tuple[int, ...], itemsize: int) -> torch.Tensor:
        num_bytes = prod(shape) * itemsize
        return self._numbers[offset_bytes:][:num_bytes:itemsize].view(shape)


def copy_out(full: FullBuffer, layout: UnitLayout, lane: Lane, bucket: Bucket, sent: torch.Tensor):
    """Put a gathered bucket (ranks x segment) into the full buffer, by what the plan says alone."""
    itemsize = lane.dtypes.computed.itemsize
    if bucket.kind is BucketKind.IN_PLACE:
        full.write(bucket.slots[0].full_offset_bytes, sent, itemsize)
    elif bucket.kind is BucketKind.PERMUTED:
        (slot,) = bucket.slots
        split = layout.params[slot.param_index].split
        shards = [
            sent[rank, : split.shard_numel(rank)].view(split.shard_shape(rank))
            for rank in range(layout.num_ranks)
        ]
        full.write(slot.full_offset_bytes, torch.cat(shards, dim=split.dim), itemsize)
    else:
        for slot in bucket.slots:
            part = sent[:, slot.offset : slot.offset + slot.numel]
            full.write(slot.full_offset_bytes, part, itemsize)
        full.write(bucket.padding_offset_bytes, sent[:, bucket.used_numel :], itemsize)


@many
@given(splits())
def test_the_shards_of_a_split_hold_every_element_exactly_once(split: Split) -> None:
    full = torch.arange(split.numel).view(split.shape)
    if split.dim is None:
        assert all(split.shard_shape(rank) == split.shape for rank in range(split.num_ranks))
        return
    shards = [shard_of(full, split, rank) for rank in range(split.num_ranks)]
    assert torch.equal(torch.cat(shards, dim=split.dim), full)
    for rank, shard in enumerate(shards):
        assert shard.shape == split.shard_shape(rank)
        assert shard.numel() == split.shard_numel(rank) <= split.slot_numel


@many
@given(cut_splits)
def test_local_shapes_are_those_of_torch_chunk(split: Split) -> None:
    chunks = torch.empty(split.shape).chunk(split.num_ranks, dim=split.dim)
    rows = [chunk.size(split.dim) for chunk in chunks]
    rows += [0] * (split.num_ranks - len(rows))
    assert [len(split.rows(rank)) for rank in range(split.num_ranks)] == rows


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_local_shapes_and_offsets_are_those_of_dtensor(size: int) -> None:
    examples = [((n, 4, 3), 0) for n in range(12)] + [((2, n, 3), 1) for n in range(12)]
    examples += [((2, 0, n), 2) for n in range(4)] + [((n,), 0) for n in range(12)]
    for rank in range(size):
        with fake_world(size, rank):
            mesh = init_device_mesh("cpu", (size,))
            for shape, dim in examples:
                expected = compute_local_shape_and_global_offset(shape, mesh, [Shard(dim)])
                split = Split(shape, dim, size)
                local_shape, offset = expected
                assert split.shard_shape(rank) == tuple(local_shape)
                if split.rows(rank):
                    assert split.rows(rank).start == offset[dim]


@many
@given(cut_splits)
def test_blocks_are_the_ranks_that_hold_something(split: Split) -> None:
    held = [len(split.rows(rank)) for rank in range(split.num_ranks)]
    blocks = list(split.blocks())
    in_blocks = [block.num_rows for block in blocks for _ in range(block.num_ranks)]
    assert len(blocks) <= 2
    assert in_blocks == [rows for rows in held if rows]
    for block in blocks:
        ranks = range(block.first_rank, block.first_rank + block.num_ranks)
        assert all(held[rank] == block.num_rows for rank in ranks)


@many
@given(splits())
def test_a_stacked_split_is_the_tensor_as_it_lies_in_memory(split: Split) -> None:
    full = torch.arange(split.numel).view(split.shape)
    shards = [shard_of(full, split, rank).reshape(-1) for rank in range(split.num_ranks)]
    if split.is_stacked:
        assert torch.equal(torch.cat(shards), full.reshape(-1))
    if split.dim is not None and split.num_rows % split.num_ranks == 0:
        assert {shard.numel() for shard in shards} == {split.slot_numel}


@many
@given(plans())
def test_what_ranks_send_lands_as_the_full_parameters(layout: UnitLayout) -> None:
    fulls = numbered(layout)
    buffer = FullBuffer(layout.full_bytes)
    for lane in layout.lanes:
        shard_buffers = [shards_of(layout, lane, fulls, rank) for rank in range(layout.num_ranks)]
        for bucket in lane.buckets:
            pieces = [
                shard_buffer[bucket.buffer_offset :][: bucket.segment_numel]
                for shard_buffer in shard_buffers
            ]
            assert all(piece.numel() == bucket.segment_numel for piece in pieces)
            copy_out(buffer, layout, lane, bucket, torch.stack(pieces))
    for lane, bucket in all_buckets(layout):
        for slot in bucket.slots:
            full, itemsize = fulls[slot.param_index], lane.dtypes.computed.itemsize
            found = buffer.read(slot.full_offset_bytes, tuple(full.shape), itemsize)
            assert torch.equal(found, full), layout


@many
@given(plans())
def test_every_element_is_in_one_shard_buffer_exactly(layout: UnitLayout) -> None:
    fulls = numbered(layout)
    copies: Counter[int] = Counter()
    for lane in layout.lanes:
        for rank in range(layout.num_ranks):
            copies.update(shards_of(layout, lane, fulls, rank).tolist())
    for full, param in zip(fulls, layout.params, strict=True):
        expected = layout.num_ranks if param.split.dim is None else 1
        assert all(copies[number] == expected for number in full.reshape(-1).tolist())


@many
@given(plans())
def test_every_parameter_has_one_slot_in_a_lane_of_its_stages_and_trainability(
    layout: UnitLayout,
) -> None:
    found = Counter(slot.param_index for _, bucket in all_buckets(layout) for slot in bucket.slots)
    assert found == Counter(range(len(layout.params)))
    for lane, bucket in all_buckets(layout):
        for slot in bucket.slots:
            param = layout.params[slot.param_index]
            assert (param.dtypes, param.is_trainable) == (lane.dtypes, lane.is_trainable)
    kinds = [(lane.dtypes, lane.is_trainable) for lane in layout.lanes]
    assert len(kinds) == len(set(kinds))


@many
@given(plans())
def test_a_bucket_is_a_multiple_of_16_bytes_per_rank_in_every_stage(layout: UnitLayout) -> None:
    for lane, bucket in all_buckets(layout):
        dtypes = lane.dtypes
        for dtype in (dtypes.stored, dtypes.computed, dtypes.reduced, dtypes.wire):
            assert bucket.segment_numel * dtype.itemsize % 16 == 0
            assert bucket.buffer_offset * dtype.itemsize % 16 == 0


@many
@given(plans())
def test_buckets_fill_their_home_without_gaps(layout: UnitLayout) -> None:
    for lane in layout.lanes:
        end = 0
        for bucket in lane.buckets:
            assert bucket.buffer_offset == end
            end += bucket.segment_numel
            used = 0
            for slot in bucket.slots:
                assert slot.offset == used
                used += slot.numel
            assert used == bucket.used_numel == bucket.segment_numel - bucket.padding_numel
        assert end == lane.shard_numel


@many
@given(plans())
def test_padding_is_less_than_one_alignment_per_bucket_and_one_row_per_rank(
    layout: UnitLayout,
) -> None:
    for lane, bucket in all_buckets(layout):
        assert 0 <= bucket.padding_numel < lane.dtypes.alignment_numel
        for slot in bucket.slots:
            split = layout.params[slot.param_index].split
            if split.dim is None:
                assert slot.numel == split.numel
                continue
            wasted = layout.num_ranks * slot.numel - split.numel
            row = split.outer * split.inner
            assert 0 <= wasted <= (layout.num_ranks - 1) * row


@many
@given(plans())
def test_a_full_buffer_is_parameters_padding_and_alignment_gaps(layout: UnitLayout) -> None:
    full_bytes = padding_bytes = num_regions = 0
    for lane, bucket in all_buckets(layout):
        itemsize = lane.dtypes.computed.itemsize
        num_regions += len(bucket.slots) + 1
        padding_bytes += layout.num_ranks * bucket.padding_numel * itemsize
        for slot in bucket.slots:
            split = layout.params[slot.param_index].split
            kept = split.numel if bucket.kind is BucketKind.PERMUTED else 0
            full_bytes += (kept or layout.num_ranks * slot.numel) * itemsize
    gaps = num_regions * (FULL_ALIGNMENT_BYTES - 1)
    assert layout.full_bytes <= full_bytes + padding_bytes + gaps


@many
@given(plans())
def test_a_landing_fits_the_split_that_it_is_for(layout: UnitLayout) -> None:
    for _, bucket in all_buckets(layout):
        found = [layout.params[slot.param_index].split for slot in bucket.slots]
        if bucket.kind is BucketKind.IN_PLACE:
            assert len(found) == 1
            assert found[0].is_stacked
            assert bucket.padding_numel == 0  # padding between shards would tear it apart
        elif bucket.kind is BucketKind.PERMUTED:
            assert len(found) == 1
            assert not found[0].is_stacked
        else:
            assert all(s.is_stacked or s.dim is None or s.slot_numel == 0 for s in found)
    for lane in layout.lanes:
        assert sum(bucket.kind is BucketKind.SPLIT for bucket in lane.buckets) <= 1


@many
@given(plans())
def test_the_cost_model_decides_who_gets_a_bucket_of_its_own(layout: UnitLayout) -> None:
    """If two plans differ in the cost model only, the one with dear buckets has fewer of them."""
    frugal = plan_layout(layout.params, layout.num_ranks, SHARES)
    lavish = plan_layout(layout.params, layout.num_ranks, OWNS)

    def own(plan: UnitLayout) -> set[int]:
        return {
            bucket.slots[0].param_index
            for _, bucket in all_buckets(plan)
            if bucket.kind is BucketKind.IN_PLACE
        }

    assert own(frugal) == set()
    assert own(frugal) <= own(layout) <= own(lavish)
    for index, param in enumerate(layout.params):
        split, alignment = param.split, param.dtypes.alignment_numel
        could_own = split.is_stacked and split.slot_numel and split.slot_numel % alignment == 0
        assert (index in own(lavish)) == bool(could_own)


def test_on_an_accelerator_matrices_share_a_bucket_and_embeddings_have_their_own() -> None:
    cost = CostModel.of_device("cuda")
    embedding, matrix = 2 * 128_000 * 4096, 2 * 4096 * 4096
    assert not cost.deserves_bucket(matrix, num_ranks=2)
    assert cost.deserves_bucket(embedding, num_ranks=256)
    # Each rank's part is small here: latency would count.
    assert not cost.deserves_bucket(embedding, num_ranks=1024)
    assert cost.deserves_unit(embedding, num_ranks=256)
    assert not cost.deserves_unit(embedding, num_ranks=1024)
    assert not replace(cost, own_bucket_bytes=0.0).deserves_unit(matrix, num_ranks=2)
    assert CostModel.of_device("cpu").deserves_bucket(matrix, num_ranks=2)


def test_the_cost_model_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_OWN_BUCKET_MB", "8")
    monkeypatch.setenv("FULLSHARD_OWN_SEGMENT_MB", "0.5")
    assert CostModel.of_device("cuda") == CostModel(8e6, 0.5e6)
    monkeypatch.setenv("FULLSHARD_OWN_BUCKET_MB", "many")
    with pytest.raises(ConfigError, match=r"FULLSHARD_OWN_BUCKET_MB.*'many'"):
        CostModel.of_device("cuda")


@many
@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from((1, 2, 4, 8, 24))), min_size=1),
    st.integers(2, 6),
    st.sampled_from((torch.int16, torch.int32)),
)
def test_an_index_of_words_copies_a_split_bucket_out_and_in(
    sizes: list[tuple[int, int]], num_ranks: int, dtype: torch.dtype
) -> None:
    """Integers stand for words of parameters and gradients, whatever these hold."""
    stages = DtypePlan.of(dtype, None, None, None)
    params = [
        ParamSpec(str(index), Split((num_ranks * rows, inner), 0, num_ranks), stages, True)
        for index, (rows, inner) in enumerate(sizes)
    ]
    layout = plan_layout(params, num_ranks, CostModel(inf, inf))
    ((_, bucket),) = all_buckets(layout)
    assert bucket.kind is BucketKind.SPLIT
    itemsize, cpu = dtype.itemsize, torch.device("cpu")
    out_index = bucket.copy_out_index(num_ranks, itemsize, cpu)
    in_index = bucket.copy_in_index(num_ranks, itemsize, cpu)
    has_words = all(rows * inner * itemsize % 8 == 0 for rows, inner in sizes)
    assert (out_index is not None) == has_words
    assert (in_index is not None) == (has_words and not bucket.padding_numel)
    sent = torch.arange(num_ranks * bucket.segment_numel, dtype=dtype).view(num_ranks, -1)
    parts = [sent[:, slot.offset : slot.offset + slot.numel] for slot in bucket.slots]
    if out_index is not None:
        words = sent.view(-1).view(out_index.dtype)
        full = words.gather(0, out_index.index).view(dtype)
        for slot, part in zip(bucket.slots, parts, strict=True):
            start = (slot.full_offset_bytes - bucket.slots[0].full_offset_bytes) // itemsize
            assert torch.equal(full[start : start + part.numel()], part.flatten())
    if in_index is not None:
        words = torch.cat([part.flatten() for part in parts]).view(in_index.dtype)
        assert torch.equal(words.gather(0, in_index.index).view(dtype), sent.view(-1))


@many
@given(plans(), st.data())
def test_columns_of_a_bucket_have_all_of_its_parameters(
    layout: UnitLayout, data: st.DataObject
) -> None:
    num_ranks = layout.num_ranks
    for _, bucket in all_buckets(layout):
        if bucket.kind is BucketKind.PERMUTED or not bucket.segment_numel:
            continue
        is_flat, size = bucket.kind is BucketKind.FLAT, bucket.segment_numel
        splits = [layout.params[slot.param_index].split for slot in bucket.slots]
        numels = [prod(split.shape) if split.shape or is_flat else num_ranks for split in splits]
        # Every element by slot and place in its tensor; padding has a slot of its own.
        slots, elements = (torch.full((num_ranks, size), EMPTY) for _ in range(2))
        width = data.draw(st.integers(1, size))
        for start in range(0, size, width):
            for rows in bucket.columns(start, min(start + width, size), num_ranks, numels):
                assert start <= rows.column
                assert rows.column + rows.width <= start + width
                for rank in range(rows.num_ranks):
                    place = rows.rank + rank, slice(rows.column, rows.column + rows.width)
                    assert (slots[place] == EMPTY).all()  # none is copied twice
                    slots[place] = rows.slot
                    first = rows.first + rank * rows.stride
                    elements[place] = torch.arange(first, first + rows.width)
        assert (slots != EMPTY).all()
        for index, (slot, numel) in enumerate(zip(bucket.slots, numels, strict=True)):
            found = elements[slots == index]
            assert torch.equal(found, torch.arange(numel))
            if not is_flat:
                in_slot = slots[:, slot.offset : slot.offset + slot.numel].flatten()
                assert (in_slot[:numel] == index).all()


@many
@given(cut_splits.filter(lambda split: split.numel > 0))
def test_permuted_pairs_carry_a_tensor_into_its_bucket_and_back(split: Split) -> None:
    full = torch.arange(split.numel).view(split.shape)
    padded = split.slot_numel + 3
    segments = torch.full((split.num_ranks, padded), EMPTY)
    for in_full, in_bucket in permuted_pairs(split, full, segments):
        in_bucket.copy_(in_full)
    for rank in range(split.num_ranks):
        numel = split.shard_numel(rank)
        expected = shard_of(full, split, rank).reshape(-1)
        assert torch.equal(segments[rank, :numel], expected)
        assert (segments[rank, numel:] == EMPTY).all()
    back = torch.full(split.shape, EMPTY)
    for in_full, in_bucket in permuted_pairs(split, back, segments):
        in_full.copy_(in_bucket)
    assert torch.equal(back, full)


@many
@given(plans())
def test_a_plan_is_a_value(layout: UnitLayout) -> None:
    again = plan_layout(layout.params, layout.num_ranks, SHARES)
    assert again == plan_layout(list(layout.params), layout.num_ranks, SHARES)
    assert hash(again) == hash(plan_layout(list(layout.params), layout.num_ranks, SHARES))


@pytest.mark.parametrize(
    "kept, param_dtype, reduce_dtype, expected",
    [
        (torch.float32, None, None, (torch.float32, torch.float32, torch.float32)),
        (torch.float32, torch.bfloat16, None, (torch.float32, torch.bfloat16, torch.bfloat16)),
        (
            torch.float32,
            torch.bfloat16,
            torch.float32,
            (torch.float32, torch.bfloat16, torch.float32),
        ),
        (torch.float32, None, torch.float64, (torch.float32, torch.float32, torch.float64)),
        (torch.int64, torch.bfloat16, torch.float32, (torch.int64,) * 3),
        (torch.bool, torch.bfloat16, None, (torch.bool,) * 3),
    ],
)
def test_stages_apply_a_precision_policy_to_floating_point_parameters_only(
    kept: torch.dtype,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    expected: tuple[torch.dtype, ...],
) -> None:
    found = DtypePlan.of(kept, param_dtype, reduce_dtype)
    assert (found.stored, found.computed, found.reduced) == expected
    assert found.casts_to_gather == (expected[0] != expected[1])
    assert (found.wire, found.sums_on_arrival) == (found.reduced, False)


def test_a_gradient_travels_in_the_wire_dtype_if_that_is_narrower_than_what_it_is_reduced_in() -> (
    None
):
    cases = {
        (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16): torch.bfloat16,
        (torch.float32, None, None, torch.float16): torch.float16,
        (torch.float64, None, None, torch.float32): torch.float32,
        (torch.float32, None, None, torch.float32): torch.float32,
        (torch.bfloat16, None, None, torch.float32): torch.bfloat16,
        (torch.bfloat16, None, None, torch.float16): torch.bfloat16,
        (torch.bfloat16, None, torch.float32, torch.float16): torch.float16,
        (torch.int64, torch.float32, torch.float32, torch.bfloat16): torch.int64,
    }
    for given_dtypes, expected in cases.items():
        found = DtypePlan.of(*given_dtypes)
        assert found.wire == expected, given_dtypes
        assert found.sums_on_arrival == (found.wire != found.reduced)
