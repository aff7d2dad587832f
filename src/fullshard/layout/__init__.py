"""Where elements lie: splits, buckets and the plan of a unit. Arithmetic only."""

from fullshard.layout.plan import (
    Bucket,
    BucketKind,
    CostModel,
    DtypePlan,
    Lane,
    ParamSpec,
    Slot,
    UnitLayout,
    WordOrder,
    plan_unit,
)
from fullshard.layout.split import FlatSplit, Split

__all__ = ["Bucket", "BucketKind", "CostModel", "DtypePlan", "FlatSplit", "Lane", "ParamSpec"]
__all__ += ["Slot", "Split", "UnitLayout", "WordOrder", "plan_unit"]
