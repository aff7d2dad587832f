"""The optimizer of a run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fullshard._torch import BatchNormBase
from fullshard.errors import ConfigError
from fullshard.optim.by_unit import by_unit
from fullshard.runtime.names import clean_name
from fullshard.state.shards import TensorShard, tensor_shards
from fullshard.training.config import OptimizerSection

_FUSED_ON = ("cpu", "cuda")
_UNDECAYED = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    BatchNormBase,
)


def build_optimizer(
    model: nn.Module, section: OptimizerSection, device: torch.device
) -> torch.optim.AdamW:
    """AdamW over what is trained of a model that either door has sharded, or none.

    Two groups: matrices, which decay, and the rest: vectors, biases, embeddings (a head tied to
    one, too) and norms. It is the shape of the whole parameter that counts. Fused where the device
    that holds the shards can do it, and stepped unit by unit.
    """
    decayed: dict[torch.Tensor, None] = {}
    others: dict[torch.Tensor, None] = {}
    kinds = _modules_by_name(model)
    for shard in _trained(model):
        (decayed if _is_decayed(shard, kinds) else others)[shard.tensor] = None
    if decayed.keys() & others.keys():
        raise ConfigError(
            "optimizer: each parameter of a model is expected to be its own, found some that decay "
            "and some that do not in one flat parameter; wrap with use_orig_params=True."
        )
    if not decayed and not others:
        raise ConfigError(
            f"{type(model).__name__}: something to train is expected, found no parameter that "
            "takes a gradient; thaw some with requires_grad_()."
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
    """What a module is, by the name it has in the model as it was written; wrappers share it."""
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
    # A norm of the model's own, as most large models have one, is known by its name only.
    return isinstance(module, _UNDECAYED) or type(module).__name__.endswith("Norm")
