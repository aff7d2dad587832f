"""What a wrapper does to a module before its parameters become a unit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.api import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from fullshard.choosing import Chosen, choose, wrap_chosen
from fullshard.comm.mesh import MeshInfo, device_of
from fullshard.errors import ConfigError, LifecycleError
from fullshard.runtime.build import managed_modules
from fullshard.runtime.hooks import hooks_of
from fullshard.runtime.replaced import replacement_of
from fullshard.runtime.scheduler import HookOptions
from fullshard.runtime.trees import map_tensors
from fullshard.unit.settings import UnitSettings

_BUCKET_BYTES = 250 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Ignored:
    """What a wrapper leaves alone: modules with all that is in them, and parameters."""

    modules: frozenset[nn.Module]
    params: frozenset[nn.Parameter]
    given: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls,
        module: nn.Module,
        ignored_modules: Iterable[nn.Module] | None,
        ignored_states: Iterable[Any] | None,
    ) -> Ignored:
        if ignored_modules is not None and ignored_states is not None:
            raise ConfigError(
                "FullyShardedDataParallel: ignored_modules or ignored_states is expected, found "
                "both; pass ignored_states alone."
            )
        name = "ignored_states" if ignored_modules is None else "ignored_modules"
        given = _as_tuple(name, ignored_states if ignored_modules is None else ignored_modules)
        params = [each for each in given if isinstance(each, nn.Parameter)]
        modules = [each for each in given if isinstance(each, nn.Module)]
        if len(params) + len(modules) < len(given) or (params and modules):
            kinds = sorted({type(each).__name__ for each in given})
            raise ConfigError(
                f"{name}: only modules, or only parameters, are expected, found {kinds}; pass one "
                "kind."
            )
        if name == "ignored_modules" and params:
            raise TypeError(
                f"{name}: modules are expected, found a parameter; pass it as ignored_states."
            )
        _require_inside(name, module, params, modules)
        inside = frozenset(inner for each in modules for inner in each.modules())
        found = {p for each in modules for p in each.parameters()}
        return cls(inside, frozenset([*params, *found]), given)

    def within(self, module: nn.Module) -> tuple[Any, ...]:
        """What of it is in a module."""
        inside: set[Any] = {*module.modules(), *module.parameters()}
        return tuple(each for each in self.given if each in inside)


def _as_tuple(name: str, given: Iterable[Any] | None) -> tuple[Any, ...]:
    if given is None:
        return ()
    try:
        return tuple(given)
    except TypeError:
        raise TypeError(
            f"{name}: an iterable is expected, found {type(given).__name__}; pass a list."
        ) from None


def _require_inside(
    name: str, module: nn.Module, params: list[nn.Parameter], modules: list[nn.Module]
) -> None:
    inside = set(module.modules())
    held = set(module.parameters())
    for each in modules:
        if hooks_of(each) is not None:
            raise ConfigError(
                f"{name}: modules that are not wrapped are expected, found a "
                f"{type(each).__name__}; ignore it when it would be wrapped."
            )
        if each not in inside:
            raise ConfigError(
                f"{name}: a module of {type(module).__name__} is expected, found a "
                f"{type(each).__name__} that is not in it; pass modules of the model itself."
            )
    for param in params:
        if param not in held:
            raise ConfigError(
                f"{name}: a parameter of {type(module).__name__} is expected, found one of shape "
                f"{tuple(param.shape)} that is not in it; pass parameters of the model itself."
            )


# What was asked for


def checked_strategy(module: Any, strategy: Any, backward_prefetch: Any) -> ShardingStrategy:
    """The sharding strategy: FULL_SHARD unless another is given."""
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"FullyShardedDataParallel: an nn.Module is expected, found {type(module).__name__}; "
            "pass the module itself."
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        warnings.warn(
            f"FullyShardedDataParallel: a module that is called is expected, found "
            f"{type(module).__name__}, which has no forward: its parameters will not be gathered "
            "when the modules inside run. Wrap those, or the module around it.",
            stacklevel=3,
        )
    if backward_prefetch is not None and not isinstance(backward_prefetch, BackwardPrefetch):
        raise ConfigError(
            f"backward_prefetch: one of {[str(each) for each in BackwardPrefetch]} or None is "
            f"expected, found {backward_prefetch!r}; import BackwardPrefetch from fullshard."
        )
    if strategy is None:
        return ShardingStrategy.FULL_SHARD
    if not isinstance(strategy, ShardingStrategy):
        raise ConfigError(
            f"sharding_strategy: one of {[str(each) for each in ShardingStrategy]} is expected, "
            f"found {strategy!r}; import ShardingStrategy from fullshard."
        )
    return strategy


def compute_device(
    module: nn.Module,
    device_id: int | torch.device | str | None,
    process_group: Any,
    device_mesh: DeviceMesh | None,
) -> torch.device:
    """Where a wrapper computes: as asked for, as its mesh or its parameters say, or the best."""
    if isinstance(device_id, int):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            raise ConfigError(
                f"device_id: a number names an accelerator, found {device_id} and no accelerator; "
                "pass torch.device('cpu') or leave it out."
            )
        return torch.device(accelerator.type, device_id)
    if device_id is not None:
        return _indexed(torch.device(device_id))
    if isinstance(device_mesh, DeviceMesh):
        return device_of(device_mesh)
    for param in module.parameters():
        if param.device.type not in ("cpu", "meta"):
            return param.device
    group = process_group[0] if isinstance(process_group, (tuple, list)) else process_group
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not dist.is_initialized():
        return torch.device("cpu")
    group = dist.group.WORLD if group is None else group
    if isinstance(group, dist.ProcessGroup) and accelerator.type in {
        device.type for device in group._device_types
    }:
        return _indexed(accelerator)
    return torch.device("cpu")


def _indexed(device: torch.device) -> torch.device:
    """The device with its number: the current one, unless one is given."""
    if device.type == "cpu" or ":" in str(device):
        return device
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


_RESHARDS = {
    # None: unless it is the root, which backward starts with.
    ShardingStrategy.FULL_SHARD: None,
    ShardingStrategy.HYBRID_SHARD: None,
    ShardingStrategy.SHARD_GRAD_OP: False,
    ShardingStrategy._HYBRID_SHARD_ZERO2: False,
    ShardingStrategy.NO_SHARD: None,
}


def policy_of(precision: MixedPrecision) -> MixedPrecisionPolicy:
    """The dtypes, in the engine's words."""
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
        cast_forward_inputs=precision.cast_forward_inputs,
        wire_dtype=precision.wire_dtype,
    )


