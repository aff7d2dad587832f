"""What a run will need and how long it will take, without a process group or a device."""

from fullshard.plan.device_profile import (
    DeviceProfile,
    known_profile,
    profile_named,
    read_profile,
    write_profile,
)
from fullshard.plan.flops import count_flops
from fullshard.plan.ledger import Kind, Peak
from fullshard.plan.step_plan import Job, Machine, StepPlan, plan, simulate

__all__ = [
    "DeviceProfile",
    "Job",
    "Kind",
    "Machine",
    "Peak",
    "StepPlan",
    "count_flops",
    "known_profile",
    "plan",
    "profile_named",
    "read_profile",
    "simulate",
    "write_profile",
]
