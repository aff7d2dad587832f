"""From modules to units: which parameters are theirs, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fullshard.api import MixedPrecisionPolicy, OffloadPolicy
from fullshard.comm.placement import as_dtensor, place, shard_dim, with_dtype
from fullshard.comm.topology import Topology, thin_size, topology_of
from fullshard.device.streams import device_for
from fullshard.errors import ConfigError, TopologyError, UnsupportedError
from fullshard.runtime.prepare import prepare
from fullshard.runtime.runner import Habits, Runner, manage, manager_of, runner_of
from fullshard.runtime.ties import runners_below, settle_ties
from fullshard.unit.flat import Form, PartMember, PlainLocation, SliceMember
from fullshard.unit.flat_lanes import FlatLanes
from fullshard.unit.flow import Flow
from fullshard.unit.homes import home_device
from fullshard.unit.member import Location, Member
from fullshard.unit.rows import RowsMember
from fullshard.unit.settings import Settings
from fullshard.unit.succession import succeed, successor
from fullshard.unit.unit import Unit


@dataclass(frozen=True, slots=True)
class Request:
    """What one `fully_shard` call or one wrapper asks for, checked.

    `owner` is where a flat unit registers the parameters that stand for its lanes.
    """

    modules: tuple[nn.Module, ...]
    topology: Topology
    device: torch.device
    policy: MixedPrecisionPolicy
    offload: OffloadPolicy
    settings: Settings
    placement_fn: Callable[[nn.Parameter], Any] | None = None
    ignored: frozenset[nn.Parameter] = frozenset()
    ignored_modules: frozenset[nn.Module] = frozenset()
    form: Form = Form.ROWS
    owner: nn.Module | None = None
    habits: Habits = field(default_factory=Habits)


def build_runner(request: Request) -> Runner:
    """Shard the parameters of the modules that no inner call has sharded."""
    modules = list(managed_modules(request.modules, request.ignored_modules))
    found: dict[nn.Parameter, list[Location]] = {}
    names: dict[nn.Parameter, str] = {}
    ties: list[tuple[Member, Location]] = []
    for path, module in modules:
        for name, param in module._parameters.items():
            if param is None or param in request.ignored:
                continue
            member = successor(param)
            if member is not None:
                ties.append((member, Location(module, name)))
                continue
            found.setdefault(param, []).append(Location(module, name))
            names.setdefault(param, f"{path}.{name}" if path else name)
        _move_buffers(module, request.device)
    for member, location in ties:
        _tie(member, location)
    name = ", ".join(type(module).__name__ for module in request.modules)
    if request.form is Form.ROWS:
        units = _units(name, request, found, names)
    else:
        units = [flat_unit(name, request, found, names)]
    for _, module in modules:
        # Dynamo must not bake parameters that come and go into its graphs.
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        module._fsdp_use_orig_params = request.form is not Form.FLAT  # type: ignore[assignment]
    runner = Runner(
        name, request.modules, units, request.policy, request.device, prepare, request.habits
    )
    manage(runner, (module for _, module in modules))
    settle_ties([runner], list(runners_below(runner)))
    for member, _ in ties:
        _borrow(runner, member)
    for _, module in modules:
        if request.form is Form.ROWS and module._parameters:
            _keep_state_sharded(runner, module)
    return runner


def flat_unit(
    name: str,
    request: Request,
    found: dict[nn.Parameter, list[Location]],
    names: dict[nn.Parameter, str],
) -> Unit:
    """All parameters of a wrapper, one after another."""
    kind = PartMember if request.form is Form.FLAT else SliceMember
    members: list[Member] = []
    originals = list(found)
    for param, locations in found.items():
        if isinstance(param, DTensor):
            raise UnsupportedError(
                f"{names[param]}: a wrapper flattens plain parameters, found a DTensor placed "
                f"{param.placements}; use fully_shard, which shards DTensors along further axes."
            )
        _move_parameter(names[param], param, request.device)
        if request.form is Form.FLAT:
            locations = [PlainLocation.in_place_of(location) for location in locations]
        members.append(kind.of(names[param], param, locations))
    owner = request.modules[0] if request.owner is None else request.owner
    unit = Unit(
        name,
        members,
        request.topology,
        request.policy,
        request.offload,
        Flow(device_for(request.device)),
        request.settings,
        FlatLanes(request.form, owner, request.topology.shard, request.device),
    )
    for param, member in zip(originals, members, strict=True):
        member.show(member.shard)
        succeed(param, member, request.topology.shard.rank)
    return unit


def _units(
    name: str,
    request: Request,
    found: dict[nn.Parameter, list[Location]],
    names: dict[nn.Parameter, str],
) -> list[Unit]:
    """One unit per mesh that the parameters are placed on; the first is the call's own mesh."""
    members: dict[Topology, list[Member]] = {request.topology: []}
    originals: list[tuple[nn.Parameter, RowsMember, int]] = []
    for param, locations in found.items():
        topology, placement = _placement(names[param], param, request)
        _move_parameter(names[param], param, request.device)
        dim = shard_dim(names[param], _local(param), placement)
        with torch.no_grad():
            placed = place(names[param], param, dim, topology)
            home, _ = home_device(request.offload, request.device)
            member = RowsMember.of(names[param], param, locations, placed, topology.shard, home)
        members.setdefault(topology, []).append(member)
        originals.append((param, member, topology.shard.rank))
    flow = Flow(device_for(request.device))
    units = [
        Unit(name, part, topology, request.policy, request.offload, flow, request.settings)
        for topology, part in members.items()
    ]
    for unit in units:
        after = unit.settings.reshard_after_forward
        if after is not None and not isinstance(after, bool):
            after = thin_size(unit.topology, after)  # a parameter's own mesh has its own size
            unit.set(reshard_after_forward=after)
        if after is not None and not isinstance(after, bool):
            unit.require_thinnable()
            unit.topology.thin_axis(after)  # its groups are made here, on all ranks alike
    for param, member, rank in originals:
        member.show(member.shard)
        succeed(param, member, rank)
    return units


