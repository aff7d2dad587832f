"""From modules to units and hooks, and from hooks to a scheduler.

`build_hooks` runs in `fully_shard` and the wrapper; `make_scheduler` before the first forward of
the root.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fullshard._torch import to_local
from fullshard.api import MixedPrecisionPolicy, OffloadPolicy
from fullshard.comm.agreement import Agreement
from fullshard.comm.mesh import MeshInfo, mesh_info_of, subgroup_size
from fullshard.comm.placement import as_dtensor, place, shard_dim, with_dtype
from fullshard.device import device_for
from fullshard.errors import ConfigError, LifecycleError, TopologyError, UnsupportedError
from fullshard.runtime.hooks import ModuleHooks, hooks_managing, hooks_of, manage
from fullshard.runtime.names import clean_name
from fullshard.runtime.replaced import record_replacement, replacement_of, repoint_living_optimizers
from fullshard.runtime.scheduler import HookOptions, Phase, Scheduler
from fullshard.runtime.ties import hooks_below, join_late_ties, lending_tops, settle_ties
from fullshard.unit.context import CommContext
from fullshard.unit.flat_param import (
    FlatParams,
    FlatParamSlice,
    OrigParamSlice,
    ParamForm,
)
from fullshard.unit.param import DTensorParam, ParamLocation, ShardedParam, shard_device
from fullshard.unit.settings import UnitSettings
from fullshard.unit.unit import Unit


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """What one `fully_shard` call or one wrapper asks for, checked.

    `owner` is the module that a wrapper's flat parameters are registered at.
    """

    modules: tuple[nn.Module, ...]
    mesh_info: MeshInfo
    device: torch.device
    policy: MixedPrecisionPolicy
    offload: OffloadPolicy
    settings: UnitSettings
    placement_fn: Callable[[nn.Parameter], Any] | None = None
    ignored: frozenset[nn.Parameter] = frozenset()
    ignored_modules: frozenset[nn.Module] = frozenset()
    form: ParamForm = ParamForm.DTENSOR
    owner: nn.Module | None = None
    options: HookOptions = field(default_factory=HookOptions)


@dataclass(slots=True)
class _FoundParam:
    """An original parameter to shard: its name, and everywhere it is registered."""

    name: str
    original: nn.Parameter
    locations: list[ParamLocation] = field(default_factory=list)


def build_hooks(request: ShardRequest) -> ModuleHooks:
    """Shard the parameters of the modules that no inner call has sharded."""
    modules = list(managed_modules(request.modules, request.ignored_modules))
    found: dict[nn.Parameter, _FoundParam] = {}
    ties: list[tuple[ShardedParam, ParamLocation]] = []
    for path, module in modules:
        for name, param in module._parameters.items():
            if param is None or param in request.ignored:
                continue
            location = ParamLocation(module, name)
            sharded = replacement_of(param)
            if sharded is not None:
                ties.append((sharded, location))
                continue
            full_name = f"{path}.{name}" if path else name
            found.setdefault(param, _FoundParam(full_name, param)).locations.append(location)
        _move_buffers(module, request.device)
    for sharded, location in ties:
        _tie(sharded, location)
    name = ", ".join(type(module).__name__ for module in request.modules)
    is_flat = request.form is not ParamForm.DTENSOR
    make_units = _flat_unit if is_flat else _dtensor_units
    units = make_units(name, request, list(found.values()))
    for _, module in modules:
        # Dynamo must not bake parameters that come and go into its graphs.
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        module._fsdp_use_orig_params = request.form is not ParamForm.FLAT_PARAM  # type: ignore[assignment]
    hooks = ModuleHooks(
        name,
        request.modules,
        units,
        request.policy,
        request.device,
        make_scheduler,
        request.options,
    )
    manage(hooks, (module for _, module in modules))
    settle_ties([hooks], list(hooks_below(hooks)))
    for sharded, _ in ties:
        _borrow(hooks, sharded)
    for _, module in modules:
        if not is_flat and module._parameters:
            _keep_state_sharded(hooks, module)
    return hooks


def managed_modules(
    roots: Sequence[nn.Module], ignored: Collection[nn.Module] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """The modules below the roots that no inner call has taken and that are not ignored."""
    seen: set[nn.Module] = set(ignored)

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or (module not in roots and hooks_of(module) is not None):
            return
        seen.add(module)
        yield path, module
        for name, child in module.named_children():
            yield from walk(f"{path}.{name}" if path else name, child)

    for root in roots:
        yield from walk("", root)


# Units


def _flat_unit(name: str, request: ShardRequest, found: Sequence[_FoundParam]) -> list[Unit]:
    """One unit of all parameters of a wrapper, one after another."""
    is_flat_param = request.form is ParamForm.FLAT_PARAM
    kind = FlatParamSlice if is_flat_param else OrigParamSlice
    params: list[ShardedParam] = []
    for each in found:
        if isinstance(each.original, DTensor):
            raise UnsupportedError(
                f"{each.name}: a wrapper flattens plain parameters, found a DTensor placed "
                f"{each.original.placements}; use fully_shard, which shards DTensors along further "
                "axes."
            )
        _move_parameter(each, request.device)
        locations = each.locations
        if is_flat_param:
            locations = [location.unregistered() for location in locations]
        params.append(kind.of(each.name, each.original, locations))
    owner = request.modules[0] if request.owner is None else request.owner
    unit = Unit(
        name,
        params,
        request.mesh_info,
        request.policy,
        request.offload,
        CommContext(device_for(request.device)),
        request.settings,
        FlatParams(request.form, owner, request.mesh_info.shard, request.device),
    )
    for each, param in zip(found, params, strict=True):
        param.register(param.shard)
        record_replacement(each.original, param, request.mesh_info.shard.rank)
    return [unit]


def _dtensor_units(name: str, request: ShardRequest, found: Sequence[_FoundParam]) -> list[Unit]:
    """One unit per mesh that the parameters are placed on; the first is the call's own mesh."""
    by_mesh: dict[MeshInfo, list[ShardedParam]] = {request.mesh_info: []}
    replaced: list[tuple[nn.Parameter, DTensorParam, int]] = []
    device, _ = shard_device(request.offload, request.device)
    for each in found:
        mesh_info, placement = _placement(each, request)
        _move_parameter(each, request.device)
        dim = shard_dim(each.name, to_local(each.original), placement)
        with torch.no_grad():
            placed = place(each.name, each.original, dim, mesh_info)
            axis = mesh_info.shard
            param = DTensorParam.of(each.name, each.original, each.locations, placed, axis, device)
        by_mesh.setdefault(mesh_info, []).append(param)
        replaced.append((each.original, param, axis.rank))
    comm_ctx = CommContext(device_for(request.device))
    units = [
        Unit(name, params, mesh_info, request.policy, request.offload, comm_ctx, request.settings)
        for mesh_info, params in by_mesh.items()
    ]
    for unit in units:
        after = unit.settings.reshard_after_forward
        if after is not None and not isinstance(after, bool):
            after = subgroup_size(unit.mesh_info, after)  # a parameter's own mesh has its own size
            unit.set(reshard_after_forward=after)
        if after is not None and not isinstance(after, bool):
            unit.require_plain_params()
            unit.mesh_info.subgroup_axis(after)  # its groups are made here, on all ranks alike
    for original, param, rank in replaced:
        param.register(param.shard)
        record_replacement(original, param, rank)
    return units


