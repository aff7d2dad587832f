"""The laws of the flat arrangement, on generated parameters."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout import Entry, FlatSplit, Split, Stages, UnitLayout, plan_flat_layout
from fullshard.layout.messages import Landing

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16])
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    made = []
    for index in range(draw(st.integers(1, 8))):
        stages = Stages.of(draw(DTYPES), draw(st.none() | DTYPES), draw(st.none() | DTYPES))
        shape = draw(SHAPES)
        made.append(Entry(f"p{index}", Split(shape, None, 1), stages, draw(st.booleans())))
    return made


def splits(layout: UnitLayout) -> dict[int, FlatSplit]:
    return {
        slot.entry: FlatSplit(
            layout.entries[slot.entry].split.shape,
            slot.offset,
            message.segment_numel,
            layout.num_ranks,
        )
        for lane in layout.lanes
        for message in lane.messages
        for slot in message.slots
    }


@given(entries(), st.integers(1, 9))
def test_every_element_lies_on_exactly_one_rank(made: list[Entry], num_ranks: int) -> None:
    for index, split in splits(plan_flat_layout(made, num_ranks)).items():
        held = [element for rank in range(num_ranks) for element in split.elements(rank)]
        assert held == list(range(made[index].split.numel))


@given(entries(), st.integers(1, 9))
def test_what_segments_hold_one_after_another_is_the_lane(
    made: list[Entry], num_ranks: int
) -> None:
    layout = plan_flat_layout(made, num_ranks)
    all_splits = splits(layout)
    for lane in layout.lanes:
        (message,) = lane.messages
        gathered = [-1] * (num_ranks * message.segment_numel)
        for slot in message.slots:
            for rank in range(num_ranks):
                begin = rank * message.segment_numel + message.shard_offset(slot, rank)
                for position, element in enumerate(all_splits[slot.entry].elements(rank), begin):
                    assert gathered[position] == -1
                    assert position < (rank + 1) * message.segment_numel
                    gathered[position] = slot.offset + element
        total = sum(slot.numel for slot in message.slots)
        assert gathered[:total] == list(range(total))
        assert set(gathered[total:]) <= {-1}


@given(entries(), st.integers(1, 9))
def test_a_lane_is_one_message_with_less_than_one_alignment_of_padding_per_rank(
    made: list[Entry], num_ranks: int
) -> None:
    layout = plan_flat_layout(made, num_ranks)
    for lane in layout.lanes:
        (message,) = lane.messages
        assert message.landing is Landing.FLAT
        assert not message.landing.is_copied
        alignment = lane.stages.alignment_numel
        assert message.segment_numel % alignment == 0
        total = sum(slot.numel for slot in message.slots)
        assert 0 <= message.segment_numel * num_ranks - total < num_ranks * (alignment + 1)


@given(entries(), st.integers(1, 9))
def test_parameters_lie_in_the_slab_as_they_lie_in_their_message(
    made: list[Entry], num_ranks: int
) -> None:
    layout = plan_flat_layout(made, num_ranks)
    taken: list[tuple[int, int]] = []
    for lane in layout.lanes:
        (message,) = lane.messages
        itemsize = lane.stages.computed.itemsize
        start = message.slots[0].slab_offset_bytes
        assert start % 16 == 0
        for slot in message.slots:
            assert slot.slab_offset_bytes == start + slot.offset * itemsize
        taken.append((start, start + num_ranks * message.segment_numel * itemsize))
    taken.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
    assert all(end <= layout.slab_bytes for _, end in taken)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 5))
def test_a_parameter_of_an_even_size_starts_at_an_aligned_address(
    numels: list[int], num_ranks: int
) -> None:
    stages = Stages.of(torch.float32, torch.bfloat16)
    made = [Entry(f"p{i}", Split((n,), None, 1), stages, True) for i, n in enumerate(numels)]
    for lane in plan_flat_layout(made, num_ranks).lanes:
        for slot in lane.messages[0].slots:
            if slot.numel % stages.alignment_numel == 0:
                assert slot.slab_offset_bytes % 16 == 0


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
    stages = Stages.of(torch.float32, torch.bfloat16 if param_dtype else None)
    made = [Entry("p", Split((4, 4), None, 1), stages, True)]
    assert plan_flat_layout(made, num_ranks).is_whole is is_whole