def _placement(name: str, param: nn.Parameter, request: Request) -> tuple[Topology, Any]:
    """The mesh and the dim that the user's function chooses for a parameter."""
    if request.placement_fn is None:
        return request.topology, None
    chosen = request.placement_fn(param)
    if chosen is None or isinstance(chosen, Shard):
        return request.topology, chosen
    mesh_info = getattr(chosen, "mesh_info", None)
    if mesh_info is None or not hasattr(chosen, "placement"):
        raise ConfigError(
            f"{name}: shard_placement_fn must return a Shard, a ShardPlacementResult or None, "
            f"found {chosen!r}; return for example Shard(0)."
        )
    mesh = getattr(mesh_info, "mesh", mesh_info)
    # A DeviceMesh has an attribute `mesh` too: the tensor of its ranks.
    return topology_of(mesh_info if isinstance(mesh, torch.Tensor) else mesh), chosen.placement


def managed_modules(
    roots: Sequence[nn.Module], ignored: Collection[nn.Module] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """The modules below the roots that no inner call has taken and that are not ignored."""
    seen: set[nn.Module] = set(ignored)

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or (module not in roots and runner_of(module) is not None):
            return
        seen.add(module)
        yield path, module
        for name, child in module.named_children():
            yield from walk(f"{path}.{name}" if path else name, child)

    for root in roots:
        yield from walk("", root)


def _tie(member: Member, location: Location) -> None:
    """Register a shard at one more place: the parameter is shared with a sharded module."""
    if isinstance(member, PartMember):
        location = PlainLocation.in_place_of(location)
    member.locations.append(location)
    location.put(member.shard)


def _borrow(runner: Runner, member: Member) -> None:
    """Note whose parameter it is, if none of the runners in this tree has it."""
    owner = manager_of(member.locations[0].module)
    for unit in [] if owner is None else owner.units:
        if member in unit.members and unit not in runner.reads:
            runner.lenders.append(unit)


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


def _keep_state_sharded(runner: Runner, module: nn.Module) -> None:
    """State dicts read and write shards, whatever the unit's state; full values are cut to fit."""

    def settle(*_: Any) -> None:
        # A state dict is often held while the model trains: shards must not move after this.
        # And whoever writes to its tensors is not seen, so nothing gathered may be kept.
        for unit in runner.reads:
            unit.reshard_now()
            unit.refresh(plan_training=runner.root is None)
            unit.is_held = True

    def cut(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for unit in runner.reads:
            unit.reshard_now()
            for member in unit.members:
                for location in member.locations:
                    key = prefix + location.name
                    if location.module is module and key in state_dict:
                        state_dict[key] = _cut(member, state_dict[key], unit.topology.shard.rank)

    module.register_state_dict_pre_hook(settle)
    module._register_load_state_dict_pre_hook(cut)


def _cut(member: Member, value: Any, rank: int) -> Any:
    """This rank's shard of a full value; anything else is left for torch to judge."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not is_plain or not isinstance(member, RowsMember):
        return value
    if member.full_spec is not None or member.extension is not None:
        return value
    if tuple(value.shape) != member.split.shape:
        return value
    spec = with_dtype(member.shard_spec, value.dtype)
    return as_dtensor(member.cut(value.detach(), rank).contiguous(), spec)
