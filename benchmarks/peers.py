"""Other libraries that shard parameters, where they are installed and run.

DeepSpeed and FairScale are not among the dependencies: a benchmark offers them if they can be
imported. FairScale's class asks for CUDA streams in every forward, so it runs on CUDA only.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor, nn

DEEPSPEED = "DeepSpeed ZeRO-3"
FAIRSCALE = "FairScale"


def installed(device: torch.device) -> list[str]:
    """The peers that can run on a device."""
    found = []
    if importlib.util.find_spec("deepspeed"):
        found.append(DEEPSPEED)
    if importlib.util.find_spec("fairscale") and device.type == "cuda":
        found.append(FAIRSCALE)
    return found


class DeepSpeedStep:
    """A model in DeepSpeed's engine, which owns its backward and its optimizer."""

    def __init__(
        self, model: nn.Module, batch: int, learning_rate: float, dtype: torch.dtype
    ) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": batch,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": dtype == torch.bfloat16},
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        self._engine = deepspeed.initialize(
            model=model, optimizer=optimizer, dist_init_required=False, config=config
        )[0]

    def __call__(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self._engine(tokens)
        self._engine.backward(loss)
        self._engine.step()
        return loss


def fairscale_wrapped(
    model: nn.Module, unit_class: type[nn.Module], dtype: torch.dtype
) -> nn.Module:
    """The model in FairScale's class, unit by unit."""
    from fairscale.nn import FullyShardedDataParallel, auto_wrap, enable_wrap

    def is_unit(module: nn.Module, recurse: bool, **_: object) -> bool:
        return recurse or isinstance(module, unit_class)

    options = {"mixed_precision": dtype != torch.float32}
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, auto_wrap_policy=is_unit, **options):
        wrapped: nn.Module = FullyShardedDataParallel(auto_wrap(model), **options)
    return wrapped
