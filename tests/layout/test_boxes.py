"""Runs of elements as rectangles, on generated tensors."""

import itertools
import time
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout.split import (
    Box,
    boxes_of_range,
    intersection,
    pieces,
    row_chunks,
    slices,
    tiles,
)

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], range]:
    shape = draw(SHAPES)
    begin, end = sorted(draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    return shape, range(begin, end)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    return Box(tuple(b for b, _ in ends), tuple(e - b for b, e in ends))


def region(tensor: torch.Tensor, block: Box) -> torch.Tensor:
    return tensor[slices(block, Box.whole(tensor.shape))]


@given(runs())
def test_rectangles_are_the_run_in_its_order(run: tuple[tuple[int, ...], range]) -> None:
    shape, elements = run
    numbered = torch.arange(prod(shape)).view(shape)
    found = [
        n for each in boxes_of_range(shape, elements) for n in region(numbered, each).flatten()
    ]
    assert [int(n) for n in found] == list(elements)


@given(runs())
def test_there_are_at_most_two_rectangles_per_dim_and_one(
    run: tuple[tuple[int, ...], range],
) -> None:
    shape, elements = run
    assert len(list(boxes_of_range(shape, elements))) <= max(2 * len(shape) - 1, 1)


@given(SHAPES, st.lists(st.integers(0, 700), max_size=5))
def test_the_runs_of_all_ranks_tile_the_tensor(shape: tuple[int, ...], cuts: list[int]) -> None:
    numel = prod(shape)
    ends = [0, *sorted(min(cut, numel) for cut in cuts), numel]
    blocks = [
        block
        for begin, end in itertools.pairwise(ends)
        for block in boxes_of_range(shape, range(begin, end))
    ]
    assert tiles(shape, blocks)
    if blocks:
        assert not tiles(shape, blocks[1:])
        assert not tiles(shape, [*blocks, blocks[0]])


def test_blocks_that_overlap_do_not_tile_though_their_sizes_add_up() -> None:
    assert not tiles((4, 2), [Box((0, 0), (2, 2)), Box((1, 0), (2, 2))])
    assert not tiles((2, 2), [Box((1, 0), (2, 2))])
    assert tiles((4, 2), [Box((0, 0), (4, 1)), Box((0, 1), (4, 1))])
    assert tiles((), [Box((), ())])
    # Two cells are covered twice, and two not at all; in the other order of dims, too.
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1))]
    assert tiles((3, 3), [*pinwheel, Box((1, 1), (1, 1))])
    assert not tiles((3, 3), [*pinwheel, Box((0, 0), (1, 1))])


def test_many_blocks_are_compared_in_no_time_along_any_dim() -> None:
    begun = time.process_time()
    for number, shape in ((20_000, (1, 20_000)), (20_000, (20_000, 1)), (141, (141, 142))):
        cells = itertools.product(range(shape[0]), range(shape[1]))
        blocks = [Box(cell, (1, 1)) for cell in cells]
        assert tiles(shape, blocks)
        assert not tiles(shape, [*blocks[1:], blocks[number - 1]])
    assert time.process_time() - begun < 30  # pairs of blocks take a hundred times as long


@given(SHAPES, st.data())
def test_an_intersection_has_the_elements_of_both_boxes(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    numbered = torch.arange(prod(shape)).view(shape)
    shared = {*region(numbered, one).flatten().tolist()}
    shared &= {*region(numbered, other).flatten().tolist()}
    found = intersection(one, other)
    assert (found is None) == (not shared)
    if found is not None:
        values = region(numbered, one)[slices(found, one)]
        assert {*values.flatten().tolist()} == shared
        assert torch.equal(values, region(numbered, found))


@given(SHAPES, st.integers(1, 50))
def test_pieces_are_a_box_in_its_order(shape: tuple[int, ...], max_numel: int) -> None:
    numbered = torch.arange(prod(shape)).view(shape)
    found = list(pieces(Box.whole(shape), max_numel))
    assert all(0 < piece.numel <= max_numel for piece in found)
    assert [n for piece in found for n in region(numbered, piece).flatten().tolist()] == [
        *range(prod(shape))
    ]


@given(SHAPES.filter(len), st.integers(1, 7))
def test_rows_are_split_as_torch_splits_them(shape: tuple[int, ...], num_parts: int) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    found = [region(whole, box) for box in row_chunks(shape, num_parts)]
    expected = whole.chunk(num_parts) if shape[0] else [whole]
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]


def test_a_box_beyond_a_tensor_is_not_within_it() -> None:
    assert Box((1, 0), (2, 2)).is_within((3, 2))
    assert not Box((2, 0), (2, 2)).is_within((3, 2))
    assert not Box((-1, 0), (2, 2)).is_within((3, 2))
    assert not Box((0,), (2,)).is_within((3, 2))
    assert row_chunks((), 3) == [Box((), ())]
