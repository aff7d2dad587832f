"""Tensors inside what a module takes and returns: containers, dataclasses, named tuples."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


# Of exactly these types a value has no tensors inside; most arguments that are not tensors are.
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in _PLAIN:
        return
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from tensors(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from tensors(getattr(value, item.name, None))


def map_arguments(
    change: Callable[[torch.Tensor], torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with, with its tensors changed.

    Most modules are given plain tensors: those are not worth a walk (rule 7).
    """
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
        return (change(args[0]),), kwargs
    return map_tensors(change, args), map_tensors(change, kwargs)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: _T) -> _T:
    """The value with its tensors changed; the same object wherever nothing changed."""
    result: _T = _mapped(change, value)
    return result


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is not tuple and kind is not dict and dataclasses.is_dataclass(value):
        return value if isinstance(value, type) else _mapped_dataclass(change, value)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_mapped(change, part) for part in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, Mapping):
        parts = {key: _mapped(change, part) for key, part in value.items()}
        if all(parts[key] is value[key] for key in parts):
            return value
        return _mapping_like(value, parts)
    return value


def _mapped_dataclass(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    changed: dict[str, Any] = {}
    for item in dataclasses.fields(value):
        old = getattr(value, item.name, None)
        new = _mapped(change, old)
        if new is not old:
            changed[item.name] = new
    if not changed:
        return value
    result = copy.copy(value)
    for name, new in changed.items():
        # A frozen dataclass refuses setattr; one that is a mapping too keeps both in step by it.
        frozen = type(value).__dataclass_params__.frozen
        (object.__setattr__ if frozen else setattr)(result, name, new)
    return result


def _mapping_like(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return parts
    result = copy.copy(value)
    for key, part in parts.items():
        result[key] = part  # type: ignore[index]
    return result
