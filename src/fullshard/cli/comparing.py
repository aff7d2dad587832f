"""Two checkpoints compared, however each of them is cut into blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fullshard.cli.screen import counted
from fullshard.state.dcp import MODEL
from fullshard.state.store import StoredCheckpoint, as_text, checksum, joined

# Differences are taken in float64: a few times this much memory, whatever the size of a block.
_PIECE_NUMEL = 2**20


@dataclass(frozen=True, slots=True)
class Difference:
    """What is different: a tensor by its key, or an option of the optimizer."""

    subject: str
    what: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two checkpoints, and how many tensors are the same."""

    differences: tuple[Difference, ...]
    num_same: int


@dataclass(slots=True)
class _Distance:
    """How far two tensors lie apart."""

    largest: float = 0.0
    num_different: int = 0


def compare(
    first: StoredCheckpoint,
    second: StoredCheckpoint,
    *,
    with_values: bool,
    progress: Callable[[int, int], None],
) -> Comparison:
    """Compare tensors in the order of the first checkpoint, then what optimizers keep beside."""
    of_first, of_second = _Keys(first), _Keys(second)
    keys = list(dict.fromkeys([*first.keys, *second.keys]))
    found, num_same = [], 0
    for num_done, key in enumerate(keys, 1):
        one, other = of_first.stored(key), of_second.stored(key)
        if other is None:
            what = "only in the first"
        elif one is None:
            what = "only in the second"
        else:
            what = _difference(_Tensor(first, one), _Tensor(second, other), with_values)
        if what:
            found.append(Difference(key, what))
        else:
            num_same += 1
        progress(num_done, len(keys))
    return Comparison((*found, *_optimizer_differences(first, second)), num_same)


class _Keys:
    """Which tensor a key means. A tied one is stored under one of its names, and has them all."""

    def __init__(self, checkpoint: StoredCheckpoint) -> None:
        self._meant = {key: key for key in checkpoint.keys}
        aliases = {} if checkpoint.manifest is None else checkpoint.manifest.aliases
        for name, stored in aliases.items():
            if MODEL + stored in self._meant:
                self._meant.setdefault(MODEL + name, MODEL + stored)

    def stored(self, key: str) -> str | None:
        return self._meant.get(key)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of one of the two checkpoints."""

    checkpoint: StoredCheckpoint
    key: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.checkpoint.shape(self.key)

    @property
    def dtype(self) -> torch.dtype:
        return self.checkpoint.dtype(self.key)

    def checksum(self) -> str:
        """As the manifest says; without one, of what is read, a block at a time."""
        manifest = self.checkpoint.manifest
        if manifest is not None and self.key in manifest.tensors:
            return manifest.tensors[self.key].checksum
        self.checkpoint.require_tiled(self.key)
        blocks = self.checkpoint.load_all(self.key)
        return as_text(joined(checksum(self.shape, box, values) for box, values in blocks))


def _difference(one: _Tensor, other: _Tensor, with_values: bool) -> str:
    """What differs of a tensor that both have; nothing if it is the same."""
    if one.shape != other.shape:
        return f"shape {list(one.shape)} and {list(other.shape)}"
    if one.dtype != other.dtype:
        what = f"dtype {_name(one.dtype)} and {_name(other.dtype)}"
    elif one.checksum() != other.checksum():
        what = "different content"
    else:
        return ""
    return f"{what}, {_distance_in_words(one, other)}" if with_values else what


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _distance_in_words(one: _Tensor, other: _Tensor) -> str:
    distance = _Distance()
    for box, values in one.checkpoint.load_all(one.key):
        _measure(distance, values, other.checkpoint.read(other.key, box))
    if not distance.num_different:
        return "equal values in other bits"
    return (
        f"max abs difference {distance.largest:.6g}, "
        f"{distance.num_different:,} of {counted(prod(one.shape), 'element')}"
    )


def _measure(distance: _Distance, one: torch.Tensor, other: torch.Tensor) -> None:
    one, other = one.reshape(-1), other.reshape(-1)
    for a, b in zip(one.split(_PIECE_NUMEL), other.split(_PIECE_NUMEL), strict=True):
        a, b = _widened(a), _widened(b)
        # Of infinities and nans the difference says nothing: those that agree are no difference.
        is_same = (a == b) | (a.isnan() & b.isnan())
        apart = (a - b).abs()[~is_same]
        if apart.numel():
            distance.num_different += apart.numel()
            largest = float(apart.max())
            # A nan on one side stays, also when it was found in an earlier piece.
            if not distance.largest >= largest and distance.largest == distance.largest:
                distance.largest = largest


def _widened(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _optimizer_differences(first: StoredCheckpoint, second: StoredCheckpoint) -> list[Difference]:
    """Of what an optimizer keeps beside tensors; only manifests have it."""
    if first.manifest is None or second.manifest is None:
        return []
    one, other = first.manifest.optimizer, second.manifest.optimizer
    if one is None or other is None:
        if one is other:
            return []
        which = "second" if one is None else "first"
        return [Difference("optimizer", f"only in the {which}")]
    found = []
    for what in ("param_groups", "values"):
        a, b = _flattened(what, one[what]), _flattened(what, other[what])
        for path in dict.fromkeys([*a, *b]):
            if a.get(path) != b.get(path):
                shown = f"{a.get(path, 'nothing')} and {b.get(path, 'nothing')}"
                found.append(Difference(f"optimizer.{path}", shown))
    return found


def _flattened(path: str, value: Any) -> dict[str, str]:
    """Plain values by where they are. As text: nan is like nan, and 1 is unlike 1.0."""
    if isinstance(value, dict) and value:
        parts = [(f"{path}.{name}", each) for name, each in value.items()]
    elif isinstance(value, list) and value:
        parts = [(f"{path}[{index}]", each) for index, each in enumerate(value)]
    else:
        return {path: json.dumps(value)}
    found: dict[str, str] = {}
    for name, each in parts:
        found |= _flattened(name, each)
    return found