def unit_settings(strategy: ShardingStrategy, precision: MixedPrecision) -> UnitSettings:
    """How a unit behaves under a strategy."""
    return UnitSettings(
        reshard_after_forward=_RESHARDS[strategy],
        keep_low_precision_grads=precision.keep_low_precision_grads,
    )


def hook_options(
    forward: bool, backward: BackwardPrefetch | None, precision: MixedPrecision
) -> HookOptions:
    """When a wrapper prefetches, and what it casts."""
    return HookOptions(
        prefetches_forward=forward,
        backward_prefetch=backward,
        casts_root_inputs=precision.cast_root_forward_inputs,
    )


def offload_of(offload: CPUOffload | None) -> OffloadPolicy:
    """Where the shards live."""
    return CPUOffloadPolicy() if offload is not None and offload.offload_params else OffloadPolicy()


# Wrapping by a policy


def wrap_by_policy(
    module: nn.Module,
    policy: Any,
    wrapper_cls: Callable[..., nn.Module],
    ignored: Ignored,
    options: dict[str, Any],
) -> None:
    """Wrap what a policy chooses inside a module."""
    choice = choose(
        module,
        policy,
        ignored_modules=ignored.modules,
        ignored_params=ignored.params,
        options=options,
    )
    units = list(choice.units)
    precision = options.get("mixed_precision")
    if isinstance(precision, MixedPrecision) and precision != MixedPrecision():
        units = _in_full_precision(module, units, precision, ignored)
    units = [
        replace(
            unit,
            overrides={**unit.overrides, "ignored_states": ignored.within(unit.module) or None},
        )
        for unit in units
    ]
    wrap_chosen(module, units, wrapper_cls, **options)


