"""The parameters of `FullyShardedDataParallel`: one after another, cut evenly over the ranks.

`OrigParamSlice` is a parameter with `use_orig_params=True`: the optimizer holds the original
object, whose data is this rank's slice. With `use_orig_params=False` the optimizer holds one
`FlatParameter` per lane, and a `FlatParamSlice` is a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from fullshard._torch import DTensorSpec
from fullshard.comm.collectives import all_gather_flat
from fullshard.comm.mesh import Axis
from fullshard.comm.placement import Placed
from fullshard.errors import LifecycleError
from fullshard.layout import FlatSplit, UnitLayout
from fullshard.unit.param import ParamLocation, ShardBuffers, ShardedParam, same_memory


class ParamForm(Enum):
    """What an optimizer holds of a unit's parameters."""

    DTENSOR = "a DTensor per parameter"
    ORIG_PARAMS = "the original parameters, as slices"
    FLAT_PARAM = "one parameter per lane"


class FlatParameter(nn.Parameter):
    """This rank's slice of all parameters of a wrapper with one dtype that are trained alike.

    Made by `FullyShardedDataParallel` with `use_orig_params=False`. With `use_orig_params=True`
    frameworks see one beside the original parameters, which follow what is assigned to its `data`.
    `_fqns` are the names of the parameters in the wrapped module.
    """

    _fqns: tuple[str, ...] = ()
    _fsdp_flattened = True

    @property
    def _local_shard(self) -> torch.Tensor:
        return self.data

    @_local_shard.setter
    def _local_shard(self, shard: torch.Tensor) -> None:
        self.data = shard


def flat_name(lane: int) -> str:
    """The name of a lane's flat parameter; most units have one."""
    return "_flat_param" if lane == 0 else f"_flat_param_{lane}"


