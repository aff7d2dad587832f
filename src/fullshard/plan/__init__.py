"""How much memory a run will need, without a process group or a device."""

from fullshard.formatting import readable
from fullshard.plan.activations import saved_activation_bytes
from fullshard.plan.memory import (
    MemoryPlan,
    ParameterShape,
    Sharding,
    UnitShapes,
    Work,
    plan_memory,
)

__all__ = [
    "MemoryPlan",
    "ParameterShape",
    "Sharding",
    "UnitShapes",
    "Work",
    "plan_memory",
    "readable",
    "saved_activation_bytes",
]
