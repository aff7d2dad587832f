"""Optimizers, clipping and scaling of gradients that are sharded over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.optim.muon import Muon

__all__ = ["Muon"]


def __getattr__(name: str) -> Any:
    if name == "Muon":
        from fullshard.optim.muon import Muon

        return Muon
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