@dataclass(frozen=True, slots=True, eq=False)
class FlatParamHolder:
    """The flat parameter of a lane, and where it is registered; gets gradients like a parameter."""

    param: FlatParameter
    location: ParamLocation

    @property
    def local(self) -> torch.Tensor:
        return self.param

    def as_grad(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def unregister(self) -> None:
        self.location.unregistered()


@dataclass(slots=True, eq=False, kw_only=True)
class FlatSlice(ShardedParam):
    """A parameter of a wrapper. `whole` is its value while it is not cut yet.

    For a DTensor (tensor parallelism), `whole` is its local tensor, and `placed` says where it is
    on the mesh of all axes; with `full_spec`, modules see a DTensor again.
    """

    split: FlatSplit
    whole: torch.Tensor | None
    placed: DTensorSpec | None = None

    @classmethod
    def of(
        cls,
        name: str,
        original: nn.Parameter,
        locations: Sequence[ParamLocation],
        placed: Placed | None,
    ) -> FlatSlice:
        """Take an original parameter, which is cut when its unit is planned."""
        whole = original.detach() if placed is None else placed.local
        shape = tuple(whole.shape)
        original._fsdp_flattened = True  # type: ignore[attr-defined]
        if placed is not None:
            original = nn.Parameter(whole, original.requires_grad)
        return cls(
            name=name,
            locations=list(locations),
            split=FlatSplit(shape, 0, prod(shape), 1),
            shard=original,
            local=whole,
            full_spec=None if placed is None else placed.full_spec,
            whole=whole,
            placed=None if placed is None else placed.shard_spec,
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.split.shape if self.full_spec is None else self.full_spec.shape)

    @property
    def tp_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups over which the flattened tensor is one part of a DTensor."""
        if self.full_spec is None:
            return ()
        mesh, pairs = self.full_spec.mesh, enumerate(self.full_spec.placements)
        return tuple(mesh.get_group(axis) for axis, each in pairs if not each.is_replicate())

    @property
    def with_own_grad(self) -> torch.Tensor:
        """A tensor whose gradient is that of this parameter alone."""
        return self.param

    def values_for(self, rank: int) -> torch.Tensor:
        if self.whole is None:
            return self.current_local
        elements = self.split.elements(rank)
        return self.whole.reshape(-1)[elements.start : elements.stop]

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a tensor that is arranged like its shard buffer."""
        return self.view_in(flat, int(self.local.storage_offset()), tuple(self.local.shape))


@dataclass(slots=True, eq=False, kw_only=True)
class OrigParamSlice(FlatSlice):
    """With `use_orig_params=True`: the original parameter object is the shard."""

    @property
    def takes_gradient(self) -> bool:
        return self.local.numel() > 0

    @property
    def current_local(self) -> torch.Tensor:
        return self.shard.data

    def set_local(self, local: torch.Tensor) -> None:
        _set_data(self.shard, local)
        self.local = local
        self.whole = None

    def is_in_buffer(self) -> bool:
        return same_memory(self.shard, self.local)

    def follow_registered(self) -> bool:
        found = self.locations[0].get()
        if found is not self.shard and isinstance(found, nn.Parameter):
            self.shard = found
            self.register(found)
        _require_size(self.name, self.shard, self.local)
        return self.is_in_buffer()


@dataclass(slots=True, eq=False, kw_only=True)
class FlatParamSlice(FlatSlice):
    """With `use_orig_params=False`: part of its lane's flat parameter; modules see tensors."""

    holder: FlatParamHolder | None = None

    @property
    def param(self) -> nn.Parameter:
        return self.shard if self.holder is None else self.holder.param

    @property
    def current_local(self) -> torch.Tensor:
        return self.local if self.holder is None else self.part_of(self.holder.param.data)

    @property
    def with_own_grad(self) -> torch.Tensor:
        if self.param.grad is None:
            return self.param
        grad = self.part_of(self.param.grad)
        part = grad.detach()
        part.grad = grad
        return part

    def set_local(self, local: torch.Tensor) -> None:
        self.local = local
        self.shard = nn.Parameter(local, requires_grad=False)
        self.whole = None

    def is_in_buffer(self) -> bool:
        return self.holder is not None  # `FlatParams.are_current` asks the holder

    def follow_registered(self) -> bool:
        return self.is_in_buffer()  # nothing of it is registered


def _require_size(name: str, found: torch.Tensor, own: torch.Tensor) -> None:
    """Raise if a user gave a parameter values that are not this rank's part of it."""
    if found.numel() != own.numel():
        raise LifecycleError(
            f"{name}: Cannot writeback when the parameter shape changes: this rank's part has the "
            f"shape {list(own.shape)}, not {list(found.shape)}; write full values inside "
            "summon_full_params, or load a state dict."
        )


def _set_data(param: nn.Parameter, data: torch.Tensor) -> None:
    """Give a parameter other memory; drop a gradient from before it was cut."""
    if param.grad is not None and param.grad.shape != data.shape:
        param.grad = None
    param.data = data


@dataclass(eq=False)
class FlatParams:
    """How a flat unit is cut, and with `ParamForm.FLAT_PARAM` the flat parameters of its lanes.

    `owner` is the module that these are registered at. With `ParamForm.ORIG_PARAMS`, `_shown` is
    the flat parameter that a framework asked for and was given: it shares the memory of
    `_shown_buffer`, the shard buffer of the first lane that is trained.
    """

    form: ParamForm
    owner: nn.Module
    axis: Axis
    device: torch.device
    holders: list[FlatParamHolder] = field(default_factory=list)
    _layout: UnitLayout | None = None
    _slices: list[FlatSlice] = field(default_factory=list)
    _shown: FlatParameter | None = None
    _shown_buffer: torch.Tensor | None = None

    def follow_layout(self, layout: UnitLayout, params: Sequence[ShardedParam]) -> None:
        """Follow a new plan. Parameters that it cuts elsewhere are made whole first."""
        flat = [param for param in params if isinstance(param, FlatSlice)]
        splits: dict[FlatSlice, FlatSplit] = {}
        for lane in layout.lanes:
            (bucket,) = lane.buckets
            for slot in bucket.slots:
                assert isinstance(slot.split, FlatSplit)
                splits[flat[slot.param_index]] = slot.split
        if any(param.whole is None and param.split != splits[param] for param in flat):
            self.make_whole()
        for param in flat:
            param.split = splits[param]
        self._layout, self._slices = layout, flat

    def make_whole(self) -> None:
        """Give every parameter its whole value: a collective over the shard axis."""
        for lane in () if self._layout is None else self._layout.lanes:
            (bucket,) = lane.buckets
            params = [self._slices[slot.param_index] for slot in bucket.slots]
            if all(param.whole is not None for param in params):
                continue
            segment = torch.zeros(bucket.segment_numel, dtype=params[0].dtype, device=self.device)
            for slot, param in zip(bucket.slots, params, strict=True):
                local = param.current_local
                offset = slot.in_segment(self.axis.rank)
                segment[offset : offset + local.numel()].copy_(local.reshape(-1))
            full = all_gather_flat(segment, self.axis)
            for param in params:
                param.whole = param.view_in(full, param.split.start, param.split.shape)

    def attach(
        self, layout: UnitLayout, params: Sequence[ShardedParam], shards: ShardBuffers
    ) -> None:
        """Make one flat parameter of each lane's shard buffer."""
        if self.form is not ParamForm.FLAT_PARAM:
            self._shown_buffer = shards.lanes[self._shown_lane] if shards.lanes else None
            if self._shown is not None and self._shown_buffer is not None:
                _set_data(self._shown, self._shown_buffer)
            return
        for index, (lane, buffer) in enumerate(zip(layout.lanes, shards.lanes, strict=True)):
            if index == len(self.holders):
                location = ParamLocation(self.owner, flat_name(index))
                flat = FlatParameter(buffer, lane.is_trainable)
                location.put(flat)
                self.holders.append(FlatParamHolder(flat, location))
            holder = self.holders[index]
            _set_data(holder.param, buffer)
            holder.param.requires_grad_(lane.is_trainable)
            for slot in lane.buckets[0].slots:
                param = params[slot.param_index]
                assert isinstance(param, FlatParamSlice)
                param.holder = holder
        for holder in self.holders[len(layout.lanes) :]:
            holder.unregister()
        del self.holders[len(layout.lanes) :]

    @property
    def _shown_lane(self) -> int:
        lanes = () if self._layout is None else self._layout.lanes
        return next((index for index, lane in enumerate(lanes) if lane.is_trainable), 0)

    def flat_param(self) -> FlatParameter | None:
        """The flat parameter as torch has it: one, whatever the optimizer holds."""
        if self.form is ParamForm.FLAT_PARAM:
            return self.holders[0].param if self.holders else None
        if self._shown is None and self._layout is not None and self._shown_buffer is not None:
            is_trainable = self._layout.lanes[self._shown_lane].is_trainable
            self._shown = FlatParameter(self._shown_buffer, is_trainable)
        return self._shown

    def _take_over_shown(self) -> None:
        """Follow what was assigned to the shown flat parameter; others follow its dtype."""
        shown, buffer = self._shown, self._shown_buffer
        if shown is None or buffer is None or self._layout is None or same_memory(shown, buffer):
            return
        slots = self._layout.lanes[self._shown_lane].buckets[0].slots
        own = {self._slices[slot.param_index] for slot in slots}
        for param in self._slices:
            if param in own:
                param.shard.data = param.part_of(shown.data)
            elif param.dtype == buffer.dtype:
                param.shard.data = param.shard.data.to(shown.dtype)

    def detach(self) -> None:
        """Let the parameters stand alone until they are attached again, perhaps elsewhere."""
        self._take_over_shown()
        for param in self._slices:
            if isinstance(param, FlatParamSlice) and param.holder in self.holders:
                param.local = param.current_local
                param.shard = nn.Parameter(param.local, requires_grad=param.is_trainable)
                param.holder = None

    def are_current(self, shards: ShardBuffers) -> bool:
        """Whether the flat parameters are registered, and are the shard buffers."""
        for holder, buffer in zip(self.holders, shards.lanes, strict=False):
            _require_size(holder.location.name, holder.param, buffer)
        if self._shown is not None and self._shown_buffer is not None:
            return same_memory(self._shown, self._shown_buffer)
        return all(
            holder.location.get() is holder.param and same_memory(holder.param, buffer)
            for holder, buffer in zip(self.holders, shards.lanes, strict=False)
        )
