"""Options of parameter groups and small optimizer state, as JSON and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fullshard.errors import ConfigError


def plain_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups, in what JSON can say."""
    return [
        {key: as_json(f"param_groups[{index}].{key}", value) for key, value in group.items()}
        for index, group in enumerate(groups)
    ]


def plain_values(small: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """State that is neither a tensor nor large, by parameter."""
    found = {
        name: {
            key: as_json(f"{name}.{key}", value)
            for key, value in state.items()
            if not isinstance(value, torch.Tensor)
        }
        for name, state in small.items()
    }
    return {name: state for name, state in found.items() if state}


def as_json(subject: str, value: Any) -> Any:
    """A value that JSON can hold and `from_json` gives back as it was."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        dtype = str(value.dtype).removeprefix("torch.")
        return {"kind": "tensor", "dtype": dtype, "value": value.item()}
    if isinstance(value, (list, tuple)):
        items = [as_json(subject, item) for item in value]
        return items if isinstance(value, list) else {"kind": "tuple", "value": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {
            "kind": "dict", "value": {k: as_json(f"{subject}.{k}", v) for k, v in value.items()}
        }  # fmt: skip
    raise ConfigError(
        f"optimizer: {subject} must be plain data (numbers, strings, lists, dicts) to be saved, "
        f"found {type(value).__name__}; give the optimizer a plain value."
    )


def from_json(value: Any) -> Any:
    """What `as_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, inner = value.get("kind"), value.get("value")
    if kind == "tuple" and isinstance(inner, list):
        return tuple(from_json(item) for item in inner)
    if kind == "dict" and isinstance(inner, dict):
        return {key: from_json(item) for key, item in inner.items()}
    dtype = getattr(torch, str(value.get("dtype")), None)
    if kind == "tensor" and isinstance(dtype, torch.dtype):
        return torch.tensor(inner, dtype=dtype)
    return value