def _placement(found: _FoundParam, request: ShardRequest) -> tuple[MeshInfo, Any]:
    """The mesh and the dim that the user's function chooses for a parameter."""
    if request.placement_fn is None:
        return request.mesh_info, None
    chosen = request.placement_fn(found.original)
    if chosen is None or isinstance(chosen, Shard):
        return request.mesh_info, chosen
    mesh_info = getattr(chosen, "mesh_info", None)
    if mesh_info is None or not hasattr(chosen, "placement"):
        raise ConfigError(
            f"{found.name}: shard_placement_fn must return a Shard, a ShardPlacementResult or "
            f"None, found {chosen!r}; return for example Shard(0)."
        )
    mesh = getattr(mesh_info, "mesh", mesh_info)
    # A DeviceMesh has an attribute `mesh` too: the tensor of its ranks.
    return mesh_info_of(mesh_info if isinstance(mesh, torch.Tensor) else mesh), chosen.placement


def _move_parameter(found: _FoundParam, device: torch.device) -> None:
    param = found.original
    if param.device == device or param.is_meta:
        return
    if isinstance(param, DTensor):
        raise TopologyError(
            f"{found.name}: a DTensor must be on the device that computes ({device}), found "
            f"{param.device}; distribute it on a mesh of type {device.type}."
        )
    if type(param.data) is torch.Tensor:
        param.data = param.data.to(device)
    else:
        with torch.no_grad():
            moved = nn.Parameter(param.to(device), param.requires_grad)
        torch.utils.swap_tensors(param, moved)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.device != device and not buffer.is_meta:
            module._buffers[name] = buffer.to(device)


