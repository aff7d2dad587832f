"""Checkpoints of models that are sharded in any way, and the state dicts of wrapped models.

The names below are imported when they are asked for: a program that saves no checkpoint does not
pay for `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.state.checkpoint import Handle, Loaded, load, save, save_async
    from fullshard.state.safetensors import LoadedWeights, export_safetensors, load_safetensors
    from fullshard.state.store import Problem, checkpoints, latest, prune, verify

__all__ = [
    "Handle",
    "Loaded",
    "LoadedWeights",
    "Problem",
    "checkpoints",
    "export_safetensors",
    "latest",
    "load",
    "load_safetensors",
    "prune",
    "save",
    "save_async",
    "verify",
]

_MODULES = {
    "checkpoint": ("Handle", "Loaded", "load", "save", "save_async"),
    "safetensors": ("LoadedWeights", "export_safetensors", "load_safetensors"),
    "store": ("Problem", "checkpoints", "latest", "prune", "verify"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
