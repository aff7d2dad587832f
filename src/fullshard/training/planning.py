"""Plans a run of `fullshard train`: simulates its step, and chooses settings that fit."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.models.architecture import Architecture
from fullshard.plan.step_plan import Job, Machine, StepPlan, simulate
from fullshard.training.config import TrainConfig, mesh_shape
from fullshard.training.optimizer import build_optimizer
from fullshard.training.sharding import build_sharded_model
from fullshard.training.world import World

_META = torch.device("meta")


def plan_run(config: TrainConfig, architecture: Architecture, machine: Machine) -> StepPlan:
    """Return the step of a rank of a run, simulated on a machine."""
    section, played = config.sharding, machine.profile.device_type
    mesh_shape(section, machine.num_ranks)
    if section.precision == "auto":
        section = replace(section, precision="float32" if played == "cpu" else "bf16")
    # Compiled blocks save no more activations than others; a CPU has its own memory only.
    section = replace(section, compile=False, offload=section.offload and played != "cpu")
    world = World(0, machine.num_ranks, 0, machine.ranks_per_host, _META)
    shape = (config.optimizer.batch, config.model.sequence)

    def make() -> Job:
        model = build_sharded_model(architecture, section, world)
        optimizer = build_optimizer(model, config.optimizer, torch.device(played))
        inputs, targets = (torch.empty(shape, dtype=torch.int64, device=_META) for _ in range(2))

        def loss() -> torch.Tensor:
            logits = architecture.logits(model, inputs)
            total = F.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"
            )
            return total / targets.ge(0).sum().clamp(min=1)

        limit = config.optimizer.clip or torch.inf
        return Job(model, loss, optimizer, lambda params: nn.utils.clip_grad_norm_(params, limit))

    accumulate = config.optimizer.accumulate
    return simulate(make, machine, accumulate=accumulate, is_offloaded=section.offload)
