"""Finds the first value of a step that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard._torch import to_local
from fullshard.ranks import RankGroup
from fullshard.runtime.names import clean_name
from fullshard.runtime.trees import map_tensors
from fullshard.state.materialize import device_of

# In the order in which one causes the next, on this rank or on another.
_KINDS = ("parameter", "output of", "gradient of the output of", "gradient of")


def first_nonfinite(model: nn.Module, step: Callable[[], object]) -> str:
    """Repeat a step with hooks, and say in words which of its values is the first not finite.

    All ranks call it, and the result is the same on all: the parameter, or the module whose output
    or gradient it is, and the rank. It is empty if everything is finite. Gradients are added to
    those that are there, and random generators are left as they were.

    Args:
        model: The model, sharded or not.
        step: Runs forward and backward.
    """
    found: list[tuple[int, str]] = []

    def check(kind: int, name: str, values: torch.Tensor) -> None:
        if not found and values.is_floating_point() and not bool(values.isfinite().all()):
            found.append((kind, name))

    def hook_of(name: str) -> Callable[..., None]:
        def look(values: torch.Tensor) -> torch.Tensor:
            check(1, name, values)
            if values.requires_grad:
                values.register_hook(lambda grad: check(2, name, grad))
            return values

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            map_tensors(look, output)

        return hook

    for name, param in model.named_parameters():
        check(0, clean_name(name), to_local(param))
    device = device_of(model)
    devices = [] if device.type == "cpu" else [device]
    modules = [(clean_name(name), module) for name, module in model.named_modules()]
    hooks = [module.register_forward_hook(hook_of(name)) for name, module in modules if name]
    try:
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            step()
    finally:
        for each in hooks:
            each.remove()
    for name, param in model.named_parameters():
        if param.grad is not None:
            check(3, clean_name(name), to_local(param.grad))
    everyone = RankGroup.world().all_gather(found)
    causes = [(*some[0], rank) for rank, some in enumerate(everyone) if some]
    if not causes:
        return ""
    kind, name, rank = min(causes, key=lambda cause: (cause[0], cause[2]))
    return f"on rank {rank} the {_KINDS[kind]} {name} is the first that is not finite"
