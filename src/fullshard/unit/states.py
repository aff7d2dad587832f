"""What a unit may be; each state carries what exists only in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fullshard.comm.topology import Axis
from fullshard.unit.gathering import Gathering


@dataclass(frozen=True, slots=True)
class Sharded:
    """Shards are registered; the slab is empty, or about to be."""


@dataclass(frozen=True, slots=True)
class Thinned:
    """Shards are registered; the full parameters are spread over a smaller group of ranks."""

    kept: torch.Tensor
    axis: Axis
    event: Any


@dataclass(frozen=True, slots=True)
class Unsharding:
    """Shards are registered; the gather is under way."""

    gathering: Gathering
    extension: Gathering | None


@dataclass(frozen=True, slots=True)
class Unsharded:
    """Full parameters are registered and may be read on the current stream."""


State = Sharded | Thinned | Unsharding | Unsharded

SHARDED = Sharded()
UNSHARDED = Unsharded()
