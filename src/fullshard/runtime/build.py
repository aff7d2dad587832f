"""What happens once, before the first pass: the root finds its units and settles what is theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fullshard.api import MixedPrecisionPolicy, OffloadPolicy
from fullshard.comm.agreement import Agreement
from fullshard.comm.mesh import MeshInfo, mesh_info_of, subgroup_size
from fullshard.comm.placement import as_dtensor, place, shard_dim, with_dtype
from fullshard.device import device_for
from fullshard.errors import ConfigError, LifecycleError, TopologyError, UnsupportedError
from fullshard.runtime.hooks import HookOptions, ModuleHooks, hooks_managing, hooks_of, manage
from fullshard.runtime.names import clean_name
from fullshard.runtime.replaced import record_replacement, replacement_of, repoint_living_optimizers
from fullshard.runtime.scheduler import Phase, Scheduler
from fullshard.runtime.ties import hooks_below, join_late_ties, lending_tops, settle_ties
from fullshard.unit.context import CommContext
from fullshard.unit.flat_param import (
    AttributeLocation,
    FlatParams,
    FlatParamSlice,
    OrigParamSlice,
    ParamForm,
)
from fullshard.unit.param import DTensorParam, ParamLocation, ShardedParam, shard_device
from fullshard.unit.settings import Settings
from fullshard.unit.unit import Unit


def prepare(top: ModuleHooks) -> Scheduler:
    """Make `top` the root of all runners below it, and of those it borrows parameters from."""
    lending = list(lending_tops(top))
    for outer in lending:
        if top in hooks_below(outer):
            return prepare(outer)
    tops = [top, *lending]
    hooks_list = list(dict.fromkeys(hooks for each in tops for hooks in hooks_below(each)))
    for hooks in hooks_list:
        if hooks.scheduler is not None and hooks.scheduler.phase is not Phase.IDLE:
            raise LifecycleError(
                f"{hooks.name}: a unit must be idle when an outer module runs for the first time, "
                f"found it in {hooks.scheduler.phase.value}; run the outer module's forward first."
            )
    _name(tops, hooks_list)
    comm_ctx = top.shared_comm_ctx or CommContext(top.units[0].comm_ctx.device)
    for hooks in hooks_list:
        hooks.is_root = hooks is top
        for unit in hooks.units:
            unit.reshard_now()
            unit.comm_ctx = comm_ctx
    join_late_ties(hooks_list)
    settle_ties(tops, hooks_list)
    for hooks in hooks_list:
        for unit in hooks.units:
            unit.refresh(plan_training=True)
            unit.require_ready()
    mesh_info = top.units[0].mesh_info
    agreement = None
    if mesh_info.num_ranks > 1:
        agreement = Agreement(mesh_info, comm_ctx.device.torch_device)
        plans = [(unit.name, unit.describe()) for hooks in hooks_list for unit in hooks.units]
        agreement.compare_plans(plans)
    repoint_living_optimizers()
    root = Scheduler(hooks_list, comm_ctx, agreement)
    for hooks in hooks_list:
        hooks.scheduler = root
    return root


def _named_modules(tops: Sequence[ModuleHooks]) -> Iterator[tuple[str, nn.Module]]:
    for top in tops:
        for module in top.modules:
            yield from module.named_modules(remove_duplicate=False)


def _name(tops: Sequence[ModuleHooks], hooks_list: Sequence[ModuleHooks]) -> None:
    """Give units and members the names that users know: paths from the root."""
    names: dict[nn.Module, str] = {}
    for name, module in _named_modules(tops):
        names.setdefault(module, name)
    for hooks in hooks_list:
        paths = [clean_name(names[module]) for module in hooks.modules]
        own = ", ".join(path for path in paths if path)
        hooks.name = own or type(hooks.modules[0]).__name__.removeprefix("FSDP")
        for unit in hooks.units:
            unit.name = hooks.name
            for sharded_param in unit.params:
                location = sharded_param.locations[0]
                path = names.get(location.module, "")
                sharded_param.name = clean_name(
                    f"{path}.{location.name}" if path else location.name
                )


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """What one `fully_shard` call or one wrapper asks for, checked.

    `owner` is where a flat unit registers the parameters that stand for its lanes.
    """

    modules: tuple[nn.Module, ...]
    mesh_info: MeshInfo
    device: torch.device
    policy: MixedPrecisionPolicy
    offload: OffloadPolicy
    settings: Settings
    placement_fn: Callable[[nn.Parameter], Any] | None = None
    ignored: frozenset[nn.Parameter] = frozenset()
    ignored_modules: frozenset[nn.Module] = frozenset()
    form: ParamForm = ParamForm.DTENSOR
    owner: nn.Module | None = None
    options: HookOptions = field(default_factory=HookOptions)


def build_hooks(request: ShardRequest) -> ModuleHooks:
    """Shard the parameters of the modules that no inner call has sharded."""
    modules = list(managed_modules(request.modules, request.ignored_modules))
    found: dict[nn.Parameter, list[ParamLocation]] = {}
    names: dict[nn.Parameter, str] = {}
    ties: list[tuple[ShardedParam, ParamLocation]] = []
    for path, module in modules:
        for name, param in module._parameters.items():
            if param is None or param in request.ignored:
                continue
            sharded_param = replacement_of(param)
            if sharded_param is not None:
                ties.append((sharded_param, ParamLocation(module, name)))
                continue
            found.setdefault(param, []).append(ParamLocation(module, name))
            names.setdefault(param, f"{path}.{name}" if path else name)
        _move_buffers(module, request.device)
    for sharded_param, location in ties:
        _tie(sharded_param, location)
    name = ", ".join(type(module).__name__ for module in request.modules)
    if request.form is ParamForm.DTENSOR:
        units = _units(name, request, found, names)
    else:
        units = [flat_unit(name, request, found, names)]
    for _, module in modules:
        # Dynamo must not bake parameters that come and go into its graphs.
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        module._fsdp_use_orig_params = request.form is not ParamForm.FLAT_PARAM  # type: ignore[assignment]
    hooks = ModuleHooks(
        name, request.modules, units, request.policy, request.device, prepare, request.options
    )
    manage(hooks, (module for _, module in modules))
    settle_ties([hooks], list(hooks_below(hooks)))
    for sharded_param, _ in ties:
        _borrow(hooks, sharded_param)
    for _, module in modules:
        if request.form is ParamForm.DTENSOR and module._parameters:
            _keep_state_sharded(hooks, module)
    return hooks


def flat_unit(
    name: str,
    request: ShardRequest,
    found: dict[nn.Parameter, list[ParamLocation]],
    names: dict[nn.Parameter, str],
) -> Unit:
    """All parameters of a wrapper, one after another."""
    kind = FlatParamSlice if request.form is ParamForm.FLAT_PARAM else OrigParamSlice
    params: list[ShardedParam] = []
    originals = list(found)
    for param, locations in found.items():
        if isinstance(param, DTensor):
            raise UnsupportedError(
                f"{names[param]}: a wrapper flattens plain parameters, found a DTensor placed "
                f"{param.placements}; use fully_shard, which shards DTensors along further axes."
            )
        _move_parameter(names[param], param, request.device)
        if request.form is ParamForm.FLAT_PARAM:
            locations = [AttributeLocation.in_place_of(location) for location in locations]
        params.append(kind.of(names[param], param, locations))
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
    for param, sharded_param in zip(originals, params, strict=True):
        sharded_param.show(sharded_param.shard)
        record_replacement(param, sharded_param, request.mesh_info.shard.rank)
    return unit


def _units(
    name: str,
    request: ShardRequest,
    found: dict[nn.Parameter, list[ParamLocation]],
    names: dict[nn.Parameter, str],
) -> list[Unit]:
    """One unit per mesh that the parameters are placed on; the first is the call's own mesh."""
    params: dict[MeshInfo, list[ShardedParam]] = {request.mesh_info: []}
    originals: list[tuple[nn.Parameter, DTensorParam, int]] = []
    for param, locations in found.items():
        mesh_info, placement = _placement(names[param], param, request)
        _move_parameter(names[param], param, request.device)
        dim = shard_dim(names[param], _local(param), placement)
        with torch.no_grad():
            placed = place(names[param], param, dim, mesh_info)
            home, _ = shard_device(request.offload, request.device)
            sharded_param = DTensorParam.of(
                names[param], param, locations, placed, mesh_info.shard, home
            )
        params.setdefault(mesh_info, []).append(sharded_param)
        originals.append((param, sharded_param, mesh_info.shard.rank))
    comm_ctx = CommContext(device_for(request.device))
    units = [
        Unit(name, part, mesh_info, request.policy, request.offload, comm_ctx, request.settings)
        for mesh_info, part in params.items()
    ]
    for unit in units:
        after = unit.settings.reshard_after_forward
        if after is not None and not isinstance(after, bool):
            after = subgroup_size(unit.mesh_info, after)  # a parameter's own mesh has its own size
            unit.set(reshard_after_forward=after)
        if after is not None and not isinstance(after, bool):
            unit.require_thinnable()
            unit.mesh_info.subgroup_axis(after)  # its groups are made here, on all ranks alike
    for param, sharded_param, rank in originals:
        sharded_param.show(sharded_param.shard)
        record_replacement(param, sharded_param, rank)
    return units


