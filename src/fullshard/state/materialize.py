"""Memory and values for a model on meta: parameters that are to be loaded, buffers that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.errors import LifecycleError
from fullshard.runtime.hooks import ModuleHooks, hooks_of
from fullshard.runtime.names import clean_name
from fullshard.unit.param import shard_device


def give_memory(model: nn.Module) -> None:
    """Give parameters and buffers on meta memory without values: of shards, for this rank's part.

    Parameters stay the objects that they are, so ties and optimizers hold.
    """
    for hooks in _hooks_of_all(model):
        for unit in hooks.units:
            device, _ = shard_device(unit.offload, unit.comm_ctx.device.torch_device)
            for member in unit.params:
                _give(member.param, device)
            unit.refresh()  # one unit at a time: its shards move to their home
    device = device_of(model)
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                _give(param, device)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in made:
                    made[id(buffer)] = torch.empty_like(buffer, device=device)
                module._buffers[name] = made[id(buffer)]


def device_of(model: nn.Module) -> torch.device:
    """Where what no unit has belongs: where the units compute, or what has memory is."""
    for hooks in _hooks_of_all(model):
        return hooks.units[0].comm_ctx.device.torch_device
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            return tensor.device
        if isinstance(tensor, DTensor):
            return torch.device(tensor.device_mesh.device_type)
    return torch.get_default_device()


def _give(param: nn.Parameter, device: torch.device) -> None:
    if param.is_meta:
        made = torch.empty_like(param, device=device)
        torch.utils.swap_tensors(param, nn.Parameter(made, requires_grad=param.requires_grad))


def _hooks_of_all(model: nn.Module) -> Iterator[ModuleHooks]:
    found = (hooks_of(module) for module in model.modules())
    yield from dict.fromkeys(hooks for hooks in found if hooks is not None)


@dataclass(frozen=True, slots=True)
class _Owner:
    """A module with buffers on meta that no file has, and what computes them."""

    module: nn.Module
    path: str
    buffers: dict[str, torch.Tensor]
    compute: Callable[[], object] | None


class LostBuffers:
    """Buffers on meta that are not persistent: somebody has to compute them again."""

    def __init__(
        self, model: nn.Module, init_buffers: Callable[[nn.Module], object] | None
    ) -> None:
        self._device = device_of(model)
        self._owners = list(_owners(model, init_buffers))
        self._made: dict[int, torch.Tensor] = {}  # some modules share a buffer

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for owner in self._owners for name in _names(owner))

    def recreate(self) -> None:
        """Compute them, or raise and leave the model as it was.

        Parameters are still on meta, so that what initialises them, too, costs nothing.
        """
        try:
            unknown: list[str] = []
            for owner in self._owners:
                unknown += self._recreate(owner)
            if unknown:
                raise LifecycleError(
                    f"{', '.join(unknown)}: buffers that are not part of files must be computed "
                    "again if they were on meta, found nothing that does it; pass init_buffers, "
                    "or give their module a method reset_non_persistent_buffers()."
                )
        except BaseException:
            for owner in self._owners:
                owner.module._buffers.update(owner.buffers)
            raise

    def _recreate(self, owner: _Owner) -> list[str]:
        """The names of those that were not computed."""
        if owner.compute is None:
            return _names(owner)
        own = owner.module._buffers
        made = {
            name: self._made.setdefault(id(buffer), torch.empty_like(buffer, device=self._device))
            for name, buffer in owner.buffers.items()
        }
        own.update(made)
        versions = {name: buffer._version for name, buffer in made.items()}
        with torch.no_grad(), self._device:
            owner.compute()
        unknown = []
        for name, buffer in made.items():
            found = own.get(name)
            is_untouched = found is buffer and buffer._version == versions[name]
            if found is None or found.is_meta or is_untouched:
                unknown.append(_name(owner, name))
            elif found.device != buffer.device:
                own[name] = found.to(self._device)
        return unknown


def _owners(
    model: nn.Module, init_buffers: Callable[[nn.Module], object] | None
) -> Iterator[_Owner]:
    modules = dict(model.named_modules())
    for path, module in modules.items():
        lost = {
            name: buffer
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
        }
        if lost:
            if init_buffers is not None:
                yield _Owner(module, path, lost, _bound(init_buffers, module))
            else:
                yield _Owner(module, path, lost, _own_way(modules, path, module))


def _own_way(
    modules: dict[str, nn.Module], path: str, module: nn.Module
) -> Callable[[], object] | None:
    """How a module, or one around it, says that its buffers are computed."""
    found = getattr(module, "reset_non_persistent_buffers", None)
    # Other ways initialise parameters, too: only if there are none to lose.
    has_values = any(p is not None and not p.is_meta for p in module._parameters.values())
    if not callable(found) and not has_values:
        found = getattr(module, "reset_parameters", None)
    if callable(found) or has_values:
        return found if callable(found) else None
    parts = path.split(".")
    for length in range(len(parts) - 1, -1, -1):
        around = modules.get(".".join(parts[:length]))
        initialise = getattr(around, "_init_weights", None)  # as transformers' models have it
        if callable(initialise):
            return _bound(initialise, module)
    return None


def _bound(function: Callable[[nn.Module], object], module: nn.Module) -> Callable[[], object]:
    return lambda: function(module)


def _names(owner: _Owner) -> list[str]:
    return [_name(owner, name) for name in owner.buffers]


def _name(owner: _Owner, name: str) -> str:
    return clean_name(f"{owner.path}.{name}" if owner.path else name)
