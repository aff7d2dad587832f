"""Comparison of two checkpoints, regardless of how each is split into blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isnan, prod
from typing import Any

import torch

from fullshard.formatting import counted
from fullshard.state.checkpoint.index import MODEL, as_text, checksum, joined
from fullshard.state.checkpoint.reader import StoredCheckpoint

# Differences are computed in float64, in pieces of this size.
_PIECE_NUMEL = 2**20


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference in a tensor, named by its key, or in an option of the optimizer.

    `size` is the largest difference of two elements; infinite for differences of another kind.
    """

    subject: str
    what: str
    size: float = inf


def compare(
    first: StoredCheckpoint, second: StoredCheckpoint, *, progress: Callable[[int, int], None]
) -> tuple[list[Difference], int]:
    """Compare tensors, then the optimizer's other values.

    Returns the differences, largest first, and how many tensors are identical.
    """
    of_first, of_second = _stored_keys(first), _stored_keys(second)
    keys = list(dict.fromkeys([*first.keys, *second.keys]))
    found, num_same = [], 0
    for num_done, key in enumerate(keys, 1):
        one, other = of_first.get(key), of_second.get(key)
        if one is None or other is None:
            found.append(Difference(key, f"only in the {'first' if other is None else 'second'}"))
        elif difference := _difference(first, one, second, other):
            found.append(Difference(key, *difference))
        else:
            num_same += 1
        progress(num_done, len(keys))
    found += _optimizer_differences(first, second)
    return sorted(found, key=lambda each: -each.size), num_same


def _stored_keys(checkpoint: StoredCheckpoint) -> dict[str, str]:
    """Map all keys, including the aliases of tied tensors, to the keys of stored tensors."""
    found = {key: key for key in checkpoint.keys}
    for name, stored in checkpoint.manifest.aliases.items():
        if MODEL + stored in found:
            found.setdefault(MODEL + name, MODEL + stored)
    return found


def _difference(
    first: StoredCheckpoint, one: str, second: StoredCheckpoint, other: str
) -> tuple[str, float] | None:
    """Return the difference between two tensors in words and its size; None if there is none."""
    a, b = first.info(one), second.info(other)
    if a.shape != b.shape:
        return f"shape {list(a.shape)} and {list(b.shape)}", inf
    if a.dtype != b.dtype:
        what = f"dtype {a.dtype_name} and {b.dtype_name}"
    elif _checksum(first, one) != _checksum(second, other):
        what = "different content"
    else:
        return None
    words, size = _value_difference(first, one, second, other)
    return f"{what}, {words}", inf if isnan(size) else size


def _checksum(checkpoint: StoredCheckpoint, key: str) -> str:
    """Return the checksum of the manifest, or that of the blocks if there is none."""
    if key in checkpoint.manifest.tensors:
        return checkpoint.manifest.tensors[key].checksum
    checkpoint.require_tiled(key)
    shape, blocks = checkpoint.info(key).shape, checkpoint.load_all(key)
    return as_text(joined(checksum(shape, where, values) for where, values in blocks))


def _value_difference(
    first: StoredCheckpoint, one: str, second: StoredCheckpoint, other: str
) -> tuple[str, float]:
    # Absolute and relative.
    largest, num_different = torch.zeros(2, dtype=torch.float64), 0
    for where, values in first.load_all(one):
        others = second.read(other, where).reshape(-1).split(_PIECE_NUMEL)
        for a, b in zip(values.reshape(-1).split(_PIECE_NUMEL), others, strict=True):
            a, b = _widened(a), _widened(b)
            # Subtracting equal infinities gives NaN, so equal elements are excluded.
            is_same = (a == b) | (a.isnan() & b.isnan())
            differences = (a - b).abs()[~is_same]
            shares = differences / torch.maximum(a.abs(), b.abs())[~is_same]
            num_different += differences.numel()
            # Unlike Python's max, torch.maximum propagates NaN.
            if differences.numel():
                largest = torch.maximum(largest, torch.stack([differences.max(), shares.max()]))
    if not num_different:
        return "equal values with different bits", 0.0
    absolute, relative = largest.tolist()
    number = f"{num_different:,} of {counted(prod(first.info(one).shape), 'element')}"
    return f"max abs difference {absolute:.6g}, relative {relative:.3g}, {number}", absolute


def _widened(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _optimizer_differences(first: StoredCheckpoint, second: StoredCheckpoint) -> list[Difference]:
    """Compare the optimizer's values that are not tensors, which only manifests have."""
    if not (first.manifest.is_ours and second.manifest.is_ours):
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
    """Return plain values by path, as text: NaN equals NaN, and 1 differs from 1.0."""
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
