"""The parameters of `FullyShardedDataParallel`: one after another, cut evenly over the ranks.

`OrigParamSlice` is a parameter with `use_orig_params=True`: the optimizer holds the original
object, its data this rank's slice. With `use_orig_params=False` the optimizer holds one
`FlatParameter` per lane, and a `FlatParamSlice` is a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import nn

from fullshard.comm.collectives import all_gather_flat
from fullshard.comm.mesh import Axis
from fullshard.layout import FlatSplit, UnitLayout
from fullshard.unit.param import ParamLocation, ShardBuffers, ShardedParam, same_memory


class ParamForm(Enum):
    """What an optimizer holds of a unit's parameters."""

    DTENSOR = "a DTensor per parameter"
    ORIG_PARAMS = "the original parameters, as slices"
    FLAT_PARAM = "one parameter per lane"


class FlatParameter(nn.Parameter):
    """This rank's slice of all parameters of a wrapper with one dtype that are trained alike.

    Made by `FullyShardedDataParallel` with `use_orig_params=False`.
    """


def flat_name(lane: int) -> str:
    """The name of a lane's flat parameter; most units have one."""
    return "_flat_param" if lane == 0 else f"_flat_param_{lane}"


class FlatParamHolder:
    """The flat parameter of a lane, and the module that it is registered at."""

    def __init__(self, location: ParamLocation, shards: torch.Tensor, is_trainable: bool) -> None:
        self.param: FlatParameter = FlatParameter(shards, is_trainable)
        self.location = location
        location.put(self.param)

    def grad_view(self, reduced: torch.Tensor, offset: int) -> torch.Tensor:
        return reduced

    def set_data(self, shards: torch.Tensor) -> None:
        if self.param.grad is not None and self.param.grad.shape != shards.shape:
            self.param.grad = None
        self.param.data = shards

    def unregister(self) -> None:
        self.location.module._parameters.pop(self.location.name, None)

    def is_current(self, shards: torch.Tensor) -> bool:
        return self.location.get() is self.param and same_memory(self.param, shards)


@dataclass(frozen=True, slots=True, eq=False)
class AttributeLocation(ParamLocation):
    """A module and the name of a tensor that it uses but does not register."""

    @property
    def registry(self) -> dict[str, Any]:
        # Not setattr, which registers parameters.
        return self.module.__dict__

    @classmethod
    def in_place_of(cls, location: ParamLocation) -> AttributeLocation:
        """Unregister a parameter from its module."""
        location.module._parameters.pop(location.name, None)
        return cls(location.module, location.name)