def _placement(name: str, param: nn.Parameter, request: ShardRequest) -> tuple[MeshInfo, Any]:
    """The mesh and the dim that the user's function chooses for a parameter."""
    if request.placement_fn is None:
        return request.mesh_info, None
    chosen = request.placement_fn(param)
    if chosen is None or isinstance(chosen, Shard):
        return request.mesh_info, chosen
    mesh_info = getattr(chosen, "mesh_info", None)
    if mesh_info is None or not hasattr(chosen, "placement"):
        raise ConfigError(
            f"{name}: shard_placement_fn must return a Shard, a ShardPlacementResult or None, "
            f"found {chosen!r}; return for example Shard(0)."
        )
    mesh = getattr(mesh_info, "mesh", mesh_info)
    # A DeviceMesh has an attribute `mesh` too: the tensor of its ranks.
    return mesh_info_of(mesh_info if isinstance(mesh, torch.Tensor) else mesh), chosen.placement


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


def _tie(sharded_param: ShardedParam, location: ParamLocation) -> None:
    """Register a shard at one more place: the parameter is shared with a sharded module."""
    if isinstance(sharded_param, FlatParamSlice):
        location = AttributeLocation.in_place_of(location)
    sharded_param.locations.append(location)
    location.put(sharded_param.shard)


