"""Builds units and hooks from modules, and a scheduler from hooks.

`build_hooks` runs in `fully_shard` and the wrapper; `make_scheduler` before the first forward of
the root.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import is_tensor_like

from fullshard._torch import to_local
from fullshard.api import MixedPrecisionPolicy, OffloadPolicy
from fullshard.comm.agreement import Agreement, UnitPlan
from fullshard.comm.annotations import read_annotations, unchecked
from fullshard.comm.mesh import MeshInfo, mesh_info_of, subgroup_size
from fullshard.comm.placement import as_dtensor, place, shard_dim, with_dtype
from fullshard.device import device_for, simulation, type_of
from fullshard.errors import ConfigError, LifecycleError, TopologyError
from fullshard.layout import CostModel
from fullshard.runtime.hooks import (
    ModuleHooks,
    ShardRequest,
    hooks_below,
    hooks_managing,
    hooks_of,
)
from fullshard.runtime.names import clean_name
from fullshard.runtime.replaced import (
    record_passes,
    record_replacement,
    replacement_of,
    repoint_living_optimizers,
)
from fullshard.runtime.step import Scheduler
from fullshard.runtime.ties import join_late_ties, lending_tops, settle_ties
from fullshard.runtime.turnstile import CheckedTurnstile, Turnstile
from fullshard.unit.context import CommContext
from fullshard.unit.flat_param import FlatParams, FlatParamSlice, OrigParamSlice, ParamForm
from fullshard.unit.param import DTensorParam, ParamLocation, ShardedParam
from fullshard.unit.store import Store
from fullshard.unit.unit import Unit

# An original parameter to shard: its name, and everywhere it is registered.
_Found = dict[nn.Parameter, tuple[str, list[ParamLocation]]]


def build_hooks(request: ShardRequest) -> ModuleHooks:
    """Shard the parameters of the modules that no inner call has sharded."""
    modules = list(managed_modules(request.modules, request.ignored_modules))
    found: _Found = {}
    ties: list[ShardedParam] = []
    for path, module in modules:
        for name, param in list(module._parameters.items()):
            if param is None or param in request.ignored:
                continue
            location = ParamLocation(module, name)
            sharded = replacement_of(param)
            if sharded is None:
                found.setdefault(param, (join(path, name), []))[1].append(location)
                continue
            # The parameter is shared with a sharded module: register its shard here, too.
            if isinstance(sharded, FlatParamSlice):
                location = location.unregistered()
            sharded.locations.append(location)
            location.put(sharded.shard)
            ties.append(sharded)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != request.device and not buffer.is_meta:
                module._buffers[name] = buffer.to(request.device)
    units = _make_units(request, found)
    for _, module in modules:
        # Dynamo must not bake parameters that come and go into its graphs.
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        module._fsdp_use_orig_params = request.form is not ParamForm.FLAT_PARAM  # type: ignore[assignment]
    hooks = ModuleHooks(request, units, (module for _, module in modules), make_scheduler)
    settle_ties([hooks])
    for sharded in ties:
        owner = hooks_managing(sharded.locations[0].module)
        for unit in [] if owner is None else owner.units:
            if sharded in unit.params and unit not in hooks.reads:
                hooks.lenders.append(unit)
    for _, module in modules:
        if request.form is ParamForm.DTENSOR and module._parameters:
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
            yield from walk(join(path, name), child)

    for root in roots:
        yield from walk("", root)


def join(path: str, name: str) -> str:
    """The path of a module's parameter or child."""
    return f"{path}.{name}" if path else name


# Units


