"""Compares what is planned for a GPU with what a step holds there."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.plan import Machine, profile_named
from fullshard.plan.device_profile import known_profile
from fullshard.testing import quiet_world
from fullshard_train.config import (
    ModelSection,
    OptimizerSection,
    ShardingSection,
    TrainConfig,
)
from fullshard_train.optimizer import build_optimizer
from fullshard_train.planning import plan_run
from fullshard_train.sharding import architecture_for, build_sharded_model
from fullshard_train.world import World


@pytest.mark.parametrize("sharding", [{}, {"api": "wrapper", "activation_checkpointing": True}])
def test_a_step_holds_what_was_planned(sharding: dict[str, Any]) -> None:
    device = torch.device("cuda", 0)
    # Memory is the same on all of them but for the workspace of matmuls.
    profile = known_profile(torch.cuda.get_device_name(device)) or profile_named("H100")
    config = TrainConfig(
        model=ModelSection(name="150m", sequence=512),
        sharding=ShardingSection(**sharding),
        optimizer=OptimizerSection(batch=4),
    )
    architecture = architecture_for(config.model)
    planned = plan_run(config, architecture, Machine(profile=profile, ranks_per_host=8))
    with quiet_world(8, device=device):
        gc.collect()
        before = torch.cuda.memory_allocated(device)
        world = World(0, 8, 0, 8, device)
        model = build_sharded_model(architecture, config.sharding, world)
        optimizer = build_optimizer(model, config.optimizer, device)
        tokens = torch.zeros(4, 512, dtype=torch.int64, device=device)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats(device)
            loss = architecture.loss(model, tokens, tokens) / tokens.numel()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found = torch.cuda.max_memory_allocated(device) - before
        del model, optimizer, loss
    # The workspace of matmuls may already have been there.
    assert planned.peak_bytes - profile.workspace_bytes <= 1.03 * found
    assert planned.peak_bytes >= 0.97 * found