def _borrow(hooks: ModuleHooks, sharded_param: ShardedParam) -> None:
    """Note whose parameter it is, if none of the runners in this tree has it."""
    owner = hooks_managing(sharded_param.locations[0].module)
    for unit in [] if owner is None else owner.units:
        if sharded_param in unit.params and unit not in hooks.reads:
            hooks.lenders.append(unit)


def _local(param: torch.Tensor) -> torch.Tensor:
    return param._local_tensor if isinstance(param, DTensor) else param


def _move_parameter(name: str, param: nn.Parameter, device: torch.device) -> None:
    if param.device == device or param.is_meta:
        return
    if isinstance(param, DTensor):
        raise TopologyError(
            f"{name}: a DTensor must be on the device that computes ({device}), found "
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


def _keep_state_sharded(hooks: ModuleHooks, module: nn.Module) -> None:
    """State dicts read and write shards, whatever the unit's state; full values are cut to fit."""

    def settle(*_: Any) -> None:
        # A state dict is often held while the model trains: shards must not move after this.
        # And whoever writes to its tensors is not seen, so nothing gathered may be kept.
        for unit in hooks.reads:
            unit.reshard_now()
            unit.refresh(plan_training=hooks.scheduler is None)
            unit.is_held = True

    def cut(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for unit in hooks.reads:
            unit.reshard_now()
            for sharded_param in unit.params:
                for location in sharded_param.locations:
                    key = prefix + location.name
                    if location.module is module and key in state_dict:
                        state_dict[key] = _cut(
                            sharded_param, state_dict[key], unit.mesh_info.shard.rank
                        )

    module.register_state_dict_pre_hook(settle)
    module._register_load_state_dict_pre_hook(cut)


def _cut(sharded_param: ShardedParam, value: Any, rank: int) -> Any:
    """This rank's shard of a full value; anything else is left for torch to judge."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not is_plain or not isinstance(sharded_param, DTensorParam):
        return value
    if sharded_param.full_spec is not None or sharded_param.extension is not None:
        return value
    if tuple(value.shape) != sharded_param.split.shape:
        return value
    spec = with_dtype(sharded_param.shard_spec, value.dtype)
    return as_dtensor(sharded_param.cut(value.detach(), rank).contiguous(), spec)
