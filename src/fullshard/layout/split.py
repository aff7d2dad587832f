"""How one tensor is cut over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring ranks that hold the same number of rows."""

    first_rank: int
    num_ranks: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Split:
    """How a tensor of `shape` is cut along `dim`, as DTensor's `Shard(dim)` cuts it.

    Every rank but the last ones holds `chunk_rows` rows; of the last ones one may hold fewer and
    the others none. With `dim=None` every rank holds the whole tensor, as `Replicate()` does:
    that is how a 0-dim tensor, which has no rows, is kept.
    """

    shape: tuple[int, ...]
    dim: int | None
    num_ranks: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_rows(self) -> int:
        return 1 if self.dim is None else self.shape[self.dim]

    @property
    def chunk_rows(self) -> int:
        return 1 if self.dim is None else -(-self.num_rows // self.num_ranks)

    @property
    def outer(self) -> int:
        """Elements of the dims before `dim`: how many runs a rank's rows fall into."""
        return 1 if self.dim is None else prod(self.shape[: self.dim])

    @property
    def inner(self) -> int:
        """Elements of one row of one run."""
        return self.numel if self.dim is None else prod(self.shape[self.dim + 1 :])

    @property
    def slot_numel(self) -> int:
        """Elements that a rank sends: its shard, padded to the largest shard."""
        return self.outer * self.chunk_rows * self.inner

    @property
    def is_stacked(self) -> bool:
        """Whether the shards, laid one after another, are the whole tensor as it lies in memory."""
        return self.dim is not None and self.outer == 1

    def rows(self, rank: int) -> range:
        """The rows that `rank` holds."""
        if self.dim is None:
            return range(1)
        start = min(rank * self.chunk_rows, self.num_rows)
        return range(start, min(start + self.chunk_rows, self.num_rows))

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], len(self.rows(rank)), *self.shape[self.dim + 1 :])

    def shard_numel(self, rank: int) -> int:
        return prod(self.shard_shape(rank))

    def blocks(self) -> Iterator[Block]:
        """The ranks that hold something, in at most two blocks: the full chunks, the rest."""
        if self.dim is None or self.chunk_rows == 0:
            return
        num_full, rest = divmod(self.num_rows, self.chunk_rows)
        if num_full:
            yield Block(0, num_full, self.chunk_rows)
        if rest:
            yield Block(num_full, 1, rest)
