"""Where elements lie: splits, buckets and the plan of a unit. Arithmetic only."""

from fullshard.layout.copies import NO_TENSOR, Copy, CopyTable
from fullshard.layout.plan import (
    Bucket,
    CostModel,
    DtypePlan,
    Lane,
    ParamSpec,
    Slot,
    UnitLayout,
    plan_unit,
)
from fullshard.layout.split import FlatSplit, RowSplit, Run, Split, Whole, split_rows
from fullshard.layout.wire import Fp8, Int4, Int8, Plain, Wire

__all__ = ["NO_TENSOR", "Bucket", "Copy", "CopyTable", "CostModel", "DtypePlan", "FlatSplit"]
__all__ += [
    "Fp8",
    "Int4",
    "Int8",
    "Lane",
    "ParamSpec",
    "Plain",
    "RowSplit",
    "Run",
    "Slot",
    "Split",
    "UnitLayout",
    "Whole",
    "Wire",
]
__all__ += ["plan_unit", "split_rows"]