def _tie(sharded: ShardedParam, location: ParamLocation) -> None:
    """Register a shard at one more place: the parameter is shared with a sharded module."""
    if isinstance(sharded, FlatParamSlice):
        location = location.unregistered()
    sharded.locations.append(location)
    location.put(sharded.shard)


def _borrow(hooks: ModuleHooks, sharded: ShardedParam) -> None:
    """Note which unit owns a parameter, if none of the hooks in this tree does."""
    owner = hooks_managing(sharded.locations[0].module)
    for unit in [] if owner is None else owner.units:
        if sharded in unit.params and unit not in hooks.reads:
            hooks.lenders.append(unit)


# State dicts of modules that `fully_shard` was called on


def _keep_state_sharded(hooks: ModuleHooks, module: nn.Module) -> None:
    """State dicts read and write shards, whatever the unit's state; full values are cut to fit."""

    def reshard(*_: Any) -> None:
        # A state dict is often held while the model trains: shards must not move after this.
        # And whoever writes to its tensors is not seen, so nothing gathered may be kept.
        for unit in hooks.reads:
            unit.reshard_now()
            unit.refresh(plan_training=hooks.scheduler is None)
            unit.is_held = True

    def cut(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for unit in hooks.reads:
            unit.reshard_now()
            rank = unit.mesh_info.shard.rank
            for param in unit.params:
                for location in param.locations:
                    key = prefix + location.name
                    if location.module is module and key in state_dict:
                        state_dict[key] = _shard_of(param, state_dict[key], rank)

    module.register_state_dict_pre_hook(reshard)
    module.register_load_state_dict_pre_hook(lambda _, *args: cut(*args))


def _shard_of(param: ShardedParam, value: Any, rank: int) -> Any:
    """This rank's shard of a full value; anything else is left for torch to judge."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not is_plain or not isinstance(param, DTensorParam):
        return value
    if param.full_spec is not None or param.extension is not None:
        return value
    if tuple(value.shape) != param.split.shape:
        return value
    spec = with_dtype(param.shard_spec, value.dtype)
    return as_dtensor(param.shard_of(value.detach(), rank).contiguous(), spec)


# The scheduler of a tree


def make_scheduler(top: ModuleHooks) -> Scheduler:
    """Make `top` the root of all hooks below it, and of those it borrows parameters from."""
    lending = list(lending_tops(top))
    for outer in lending:
        if top in hooks_below(outer):
            return make_scheduler(outer)
    tops = [top, *lending]
    members = list(dict.fromkeys(hooks for each in tops for hooks in hooks_below(each)))
    for hooks in members:
        if hooks.scheduler is not None and hooks.scheduler.phase is not Phase.IDLE:
            raise LifecycleError(
                f"{hooks.name}: a unit must be idle when an outer module runs for the first time, "
                f"found it in {hooks.scheduler.phase.value}; run the outer module's forward first."
            )
    _set_names(tops, members)
    comm_ctx = top.shared_comm_ctx or CommContext(top.units[0].comm_ctx.device)
    units = [unit for hooks in members for unit in hooks.units]
    for hooks in members:
        hooks.is_root = hooks is top
    for unit in units:
        unit.reshard_now()
        unit.comm_ctx = comm_ctx
    join_late_ties(members)
    settle_ties(tops, members)
    for unit in units:
        unit.refresh(plan_training=True)
        unit.require_ready()
    mesh_info = top.units[0].mesh_info
    agreement = None
    if mesh_info.num_ranks > 1:
        agreement = Agreement(mesh_info, comm_ctx.device.torch_device)
        agreement.compare_plans([(unit.name, unit.describe()) for unit in units])
    repoint_living_optimizers()
    scheduler = Scheduler(members, comm_ctx, agreement)
    for hooks in members:
        hooks.scheduler = scheduler
    return scheduler


def _set_names(tops: Sequence[ModuleHooks], members: Sequence[ModuleHooks]) -> None:
    """Give units and parameters the names that users know: paths from the root."""
    names: dict[nn.Module, str] = {}
    for top in tops:
        for module in top.modules:
            for name, child in module.named_modules(remove_duplicate=False):
                names.setdefault(child, name)
    for hooks in members:
        paths = [clean_name(names[module]) for module in hooks.modules]
        own = ", ".join(path for path in paths if path)
        hooks.name = own or type(hooks.modules[0]).__name__.removeprefix("FSDP")
        for unit in hooks.units:
            unit.name = hooks.name
            for param in unit.params:
                location = param.locations[0]
                path = names.get(location.module, "")
                param.name = clean_name(f"{path}.{location.name}" if path else location.name)
