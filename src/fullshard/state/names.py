"""What parameters are called by the people who made the model."""

from __future__ import annotations

from fullshard.runtime.names import WRAPPED, clean_name
from fullshard.unit.flat_lanes import flat_name

__all__ = ["WRAPPED", "clean_name", "flat_name"]
