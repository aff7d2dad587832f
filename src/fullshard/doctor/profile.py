"""The profile of this machine's devices, for plans."""

from __future__ import annotations

from dataclasses import replace

from fullshard.doctor.bandwidth import Speeds
from fullshard.doctor.machine import MachineFacts
from fullshard.plan import DeviceProfile, known_profile, profile_named


def measured_profile(facts: MachineFacts, speeds: Speeds) -> DeviceProfile:
    """Return the profile of this machine's devices: measured speeds, known values for the rest."""
    profile, name = profile_named("CPU"), facts.processor
    if facts.gpus:
        name = facts.gpus[0].name
        profile = known_profile(name) or profile_named("H100")
    size = facts.gpus[0].memory_bytes if facts.gpus else facts.memory_bytes // speeds.num_ranks
    matmul, copy = speeds.matmul / profile.matmul_efficiency, 2 * speeds.copy
    return replace(
        profile,
        name=name,
        memory_gib=size / (1 << 30),
        memory_gbs=copy / profile.memory_efficiency,
        link_gbs=max((each.gather for each in speeds.links), default=profile.link_gbs),
        link_efficiency=1.0 if speeds.links else profile.link_efficiency,
        tflops_16=matmul if facts.gpus else profile.tflops_16,
        tflops_32=profile.tflops_32 if facts.gpus else matmul,
    )
