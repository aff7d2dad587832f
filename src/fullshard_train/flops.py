"""The floating-point operations of a step, and the peak of the device, for TFLOP/s and MFU."""

from __future__ import annotations

import math

import torch

from fullshard.plan import count_flops, known_profile
from fullshard_train.config import TrainConfig
from fullshard_train.models.architecture import Architecture
from fullshard_train.sharding import Dtypes


def step_tflop(config: TrainConfig, architecture: Architecture) -> float:
    """Return the operations of a rank in a step, in units of 1e12; NaN if they cannot be counted.

    Counts the matrix products of forward and backward on the meta device, without recomputation.
    Attention counts as if nothing were masked. Frozen weights have no gradients.
    """
    shape = (config.optimizer.batch, config.model.sequence)
    tokens, model = torch.zeros(shape, dtype=torch.int64, device="meta"), architecture.build()
    trained = [param for param in model.parameters() if param.requires_grad]

    def step() -> None:
        torch.autograd.grad(architecture.logits(model, tokens).sum(), trained, allow_unused=True)

    found = count_flops(step)
    return math.nan if found is None else found * config.optimizer.accumulate / 1e12


def peak_tflops(config: TrainConfig, device: torch.device) -> float:
    """Return the peak TFLOP/s of the device in the dtype of the run; NaN if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    profile, dtype = known_profile(name), Dtypes.of(config.sharding.precision, device).param
    return math.nan if profile is None else profile.tflops(4 if dtype is None else dtype.itemsize)
