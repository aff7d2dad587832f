"""The optimizer of a run and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from fullshard.errors import ConfigError
from fullshard.optim.by_unit import by_unit
from fullshard.runtime.names import clean_name
from fullshard.state.shards import TensorShard, tensor_shards
from fullshard.training.config import OptimizerSection

_FUSED_ON = ("cpu", "cuda")
# The weights of other norms, such as batch norm, are vectors, which are never decayed.
_UNDECAYED = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)


def build_optimizer(
    model: nn.Module, section: OptimizerSection, device: torch.device
) -> torch.optim.AdamW:
    """Return fused AdamW over the trainable parameters of a model, stepped unit by unit.

    The model may be sharded with either API, or not at all. Weight decay applies to matrices, but
    not to vectors, biases, norms and embeddings, nor to a head that is tied to an embedding. The
    shape of the unsharded parameter decides.
    """
    decayed: dict[torch.Tensor, None] = {}
    others: dict[torch.Tensor, None] = {}
    kinds = _modules_by_name(model)
    for shard in _trained(model):
        (decayed if _is_decayed(shard, kinds) else others)[shard.tensor] = None
    if decayed.keys() & others.keys():
        raise ConfigError(
            "optimizer: flat parameters with the same weight decay throughout are expected, found "
            "one that mixes parameters with and without; wrap with use_orig_params=True."
        )
    if not decayed and not others:
        raise ConfigError(
            f"{type(model).__name__}: trainable parameters are expected, found no parameter that "
            "takes a gradient; call requires_grad_() on some."
        )
    groups = [(decayed, section.weight_decay), (others, 0.0)]
    optimizer = torch.optim.AdamW(
        [{"params": list(params), "weight_decay": decay} for params, decay in groups if params],
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        fused=device.type in _FUSED_ON,
    )
    return by_unit(optimizer)


def _trained(model: nn.Module) -> Iterator[TensorShard]:
    yield from (
        shard for shard in tensor_shards(model) if not shard.is_buffer and shard.is_trainable
    )


def _modules_by_name(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return modules by the name they have without wrappers; a wrapper shares its module's."""
    found: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(clean_name(name), []).append(module)
    return found


def _is_decayed(shard: TensorShard, modules: dict[str, list[nn.Module]]) -> bool:
    if len(shard.shape) < 2:
        return False
    for name in shard.names:
        path, _, own = name.rpartition(".")
        if own == "bias" or any(_is_undecayed(module) for module in modules.get(path, ())):
            return False
    return True


def _is_undecayed(module: nn.Module) -> bool:
    # Norms that a model defines itself are recognized by the name of their class.
    return isinstance(module, _UNDECAYED) or type(module).__name__.endswith("Norm")


def learning_rate(step: int, section: OptimizerSection) -> float:
    """Return the learning rate of the step after `step` others: linear warmup, cosine decay.

    The rate is `lr` in the last step of the warmup and `lr * lr_end` in the last step of all. If
    the warmup is longer than the run, it ends with the last step.
    """
    warmup = max(1, min(section.warmup, section.steps))
    number = step + 1
    if number <= warmup:
        return section.lr * number / warmup
    if number >= section.steps:
        return section.lr * section.lr_end
    progress = (number - warmup) / (section.steps - warmup)
    share = (1 + math.cos(math.pi * progress)) / 2
    return section.lr * (section.lr_end + (1 - section.lr_end) * share)