@dataclass(slots=True, eq=False, kw_only=True)
class FlatSlice(ShardedParam):
    """A parameter of a wrapper. `whole` is its value while it is not cut yet."""

    split: FlatSplit
    whole: torch.Tensor | None

    @classmethod
    def of(cls, name: str, original: nn.Parameter, locations: Sequence[ParamLocation]) -> FlatSlice:
        """Take an original parameter, which is cut when its unit is planned."""
        shape = tuple(original.shape)
        whole = original.detach()
        return cls(
            name=name,
            locations=list(locations),
            split=FlatSplit(shape, 0, prod(shape), 1),
            shard=original,
            local=whole,
            whole=whole,
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.split.shape)

    def values_for(self, rank: int) -> torch.Tensor:
        if self.whole is None:
            return self.current_local
        elements = self.split.elements(rank)
        return self.whole.reshape(-1)[elements.start : elements.stop]

    def view_in(self, buffer: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        return buffer[offset : offset + prod(shape)].view(shape)

    def grad_view(self, reduced: torch.Tensor, offset: int) -> torch.Tensor:
        local = self.local
        return reduced[offset : offset + local.numel()].view(local.shape)


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
        if self.shard.grad is not None and self.shard.grad.shape != local.shape:
            self.shard.grad = None  # of the parameter before it was cut
        self.shard.data = local
        self.local = local
        self.whole = None

    def is_in_buffer(self) -> bool:
        return same_memory(self.shard, self.local)

    def follow_registered(self) -> None:
        found = self.locations[0].get()
        if found is self.shard or not isinstance(found, nn.Parameter):
            return
        self.shard = found
        self.register(found)


@dataclass(slots=True, eq=False, kw_only=True)
class FlatParamSlice(FlatSlice):
    """With `use_orig_params=False`: part of its lane's flat parameter; modules see plain tensors.

    `offset` is where its slice lies in the shard buffer.
    """

    holder: FlatParamHolder | None = None
    offset: int = 0

    @property
    def param(self) -> nn.Parameter:
        return self.shard if self.holder is None else self.holder.param

    @property
    def current_local(self) -> torch.Tensor:
        if self.holder is None:
            return self.local
        shape = self.local.shape
        return self.holder.param.data[self.offset : self.offset + prod(shape)].view(shape)

    def set_local(self, local: torch.Tensor) -> None:
        self.local = local
        self.offset = int(local.storage_offset())
        self.shard = nn.Parameter(local, requires_grad=False)
        self.whole = None

    def is_current(self) -> bool:
        return self.is_in_buffer()  # nothing of it is registered

    def is_in_buffer(self) -> bool:
        return self.holder is not None  # `FlatParams.are_current` asks the holder

    def follow_registered(self) -> None:
        """Nothing of it is registered."""

    def detach_from_holder(self) -> None:
        """Stand alone until the unit is planned again, or another unit takes the parameter."""
        self.local = self.current_local
        self.shard = nn.Parameter(self.local, requires_grad=self.is_trainable)
        self.holder = None


class FlatParams:
    """How a flat unit is cut, and with `ParamForm.FLAT_PARAM` the flat parameters of its lanes.

    `owner` is the module that those are registered at.
    """

    def __init__(self, form: ParamForm, owner: nn.Module, axis: Axis, device: torch.device) -> None:
        self.form = form
        self.holders: list[FlatParamHolder] = []
        self._owner = owner
        self._axis = axis
        self._device = device
        self._layout: UnitLayout | None = None
        self._params: list[FlatSlice] = []

    def follow_layout(self, layout: UnitLayout, params: Sequence[ShardedParam]) -> None:
        """Follow a new plan. Parameters that it cuts elsewhere are made whole first."""
        flat = [param for param in params if isinstance(param, FlatSlice)]
        splits: dict[FlatSlice, FlatSplit] = {}
        for lane in layout.lanes:
            (bucket,) = lane.buckets
            for slot in bucket.slots:
                param = flat[slot.param_index]
                splits[param] = FlatSplit(
                    param.split.shape, slot.offset, bucket.segment_numel, layout.num_ranks
                )
        if any(param.whole is None and param.split != splits[param] for param in flat):
            self.make_whole()
        for param in flat:
            param.split = splits[param]
        self._layout, self._params = layout, flat

    def make_whole(self) -> None:
        """Give every parameter its whole value: a collective over the shard axis."""
        for lane in () if self._layout is None else self._layout.lanes:
            (bucket,) = lane.buckets
            params = [self._params[slot.param_index] for slot in bucket.slots]
            if all(param.whole is not None for param in params):
                continue
            segment = torch.zeros(bucket.segment_numel, dtype=params[0].dtype, device=self._device)
            for slot, param in zip(bucket.slots, params, strict=True):
                local = param.current_local
                offset = bucket.shard_offset(slot, self._axis.rank)
                segment[offset : offset + local.numel()].copy_(local.reshape(-1))
            full = all_gather_flat(segment, self._axis)
            for slot, param in zip(bucket.slots, params, strict=True):
                part = full[slot.offset : slot.offset + slot.numel]
                param.whole = part.view(param.split.shape)

    def attach(
        self, layout: UnitLayout, params: Sequence[ShardedParam], shards: ShardBuffers
    ) -> None:
        """Make one flat parameter of each lane's shard buffer."""
        if self.form is not ParamForm.FLAT_PARAM:
            return
        for index, (lane, buffer) in enumerate(zip(layout.lanes, shards.lanes, strict=True)):
            if index < len(self.holders):
                holder = self.holders[index]
                holder.set_data(buffer)
                holder.param.requires_grad_(lane.is_trainable)
            else:
                location = ParamLocation(self._owner, flat_name(index))
                holder = FlatParamHolder(location, buffer, lane.is_trainable)
                self.holders.append(holder)
            for slot in lane.buckets[0].slots:
                param = params[slot.param_index]
                assert isinstance(param, FlatParamSlice)
                param.holder = holder
        for holder in self.holders[len(layout.lanes) :]:
            holder.unregister()
        del self.holders[len(layout.lanes) :]

    def detach(self) -> None:
        """Let the parameters stand alone until they are attached again."""
        for param in self._params:
            if isinstance(param, FlatParamSlice) and param.holder in self.holders:
                param.detach_from_holder()

    def are_current(self, shards: ShardBuffers) -> bool:
        pairs = zip(self.holders, shards.lanes, strict=False)
        return all(holder.is_current(buffer) for holder, buffer in pairs)
