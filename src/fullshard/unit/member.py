"""A parameter, as its unit knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm.placement import DTensorSpec, Placed, as_dtensor, with_dtype
from fullshard.comm.topology import Axis
from fullshard.errors import ConfigError
from fullshard.layout import Split, Stages
from fullshard.unit.extension import Extension


@dataclass(frozen=True, slots=True, eq=False)
class Location:
    """A module and the name under which it registers a parameter."""

    module: nn.Module
    name: str

    def get(self) -> torch.Tensor | None:
        return self.module._parameters.get(self.name)

    def put(self, param: nn.Parameter) -> None:
        # Not setattr: its checks are for parameters that the module does not know yet.
        self.module._parameters[self.name] = param


@dataclass(slots=True, eq=False, weakref_slot=True)
class Member:
    """One parameter of a unit.

    `shard` is what the optimizer sees and stays the same object for good; `local` is its tensor
    on this rank, a view of the unit's home. `full` is made at the first unshard and then kept:
    its memory comes and goes. `accumulated` holds a full gradient that was not reduced yet.
    """

    name: str
    locations: list[Location]
    split: Split
    shard: nn.Parameter
    shard_spec: DTensorSpec
    full_spec: DTensorSpec | None
    local: torch.Tensor
    extension: Extension | None = None
    full: nn.Parameter | None = None
    accumulated: torch.Tensor | None = None
    is_hooked: bool = False
    was_trainable: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        original: nn.Parameter,
        locations: Sequence[Location],
        placed: Placed,
        axis: Axis,
        home: torch.device,
    ) -> Member:
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
            name,
            list(locations),
            split,
            shard,
            placed.shard_spec,
            placed.full_spec,
            piece,
            extension,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.shard.dtype

    @property
    def current_local(self) -> torch.Tensor:
        """What the shard holds now, which a user may have replaced."""
        local: torch.Tensor = self.shard._local_tensor  # type: ignore[attr-defined]
        return local

    def adopt(self, local: torch.Tensor) -> None:
        """Let the shard look at another tensor, with the values that it has there."""
        self.shard._local_tensor = local  # type: ignore[attr-defined]
        self.shard_spec = self.shard._spec  # type: ignore[attr-defined]
        self.local = local

    def is_current(self) -> bool:
        return self.locations[0].get() is self.shard and self.current_local is self.local

    def came_back(self) -> bool:
        """Whether the shard looks at the same memory through another tensor; ours is put back."""
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
        """Take over a shard that a user registered in the place of ours."""
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
        for location in self.locations:
            location.put(self.shard)

    def make_full(self, data: torch.Tensor) -> None:
        """Make the full parameter over memory that from now on comes and goes."""
        if self.full_spec is not None:
            spec = with_dtype(self.full_spec, data.dtype)
            data = as_dtensor(data, spec)
        self.full = nn.Parameter(data, requires_grad=self.shard.requires_grad)
        self.is_hooked = False

    def register(self, param: nn.Parameter) -> None:
        for location in self.locations:
            location.put(param)

    def stages(self, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> Stages:
        return Stages.of(self.dtype, param_dtype, reduce_dtype)
