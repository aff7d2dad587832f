"""A parameter, as its unit knows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from fullshard.api import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.comm.mesh import Axis
from fullshard.comm.placement import DTensorSpec, Placed, as_dtensor, with_dtype
from fullshard.errors import ConfigError
from fullshard.layout import DtypePlan, FlatSplit, Split, UnitLayout
from fullshard.unit.extensions import Extension


@dataclass(frozen=True, slots=True, eq=False)
class ParamLocation:
    """A module and the name under which it registers a parameter."""

    module: nn.Module
    name: str

    @property
    def registry(self) -> dict[str, Any]:
        """Where the module looks it up."""
        return self.module._parameters

    def get(self) -> torch.Tensor | None:
        found: torch.Tensor | None = self.registry.get(self.name)
        return found

    def put(self, param: torch.Tensor) -> None:
        # Not setattr: its checks are for parameters that the module does not know yet.
        self.registry[self.name] = param


class Holder(Protocol):
    """Who is given gradients: a member, or the one parameter of a flat lane."""

    @property
    def param(self) -> nn.Parameter:
        """What the optimizer holds."""
        ...

    def gradient(self, result: torch.Tensor, offset: int) -> torch.Tensor:
        """What becomes the gradient, as a view of a reduced lane."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class ShardedParam(ABC):
    """One parameter of a unit.

    `shard` is this rank's part of it and stays the same object for good; `local` is its memory, a
    view of the unit's home. `full` is made at the first unshard and then kept: its memory comes
    and goes. `accumulated` holds a full gradient that was not reduced yet.
    """

    name: str
    locations: list[ParamLocation]
    split: Split | FlatSplit
    shard: nn.Parameter
    local: torch.Tensor
    full: nn.Parameter | None = None
    full_spec: DTensorSpec | None = None
    extension: Extension | None = None
    accumulated: torch.Tensor | None = None
    is_hooked: bool = False

    # What the optimizer holds

    @property
    def param(self) -> nn.Parameter:
        return self.shard

    @property
    def is_trainable(self) -> bool:
        return self.param.requires_grad

    @property
    def takes_gradient(self) -> bool:
        """Whether there is something on this rank to give a gradient to."""
        return True

    def freeze_or_thaw(self, is_trainable: bool) -> None:
        self.param.requires_grad_(is_trainable)

    @abstractmethod
    def gradient(self, result: torch.Tensor, offset: int) -> torch.Tensor: ...

    # Where the shard's memory is

    @property
    def dtype(self) -> torch.dtype:
        return self.param.dtype

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Of the whole parameter, as users know it."""

    @property
    def version(self) -> int:
        """Changes whenever an optimizer, or anyone else, has written to the shard."""
        return self.param._version + self.local._version

    @property
    @abstractmethod
    def current_local(self) -> torch.Tensor:
        """What the shard holds now, which a user may have replaced."""

    def piece(self, rank: int) -> torch.Tensor:
        """What belongs into a new home."""
        return self.current_local

    @abstractmethod
    def place(self, home: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A part of a home, as the shard is to look at it."""

    @abstractmethod
    def adopt(self, local: torch.Tensor) -> None:
        """Let the shard look at another tensor, with the values that it has there."""

    def is_current(self) -> bool:
        """Whether the shard is registered, and looks at its home."""
        return self.locations[0].get() is self.shard and self.is_at_home()

    @abstractmethod
    def is_at_home(self) -> bool:
        """Whether the shard looks at its home."""

    def came_back(self) -> bool:
        """Whether the shard looks at the same memory through another tensor; ours is put back."""
        return False

    @abstractmethod
    def follow_registered(self) -> None:
        """Take over a shard that a user registered in the place of ours."""

    # What the module sees

    def make_full(self, data: torch.Tensor) -> None:
        """Make the full parameter over memory that from now on comes and goes."""
        if self.full_spec is not None:
            data = as_dtensor(data, with_dtype(self.full_spec, data.dtype))
        self.full = nn.Parameter(data, requires_grad=self.is_trainable)
        self.is_hooked = False

    def show(self, param: nn.Parameter) -> None:
        """Let the module see the shard or the full parameter."""
        for location in self.locations:
            location.put(param)

    def dtype_plan(self, policy: MixedPrecisionPolicy, *, is_alone: bool = False) -> DtypePlan:
        """The dtypes under a policy; `is_alone` if there is no rank that gradients travel to."""
        wire_dtype = None if is_alone else policy.wire_dtype
        return DtypePlan.of(self.dtype, policy.param_dtype, policy.reduce_dtype, wire_dtype)