def _make_units(request: ShardRequest, found: _Found) -> list[Unit]:
    """One unit per mesh that the parameters are placed on, and per place where shards live.

    The first is the call's own mesh.
    """
    offload_of = _offload_policies(request, [name for name, _ in found.values()])
    usual = offload_of.get("", OffloadPolicy())
    # By mesh and place. As text: policies cannot be hashed.
    groups: dict[tuple[MeshInfo, str], list[ShardedParam]] = {(request.mesh_info, repr(usual)): []}
    policies = {repr(each): each for each in (usual, *offload_of.values())}
    replaced: list[tuple[nn.Parameter, ShardedParam, int]] = []
    for original, (name, locations) in found.items():
        _move_parameter(name, original, request.device)
        offload = offload_of.get(name, usual)
        if request.form is ParamForm.DTENSOR:
            mesh_info, param = _dtensor_param(request, name, original, locations, offload)
        else:
            mesh_info, param = request.mesh_info, _flat_param(request, name, original, locations)
        groups.setdefault((mesh_info, repr(offload)), []).append(param)
        replaced.append((original, param, mesh_info.shard.rank))
    name = ", ".join(type(module).__name__ for module in request.modules)
    comm_ctx = CommContext(device_for(request.device))
    policy, settings = request.policy, request.settings
    units = []
    for (mesh_info, key), params in groups.items():
        store = Store.of(policies[key], comm_ctx.device.torch_device)
        large = [param for param in params if _is_large(param, mesh_info, policy, comm_ctx)]
        rest = [param for param in params if param not in large]
        alone = [[param] for param in large]
        for each in alone if large and not rest else [rest, *alone]:
            flat = _flat_params(request)
            unit = Unit(name, each, mesh_info, policy, store, comm_ctx, settings, flat)
            unit.set(stands_alone=each is not rest)
            units.append(unit)
    for unit in units:
        # A parameter's own mesh has its own size.
        unit.set(reshard_after_forward=reshard_of(unit, unit.settings.reshard_after_forward))
    for original, param, rank in replaced:
        param.register(param.shard)
        record_replacement(original, param, rank)
    return units


def _offload_policies(request: ShardRequest, names: Collection[str]) -> Mapping[str, OffloadPolicy]:
    """The policies of parameters by name; that of all others under the empty name."""
    if isinstance(request.offload, OffloadPolicy):
        return {"": request.offload}
    if unknown := sorted(set(request.offload).difference(names)):
        raise ConfigError(
            f"offload_policy: {unknown} are not names of parameters that this call shards; choose "
            f"from {sorted(names)}."
        )
    return request.offload


def _is_large(
    param: ShardedParam, mesh_info: MeshInfo, policy: MixedPrecisionPolicy, comm_ctx: CommContext
) -> bool:
    """Whether a parameter is gathered, freed and reduced by itself (rule 15: large ones alone)."""
    dtype = policy.param_dtype if param.dtype.is_floating_point else None
    num_bytes = param.split.numel * (dtype or param.dtype).itemsize
    cost = CostModel.of_device(type_of(comm_ctx.device.torch_device))
    return (
        comm_ctx.device.has_streams
        and not isinstance(param, FlatParamSlice)  # whose optimizer holds one parameter for all
        and not mesh_info.shard.is_single
        and cost.deserves_unit(num_bytes, mesh_info.shard.size)
        and param.full_spec is None
        and param.extension is None
        and len(param.locations) == 1
    )


def _flat_params(request: ShardRequest) -> FlatParams | None:
    """How a unit of a wrapper is cut; None for the units of `fully_shard`."""
    if request.form is ParamForm.DTENSOR:
        return None
    owner = request.modules[0] if request.owner is None else request.owner
    return FlatParams(request.form, owner, request.mesh_info.shard, request.device)


def _flat_param(
    request: ShardRequest, name: str, original: nn.Parameter, locations: list[ParamLocation]
) -> ShardedParam:
    is_dtensor = isinstance(original, DTensor)
    placed = place(name, original, None, request.mesh_info) if is_dtensor else None
    if request.form is ParamForm.ORIG_PARAMS:
        return OrigParamSlice.of(name, original, locations, placed)
    places = [location.unregistered() for location in locations]
    return FlatParamSlice.of(name, original, places, placed)