def _in_full_precision(
    module: nn.Module, units: list[Chosen], precision: MixedPrecision, ignored: Ignored
) -> list[Chosen]:
    """Give modules that must not compute in low precision a unit of their own."""
    kinds = tuple(precision._module_classes_to_ignore)
    found = [
        (name, inner)
        for name, inner in module.named_modules()
        if kinds and isinstance(inner, kinds) and inner not in ignored.modules
    ]
    if not found:
        return units
    names = sorted({type(inner).__name__ for _, inner in found})
    warnings.warn(
        f"Both mixed precision and an auto_wrap_policy were given, and the model has {names}: "
        "these become units of their own without mixed precision. Pass "
        "_module_classes_to_ignore=() to MixedPrecision to change that.",
        stacklevel=4,
    )
    overrides = {"mixed_precision": None}
    kept = {inner for _, inner in found}
    own = [
        Chosen(name, inner, (), overrides, "computes in full precision")
        for name, inner in found
        if inner is not module
    ]
    for _, inner in found:
        _cast_around(inner)
    return [*own, *(unit for unit in units if unit.module not in kept)]


def _cast_around(module: nn.Module) -> None:
    """Give a module its inputs in float32, and its outputs the dtype that its inputs had."""
    seen: list[torch.dtype] = []

    def widen(_: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.clear()

        def widened(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point() or tensor.dtype == torch.float32:
                return tensor
            seen.append(tensor.dtype)
            return tensor.float()

        return map_tensors(widened, (args, kwargs))

    def narrow(_: nn.Module, args: Any, output: Any) -> Any:
        if not seen:
            return output
        dtype = seen[-1]

        def narrowed(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor

        return map_tensors(narrowed, output)

    module.register_forward_pre_hook(widen, with_kwargs=True)
    module.register_forward_hook(narrow)


# Values


def materialize(
    module: nn.Module,
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
    ignored: Ignored,
) -> None:
    """Give what is on meta memory and values; parameters that were tied stay tied."""
    own = [inner for _, inner in managed_modules([module], ignored.modules)]
    if not any(state.is_meta for inner in own for state in _states(inner, ignored)):
        return
    if param_init_fn is not None and not callable(param_init_fn):
        raise ConfigError(
            f"param_init_fn: a function of a module is expected, found {param_init_fn!r}; pass a "
            "function that gives the module's own parameters and buffers values."
        )
    ties: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for inner in own:
        for name, param in inner._parameters.items():
            if param is not None:
                ties.setdefault(param, []).append((inner, name))
    for inner in own:
        if not any(state.is_meta for state in _states(inner, ignored)):
            continue
        if param_init_fn is not None:
            param_init_fn(inner)
        else:
            _reset(inner, device)
    for places in ties.values():
        first, first_name = places[0]
        for inner, name in places[1:]:
            inner._parameters[name] = first._parameters[first_name]
    for inner in own:
        for state in _states(inner, ignored):
            if state.is_meta:
                raise LifecycleError(
                    f"{type(inner).__name__}: parameters and buffers must have values after "
                    f"param_init_fn, found one of shape {tuple(state.shape)} on meta; call "
                    "module.to_empty(device=..., recurse=False) and initialise it there."
                )


def _reset(module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise LifecycleError(
            f"{type(module).__name__}: a module with parameters or buffers on meta must have a "
            "reset_parameters method, found none; pass param_init_fn."
        )
    with torch.no_grad():
        module.to_empty(device=device, recurse=False)
        reset()


def _states(module: nn.Module, ignored: Ignored) -> Iterator[torch.Tensor]:
    for param in module._parameters.values():
        if param is not None and param not in ignored.params:
            yield param
    yield from (buffer for buffer in module._buffers.values() if buffer is not None)


def broadcast_states(
    module: nn.Module, ignored: Ignored, mesh_info: MeshInfo, device: torch.device
) -> None:
    """Let all ranks start with the values of the first: parameters and buffers."""
    states: dict[int, torch.Tensor] = {}
    for _, inner in managed_modules([module], ignored.modules):
        for buffers in (inner._parameters, inner._buffers):
            for state in buffers.values():
                if state is None or state in ignored.params:
                    continue
                if replacement_of(state) is not None:
                    continue  # tied to what an inner wrapper has sent already
                if state.device != device:
                    state.data = state.data.to(device)
                states.setdefault(id(state), state.detach())
    for axis in (mesh_info.shard, mesh_info.replicate):
        if axis.group is not None and not axis.is_single and states:
            dist._broadcast_coalesced(  # type: ignore[attr-defined]
                axis.group, list(states.values()), _BUCKET_BYTES, 0
            )
