"""The floating-point operations of a step, and the peak of the device, for TFLOP/s and MFU."""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress

import torch
from torch.utils.flop_counter import FlopCounterMode

from fullshard._torch import FakeTensorMode
from fullshard.plan.device_profile import known_profile
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
    # Fake tensors are slower, but work for models that read values.
    for mode in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with suppress(Exception), mode, FlopCounterMode(display=False) as counter:
            loss = architecture.logits(model, tokens).sum()
            torch.autograd.grad(loss, trained, allow_unused=True)
            return float(counter.get_total_flops() * config.optimizer.accumulate / 1e12)
    return math.nan


def peak_tflops(config: TrainConfig, device: torch.device) -> float:
    """Return the peak TFLOP/s of the device in the dtype of the run; NaN if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    profile, dtype = known_profile(name), Dtypes.of(config.sharding.precision, device).param
    return math.nan if profile is None else profile.tflops(4 if dtype is None else dtype.itemsize)
