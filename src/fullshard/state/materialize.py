"""Memory and values for a model on meta: parameters that are to be loaded, buffers that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard._torch import version_of
from fullshard.errors import LifecycleError
from fullshard.runtime.hooks import ModuleHooks, hooks_of
from fullshard.runtime.names import clean_name
from fullshard.unit.param import shard_device


def give_memory(model: nn.Module) -> None:
    """Give parameters and buffers on meta memory without values; shards, for this rank's part.

    Parameters stay the objects that they are, so ties and optimizers hold.
    """
    for hooks in _all_hooks(model):
        for unit in hooks.units:
            device, _ = shard_device(unit.offload, unit.comm_ctx.device.torch_device)
            for sharded_param in unit.params:
                _allocate(sharded_param.param, device)
            unit.refresh()  # one unit at a time: its shards move to their buffer
    device = device_of(model)
    made: dict[torch.Tensor, torch.Tensor] = {}  # some modules share a buffer
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                _allocate(param, device)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if buffer not in made:
                    made[buffer] = torch.empty_like(buffer, device=device)
                module._buffers[name] = made[buffer]


def device_of(model: nn.Module) -> torch.device:
    """The device for what no unit manages: where units compute, or where there is memory."""
    for hooks in _all_hooks(model):
        return hooks.units[0].comm_ctx.device.torch_device
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            return tensor.device
        if isinstance(tensor, DTensor):
            return torch.device(tensor.device_mesh.device_type)
    return torch.get_default_device()


def _allocate(param: nn.Parameter, device: torch.device) -> None:
    if param.is_meta:
        made = torch.empty_like(param, device=device)
        torch.utils.swap_tensors(param, nn.Parameter(made, requires_grad=param.requires_grad))


def _all_hooks(model: nn.Module) -> Iterator[ModuleHooks]:
    found = (hooks_of(module) for module in model.modules())
    yield from dict.fromkeys(hooks for hooks in found if hooks is not None)


class LostBuffers:
    """Buffers on meta that are not persistent: no file has them, so they are computed again."""

    def __init__(
        self, model: nn.Module, init_buffers: Callable[[nn.Module], object] | None
    ) -> None:
        self._device = device_of(model)
        self._modules = dict(model.named_modules())
        self._init_buffers = init_buffers
        self._made: dict[torch.Tensor, torch.Tensor] = {}  # some modules share a buffer
        self._lost: dict[str, dict[str, torch.Tensor]] = {}  # by the path of their module
        for path, module in self._modules.items():
            lost = {
                name: buffer
                for name, buffer in module._buffers.items()
                if buffer is not None
                and buffer.is_meta
                and name in module._non_persistent_buffers_set
            }
            if lost:
                self._lost[path] = lost

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(_name(path, name) for path, lost in self._lost.items() for name in lost)

    def recreate(self) -> None:
        """Compute them, or raise and leave the model as it was.

        Parameters are still on meta, so that what initialises them, too, costs nothing.
        """
        try:
            unknown = [name for path in self._lost for name in self._recreate(path)]
            if unknown:
                raise LifecycleError(
                    f"{', '.join(unknown)}: buffers that are not part of files must be computed "
                    "again if they were on meta, found nothing that does it; pass init_buffers, "
                    "or give their module a method reset_non_persistent_buffers()."
                )
        except BaseException:
            for path, lost in self._lost.items():
                self._modules[path]._buffers.update(lost)
            raise

    def _recreate(self, path: str) -> list[str]:
        """Compute the buffers of a module; return the names of those that were not computed."""
        lost, own = self._lost[path], self._modules[path]._buffers
        compute = self._compute_of(path)
        if compute is None:
            return [_name(path, name) for name in lost]
        for buffer in lost.values():
            if buffer not in self._made:
                self._made[buffer] = torch.empty_like(buffer, device=self._device)
        made = {name: self._made[buffer] for name, buffer in lost.items()}
        own.update(made)
        versions = {name: version_of(buffer) for name, buffer in made.items()}
        with torch.no_grad(), self._device:
            compute()
        unknown = []
        for name, buffer in made.items():
            found = own.get(name)
            is_untouched = found is buffer and version_of(buffer) == versions[name]
            if found is None or found.is_meta or is_untouched:
                unknown.append(_name(path, name))
            elif found.device != buffer.device:
                own[name] = found.to(self._device)
        return unknown

    def _compute_of(self, path: str) -> Callable[[], object] | None:
        """How a module, or one around it, says that its buffers are computed."""
        module = self._modules[path]
        if self._init_buffers is not None:
            return partial(self._init_buffers, module)
        if callable(getattr(module, "reset_non_persistent_buffers", None)):
            return partial(module.reset_non_persistent_buffers)
        # Other ways initialise parameters, too: only if there are none to lose.
        if any(p is not None and not p.is_meta for p in module._parameters.values()):
            return None
        if callable(getattr(module, "reset_parameters", None)):
            return partial(module.reset_parameters)
        parts = path.split(".")
        for length in range(len(parts) - 1, -1, -1):
            around = self._modules.get(".".join(parts[:length]))
            initialise = getattr(around, "_init_weights", None)  # as transformers' models have it
            if callable(initialise):
                return partial(initialise, module)
        return None


def _name(path: str, name: str) -> str:
    return clean_name(f"{path}.{name}" if path else name)
