"""Linear layers that multiply in float8, with torchao: `--precision fp8` and `fp8-rowwise`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.errors import ConfigError
from fullshard_train.models.optional import optional

PRECISIONS = {"fp8": "tensorwise", "fp8-rowwise": "rowwise"}
# Kernels need sizes that are multiples of it.
MULTIPLE = 16


def use_float8(
    model: nn.Module,
    blocks: tuple[type[nn.Module], ...],
    precision: str,
    device: torch.device,
    *,
    gathers: bool,
) -> None:
    """Replace the linear layers of blocks; the head, embeddings and norms stay as they are.

    With `gathers`, the weights of tensorwise layers travel between ranks in float8, too. A CPU
    emulates the products.
    """
    float8: Any = optional("torchao.float8", f"--precision {precision}", "torchao")
    recipe = PRECISIONS[precision]
    is_emulated = device.type != "cuda"
    if not is_emulated and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            f"--precision {precision}: {torch.cuda.get_device_name(device)} has no float8 "
            "products; choose bf16."
        )
    settings = vars(float8.Float8LinearConfig.from_recipe_name(recipe))
    if is_emulated or (gathers and recipe == "tensorwise"):
        settings = {**settings, "emulate": is_emulated}
        settings["enable_fsdp_float8_all_gather"] = gathers and recipe == "tensorwise"
    config = float8.Float8LinearConfig(**settings)

    def fits(layer: nn.Module, name: str) -> bool:
        return all(size % MULTIPLE == 0 for size in getattr(layer, "weight").shape)  # noqa: B009

    number = 0
    for module in model.modules():
        if isinstance(module, blocks):
            float8.convert_to_float8_training(module, module_filter_fn=fits, config=config)
            number += sum(isinstance(each, _layer_class()) for each in module.modules())
    if not number:
        raise ConfigError(
            f"--precision {precision}: no block has a linear layer whose sizes are multiples of "
            f"{MULTIPLE}; choose bf16."
        )


def follow_scales(model: nn.Module) -> None:
    """Compute the scales of all weights together, with one all-reduce, before each forward."""
    compute = optional("torchao.float8", "--precision", "torchao")
    precompute: Any = compute.precompute_float8_dynamic_scale_for_fsdp
    # Before the hook of the model itself, which begins to gather.
    model.register_forward_pre_hook(lambda *_: precompute(model), prepend=True)


def _layer_class() -> Any:
    module: Any = optional("torchao.float8.float8_linear", "--precision", "torchao")
    return module.Float8Linear
