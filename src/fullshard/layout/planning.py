"""Which arrangement a unit gets."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.layout.cost import CostModel
from fullshard.layout.flat import plan_flat_layout
from fullshard.layout.messages import Entry, UnitLayout, plan_layout


def plan_unit(
    entries: Sequence[Entry], num_ranks: int, cost: CostModel, *, is_flat: bool
) -> UnitLayout:
    """The layout of a unit; `is_flat` if its parameters are to be cut as one.

    On one rank nothing is cut, and rows lie one after another anyway: a flat message needs no copy
    of its own for each parameter, and none at all where nothing is cast.
    """
    if is_flat or num_ranks == 1:
        return plan_flat_layout(entries, num_ranks)
    return plan_layout(entries, num_ranks, cost)
