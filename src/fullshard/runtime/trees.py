"""Tensors in a module's inputs and outputs: in containers, dataclasses, named tuples."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

# Values of exactly these types contain no tensors; most non-tensor arguments are of these types.
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The value with its tensors changed; the same object wherever nothing changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    kind = type(value)
    if kind in _PLAIN:
        return value
    assign: Callable[[Any, Any, Any], None]
    # Checked first: a dataclass that is also a mapping keeps both in sync through `setattr`.
    if dataclasses.is_dataclass(kind):
        parts = {each.name: getattr(value, each.name, None) for each in dataclasses.fields(kind)}
        is_frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assign = object.__setattr__ if is_frozen else setattr
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = [map_tensors(change, part) for part in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    elif isinstance(value, Mapping):
        parts, assign = dict(value), operator.setitem
    else:
        return value
    changed = {key: map_tensors(change, part) for key, part in parts.items()}
    if all(changed[key] is part for key, part in parts.items()):
        return value
    result = copy.copy(value)
    for key, part in changed.items():
        if part is not parts[key]:
            assign(result, key, part)
    return result
