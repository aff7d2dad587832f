"""Checkpoints of models that are sharded in any way, and the state dicts of wrapped models.

The names below are imported when they are asked for: a program that saves no checkpoint does not
pay for `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.state.checkpoint.folder import checkpoints, prune
    from fullshard.state.checkpoint.load import Loaded, load
    from fullshard.state.checkpoint.reader import Problem, latest, verify
    from fullshard.state.checkpoint.save import Handle, save, save_async
    from fullshard.state.safetensors.export import export_safetensors
    from fullshard.state.safetensors.load import LoadedWeights, load_safetensors

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

_MODULES = [f"checkpoint.{each}" for each in ("folder", "reader", "save", "load")]
_MODULES += ["safetensors.export", "safetensors.load"]


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        found = importlib.import_module(f"{__name__}.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
