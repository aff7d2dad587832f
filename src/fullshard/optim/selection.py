"""Which parameters of a model decay, and which are the matrices of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from fullshard.errors import ConfigError
from fullshard.runtime.names import clean_name
from fullshard.state.shards import TensorShard, tensor_shards

Choice = Callable[[str, torch.Size], bool | None]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# The weights of other norms, such as batch norm, are vectors, which are never decayed.
_UNDECAYED = (*_EMBEDDINGS, nn.LayerNorm, nn.RMSNorm)
_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)  # their weights have three dims, too
_HEADS = ("head", "lm_head", "output_head", "classifier")


@dataclass(frozen=True, slots=True)
class Selection:
    """The trainable parameters of a model, as an optimizer holds them.

    Those in `matrices` are for Muon. The others are for AdamW, with and without weight decay.
    """

    matrices: list[torch.Tensor] = field(default_factory=list)
    decayed: list[torch.Tensor] = field(default_factory=list)
    undecayed: list[torch.Tensor] = field(default_factory=list)


def select(model: nn.Module, by_muon: Choice | None = None) -> Selection:
    """Sort the parameters of a model, sharded with either API or not at all.

    Weight decay applies to matrices, but not to vectors, biases, norms and embeddings, nor to a
    head that is tied to an embedding; the shape of the unsharded parameter decides. Matrices for
    Muon are those that decay and are no heads: what has the shape of an embedding or the name of a
    head. `by_muon(name, shape)` decides otherwise, unless it returns None.
    """
    modules = _modules_by_name(model)
    heads = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, _EMBEDDINGS)}
    found: dict[torch.Tensor, tuple[str, str]] = {}
    for shard in tensor_shards(model):
        if shard.is_buffer or not shard.is_trainable:
            continue
        is_decayed = _is_decayed(shard, modules)
        is_hidden = is_decayed and _is_hidden(shard, modules) and tuple(shard.shape) not in heads
        own = None if by_muon is None else by_muon(shard.name, shard.shape)
        kind = "decayed" if is_decayed else "undecayed"
        if is_hidden if own is None else own:
            kind = "matrices"
        other, was = found.setdefault(shard.tensor, (shard.name, kind))
        if was != kind and "matrices" in (was, kind):
            raise ConfigError(
                f"{shard.name}: this tensor and {other} are in one flat parameter, of which Muon "
                "can train all or nothing; wrap with use_orig_params=True."
            )
    result = Selection()
    for tensor, (_, kind) in found.items():
        getattr(result, kind).append(tensor)
    return result


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


def _is_hidden(shard: TensorShard, modules: dict[str, list[nn.Module]]) -> bool:
    """Whether a parameter is a matrix, or a stack of them, and no head by its name."""
    for name in shard.names:
        path = name.rpartition(".")[0]
        is_convolution = any(isinstance(each, _CONVOLUTIONS) for each in modules.get(path, ()))
        if is_convolution or path.rpartition(".")[2] in _HEADS:
            return False
    return len(shard.shape) in (2, 3)
