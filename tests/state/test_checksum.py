"""Checksums of tensors: the same however a tensor is cut, another for any other content."""

import itertools
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.layout.split import Box, boxes_of_range
from fullshard.state.checkpoint.index import MASK, as_text, checksum, joined

many = settings(derandomize=True, deadline=None, max_examples=50)

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of random bits: all kinds of numbers, and NaNs."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (prod(shape) * dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


def whole(tensor: torch.Tensor) -> int:
    shape = tuple(tensor.shape)
    return checksum(shape, Box((0,) * len(shape), shape), tensor)


def region(tensor: torch.Tensor, where: Box) -> torch.Tensor:
    ends = zip(where.offsets, where.sizes, strict=True)
    return tensor[tuple(slice(offset, offset + size) for offset, size in ends)]


def in_blocks(tensor: torch.Tensor, blocks: list[Box]) -> int:
    return joined(checksum(tensor.shape, where, region(tensor, where)) for where in blocks)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    return bits(draw(SHAPES), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**16)))


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut in any places of any dims."""
    per_dim = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(0, size), max_size=3)) | {0, size})
        per_dim.append([(a, b - a) for a, b in itertools.pairwise(cuts)] or [(0, 0)])
    cells = itertools.product(*per_dim)
    return [Box(tuple(o for o, _ in cell), tuple(s for _, s in cell)) for cell in cells]


@many
@given(st.data())
def test_any_cutting_gives_the_same_sum(data: st.DataObject) -> None:
    tensor = data.draw(tensors())
    assert in_blocks(tensor, data.draw(grids(tuple(tensor.shape)))) == whole(tensor)
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, tensor.numel())] * 2)))
    runs = [range(begin), range(begin, end), range(end, tensor.numel())]
    cut = [where for run in runs for where in boxes_of_range(tensor.shape, run)]
    assert in_blocks(tensor, cut) == whole(tensor)


def test_a_tensor_larger_than_a_piece_has_the_sum_of_its_parts() -> None:
    tensor = bits((3, 700_001), torch.int16, seed=0)
    rows = [Box((row, 0), (1, 700_001)) for row in range(3)]
    columns = [Box((0, 0), (3, 5)), Box((0, 5), (3, 699_996))]
    before = tensor.clone()
    assert whole(tensor) == in_blocks(tensor, rows) == in_blocks(tensor, columns)
    assert torch.equal(tensor, before)


@many
@given(st.data())
def test_one_or_two_flipped_bits_change_the_sum(data: st.DataObject) -> None:
    tensor = data.draw(tensors().filter(lambda t: t.numel() > 0 and t.dtype != torch.bool))
    changed = tensor.clone()
    raw = changed.view(-1).view(torch.uint8)
    places = st.tuples(st.integers(0, raw.numel() - 1), st.integers(0, 7))
    for place, bit in data.draw(st.sets(places, min_size=1, max_size=2)):
        raw[place] ^= 1 << bit
    assert whole(changed) != whole(tensor)


@many
@given(st.data())
def test_swapped_elements_change_the_sum(data: st.DataObject) -> None:
    tensor = bits((40,), torch.int64, data.draw(st.integers(0, 2**16)))
    a, b = data.draw(st.lists(st.integers(0, 39), min_size=2, max_size=2, unique=True))
    # The highest bit alone is what arithmetic modulo 2**64 forgets first.
    tensor[b] = tensor[a] ^ data.draw(st.sampled_from([1, -(2**63), 2**32, 2**62]))
    changed = tensor.clone()
    changed[[a, b]] = tensor[[b, a]]
    assert whole(changed) != whole(tensor)


def test_zeros_count_by_their_number() -> None:
    sums = [whole(torch.zeros(n)) for n in range(50)]
    assert sums[0] == 0
    assert len(set(sums)) == 50


def test_it_sees_bits_and_not_numbers() -> None:
    assert whole(torch.tensor([0.0])) != whole(torch.tensor([-0.0]))
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert whole(quiet) != whole(other)
    assert whole(quiet) == whole(quiet.clone())


def test_strides_and_pending_conjugation_do_not_matter() -> None:
    tensor = bits((6, 5), torch.float32, seed=1)
    assert whole(tensor.t()) == whole(tensor.t().contiguous())
    assert whole(tensor.expand(3, 6, 5)) == whole(tensor.expand(3, 6, 5).clone())
    for dtype in (torch.complex64, torch.complex128):
        numbers = torch.randn(4, 3, dtype=dtype)
        assert whole(numbers.conj()) == whole(numbers.conj().resolve_conj()) != whole(numbers)
        negative = numbers.conj().imag
        assert whole(negative) == whole(negative.resolve_neg())


def in_python(words: list[int]) -> int:
    """The definition, word by word."""
    total = 0
    for place, word in enumerate(words, start=1):
        mixed = (word + place * 0x9E3779B97F4A7C15) & MASK
        mixed ^= mixed >> 32
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed = (mixed * factor) & MASK
            mixed ^= mixed >> 32
        total += mixed
    return total & MASK


@many
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_it_is_what_its_definition_says(words: list[int]) -> None:
    assert whole(torch.tensor(words, dtype=torch.int64)) == in_python(words)


def test_it_is_what_earlier_versions_wrote() -> None:
    """Checkpoints on disk have it: another value for the same bits would break them all."""
    assert as_text(whole(torch.arange(10, dtype=torch.float32))) == "523c7a9df6f2f382"
    assert as_text(whole(torch.arange(6, dtype=torch.bfloat16).view(2, 3))) == "4cb3788194fa0a89"
    assert as_text(whole(torch.tensor([1 + 2j], dtype=torch.complex128))) == "c612b4e406fdba55"
    assert (as_text(0), as_text(MASK)) == ("0" * 16, "f" * 16)
    assert joined([MASK, 1, 5]) == 5


def test_it_leaves_its_input_alone() -> None:
    tensor = bits((9, 9), torch.int64, seed=3)
    before = tensor.clone()
    whole(tensor)
    assert torch.equal(tensor, before)
