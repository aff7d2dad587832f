"""WHERE: which elements of which parameter lie where on which rank. Arithmetic only."""

from fullshard.layout.cost import CostModel
from fullshard.layout.flat import FlatSplit, plan_flat_layout
from fullshard.layout.messages import (
    Entry,
    Landing,
    Lane,
    Message,
    Slot,
    UnitLayout,
    plan_layout,
)
from fullshard.layout.planning import plan_unit
from fullshard.layout.split import Block, Split
from fullshard.layout.stages import Stages

__all__ = [
    "Block",
    "CostModel",
    "Entry",
    "FlatSplit",
    "Landing",
    "Lane",
    "Message",
    "Slot",
    "Split",
    "Stages",
    "UnitLayout",
    "plan_flat_layout",
    "plan_layout",
    "plan_unit",
]
