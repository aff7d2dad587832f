"""Checkpoints of models that are sharded in any way, and the state dicts of wrapped models.

The names below are imported when they are asked for: a program that saves no checkpoint does not
pay for `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.state.folder import checkpoints, latest, prune
    from fullshard.state.restoring import Loaded, load
    from fullshard.state.safetensors_export import export_safetensors
    from fullshard.state.safetensors_import import LoadedWeights, load_safetensors
    from fullshard.state.saving import Handle, save, save_async
    from fullshard.state.verifying import Problem, verify

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

_HOMES = {
    "folder": ("checkpoints", "latest", "prune"),
    "restoring": ("Loaded", "load"),
    "safetensors_export": ("export_safetensors",),
    "safetensors_import": ("LoadedWeights", "load_safetensors"),
    "saving": ("Handle", "save", "save_async"),
    "verifying": ("Problem", "verify"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
