"""Parameters that lie one after another, of which a rank has a slice (the second door)."""

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
from fullshard.unit.param import ParamLocation, ShardBuffers, ShardedParam


class ParamForm(Enum):
    """What an optimizer holds of a unit's parameters."""

    DTENSOR = "a DTensor per parameter"
    ORIG_PARAMS = "the original parameters, as slices"
    FLAT_PARAM = "one parameter per lane"

    @property
    def is_flat(self) -> bool:
        return self is not ParamForm.DTENSOR


class FlatParameter(nn.Parameter):
    """All parameters of a wrapper that are kept in one dtype and trained alike: this rank's slice.

    Made by `FullyShardedDataParallel` with `use_orig_params=False`.
    """


class FlatHolder:
    """The one parameter of a lane, and the module that it is registered at."""

    def __init__(self, location: ParamLocation, home: torch.Tensor, is_trainable: bool) -> None:
        made = torch.Tensor._make_subclass(FlatParameter, home, is_trainable)
        assert isinstance(made, FlatParameter)
        self.param: FlatParameter = made
        self.location = location
        location.put(made)

    def gradient(self, result: torch.Tensor, offset: int) -> torch.Tensor:
        return result

    def adopt(self, home: torch.Tensor) -> None:
        if self.param.grad is not None and self.param.grad.shape != home.shape:
            self.param.grad = None
        self.param.data = home

    def leave(self) -> None:
        """Stand for nothing any more."""
        self.location.module._parameters.pop(self.location.name, None)

    def is_current(self, home: torch.Tensor) -> bool:
        found = self.param
        return self.location.get() is found and _same_memory(found, home)


@dataclass(frozen=True, slots=True, eq=False)
class AttributeLocation(ParamLocation):
    """A module and the name of a tensor that it uses but does not register."""

    @property
    def registry(self) -> dict[str, Any]:
        # What setattr would put elsewhere, since it registers parameters.
        return self.module.__dict__

    @classmethod
    def in_place_of(cls, location: ParamLocation) -> AttributeLocation:
        """Take a parameter off its module's register."""
        location.module._parameters.pop(location.name, None)
        return cls(location.module, location.name)


