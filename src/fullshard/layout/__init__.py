"""Where elements lie: splits, buckets and the plan of a unit. Arithmetic only."""

from fullshard.layout.plan import (
    Bucket,
    BucketKind,
    CopyIndex,
    CostModel,
    DtypePlan,
    Lane,
    ParamSpec,
    Rows,
    Slot,
    UnitLayout,
    plan_unit,
)
from fullshard.layout.split import FlatSplit, Split

__all__ = ["Bucket", "BucketKind", "CostModel", "DtypePlan", "FlatSplit", "Lane", "ParamSpec"]
__all__ += ["CopyIndex", "Rows", "Slot", "Split", "UnitLayout", "plan_unit"]
