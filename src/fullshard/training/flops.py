"""What a step computes for the model, and what the device could compute: tflops and MFU."""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress

import torch
from torch.utils.flop_counter import FlopCounterMode

from fullshard._torch import FakeTensorMode
from fullshard.models.architecture import Architecture
from fullshard.training.config import TrainConfig
from fullshard.training.sharding import Dtypes

# Dense peaks in TFLOP/s, as vendors state them: in 16 bits, and in float32. The first name counts.
_PEAKS: dict[str, tuple[float, float]] = {
    "B200": (2250, 75), "H100 PCIe": (756, 51), "H100 NVL": (835, 60), "H100": (989, 67),
    "H200": (989, 67), "A100": (312, 19.5), "A10G": (70, 35), "A6000": (155, 38.7),
    "L40S": (362, 91.6), "L4": (121, 30.3), "RTX 5090": (210, 105), "RTX 4090": (165, 82.6),
    "RTX 3090": (71, 35.6), "MI300X": (1307, 163),
}  # fmt: skip


def step_tflop(config: TrainConfig, architecture: Architecture) -> float:
    """Return what a rank computes in a step, in units of 1e12; NaN if it cannot be told.

    Counts the matrix products of forward and backward on the meta device, without recomputation,
    attention's as if nothing were masked. Frozen weights have no gradients.
    """
    shape = (config.optimizer.batch, config.model.sequence)
    tokens, model = torch.zeros(shape, dtype=torch.int64, device="meta"), architecture.build()
    trained = [param for param in model.parameters() if param.requires_grad]
    # Fake tensors are slower, and suit models that read values.
    for mode in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with suppress(Exception), mode, FlopCounterMode(display=False) as counter:
            loss = architecture.logits(model, tokens).sum()
            torch.autograd.grad(loss, trained, allow_unused=True)
            return float(counter.get_total_flops() * config.optimizer.accumulate / 1e12)
    return math.nan


def peak_tflops(config: TrainConfig, device: torch.device) -> float:
    """Return what the device can compute in a second in the dtype of the run; NaN if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = next((both for known, both in _PEAKS.items() if known in name), (math.nan, math.nan))
    return peaks[Dtypes.of(config.sharding.precision, device).param is None]
