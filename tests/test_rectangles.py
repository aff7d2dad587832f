"""Runs of elements as rectangles, on generated tensors."""

import itertools
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout.split import Box, boxes_of_range, tiles

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], range]:
    shape = draw(SHAPES)
    begin, end = sorted(draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    return shape, range(begin, end)


def region(tensor: torch.Tensor, block: Box) -> torch.Tensor:
    where = tuple(slice(o, o + s) for o, s in zip(block.offsets, block.sizes, strict=True))
    return tensor[where]


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