@dataclass(slots=True, eq=False, kw_only=True)
class FlatSlice(ShardedParam):
    """A parameter of the second door. `whole` is its value while it is not cut yet."""

    split: FlatSplit
    whole: torch.Tensor | None

    @classmethod
    def of(cls, name: str, original: nn.Parameter, locations: Sequence[ParamLocation]) -> FlatSlice:
        """Take an original parameter, which is cut when its unit has planned."""
        shape = tuple(original.shape)
        split = FlatSplit(shape, 0, prod(shape), 1)
        whole = original.detach()
        return cls(
            name=name,
            locations=list(locations),
            split=split,
            shard=original,
            local=whole,
            whole=whole,
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.split.shape)

    def piece(self, rank: int) -> torch.Tensor:
        if self.whole is None:
            return self.current_local
        elements = self.split.elements(rank)
        return self.whole.reshape(-1)[elements.start : elements.stop]

    def place(self, home: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        return home[offset : offset + prod(shape)].view(shape)

    def gradient(self, result: torch.Tensor, offset: int) -> torch.Tensor:
        local = self.local
        return result[offset : offset + local.numel()].view(local.shape)


@dataclass(slots=True, eq=False, kw_only=True)
class OrigParamSlice(FlatSlice):
    """With `use_orig_params=True`: the original parameter object is the shard."""

    @property
    def takes_gradient(self) -> bool:
        return self.local.numel() > 0

    @property
    def current_local(self) -> torch.Tensor:
        return self.shard.data

    def adopt(self, local: torch.Tensor) -> None:
        if self.shard.grad is not None and self.shard.grad.shape != local.shape:
            self.shard.grad = None  # of the parameter before it was cut
        self.shard.data = local
        self.local = local
        self.whole = None

    def is_at_home(self) -> bool:
        return _same_memory(self.shard, self.local)

    def follow_registered(self) -> None:
        found = self.locations[0].get()
        if found is self.shard or not isinstance(found, nn.Parameter):
            return
        self.shard = found
        self.show(found)


@dataclass(slots=True, eq=False, kw_only=True)
class FlatParamSlice(FlatSlice):
    """With `use_orig_params=False`: part of its lane's flat parameter; modules see plain tensors.

    `offset` is where its slice lies in the home.
    """

    holder: FlatHolder | None = None
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

    def adopt(self, local: torch.Tensor) -> None:
        self.local = local
        self.offset = int(local.storage_offset())
        self.shard = nn.Parameter(local, requires_grad=False)
        self.whole = None

    def is_current(self) -> bool:
        return self.is_at_home()  # nothing of it is registered

    def is_at_home(self) -> bool:
        return self.holder is not None  # the unit asks the holder

    def follow_registered(self) -> None:
        """Nothing of it is registered."""

    def leave(self) -> None:
        """Part from a lane that is planned anew, or that the member moves away from."""
        self.local = self.current_local
        self.shard = nn.Parameter(self.local, requires_grad=self.is_trainable)
        self.holder = None


def _same_memory(found: torch.Tensor, own: torch.Tensor) -> bool:
    return (
        found.data_ptr() == own.data_ptr()
        and found.dtype == own.dtype
        and found.shape == own.shape
        and found.device == own.device
    )


def flat_name(lane: int) -> str:
    """The name of the parameter that stands for a lane: of most units, the only one."""
    return "_flat_param" if lane == 0 else f"_flat_param_{lane}"


class FlatParams:
    """The cuts of a flat unit, and with `ParamForm.FLAT_PARAM` the parameters that stand for its lanes.

    `owner` is the module that those are registered at.
    """

    def __init__(self, form: ParamForm, owner: nn.Module, axis: Axis, device: torch.device) -> None:
        self.form = form
        self.holders: list[FlatHolder] = []
        self._owner = owner
        self._axis = axis
        self._device = device
        self._layout: UnitLayout | None = None
        self._params: list[FlatSlice] = []

    def recut(self, layout: UnitLayout, params: Sequence[ShardedParam]) -> None:
        """Follow a new plan: what is cut elsewhere than before is made whole first."""
        flat = [sharded_param for sharded_param in params if isinstance(sharded_param, FlatSlice)]
        splits: dict[FlatSlice, FlatSplit] = {}
        for lane in layout.lanes:
            (bucket,) = lane.buckets
            for slot in bucket.slots:
                sharded_param = flat[slot.param_index]
                splits[sharded_param] = FlatSplit(
                    sharded_param.split.shape, slot.offset, bucket.segment_numel, layout.num_ranks
                )
        if any(m.whole is None and m.split != splits[m] for m in flat):
            self.collect()
        for sharded_param in flat:
            sharded_param.split = splits[sharded_param]
        self._layout, self._params = layout, flat

    def collect(self) -> None:
        """Give every member its whole value: a collective over the shard axis."""
        if self._layout is None:
            return
        for lane in self._layout.lanes:
            (bucket,) = lane.buckets
            params = [self._params[slot.param_index] for slot in bucket.slots]
            if all(sharded_param.whole is not None for sharded_param in params):
                continue
            segment = torch.zeros(bucket.segment_numel, dtype=params[0].dtype, device=self._device)
            for slot, sharded_param in zip(bucket.slots, params, strict=True):
                local = sharded_param.current_local
                offset = bucket.shard_offset(slot, self._axis.rank)
                segment[offset : offset + local.numel()].copy_(local.reshape(-1))
            full = all_gather_flat(segment, self._axis)
            for slot, sharded_param in zip(bucket.slots, params, strict=True):
                part = full[slot.offset : slot.offset + slot.numel]
                sharded_param.whole = part.view(sharded_param.split.shape)

    def settle(
        self, layout: UnitLayout, params: Sequence[ShardedParam], shard_buffers: ShardBuffers
    ) -> None:
        """Let one parameter stand for each lane."""
        if self.form is not ParamForm.FLAT_PARAM:
            return
        for index, (lane, home) in enumerate(zip(layout.lanes, shard_buffers.lanes, strict=True)):
            if index < len(self.holders):
                holder = self.holders[index]
                holder.adopt(home)
                holder.param.requires_grad_(lane.is_trainable)
            else:
                location = ParamLocation(self._owner, flat_name(index))
                holder = FlatHolder(location, home, lane.is_trainable)
                self.holders.append(holder)
            for slot in lane.buckets[0].slots:
                sharded_param = params[slot.param_index]
                assert isinstance(sharded_param, FlatParamSlice)
                sharded_param.holder = holder
        for holder in self.holders[len(layout.lanes) :]:
            holder.leave()
        del self.holders[len(layout.lanes) :]

    def part(self) -> None:
        """Let the members speak for themselves until they are settled again."""
        for sharded_param in self._params:
            if isinstance(sharded_param, FlatParamSlice) and sharded_param.holder in self.holders:
                sharded_param.leave()

    def are_current(self, shard_buffers: ShardBuffers) -> bool:
        pairs = zip(self.holders, shard_buffers.lanes, strict=False)
        return all(holder.is_current(home) for holder, home in pairs)
