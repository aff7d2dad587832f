"""The optimizer of a run and its learning rate."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import nn

from fullshard import by_unit
from fullshard.errors import ConfigError
from fullshard.optim import Muon, select
from fullshard_train.config import OptimizerSection
from fullshard_train.models.optional import optional

_FUSED_ON = ("cpu", "cuda")


def build_optimizer(
    model: nn.Module, section: OptimizerSection, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable parameters of a model; AdamW steps unit by unit.

    The model may be sharded with either API, or not at all. `select` says what decays, and what
    Muon trains.
    """
    is_muon = section.name == "muon"
    found = select(model, None if is_muon else lambda name, shape: False)
    if not (found.matrices or found.decayed or found.undecayed):
        raise ConfigError(
            f"No parameter of {type(model).__name__} requires a gradient; call requires_grad_() "
            "on those to train."
        )
    betas, is_fused = (section.beta1, section.beta2), device.type in _FUSED_ON
    groups: Any = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((found.decayed, section.weight_decay), (found.undecayed, 0.0))
        if params
    ]
    if found.matrices:
        for group in groups:
            group |= {"betas": betas, "fused": is_fused}
        matrices = {"params": found.matrices, "weight_decay": section.weight_decay}
        return Muon([matrices, *groups], lr=section.lr, adjust_lr_fn="match_rms_adamw")
    if section.name == "adamw8bit":
        torchao: Any = optional("torchao.optim", "--optimizer adamw8bit", "torchao")
        return cast(torch.optim.Optimizer, torchao.AdamW8bit(groups, lr=section.lr, betas=betas))
    return by_unit(torch.optim.AdamW(groups, lr=section.lr, betas=betas, fused=is_fused))


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer create its quantized state, so that a loaded state is quantized, too."""
    for group in optimizer.param_groups:
        group["lr"].fill_(0.0)
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()


def learning_rate(step: int, section: OptimizerSection) -> float:
    """Return the learning rate of step `step`, counted from 0: linear warmup, then the schedule.

    The rate is `lr` in the last step of the warmup and, unless it is constant, `lr * lr_end` in the
    last step of all. If the warmup is longer than the run, it ends with the last step.
    """
    warmup, number = max(1, min(section.warmup, section.steps)), step + 1
    if number <= warmup:
        return section.lr * number / warmup
    progress = min(1.0, (number - warmup) / max(1, section.steps - warmup))
    share = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "constant": 1.0,
        "wsd": min(1.0, max(0, section.steps - number) / max(1.0, section.decay * section.steps)),
    }[section.schedule]
    return section.lr * (section.lr_end + (1 - section.lr_end) * share)
