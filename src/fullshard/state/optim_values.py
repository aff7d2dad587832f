"""Values of an optimizer's state: tensors, whole or sharded, numbers, and mappings of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fullshard.state.shards import (
    is_sharded,
    on_meta,
    shape_of,
)


def copied(value: Any, *, to_cpu: bool = False) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.detach().cpu() if to_cpu and not value.is_cpu else value.detach().clone()


def is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_sharded(value)


def has_dims(value: Any) -> bool:
    return is_array(value) and len(shape_of(value)) > 0


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested state with `change` applied to each value, in the same order on all ranks."""
    if isinstance(value, Mapping):
        changed = {key: mapped(value[key], change) for key in sorted(value, key=str)}
        return {key: changed[key] for key in value}
    return change(value)


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of nested state, each with the keys that lead to it."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in value.items():
        yield from leaves(inner, (*path, str(key)))


def outline(value: Any) -> Any:
    """A value without its elements; numbers stay."""
    if not is_array(value):
        return value
    return on_meta(value) if has_dims(value) or is_sharded(value) else value.detach().cpu()
