"""The laws of the flat arrangement, on generated parameters."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout import (
    CostModel,
    DtypePlan,
    FlatSplit,
    ParamSpec,
    UnitLayout,
    Whole,
    plan_unit,
)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16])
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def params(draw: st.DrawFn) -> list[ParamSpec]:
    made = []
    for index in range(draw(st.integers(1, 8))):
        dtypes = DtypePlan.of(draw(DTYPES), draw(st.none() | DTYPES), draw(st.none() | DTYPES))
        shape = draw(SHAPES)
        made.append(ParamSpec(f"p{index}", Whole(shape, 1), dtypes, draw(st.booleans())))
    return made


def plan_flat_layout(made: list[ParamSpec], num_ranks: int) -> UnitLayout:
    return plan_unit(made, num_ranks, CostModel.of_device("cpu"), is_flat=True)


def splits(layout: UnitLayout) -> dict[int, FlatSplit]:
    return {
        slot.param_index: slot.split
        for lane in layout.lanes
        for bucket in lane.buckets
        for slot in bucket.slots
        if isinstance(slot.split, FlatSplit)
    }


@given(params(), st.integers(1, 9))
def test_every_element_lies_on_exactly_one_rank(made: list[ParamSpec], num_ranks: int) -> None:
    for index, split in splits(plan_flat_layout(made, num_ranks)).items():
        held = [element for rank in range(num_ranks) for element in split.elements(rank)]
        assert held == list(range(made[index].split.numel))


@given(params(), st.integers(1, 9))
def test_what_segments_hold_one_after_another_is_the_lane(
    made: list[ParamSpec], num_ranks: int
) -> None:
    layout = plan_flat_layout(made, num_ranks)
    all_splits = splits(layout)
    for lane in layout.lanes:
        (bucket,) = lane.buckets
        all_gather_flat = [-1] * (num_ranks * bucket.segment_numel)
        for slot in bucket.slots:
            for rank in range(num_ranks):
                begin = rank * bucket.segment_numel + slot.in_segment(rank)
                split = all_splits[slot.param_index]
                for position, element in enumerate(split.elements(rank), begin):
                    assert all_gather_flat[position] == -1
                    assert position < (rank + 1) * bucket.segment_numel
                    all_gather_flat[position] = split.start + element
        total = sum(slot.split.numel for slot in bucket.slots)
        assert all_gather_flat[:total] == list(range(total))
        assert set(all_gather_flat[total:]) <= {-1}


@given(params(), st.integers(1, 9))
def test_a_lane_is_one_message_with_less_than_one_alignment_of_padding_per_rank(
    made: list[ParamSpec], num_ranks: int
) -> None:
    layout = plan_flat_layout(made, num_ranks)
    for lane in layout.lanes:
        (bucket,) = lane.buckets
        assert not bucket.is_copied
        alignment = lane.dtypes.alignment_numel
        assert bucket.segment_numel % alignment == 0
        total = sum(slot.split.numel for slot in bucket.slots)
        assert 0 <= bucket.segment_numel * num_ranks - total < num_ranks * (alignment + 1)


@given(params(), st.integers(1, 9))
def test_parameters_lie_in_the_slab_as_they_lie_in_their_message(
    made: list[ParamSpec], num_ranks: int
) -> None:
    layout = plan_flat_layout(made, num_ranks)
    all_splits = splits(layout)
    taken: list[tuple[int, int]] = []
    for lane in layout.lanes:
        (bucket,) = lane.buckets
        itemsize = lane.dtypes.computed.itemsize
        start = bucket.full_offset_bytes
        assert start is not None
        assert start % 16 == 0
        for slot in bucket.slots:
            offset = all_splits[slot.param_index].start
            assert slot.full_offset_bytes == start + offset * itemsize or not slot.split.numel
        taken.append((start, start + num_ranks * bucket.segment_numel * itemsize))
    taken.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
    assert all(end <= layout.full_bytes for _, end in taken)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 5))
def test_a_parameter_of_an_even_size_starts_at_an_aligned_address(
    numels: list[int], num_ranks: int
) -> None:
    dtypes = DtypePlan.of(torch.float32, torch.bfloat16)
    made = [ParamSpec(f"p{i}", Whole((n,), 1), dtypes, True) for i, n in enumerate(numels)]
    for lane in plan_flat_layout(made, num_ranks).lanes:
        for slot in lane.buckets[0].slots:
            if slot.split.numel % dtypes.alignment_numel == 0:
                assert slot.full_offset_bytes % 16 == 0


def test_what_is_not_split_keeps_its_shape() -> None:
    assert FlatSplit((2, 3), 0, 8, 1).shard_shape(0) == (2, 3)
    assert FlatSplit((2, 3), 0, 4, 2).shard_shape(0) == (4,)
    assert FlatSplit((2, 3), 0, 4, 2).shard_shape(1) == (2,)


@pytest.mark.parametrize(
    "num_ranks, param_dtype, is_whole", [(1, None, True), (2, None, False), (1, "bf16", False)]
)
def test_only_what_is_neither_split_nor_cast_computes_where_it_is_kept(
    num_ranks: int, param_dtype: str | None, is_whole: bool
) -> None:
    dtypes = DtypePlan.of(torch.float32, torch.bfloat16 if param_dtype else None)
    made = [ParamSpec("p", Whole((4, 4), 1), dtypes, True)]
    assert plan_flat_layout(made, num_ranks).is_whole is is_whole
