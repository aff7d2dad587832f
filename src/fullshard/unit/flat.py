"""Parameters that lie one after another, of which a rank has a slice (the second door)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import nn

from fullshard.layout import FlatSplit
from fullshard.unit.member import Location, Member


class Form(Enum):
    """What an optimizer holds of a unit's parameters."""

    ROWS = "a DTensor per parameter"
    SLICES = "the original parameters, as slices"
    FLAT = "one parameter per lane"

    @property
    def is_flat(self) -> bool:
        return self is not Form.ROWS


class FlatParameter(nn.Parameter):
    """All parameters of a wrapper that are kept in one dtype and trained alike: this rank's slice.

    Made by `FullyShardedDataParallel` with `use_orig_params=False`.
    """


class FlatHolder:
    """The one parameter of a lane, and the module that it is registered at."""

    def __init__(self, location: Location, home: torch.Tensor, is_trainable: bool) -> None:
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
class PlainLocation(Location):
    """A module and the name of a tensor that it uses but does not register."""

    @property
    def registry(self) -> dict[str, Any]:
        # What setattr would put elsewhere, since it registers parameters.
        return self.module.__dict__

    @classmethod
    def in_place_of(cls, location: Location) -> PlainLocation:
        """Take a parameter off its module's register."""
        location.module._parameters.pop(location.name, None)
        return cls(location.module, location.name)


@dataclass(slots=True, eq=False, kw_only=True)
class FlatMember(Member):
    """A parameter of the second door. `whole` is its value while it is not cut yet."""

    split: FlatSplit
    whole: torch.Tensor | None

    @classmethod
    def of(cls, name: str, original: nn.Parameter, locations: Sequence[Location]) -> FlatMember:
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
class SliceMember(FlatMember):
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
class PartMember(FlatMember):
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
