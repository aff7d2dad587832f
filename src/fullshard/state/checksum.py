"""Checksums of tensors that do not depend on how a tensor is cut.

Each element is mixed with its place in the whole tensor into 64 bits, and these are added. So the
checksum of a tensor is the sum of its blocks' checksums, whoever has them, and a checkpoint that
was saved in one arrangement can be verified in any other.

The mixing is a permutation of what it is given: one changed element always changes the sum, and
several changes cancel by accident only (about once in 2**64). It notices accidents; it is no
protection against someone who forges content on purpose.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

import torch

from fullshard.errors import ConfigError
from fullshard.layout.split import Box

MASK = 2**64 - 1

# Extra memory is a few times eight bytes for each of these.
_PIECE_NUMEL = 2**20

_STRIDE = 0x9E3779B97F4A7C15  # between neighbours, before mixing: 2**64 over the golden ratio
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64, known to spread bits well
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(shape: Sequence[int], where: Box, values: torch.Tensor) -> int:
    """Of one block of a tensor of `shape`, computed where the values are.

    It sees bits, not numbers: 0.0 and -0.0 differ, and so do two nans with different payloads.
    """
    if tuple(values.shape) != where.sizes or len(shape) != len(where.sizes):
        raise ConfigError(
            f"checksum: values of shape {where.sizes} in a tensor of {len(where.sizes)} dims are "
            f"expected, found {tuple(values.shape)} in {tuple(shape)}; pass the block's own values."
        )
    if not values.numel():
        return 0
    words = _as_integers(values.detach())
    # A complex128 is two words; they are neighbours, like elements of one more dim.
    extra = words.shape[len(shape) :]
    shape = (*shape, *extra)
    offsets = (*where.offsets, *(0 for _ in extra))
    numel = min(_PIECE_NUMEL, words.numel())
    keys = torch.arange(1, numel + 1, device=words.device) * _signed(_STRIDE)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for begin, piece in _pieces(offsets, words):
        total += _mixed(_keyed(shape, begin, piece, keys)).sum()
    return int(total) & MASK


def joined(parts: Iterable[int]) -> int:
    """The checksum of what these are the checksums of the parts of."""
    return sum(parts) & MASK


def as_text(value: int) -> str:
    return f"{value:016x}"


def _as_integers(values: torch.Tensor) -> torch.Tensor:
    """The bits of each element, as an integer of its size."""
    values = values.resolve_conj().resolve_neg()
    if values.dtype == torch.complex128:
        return torch.view_as_real(values).view(torch.int64)
    return values.view(_INTEGERS[values.itemsize])


def _pieces(
    offsets: tuple[int, ...], values: torch.Tensor
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """A block in parts of a bounded size, each with where it begins in the whole tensor."""
    if values.numel() <= _PIECE_NUMEL:
        yield offsets, values
        return
    dim = next(dim for dim, size in enumerate(values.shape) if size > 1)
    row_numel = values.numel() // values.shape[dim]
    num_rows = max(1, _PIECE_NUMEL // row_numel)
    for row in range(0, values.shape[dim], num_rows):
        begin = (*offsets[:dim], offsets[dim] + row, *offsets[dim + 1 :])
        part = values.narrow(dim, row, min(num_rows, values.shape[dim] - row))
        yield from _pieces(begin, part)


def _keyed(
    shape: Sequence[int], begin: tuple[int, ...], piece: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """New memory with each element's bits plus a multiple of its place in the whole tensor."""
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    first = sum(b * s for b, s in zip(begin, strides, strict=True))
    numel = piece.numel()
    bits = piece.to(torch.int64, memory_format=torch.contiguous_format, copy=True)
    if _is_run(shape, piece.shape):
        found = bits.view(-1).add_(keys[:numel])
        return found.add_(_signed(first * _STRIDE))
    for dim, (size, stride) in enumerate(zip(piece.shape, strides, strict=True)):
        if size > 1:
            column = [1] * len(shape)
            column[dim] = size
            places = torch.arange(size, device=piece.device) * _signed(stride * _STRIDE)
            bits += places.view(column)
    return bits.view(-1).add_(_signed((first + 1) * _STRIDE))


def _is_run(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a block's elements are neighbours in the whole tensor."""
    dim = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    return tuple(sizes[dim + 1 :]) == tuple(shape[dim + 1 :])


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Every bit of a word made to depend on every other, in place."""
    halves = words.view(torch.int32).view(-1, 2)
    low, high = halves[:, _LOW], halves[:, _HIGH]
    low ^= high  # words ^= words >> 32, without the sign that torch's shift drags along
    for factor in _FACTORS:
        words *= _signed(factor)
        low ^= high
    return words


def _signed(value: int) -> int:
    """Of an unsigned 64-bit number, the one with the same bits that torch's int64 holds."""
    value &= MASK
    return value - 2**64 if value >= 2**63 else value