def _dtensor_param(
    request: ShardRequest,
    name: str,
    original: nn.Parameter,
    locations: list[ParamLocation],
    offload: OffloadPolicy,
) -> tuple[MeshInfo, ShardedParam]:
    mesh_info, placement = request.mesh_info, None
    chosen = None if request.placement_fn is None else request.placement_fn(original)
    if chosen is None or isinstance(chosen, Shard):
        placement = chosen
    elif hasattr(chosen, "mesh_info") and hasattr(chosen, "placement"):
        mesh, placement = chosen.mesh_info, chosen.placement
        inner = getattr(mesh, "mesh", mesh)
        # A DeviceMesh has an attribute `mesh` too: the tensor of its ranks.
        mesh_info = mesh_info_of(mesh if isinstance(inner, torch.Tensor) else inner)
    else:
        raise ConfigError(
            f"{name}: Invalid shard_placement_fn result: {chosen!r}; return a Shard such as "
            "Shard(0), a ShardPlacementResult or None."
        )
    device = Store.of(offload, request.device).device
    dim = shard_dim(name, to_local(original), placement)
    with torch.no_grad(), unchecked():
        stored, annotations = read_annotations(name, original, mesh_info)
        placed = place(name, stored, dim, mesh_info)
        axis = mesh_info.shard
        param = DTensorParam.of(name, original, locations, placed, axis, device)
    param.annotations = annotations
    param.keeps_dtype = _keeps_dtype(request.policy, name, original)
    return mesh_info, param


def _keeps_dtype(policy: MixedPrecisionPolicy, name: str, original: nn.Parameter) -> bool:
    """Whether a policy leaves a parameter in its own dtype."""
    override_fn = policy.param_dtype_override_fn
    chosen = None if override_fn is None else override_fn(original)
    if chosen not in (None, policy.param_dtype, original.dtype):
        raise ConfigError(
            f"{name}: param_dtype_override_fn must return None, param_dtype "
            f"({policy.param_dtype}) or the parameter's own dtype ({original.dtype}), not "
            f"{chosen!r}."
        )
    return chosen is not None and chosen == original.dtype


