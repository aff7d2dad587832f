"""Optimizers, clipping and scaling of gradients that are sharded over ranks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.optim.muon import Muon
    from fullshard.optim.selection import Selection, select

__all__ = ["Muon", "Selection", "select"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        file = "muon" if name == "Muon" else "selection"
        return getattr(importlib.import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
