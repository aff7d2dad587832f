"""Which sequences each rank is given, step after step.

All ranks walk one global order of sequences: a permutation of the corpus per epoch. Of each
micro-batch a rank takes its share. The number of sequences that all ranks have taken is the whole
state, so a run goes on, on any number of ranks, where another has stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.errors import ConfigError
from fullshard.training.corpus import Corpus

_NUM_ROUNDS = 6
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Permutation:
    """Of the numbers below `size`, computed one by one: it takes no memory.

    A Feistel network permutes the numbers below the next power of four; a result that is not below
    `size` is permuted again until one is (cycle walking).
    """

    size: int
    half_bits: int
    keys: tuple[int, ...]

    @classmethod
    def of(cls, size: int, seed: int, epoch: int) -> Permutation:
        half_bits = max(1, -(-(size - 1).bit_length() // 2))
        digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
        keys = tuple(
            int.from_bytes(digest[8 * index : 8 * index + 8], "little")
            for index in range(_NUM_ROUNDS)
        )
        return cls(size, half_bits, keys)

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
    """Every bit of the result depends on every bit of the value: the finish of splitmix64."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


class Batches:
    """This rank's inputs and targets, micro-batch by micro-batch, without an end.

    `position` counts the sequences that all ranks have taken. Every sequence comes once an epoch;
    an epoch may end inside a micro-batch. With `batch * num_ranks` the same, the ranks together
    are given the same sequences in each micro-batch, however many they are.
    """

    def __init__(
        self, corpus: Corpus, *, sequence: int, batch: int, rank: int, num_ranks: int, seed: int
    ) -> None:
        self.position = 0
        self._corpus = corpus
        self._sequence = sequence
        self._batch = batch
        self._rank = rank
        self._num_ranks = num_ranks
        self._seed = seed
        self._epoch = 0
        self._order = Permutation.of(self.num_sequences, seed, 0)

    @property
    def num_sequences(self) -> int:
        """In an epoch."""
        return self._corpus.num_sequences(self._sequence)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each int64 of `batch` times `sequence`; moves all ranks on."""
        first = self.position + self._rank * self._batch
        rows = torch.stack(
            [
                self._corpus.row(self._index(place), self._sequence)
                for place in range(first, first + self._batch)
            ]
        )
        self.position += self._batch * self._num_ranks
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank."""
        return {"position": self.position, **self._setting()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken, on any number of ranks and with any batch."""
        expected = self._setting()
        words = {"corpus": "--data or --tokenizer", "sequence": "--sequence", "seed": "--seed"}
        for key, option in words.items():
            if state[key] != expected[key]:
                raise ConfigError(
                    f"data: a run goes on with the {key} that it was begun with, {state[key]!r}, "
                    f"found {expected[key]!r}; pass the same {option} as before, or begin a new "
                    "run in another folder."
                )
        self.position = int(state["position"])

    def _setting(self) -> dict[str, Any]:
        """What the order of sequences depends on."""
        return {
            "corpus": self._corpus.fingerprint,
            "sequence": self._sequence,
            "seed": self._seed,
        }

    def _index(self, place: int) -> int:
        """The sequence at a place in the global order."""
        epoch, within = divmod(place, self.num_sequences)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, Permutation.of(self.num_sequences, self._seed, epoch)
        return self._order(within)
