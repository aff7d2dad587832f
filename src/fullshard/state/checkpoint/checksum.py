"""Checksums of tensors, which do not depend on how a tensor is sharded.

Each element is mixed with its place in the whole tensor into 64 bits, and these are added, so that
the checksum of a tensor is the sum of the checksums of its boxes. The mixing is a permutation of
what it is given: one changed element always changes the sum, and several changes cancel by accident
only (about once in 2**64). Checksums notice accidents; they are no protection against a forger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch

from fullshard.layout.split import Box, pieces, slices

MASK = 2**64 - 1
_PIECE_NUMEL = 2**20  # extra memory is a few times eight bytes for each of these
_STRIDE = 0x9E3779B97F4A7C15  # between neighbors, before mixing: 2**64 over the golden ratio
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64, known to spread bits well
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(shape: Sequence[int], box: Box, values: torch.Tensor) -> int:
    """The checksum of one box of a tensor of `shape`, computed on the device of its values.

    It sees bits, not numbers: 0.0 and -0.0 differ, and so do two nans with different payloads.
    """
    words = values.detach().resolve_conj().resolve_neg()
    if words.dtype == torch.complex128:
        # Two words per element; they are neighbors, like elements of one more dim.
        words = torch.view_as_real(words).view(torch.int64)
        shape, box = (*shape, 2), Box((*box.offsets, 0), (*box.sizes, 2))
    else:
        words = words.view(_INTEGERS[words.itemsize])
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in pieces(box, _PIECE_NUMEL):
        bits = words[slices(piece, box)]
        bits = bits.to(torch.int64, memory_format=torch.contiguous_format, copy=True)
        first = sum(offset * each for offset, each in zip(piece.offsets, strides, strict=True))
        bits += _signed((first + 1) * _STRIDE)
        for dim, (size, stride) in enumerate(zip(piece.sizes, strides, strict=True)):
            if size > 1:
                places = torch.arange(size, device=bits.device) * _signed(stride * _STRIDE)
                bits += places.view(-1, *[1] * (len(strides) - dim - 1))
        total += _mixed(bits.view(-1)).sum()
    return int(total) & MASK


def joined(parts: Iterable[int]) -> int:
    """The checksum of a tensor whose parts have these checksums."""
    return sum(parts) & MASK


def as_text(value: int) -> str:
    return f"{value:016x}"


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Make every bit of a word depend on every other, in place."""
    low, high = words.view(torch.int32).view(-1, 2).unbind(1)
    low ^= high  # words ^= words >> 32, without the sign that torch's shift drags along
    for factor in _FACTORS:
        words *= _signed(factor)
        low ^= high
    return words


def _signed(value: int) -> int:
    """The int64 that has the bits of an unsigned 64-bit number."""
    value &= MASK
    return value - 2**64 if value >= 2**63 else value
