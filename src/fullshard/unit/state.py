"""What the memory of a unit holds, and which version of the shards it came from.

    Absent -> Arriving -> Present -> Leaving -> Absent, or Kept
                 ^           ^          |                  |
                 |           +----------+                  |
                 +-----------------------------------------+

A state carries the version of the shards that its memory came from (rule 17: memory says its
version). Memory that leaves is freed by the comm context once another all-gather has been issued
(rule 3: freed one step late); until then, the unit may take it back. What modules see meanwhile is
another matter (`registration.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fullshard.comm.mesh import Axis
from fullshard.unit.all_gather import InFlightAllGather

# The version counters of all shards of a unit: they change whenever an optimizer, or anyone else,
# writes to one. Two states have the same version if they have the same object.
Version: TypeAlias = list[tuple[int, int]]


@dataclass(slots=True, eq=False)
class Absent:
    """Nothing: the full buffer is free."""


@dataclass(slots=True, eq=False)
class Arriving:
    """An all-gather is under way."""

    all_gather: InFlightAllGather
    version: Version


@dataclass(slots=True, eq=False)
class Present:
    """The full parameters, which may be read on the current stream."""

    version: Version


@dataclass(slots=True, eq=False)
class Kept:
    """This rank's part of the full buffer, which is split over fewer ranks than the shards are."""

    version: Version
    part: torch.Tensor
    axis: Axis
    event: Any


@dataclass(slots=True, eq=False)
class Leaving:
    """The full parameters, which compute reads until `event`; what is `then` if they are freed."""

    version: Version
    event: Any
    then: Absent | Kept


State: TypeAlias = Absent | Arriving | Present | Leaving | Kept

ABSENT = Absent()
