"""Low-rank adapters (LoRA) for the linear layers of a frozen model, with peft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.errors import ConfigError
from fullshard.state import TensorShard, draw_into
from fullshard_train.models.initialization import constant, uniform
from fullshard_train.models.optional import optional
from fullshard_train.models.quantized import ReadRows, fill_quantized, quantize_base

# Names that peft gives: a module with an adapter becomes the `base_layer` of its replacement.
_BASE = ".base_layer."
_DOWN, _UP = ".lora_A.", ".lora_B."
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The options of LoRA; the output of an adapter is scaled by alpha / rank.

    A module gets an adapter if its name ends with one of `targets`. Without targets, every linear
    layer except the output head gets one. `base` is how linear layers of blocks are stored.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    base: str = PLAIN


def add_adapters(
    model: nn.Module, settings: LoraSettings, blocks: tuple[type[nn.Module], ...]
) -> nn.Module:
    """Freeze a model on the meta device and add adapters, which are on the meta device as well.

    Modules and parameters are named as peft names them.
    """
    peft = optional("peft", "adapters", "lora")
    names = sorted(_targeted(model, settings.targets))
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=names,
        fan_in_fan_out=any(_is_transposed(model.get_submodule(name)) for name in names),
    )
    adapted: nn.Module = peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    if settings.base != PLAIN:
        quantize_base(adapted, blocks, settings.base)
    return adapted


def merge_adapters(model: nn.Module) -> None:
    """Merge adapters into their base weights and remove them; names are then the model's own."""
    layer_class = optional("peft", "adapters", "lora").tuners.tuners_utils.BaseTunerLayer
    layers = [(name, each) for name, each in model.named_modules() if isinstance(each, layer_class)]
    for name, layer in layers:
        layer.merge()
        model.set_submodule(name, layer.get_base_layer())


def base_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    return name.replace(_BASE, ".")


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return _DOWN in name or _UP in name


def fill_adapters(shards: Iterable[TensorShard], seed: int) -> list[TensorShard]:
    """Initialize adapters as peft would, so that they add nothing yet.

    Returns the shards of other parameters.
    """
    others = []
    for shard in shards:
        if _DOWN in shard.name:
            draw_into(shard, shard.name, seed, uniform(shard.shape[1] ** -0.5))
        elif _UP in shard.name:
            draw_into(shard, shard.name, seed, constant(0.0))
        else:
            others.append(shard)
    return others


def fill_base(
    shards: Iterable[TensorShard], settings: LoraSettings | None, read: ReadRows
) -> list[TensorShard]:
    """Quantize what this rank holds of a frozen base, if it is stored so.

    Returns the shards of other parameters.
    """
    if settings is None or settings.base == PLAIN:
        return list(shards)
    return fill_quantized(shards, settings.base, base_name, read)


def _targeted(model: nn.Module, targets: tuple[str, ...]) -> set[str]:
    """Return the full names of the layers that get an adapter."""
    linear = {name for name, module in model.named_modules() if _is_linear(module)}
    if not targets:
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        return {name for name in linear if model.get_submodule(name) is not head}
    found: set[str] = set()
    for target in targets:
        matching = {name for name in linear if f".{name}".endswith(f".{target}")}
        if not matching:
            ends = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"adapters: no linear layer has a name that ends in {target!r}; choose among "
                f"{', '.join(ends)}."
            )
        found |= matching
    return found


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of GPT-2, whose weight is transposed."""
    return type(module).__name__ == "Conv1D"
