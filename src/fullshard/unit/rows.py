"""A parameter that is cut along one dim: its shard is a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from fullshard.comm.placement import DTensorSpec, Placed, as_dtensor, with_dtype
from fullshard.comm.topology import Axis
from fullshard.errors import ConfigError
from fullshard.layout import Split
from fullshard.unit.extension import Extension
from fullshard.unit.member import Location, Member


@dataclass(slots=True, eq=False, kw_only=True)
class RowsMember(Member):
    """A parameter of the first door."""

    split: Split
    shard_spec: DTensorSpec

    @classmethod
    def of(
        cls,
        name: str,
        original: nn.Parameter,
        locations: Sequence[Location],
        placed: Placed,
        axis: Axis,
        home: torch.device,
    ) -> RowsMember:
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
