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
    CopyTable,
    CostModel,
    DtypePlan,
    Lane,
    ParamSpec,
    Plain,
    RowSplit,
    Split,
    UnitLayout,
    plan_unit,
    split_rows,
)
from fullshard.layout.plan import FULL_ALIGNMENT_BYTES
from fullshard.testing import fake_world

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
    st.sampled_from((None, *map(Plain, FLOATS))),
    st.sampled_from((None, *map(Plain, FLOATS))),
)


@st.composite
def splits(draw: st.DrawFn, size: int | None = None) -> Split:
    shape = draw(shapes)
    dim = draw(st.integers(0, len(shape) - 1)) if shape else None
    return split_rows(shape, dim, size or draw(num_ranks))


cut_splits = splits().filter(lambda split: isinstance(split, RowSplit))


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
    if not isinstance(split, RowSplit):
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
            place = shard_buffer[bucket.buffer_offset + slot.offset :][: split.slot_numel]
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


def copy_out(full: FullBuffer, lane: Lane, bucket: Bucket, sent: torch.Tensor) -> None:
    """Put a gathered bucket (ranks x segment) into the full buffer, by what the plan says alone."""
    itemsize = lane.dtypes.computed.itemsize
    if bucket.full_offset_bytes is not None:
        full.write(bucket.full_offset_bytes, sent, itemsize)
        return
    for slot in bucket.slots:
        split = slot.split
        shards = [
            segment[slot.offset :][: split.shard_numel(rank)].view(split.shard_shape(rank))
            for rank, segment in enumerate(sent)
        ]
        whole = torch.cat(shards, dim=split.dim) if isinstance(split, RowSplit) else shards[0]
        full.write(slot.full_offset_bytes, whole, itemsize)


@many
@given(splits())
def test_the_shards_of_a_split_hold_every_element_exactly_once(split: Split) -> None:
    full = torch.arange(split.numel).view(split.shape)
    if not isinstance(split, RowSplit):
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
                split = RowSplit(shape, dim, size)
                local_shape, offset = expected
                assert split.shard_shape(rank) == tuple(local_shape)
                if split.rows(rank):
                    assert split.rows(rank).start == offset[dim]


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
            copy_out(buffer, lane, bucket, torch.stack(pieces))
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
        expected = 1 if isinstance(param.split, RowSplit) else layout.num_ranks
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
        for dtype in (dtypes.stored, dtypes.computed, dtypes.reduced, dtypes.reduce_wire.dtype):
            assert bucket.segment_numel * dtype.itemsize % 16 == 0
            assert bucket.buffer_offset * dtype.itemsize % 16 == 0


@many
@given(plans())
def test_buckets_fill_the_shard_buffer_with_little_padding(layout: UnitLayout) -> None:
    for lane in layout.lanes:
        end = 0
        for bucket in lane.buckets:
            assert bucket.buffer_offset == end
            end += bucket.segment_numel
            used = 0
            for slot in bucket.slots:
                assert slot.offset == used
                used += slot.split.slot_numel
            assert 0 <= bucket.segment_numel - used < lane.dtypes.alignment_numel
        assert end == lane.shard_numel


@many
@given(plans())
def test_a_full_buffer_is_parameters_and_alignment_gaps(layout: UnitLayout) -> None:
    full_bytes = num_regions = 0
    for lane, bucket in all_buckets(layout):
        itemsize = lane.dtypes.computed.itemsize
        if bucket.full_offset_bytes is None:
            num_regions += len(bucket.slots)
            full_bytes += sum(slot.split.numel for slot in bucket.slots) * itemsize
        else:
            num_regions += 1
            full_bytes += layout.num_ranks * bucket.segment_numel * itemsize
    gaps = layout.full_bytes - full_bytes
    assert 0 <= gaps <= num_regions * FULL_ALIGNMENT_BYTES


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
            if len(bucket.slots) == 1 and not bucket.is_copied and bucket.segment_numel
        }

    assert own(frugal) <= own(layout) <= own(lavish)
    assert all(len(lane.buckets) == 1 for lane in frugal.lanes)
    for index, param in enumerate(layout.params):
        split = param.split
        padded = -(-split.slot_numel // param.dtypes.alignment_numel)
        alone = CopyTable.of([(split, 0)], padded * param.dtypes.alignment_numel)
        assert (index in own(lavish)) == (alone.offsets is not None and split.numel > 0)


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
    assert (found.reduce_wire, found.sums_on_arrival) == (Plain(found.reduced), False)
    assert found.arrives_as_computed


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
        *policy, wire = given_dtypes
        found = DtypePlan.of(*policy, reduce_wire=Plain(wire))
        assert found.reduce_wire == Plain(expected), given_dtypes
        assert found.sums_on_arrival == (expected != found.reduced)
