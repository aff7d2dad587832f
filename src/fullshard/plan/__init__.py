"""What a run will need and how long it will take, without a process group or a device."""

from fullshard.formatting import readable
from fullshard.plan.activations import saved_activation_bytes
from fullshard.plan.device_profile import DeviceProfile, profile_named, read_profile, write_profile
from fullshard.plan.ledger import Kind, Peak
from fullshard.plan.memory import (
    MemoryPlan,
    ParameterShape,
    Sharding,
    UnitShapes,
    Work,
    plan_memory,
)
from fullshard.plan.step_plan import Job, Machine, StepPlan, plan, simulate

__all__ = [
    "DeviceProfile",
    "Job",
    "Kind",
    "Machine",
    "MemoryPlan",
    "ParameterShape",
    "Peak",
    "Sharding",
    "StepPlan",
    "UnitShapes",
    "Work",
    "plan",
    "plan_memory",
    "profile_named",
    "read_profile",
    "readable",
    "saved_activation_bytes",
    "simulate",
    "write_profile",
]
