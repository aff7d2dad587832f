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


def __getattr__(name: str) -> Any:
    # Each of these modules imports the one before it.
    for module in ("store", "checkpoint", "safetensors") if name in __all__ else ():
        found = importlib.import_module(f"{__name__}.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
