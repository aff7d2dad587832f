"""A wrapped model's parameters, lane by lane, for those who read and write state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.comm.collectives import all_gather_flat
from fullshard.comm.mesh import MeshInfo
from fullshard.layout import Lane
from fullshard.runtime.hooks import ModuleHooks, hooks_of, hooks_of_unit
from fullshard.runtime.names import clean_name
from fullshard.unit.flat_param import FlatParameter, FlatSlice
from fullshard.unit.param import ParamLocation
from fullshard.unit.unit import Unit


@dataclass(frozen=True, slots=True, eq=False)
class StatePart:
    """One original parameter of a wrapper.

    `names` are all its names in the model, the first one canonical. `start` is where it lies in a
    gathered lane; of it this rank has `elements` (of the flattened parameter), at `offset` of its
    segment.
    """

    names: tuple[str, ...]
    member: FlatSlice
    start: int
    elements: range
    offset: int

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shape(self) -> torch.Size:
        return self.member.shape

    @property
    def numel(self) -> int:
        return self.member.split.numel

    @property
    def param(self) -> nn.Parameter:
        """What an optimizer holds for it: itself, or its lane's flat parameter."""
        return self.member.param

    @property
    def locations(self) -> Sequence[ParamLocation]:
        return self.member.locations

    def of_full(self, full: torch.Tensor) -> torch.Tensor:
        """The parameter, in its shape, as a view of a gathered lane."""
        return full[self.start : self.start + self.numel].view(self.shape)

    def of_segment(self, segment: torch.Tensor) -> torch.Tensor:
        """This rank's slice, as a view of a tensor that is arranged like its segment."""
        return segment[self.offset : self.offset + len(self.elements)]

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a full tensor."""
        return value.reshape(-1)[self.elements.start : self.elements.stop]


class StateLane:
    """One lane of one wrapper: parameters of one dtype that are trained alike."""

    def __init__(
        self, wrapper: nn.Module, unit: Unit, index: int, names: dict[nn.Module, list[str]]
    ) -> None:
        lane = unit.layout.lanes[index]
        self.wrapper = wrapper
        self.index = index
        self.parts = tuple(_parts(lane, unit, names))
        self._unit = unit
        self._message = lane.buckets[0]

    @property
    def segment_numel(self) -> int:
        return self._message.segment_numel

    @property
    def mesh_info(self) -> MeshInfo:
        return self._unit.mesh_info

    @property
    def num_ranks(self) -> int:
        return self._unit.mesh_info.shard.size

    @property
    def dtype(self) -> torch.dtype:
        """That values are kept in."""
        return self.parts[0].member.dtype

    @property
    def device(self) -> torch.device:
        """That collectives run on; with offload, values live elsewhere."""
        return self._unit.comm_ctx.device.torch_device

    @property
    def flat_param(self) -> FlatParameter | None:
        """The one parameter of the lane, with `use_orig_params=False`."""
        flat = self._unit.flat
        return flat.holders[self.index].param if flat is not None and flat.holders else None

    def segment(self) -> torch.Tensor:
        """This rank's values, as the memory that is trained."""
        return self._unit.shard_buffers.lanes[self.index]

    def empty_segment(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.segment_numel, dtype=dtype, device=self.device)

    def gather(self, segment: torch.Tensor) -> torch.Tensor:
        """What all ranks have, one after another: a collective over the shard axis."""
        return all_gather_flat(segment.to(self.device).contiguous(), self.mesh_info.shard)


def wrappers_of(model: nn.Module) -> list[nn.Module]:
    """The wrappers at or below a module, outer ones first."""
    return [module for module in model.modules() if _flat_hooks(module) is not None]


def lanes_of(model: nn.Module, *, recurse: bool = True) -> list[StateLane]:
    """The lanes of all wrappers at or below a module; without `recurse`, of itself alone."""
    names = _paths(model)
    lanes: list[StateLane] = []
    for wrapper in wrappers_of(model) if recurse else [model]:
        hooks = _flat_hooks(wrapper)
        if hooks is None:
            continue
        hooks.require_not_computing("state_dict")
        lanes += _lanes_of_unit(wrapper, hooks.units[0], names)
    return lanes


def borrowed_lanes_of(wrapper: nn.Module) -> list[StateLane]:
    """Lanes of wrappers elsewhere that own parameters which modules in this one use.

    Their parts are only those that do: tied parameters, by their names in this wrapper.
    """
    hooks = _flat_hooks(wrapper)
    lenders = [] if hooks is None else hooks.lenders
    names = _paths(wrapper) if lenders else {}
    inside = {lane.wrapper for lane in lanes_of(wrapper)} if lenders else set()
    found: list[StateLane] = []
    for unit in lenders:
        owner = hooks_of_unit(unit)
        if owner is not None and owner.modules[0] not in inside:
            found += _lanes_of_unit(owner.modules[0], unit, names)
    for lane in found:
        lane.parts = tuple(part for part in lane.parts if part.names)
    return [lane for lane in found if lane.parts]


def _lanes_of_unit(
    wrapper: nn.Module, unit: Unit, names: dict[nn.Module, list[str]]
) -> list[StateLane]:
    if not unit.is_summoned:  # else its parameters are shown in another shape
        unit.reshard_now()
        unit.refresh()
    return [StateLane(wrapper, unit, i, names) for i in range(len(unit.layout.lanes))]


def _paths(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Where each module is registered, in their order."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _flat_hooks(module: nn.Module) -> ModuleHooks | None:
    hooks = hooks_of(module)
    return hooks if hooks is not None and hooks.units[0].flat is not None else None


def _parts(lane: Lane, unit: Unit, names: dict[nn.Module, list[str]]) -> Iterator[StatePart]:
    (message,) = lane.buckets
    rank = unit.mesh_info.shard.rank
    order = {module: index for index, module in enumerate(names)}
    for slot in message.slots:
        member = unit.params[slot.param_index]
        assert isinstance(member, FlatSlice)
        places = sorted(
            (location for location in member.locations if location.module in order),
            key=lambda location: order[location.module],
        )
        found = [
            clean_name(f"{path}.{location.name}" if path else location.name)
            for location in places
            for path in names[location.module]
        ]
        yield StatePart(
            tuple(dict.fromkeys(found)),
            member,
            slot.offset,
            member.split.elements(rank),
            message.shard_offset(slot, rank),
        )
