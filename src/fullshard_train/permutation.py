"""Permutations of any size, which take no memory."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

_NUM_ROUNDS = 6
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Permutation:
    """A permutation of the numbers below `size`, computed element by element, without memory.

    A Feistel network permutes the numbers below the next power of four; a result of `size` or more
    is permuted again until it is below (cycle walking).
    """

    size: int
    half_bits: int
    keys: tuple[int, ...]

    @classmethod
    def of(cls, size: int, seed: int, purpose: int | str) -> Permutation:
        half_bits = max(1, -(-(size - 1).bit_length() // 2))
        digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
        return cls(size, half_bits, struct.unpack(f"<{_NUM_ROUNDS}Q", digest))

    def __call__(self, index: int) -> int:
        value = self._permuted(index)
        while value >= self.size:
            value = self._permuted(value)
        return value

    def _permuted(self, value: int) -> int:
        mask = (1 << self.half_bits) - 1
        left, right = value >> self.half_bits, value & mask
        for key in self.keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << self.half_bits | right


def _mixed(value: int) -> int:
    """Mix the bits of a value, as the final step of splitmix64 does."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
