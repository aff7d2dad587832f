"""What a checkpoint of a model and its optimizer consists of, on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.errors import ConfigError, LifecycleError
from fullshard.layout.split import Box
from fullshard.state.dcp_format import HeldTensor
from fullshard.state.sites import Block, Site, sites_of

MODEL = "model."
OPTIMIZER = "optimizer.state."


@dataclass(frozen=True, slots=True)
class Small:
    """State of one parameter that is not cut: a count of steps, a number, a string.

    `is_known` says whether this rank trains a part of the parameter: others may be out of date.
    """

    value: Any
    is_known: bool


@dataclass(slots=True)
class Inventory:
    """What this rank has to write, by key; views of the memory that is trained."""

    held: dict[str, HeldTensor] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    small: dict[str, dict[str, Small]] = field(default_factory=dict)

    def add(self, key: str, path: tuple[str, ...], held: HeldTensor) -> None:
        self.held[key] = held
        self.paths[key] = path


class Selection:
    """Which parameters and buffers a checkpoint has."""

    def __init__(self, choose: Callable[[Site], bool], words: str) -> None:
        self.choose = choose
        self.words = words

    @classmethod
    def of(cls, only: str | Callable[[str], bool] | None) -> Selection:
        """All of them, those that are trained, or those whose names a function accepts."""
        if only is None:
            return cls(lambda _: True, "all")
        if only == "trainable":
            return cls(lambda site: site.is_trainable, "trainable parameters")
        if callable(only):
            name = getattr(only, "__name__", type(only).__name__)
            return cls(lambda site: bool(only(site.name)), f"names that {name} accepts")
        raise ConfigError(
            f"only: 'trainable' or a function of a name is expected, found {only!r}; leave it out "
            "to save everything."
        )


def inventory_of(model: nn.Module, optimizer: Optimizer | None, selection: Selection) -> Inventory:
    """Everything that this rank writes of a model and its optimizer."""
    sites = [site for site in sites_of(model) if selection.choose(site)]
    found = Inventory()
    for site in sites:
        _require_memory(site)
        found.aliases.update(dict.fromkeys(site.names[1:], site.name))
        key = MODEL + site.name
        found.add(key, ("model", site.name), _written(site, site.tensor))
    if optimizer is not None:
        _add_optimizer(found, optimizer, sites, {id(s.tensor) for s in sites_of(model)})
    return found


def _written(site: Site, tensor: torch.Tensor) -> HeldTensor:
    blocks: Iterable[Block] = site.blocks(tensor) if site.is_writer else ()
    if site.shape.numel() == 0:
        blocks = _empty_block(site, tensor)
    return HeldTensor(site.shape, tensor.dtype, list(blocks))


def _empty_block(site: Site, tensor: torch.Tensor) -> list[Block]:
    """Of a tensor without elements no rank has a part; the first one writes that it exists."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return []
    where = Box((0,) * len(site.shape), tuple(site.shape))
    return [Block(where, torch.empty(site.shape, dtype=tensor.dtype))]


def _require_memory(site: Site) -> None:
    if site.tensor.is_meta:
        raise LifecycleError(
            f"{site.name}: parameters and buffers must have values to be saved or loaded into, "
            "found it on meta; call model.to_empty(device=...) first."
        )


# Optimizers


def sites_by_param(
    optimizer: Optimizer, sites: Iterable[Site]
) -> list[list[tuple[torch.Tensor, list[Site]]]]:
    """For each parameter group, its parameters and the sites that each stands for."""
    by_id: dict[int, list[Site]] = {}
    for site in sites:
        by_id.setdefault(id(site.tensor), []).append(site)
    return [
        [(param, by_id.get(id(param), [])) for param in group["params"]]
        for group in optimizer.param_groups
    ]


def is_cut_like(value: Any, param: torch.Tensor) -> bool:
    """Whether state has one value per element of a parameter, and so is cut as it is."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    return value.shape == param.shape and isinstance(value, DTensor) == isinstance(param, DTensor)


def _add_optimizer(
    found: Inventory, optimizer: Optimizer, sites: list[Site], known: set[int]
) -> None:
    found.groups = []
    for group, params in zip(optimizer.param_groups, sites_by_param(optimizer, sites), strict=True):
        names: list[str] = []
        for param, its_sites in params:
            if id(param) not in known:
                raise ConfigError(
                    f"optimizer: its parameters must be the model's, found one of shape "
                    f"{tuple(param.shape)} that is not; pass the optimizer of this model."
                )
            names += [site.name for site in its_sites]
            for site in its_sites:
                _add_state(found, site, param, optimizer.state.get(param, {}))
        options = {key: value for key, value in group.items() if key != "params"}
        found.groups.append({**options, "params": names})


def _add_state(found: Inventory, site: Site, param: torch.Tensor, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if is_cut_like(value, param):
            key = f"{OPTIMIZER}{site.name}.{name}"
            path = ("optimizer", "state", site.name, name)
            found.add(key, path, _written(site, value))
        else:
            is_known = bool(site.blocks(site.tensor))
            # A DTensor without dims is replicated.
            plain = value._local_tensor if isinstance(value, DTensor) else value
            if isinstance(plain, torch.Tensor):
                plain = plain.detach().to("cpu", copy=True)  # an optimizer counts on in place
            found.small.setdefault(site.name, {})[name] = Small(plain, is_known)


def merged_small(
    everyone: Iterable[Mapping[str, Mapping[str, Small]]],
) -> dict[str, dict[str, Any]]:
    """What ranks say of state that is not cut: the word of those who train it comes first."""
    merged: dict[str, dict[str, Small]] = {}
    for said in everyone:
        for name, state in said.items():
            for key, small in state.items():
                before = merged.setdefault(name, {}).get(key)
                if before is None or (small.is_known and not before.is_known):
                    merged[name][key] = small
    return {name: {key: s.value for key, s in state.items()} for name, state in merged.items()}


def scalar_entries(
    small: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, tuple[str, ...], HeldTensor]]:
    """State that is not cut but a tensor: written whole, so that torch's tools find it."""
    for name, state in small.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                where = Box((0,) * value.dim(), tuple(value.shape))
                held = HeldTensor(value.shape, value.dtype, [Block(where, value)])
                yield f"{OPTIMIZER}{name}.{key}", ("optimizer", "state", name, key), held
