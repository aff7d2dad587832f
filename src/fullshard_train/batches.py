"""The batches of each rank.

All ranks follow one global order of sequences, a permutation of the corpus in each epoch, and each
rank takes its part of every micro-batch. With several sources, the order takes the next sequence of
the one that is furthest behind its weight. The only state is how many sequences of each source all
ranks have taken, so a run can be resumed on any number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, astuple, dataclass, field
from typing import Any

import torch

from fullshard.errors import ConfigError
from fullshard_train.corpus import Corpus, Place, Sequences, unmarked
from fullshard_train.tokenization import BEGINS


@dataclass(eq=False)
class Batches:
    """An endless series of micro-batches for this rank.

    `position` counts the sequences taken by all ranks. Every sequence occurs once per epoch; an
    epoch may end within a micro-batch. The sequences of a micro-batch depend on
    `batch * num_ranks`, but not on the number of ranks alone. `rank` and `num_ranks` may change.

    The share `held_out` of the sequences, chosen by the seed, is left to batches with `is_eval`.
    These have one epoch, in one order; sequences after it have no loss.
    """

    corpora: tuple[Corpus, ...]
    _: KW_ONLY
    sequence: int
    batch: int
    rank: int
    num_ranks: int
    seed: int
    weights: tuple[float, ...] = (1.0,)
    # The token that ends a document, if documents do not attend to each other.
    end: int | None = None
    held_out: float = 0.0
    is_eval: bool = False
    position: int = 0
    # How many sequences of each source are taken at `position`.
    _taken: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sources = [
            Sequences(corpus, self.sequence, self.seed, self.held_out, is_eval=self.is_eval)
            for corpus in self.corpora
        ]
        total = sum(self.weights)
        self._shares = [weight / total for weight in self.weights]
        self._taken = [0] * len(self.corpora)
        has_chats = any(corpus.has_chats for corpus in self.corpora)
        self._has_positions = has_chats or self.end is not None

    def begin(self) -> None:
        """Wait for the tokens of the next sequences, or raise if there are too few."""
        for source, taken in zip(self._sources, self._taken, strict=True):
            source.seek(taken)

    @property
    def is_over(self) -> bool:
        """Whether a validation has had all sequences."""
        self.begin()
        return all(n >= each.total for n, each in zip(self._taken, self._sources, strict=True))

    @property
    def num_epochs(self) -> int:
        """How often all sequences of a source were taken, at most."""
        return max(each.place.epoch for each in self._sources)

    def restart(self) -> None:
        """Go back to the beginning."""
        self.position, self._taken = 0, [0] * len(self.corpora)

    def next(self) -> tuple[torch.Tensor, ...]:
        """Return inputs and targets, [batch, sequence] of int64, and advance the position.

        Positions in documents come third if these do not attend to each other. A target of -100
        has no loss.
        """
        first, size = self.rank * self.batch, self.batch * self.num_ranks
        rows, is_past = [], []
        for place, (source, number) in enumerate(self._places(size)):
            if first <= place < first + self.batch:
                sequences = self._sources[source]
                row = sequences.row(number)
                if self.end is not None and not sequences.corpus.has_chats:
                    row[1:] += BEGINS * row[:-1].eq(self.end)
                rows.append(row)
                is_past.append(number >= sequences.total)
        # Ranks advance alike: they wait for tokens at the same time, and have the same state.
        for each, taken in zip(self._sources, self._taken, strict=True):
            each.seek(max(taken - 1, 0))
        self.position += size
        packed = torch.stack(rows)
        found = unmarked(packed) if self._has_positions else (packed, packed >= 0, packed)
        tokens, is_trained, positions = found
        is_trained[torch.tensor(is_past)] = False
        targets = tokens.masked_fill(~is_trained, -100)
        shifted = (tokens[:, :-1], targets[:, 1:], positions[:, :-1])
        return tuple(each.contiguous() for each in shifted[: 2 + self._has_positions])

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which is the same on every rank."""
        taken = [
            [number, *astuple(source.place)]
            for number, source in zip(self._taken, self._sources, strict=True)
        ]
        return {"position": self.position, "taken": taken, **self._setting()}

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
        for index, (number, *place) in enumerate(state["taken"]):
            self._taken[index] = int(number)
            self._sources[index].place = Place(*map(int, place))

    def _setting(self) -> dict[str, Any]:
        """Return the settings that the order of sequences depends on."""
        fingerprints = [corpus.fingerprint for corpus in self.corpora]
        if len(fingerprints) > 1:
            mixed = f"{fingerprints} {self._shares}"
            fingerprints = [hashlib.sha256(mixed.encode()).hexdigest()[:16]]
        return {
            "corpus": fingerprints[0],
            "sequence": self.sequence,
            "seed": self.seed,
            "held_out": self.held_out,
        }

    def _places(self, number: int) -> list[tuple[int, int]]:
        """Take the next sequences: for each, its source and its number in that."""
        found, taken = [], self._taken
        if len(taken) == 1:
            taken[0] = self.position + number
            return [(0, self.position + place) for place in range(number)]
        for place in range(self.position + 1, self.position + number + 1):
            behind = [place * share - n for share, n in zip(self._shares, taken, strict=True)]
            source = behind.index(max(behind))
            found.append((source, taken[source]))
            taken[source] += 1
        return found