def reshard_of(unit: Unit, value: Any) -> bool | int | None:
    """Check `reshard_after_forward`; a number of ranks makes its groups, on all ranks alike."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ConfigError(
            "fully_shard: reshard_after_forward should be a bool or an int representing the group "
            f"size to reshard to, not {value!r}; pass True, False or a divisor of "
            f"{unit.mesh_info.shard.size}."
        )
    after = subgroup_size(unit.mesh_info, value)
    if not isinstance(after, bool):
        unit.require_plain_params()
        unit.mesh_info.subgroup_axis(after)
    return after


def _move_parameter(name: str, param: nn.Parameter, device: torch.device) -> None:
    if param.device == device or param.is_meta:
        return
    if isinstance(param, DTensor):
        raise TopologyError(
            f"{name}: this DTensor is on {param.device}, but {device} computes; distribute it on "
            f"a mesh of type {device.type}."
        )
    if type(param.data) is torch.Tensor:
        param.data = param.data.to(device)
    else:
        with torch.no_grad():
            moved = nn.Parameter(param.to(device), param.requires_grad)
        torch.utils.swap_tensors(param, moved)


# State dicts of modules that `fully_shard` was called on


def _keep_state_sharded(hooks: ModuleHooks, module: nn.Module) -> None:
    """State dicts read and write shards, whatever the unit's state; full values are cut to fit."""

    def reshard(*_: Any) -> None:
        # A state dict is often held while the model trains: shards must not move after this.
        # And writes to its tensors are not noticed, so nothing gathered may be kept.
        for unit in hooks.reads:
            unit.reshard_now()
            unit.refresh(plan_training=hooks.scheduler is None)
            unit.arrangement.is_held = True

    def cut(_: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for unit in hooks.reads:
            unit.reshard_now()
            rank = unit.mesh_info.shard.rank
            for param in unit.params:
                for location in param.locations:
                    key = prefix + location.name
                    if location.module is module and key in state_dict:
                        state_dict[key] = _shard_of(param, state_dict[key], rank)

    module.register_state_dict_pre_hook(reshard)
    module.register_load_state_dict_pre_hook(cut)


def _shard_of(param: ShardedParam, value: Any, rank: int) -> Any:
    """This rank's shard of a full value; anything else is left for torch to check."""
    if not is_tensor_like(value) or isinstance(value, DTensor):
        return value
    is_plain = param.full_spec is None and param.extension is None
    if not isinstance(param, DTensorParam) or not is_plain or value.shape != param.split.shape:
        return value
    part = param.shard_of(torch.detach(value), rank).contiguous()
    if not isinstance(value, torch.Tensor):
        part = part.clone()  # a lazy value was loaded just now: keep only this part of it
    return as_dtensor(part, with_dtype(param.shard_spec, value.dtype))


# The scheduler of a tree


def make_scheduler(top: ModuleHooks) -> Scheduler:
    """Make `top` the root of all hooks below it, and of those it borrows parameters from."""
    lending = lending_tops(top)
    for outer in lending:
        if top in hooks_below(*outer.modules):
            return make_scheduler(outer)
    tops = [top, *lending]
    members = hooks_below(*(module for each in tops for module in each.modules))
    for hooks in members:
        if hooks.scheduler is not None and hooks.scheduler.phase != "idle":
            raise LifecycleError(
                f"{hooks.name}: FSDP requires running forward through the root module first, but "
                f"this unit is in {hooks.scheduler.phase} when an outer module runs for the first "
                "time; run the outer module's forward before, or end this one's backward."
            )
    _set_names(tops, members)
    units = [unit for hooks in members for unit in hooks.units]
    comm_ctx, mesh_info = top.units[0].comm_ctx, top.units[0].mesh_info
    share(comm_ctx, units)
    join_late_ties(members)
    settle_ties(tops)
    for unit in units:
        unit.refresh(plan_training=True)
        unit.require_ready()
    turnstile = Turnstile()
    if mesh_info.num_ranks > 1 and simulation() is None:
        agreement = Agreement(mesh_info, comm_ctx.device.torch_device)
        agreement.compare_plans([_versions(), *(p for hooks in members for p in _plans(hooks))])
        turnstile = checked = CheckedTurnstile(members, agreement)
        record_passes(checked.passes, (param for unit in units for param in unit.params))
    repoint_living_optimizers()
    scheduler = Scheduler(members, comm_ctx, turnstile)
    for hooks in members:
        hooks.scheduler = scheduler
    return scheduler


@cache
def _versions() -> UnitPlan:
    """What the process runs, to be compared as if it were a unit."""
    found = {"torch": torch.__version__.partition("+")[0]}
    with suppress(PackageNotFoundError):  # run from its source
        found["fullshard"] = version("fullshard")
    return UnitPlan("versions", "", found)


def _plans(hooks: ModuleHooks) -> Iterator[UnitPlan]:
    """What ranks compare of the units of one call."""
    request = hooks.request
    settings = {
        "forward prefetch": str([each.name for each in hooks.forward_prefetch]),
        "backward prefetch": str([each.name for each in hooks.backward_prefetch]),
        "prefetches_forward": str(request.prefetches_forward),
        "backward_prefetch": str(request.backward_prefetch),
        "uneven": str(hooks.is_uneven),
    }
    for unit in hooks.units:
        yield UnitPlan(unit.name, unit.describe(), {**settings, **unit.describe_settings()})


def share(comm_ctx: CommContext, units: Sequence[Unit]) -> None:
    """Make units use a comm context."""
    for unit in units:
        unit.reshard_now()
        unit.comm_ctx = comm_ctx


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
            for param in unit.params:
                location = param.locations[0]
                param.name = clean_name(join(names.get(location.module, ""), location.name))
            unit.name = (
                unit.params[0].name if unit.is_large and len(hooks.units) > 1 else hooks.name
            )