@dataclass(slots=True, eq=False, kw_only=True)
class DTensorParam(ShardedParam):
    """A parameter of the first door."""

    split: Split
    shard_spec: DTensorSpec

    @classmethod
    def of(
        cls,
        name: str,
        original: nn.Parameter,
        locations: Sequence[ParamLocation],
        placed: Placed,
        axis: Axis,
        home: torch.device,
    ) -> DTensorParam:
        """Cut an original parameter; the shard may be a view of it until the unit is homed."""
        local = placed.local
        split = Split(tuple(local.shape), placed.dim, axis.size)
        piece = local
        if split.dim is not None:
            rows = split.rows(axis.rank)
            piece = local.narrow(split.dim, rows.start, len(rows))
        extension = Extension.of(name, local)
        if extension is not None:
            piece = piece.clone()
        if not piece.is_meta:
            piece = piece.to(home)  # a DTensor's device is that of the tensor that it is made with
        shard = nn.Parameter(
            as_dtensor(piece, placed.shard_spec),
            requires_grad=original.requires_grad,
        )
        return cls(
            name=name,
            locations=list(locations),
            split=split,
            shard=shard,
            local=piece,
            full_spec=placed.full_spec,
            extension=extension,
            shard_spec=placed.shard_spec,
        )

    @property
    def shape(self) -> torch.Size:
        return self.shard.shape

    def gradient(self, result: torch.Tensor, offset: int) -> torch.Tensor:
        local = self.local
        view = result.as_strided(local.size(), local.stride(), offset)
        return as_dtensor(view, with_dtype(self.shard_spec, view.dtype))

    @property
    def current_local(self) -> torch.Tensor:
        local: torch.Tensor = self.shard._local_tensor  # type: ignore[attr-defined]
        return local

    def place(self, home: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A part of a home, with a version counter and a storage object of its own.

        A DTensor takes over the storage offset of its local tensor but not the storage: one that
        is not 0 breaks `copy.deepcopy` of a state dict (torch 2.11 to 2.13).
        """
        numel = prod(shape)
        if numel == 0:
            return home.new_empty(shape)
        part = home[offset : offset + numel].view(shape)
        return from_dlpack(to_dlpack(part))

    def adopt(self, local: torch.Tensor) -> None:
        self.shard._local_tensor = local  # type: ignore[attr-defined]
        self.shard_spec = self.shard._spec  # type: ignore[attr-defined]
        self.local = local

    def is_at_home(self) -> bool:
        return self.shard._local_tensor is self.local  # type: ignore[attr-defined]

    def came_back(self) -> bool:
        found, own = self.current_local, self.local
        if type(found) is not torch.Tensor or found.is_meta:
            return False
        is_same = (
            (found.data_ptr(), found.dtype, found.device, found.size(), found.stride())
            == (own.data_ptr(), own.dtype, own.device, own.size(), own.stride())
        )  # fmt: skip
        if is_same:
            self.adopt(own)
        return is_same

    def follow_registered(self) -> None:
        found = self.locations[0].get()
        if found is self.shard:
            return
        if not isinstance(found, DTensor) or found.placements != self.shard_spec.placements:
            kind = type(found).__name__
            placements = f" placed {found.placements}" if isinstance(found, DTensor) else ""
            raise ConfigError(
                f"{self.name}: a replaced parameter must be a DTensor placed "
                f"{self.shard_spec.placements}, found {kind}{placements}; copy the values into the "
                "existing parameter, or build the DTensor with distribute_tensor."
            )
        self.shard = found  # type: ignore[assignment]
        self.show(self.shard)

    def cut(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of a tensor shaped like what was sharded."""
        if self.split.dim is None:
            return whole
        rows = self.split.rows(rank)
        return whole.narrow(self.split.dim, rows.start, len(rows))


class ShardBuffers:
    """One contiguous tensor per lane with this rank's shards, each shard a view of it."""

    def __init__(
        self,
        layout: UnitLayout,
        params: Sequence[ShardedParam],
        device: torch.device,
        rank: int,
        pin_memory: bool,
    ) -> None:
        self.lanes: list[torch.Tensor] = []
        for lane in layout.lanes:
            home = torch.zeros(
                lane.shard_numel, dtype=lane.dtypes.stored, device=device, pin_memory=pin_memory
            )
            self.lanes.append(home)
            for bucket in lane.buckets:
                for slot in bucket.slots:
                    sharded_param = params[slot.param_index]
                    offset = bucket.buffer_offset + bucket.shard_offset(slot, rank)
                    view = sharded_param.place(home, offset, sharded_param.split.shard_shape(rank))
                    view.copy_(sharded_param.piece(rank).reshape(view.shape))
                    sharded_param.adopt(view)


def shard_device(policy: OffloadPolicy, device: torch.device) -> tuple[torch.device, bool]:
    """The device of the homes, and whether its memory is pinned."""
    if not isinstance(policy, CPUOffloadPolicy):
        return device, False
    return torch.device("cpu"), policy.pin_memory and device.type != "cpu"
