"""Which neighbouring shards of a home are stepped as one tensor: pure arithmetic."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """The elements of a home that are one parameter's shard.

    `kind` is what shards have alike that are stepped together: their settings, their state, the
    dtype of their gradients. None is for a shard that is not stepped so.
    """

    start: int
    numel: int
    kind: Hashable | None

    @property
    def stop(self) -> int:
        return self.start + self.numel


def plan_spans(tiles: Sequence[Tile]) -> list[list[int]]:
    """The longest runs of neighbouring tiles of one kind, as indices, in the order of the home.

    Tiles must not overlap. Between neighbours lies nothing but padding, which is stepped with
    them. Of empty tiles, one of no kind separates nothing.
    """
    order = sorted(range(len(tiles)), key=lambda index: (tiles[index].start, tiles[index].stop))
    spans: list[list[int]] = []
    open_kind: Hashable | None = None
    for index in order:
        tile = tiles[index]
        if tile.kind is None:
            open_kind = open_kind if tile.numel == 0 else None
        elif open_kind is not None and tile.kind == open_kind:
            spans[-1].append(index)
        else:
            spans.append([index])
            open_kind = tile.kind
    return spans
