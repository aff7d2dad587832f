"""A parameter, as its unit knows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fullshard.api import MixedPrecisionPolicy
from fullshard.comm.placement import DTensorSpec, as_dtensor, with_dtype
from fullshard.layout import FlatSplit, Split, Stages
from fullshard.unit.extension import Extension


@dataclass(frozen=True, slots=True, eq=False)
class Location:
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
class Member(ABC):
    """One parameter of a unit.

    `shard` is this rank's part of it and stays the same object for good; `local` is its memory, a
    view of the unit's home. `full` is made at the first unshard and then kept: its memory comes
    and goes. `accumulated` holds a full gradient that was not reduced yet.
    """

    name: str
    locations: list[Location]
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

    def stages(self, policy: MixedPrecisionPolicy, *, is_alone: bool = False) -> Stages:
        """The dtypes under a policy; `is_alone` if there is no rank that gradients travel to."""
        wire_dtype = None if is_alone else policy.wire_dtype
        return Stages.of(self.dtype, policy.param_dtype, policy.reduce_dtype, wire_dtype)
