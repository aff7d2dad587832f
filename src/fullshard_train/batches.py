"""The batches of each rank.

All ranks follow one global order of sequences, a permutation of the corpus in each epoch, and each
rank takes its part of every micro-batch. The only state is the number of sequences taken by all
ranks, so a run can be resumed on any number of ranks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from fullshard.errors import ConfigError
from fullshard_train.corpus import Corpus, unmarked

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
    def of(cls, size: int, seed: int, epoch: int) -> Permutation:
        half_bits = max(1, -(-(size - 1).bit_length() // 2))
        digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
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


@dataclass(eq=False)
class Batches:
    """An endless series of micro-batches for this rank.

    `position` counts the sequences taken by all ranks. Every sequence occurs once per epoch; an
    epoch may end within a micro-batch. The sequences of a micro-batch depend on
    `batch * num_ranks`, but not on the number of ranks alone. `rank` and `num_ranks` may change.

    The share `held_out` of the sequences, chosen by the seed, is left to batches with `is_eval`.
    These have one epoch, in one order; sequences after it have no loss.
    """

    corpus: Corpus
    _: KW_ONLY
    sequence: int
    batch: int
    rank: int
    num_ranks: int
    seed: int
    held_out: float = 0.0
    is_eval: bool = False
    position: int = 0

    def __post_init__(self) -> None:
        number = self.corpus.num_sequences(self.sequence)
        num_held_out = int(number * self.held_out)
        if self.held_out and not num_held_out:
            what = f"--eval-share: this share of {number} sequences is not even one"
            raise ConfigError(f"{what}; pass a larger share, or text with --eval-data.")
        # The number of sequences in an epoch.
        self.num_sequences = num_held_out if self.is_eval else number - num_held_out
        self._first = 0 if self.is_eval else num_held_out
        self._split = Permutation.of(number, self.seed, -1)
        self._epoch = 0
        self._order = Permutation.of(self.num_sequences, self.seed, 0)

    def next(self) -> tuple[torch.Tensor, ...]:
        """Return inputs and targets, [batch, sequence] of int64, and advance the position.

        With conversations, positions in documents come third. A target of -100 has no loss.
        """
        first = self.position + self.rank * self.batch
        rows = torch.stack(
            [
                self.corpus.row(self._index(place), self.sequence)
                for place in range(first, first + self.batch)
            ]
        )
        self.position += self.batch * self.num_ranks
        has_chats = self.corpus.has_chats
        tokens, is_trained, positions = unmarked(rows) if has_chats else (rows, rows >= 0, rows)
        if self.is_eval:
            is_trained[max(0, self.num_sequences - first) :] = False
        targets = tokens.masked_fill(~is_trained, -100)
        found = (tokens[:, :-1], targets[:, 1:], positions[:, :-1])
        return tuple(each.contiguous() for each in found[: 2 + has_chats])

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which is the same on every rank."""
        return {"position": self.position, **self._setting()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, with any number of ranks and any batch size."""
        expected = self._setting()
        words = {"corpus": "--data or --tokenizer", "sequence": "--sequence", "seed": "--seed"}
        words["held_out"] = "--eval-share"
        for key, option in words.items():
            if state.get(key, 0.0) != expected[key]:
                raise ConfigError(
                    f"data: the {key} is {expected[key]!r}, but the run was started with "
                    f"{state.get(key)!r}; pass the same {option} as before, or start a new run "
                    "in another folder."
                )
        self.position = int(state["position"])

    def _setting(self) -> dict[str, Any]:
        """Return the settings that the order of sequences depends on."""
        return {
            "corpus": self.corpus.fingerprint,
            "sequence": self.sequence,
            "seed": self.seed,
            "held_out": self.held_out,
        }

    def _index(self, place: int) -> int:
        """Return the index of the sequence at a position in the global order."""
        epoch, within = divmod(place, self.num_sequences)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, Permutation.of(self.num_sequences, self.seed, epoch)
        if not self.held_out:
            return self._order(within)
        return self._split(self._first + (within if self.is_eval else self._order(within)))
