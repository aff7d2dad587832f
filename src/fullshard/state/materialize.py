"""Memory for what is loaded into a model on meta, and values for buffers that are not loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard._torch import version_of
from fullshard.device import has_no_memory
from fullshard.errors import LifecycleError
from fullshard.runtime.build import join
from fullshard.runtime.hooks import units_below
from fullshard.runtime.names import clean_name


def give_memory(model: nn.Module) -> None:
    """Allocate memory for parameters and buffers on meta; for shards, only this rank's part.

    The memory has no values yet. Parameters stay the same objects, so ties and optimizers hold.
    """
    for unit in units_below(model):
        for sharded_param in unit.params:
            _allocate(sharded_param.param, unit.store.device)
        unit.refresh()  # one unit at a time: its shards move to their buffer
    device = device_of(model)
    made: dict[torch.Tensor, torch.Tensor] = {}  # some modules share a buffer
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                _allocate(param, device)
        for name, buffer in module._buffers.items():
            if buffer is not None and has_no_memory(buffer):
                if buffer not in made:
                    made[buffer] = torch.empty_like(buffer, device=device)
                module._buffers[name] = made[buffer]


def device_of(model: nn.Module) -> torch.device:
    """The device for tensors that no unit manages: where units compute, or where others are."""
    for unit in units_below(model):
        return unit.comm_ctx.device.torch_device
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            return tensor.device
        if isinstance(tensor, DTensor):
            return torch.device(tensor.device_mesh.device_type)
    return torch.get_default_device()


def _allocate(param: nn.Parameter, device: torch.device) -> None:
    if has_no_memory(param):
        made = torch.empty_like(param, device=device)
        torch.utils.swap_tensors(param, nn.Parameter(made, requires_grad=param.requires_grad))


def recreate_buffers(
    model: nn.Module, init_buffers: Callable[[nn.Module], object] | None = None
) -> tuple[str, ...]:
    """Compute buffers on meta that are not persistent, and so in no file; return their names.

    Raises, and leaves the model as it was, if nothing computes one of them. Parameters are still on
    meta, so a function that initializes them as well costs nothing.
    """
    modules = dict(model.named_modules())
    lost: dict[str, dict[str, torch.Tensor]] = {}  # by the path of their module
    for path, module in modules.items():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set:
                lost.setdefault(path, {})[name] = buffer
    device = device_of(model)
    made = {  # some modules share a buffer
        buffer: torch.empty_like(buffer, device=device)
        for buffers in lost.values()
        for buffer in buffers.values()
    }
    try:
        unknown = []
        for path, buffers in lost.items():
            own, compute = modules[path]._buffers, _compute_of(modules, path, init_buffers)
            own.update({name: made[buffer] for name, buffer in buffers.items()})
            versions = {name: version_of(made[buffer]) for name, buffer in buffers.items()}
            with torch.no_grad(), device:
                compute()
            for name, buffer in buffers.items():
                found = own.get(name)
                is_same = found is made[buffer] and version_of(found) == versions[name]
                if found is None or found.is_meta or is_same:
                    unknown.append(clean_name(join(path, name)))
                else:
                    own[name] = found.to(device)
        if unknown:
            raise LifecycleError(
                f"{', '.join(unknown)}: these buffers are on meta and not in the files, and "
                "nothing computes them again; pass init_buffers, or give their module a method "
                "reset_non_persistent_buffers()."
            )
    except BaseException:
        for path, buffers in lost.items():
            modules[path]._buffers.update(buffers)
        raise
    return tuple(clean_name(join(path, n)) for path, buffers in lost.items() for n in buffers)


def _compute_of(
    modules: Mapping[str, nn.Module], path: str, init_buffers: Callable[[nn.Module], object] | None
) -> Callable[[], object]:
    """The function of a module, or of one around it, that computes the module's buffers."""
    module = modules[path]
    if init_buffers is not None:
        return partial(init_buffers, module)
    reset: Callable[[], object] | None = getattr(module, "reset_non_persistent_buffers", None)
    if callable(reset):
        return reset
    # The other ways also initialize parameters: use them only if no values would be lost.
    if any(p is not None and not p.is_meta for p in module._parameters.values()):
        return lambda: None
    reset_all: Callable[[], object] | None = getattr(module, "reset_parameters", None)
    if callable(reset_all):
        return reset_all
    parts = path.split(".")
    for length in range(len(parts) - 1, -1, -1):
        around = modules.get(".".join(parts[:length]))
        initialize = getattr(around, "_init_weights", None)  # as transformers' models have it
        if callable(initialize):
            return partial(initialize, module)
    return lambda: None
