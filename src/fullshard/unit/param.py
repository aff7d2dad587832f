"""A parameter as its unit knows it: `ShardedParam`, and the shard buffers that its shard lies in.

`DTensorParam` is the parameter of `fully_shard`, sharded along one dim; `flat_param.py` has those
of `FullyShardedDataParallel`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard._torch import (
    DTensorSpec,
    grad_dtype_of,
    has_own_grad_dtype,
    local_tensor,
    set_grad_dtype,
    set_local_tensor,
    spec_of,
)
from fullshard.comm.annotations import Annotations
from fullshard.comm.mesh import Axis
from fullshard.comm.placement import Placed, as_dtensor, with_dtype
from fullshard.device import has_no_memory, with_own_storage
from fullshard.errors import ConfigError
from fullshard.layout import DtypePlan, FlatSplit, RowSplit, Split, UnitLayout, split_rows
from fullshard.unit.extensions import Extension
from fullshard.unit.store import Store


@dataclass(frozen=True, slots=True, eq=False)
class ParamLocation:
    """A module and the name of a tensor that it registers as a parameter, or only uses."""

    module: nn.Module
    name: str
    is_registered: bool = True

    @property
    def registry(self) -> dict[str, Any]:
        # Not setattr, which registers parameters, and checks those that it does not know yet.
        return self.module._parameters if self.is_registered else self.module.__dict__

    def get(self) -> torch.Tensor | None:
        found: torch.Tensor | None = self.registry.get(self.name)
        return found

    def put(self, param: torch.Tensor) -> None:
        self.registry[self.name] = param

    def unregistered(self) -> ParamLocation:
        """Unregister the parameter: the module only uses what is put here."""
        self.module._parameters.pop(self.name, None)
        return ParamLocation(self.module, self.name, is_registered=False)


@dataclass(slots=True, eq=False, weakref_slot=True)
class ShardedParam(ABC):
    """One parameter of a unit.

    `shard` is this rank's part and stays the same object; `local` is its memory, a view of the
    unit's shard buffer. `full` is made at the first unshard and then kept: its memory comes and
    goes. `accumulated` holds a full gradient that was not reduced yet, and `partial_grad` this
    rank's part of one that was summed over the shard axis but not over the replicas. `keeps_dtype`
    says that a policy's `param_dtype` does not apply to this parameter; `dtypes` is what the unit's
    plan made of the policy. One with `annotations` is stored as a DTensor, but modules see a plain
    tensor.
    """

    name: str
    locations: list[ParamLocation]
    split: Split
    shard: nn.Parameter
    local: torch.Tensor
    full: nn.Parameter | None = None
    full_spec: DTensorSpec | None = None
    annotations: Annotations | None = None
    extension: Extension | None = None
    accumulated: torch.Tensor | None = None
    partial_grad: torch.Tensor | None = None
    is_hooked: bool = False
    keeps_dtype: bool = False
    dtypes: DtypePlan = field(init=False)

    @property
    def param(self) -> nn.Parameter:
        """The parameter that the optimizer holds."""
        return self.shard

    @property
    def is_trainable(self) -> bool:
        return self.param.requires_grad

    @property
    def dtype(self) -> torch.dtype:
        return self.param.dtype

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype that the gradient of the shard must have; None for any."""
        return self.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter, as users know it."""
        return torch.Size(self.split.shape)

    @property
    def takes_gradient(self) -> bool:
        """Whether this rank has a part to give a gradient to."""
        return True

    def as_grad(self, part: torch.Tensor) -> torch.Tensor:
        """The gradient, made of this rank's part."""
        return part

    # Where the shard's memory is

    @property
    @abstractmethod
    def current_local(self) -> torch.Tensor:
        """What the shard holds now, which a user may have replaced."""

    def values_for(self, rank: int) -> torch.Tensor:
        """The values of a rank's shard, for a new shard buffer."""
        return self.current_local

    def view_in(self, buffer: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The part of a shard buffer that becomes the memory of the shard."""
        return buffer[offset : offset + prod(shape)].view(shape)

    @abstractmethod
    def set_local(self, local: torch.Tensor) -> None:
        """Make the shard a view of another tensor, with the values that are there."""

    @abstractmethod
    def is_in_buffer(self) -> bool:
        """Whether the shard lies in its shard buffer."""

    @abstractmethod
    def follow_registered(self) -> bool:
        """Take over a shard that a user registered for ours; return whether it is in the buffer.

        If it is another tensor over the same memory, ours is put back.
        """

    # What the module sees

    def make_full(self, data: torch.Tensor) -> None:
        """Make the full parameter over `data`, whose memory comes and goes from now on."""
        if self.full_spec is not None and self.annotations is None:
            data = as_dtensor(data, with_dtype(self.full_spec, data.dtype))
        self.full = nn.Parameter(data, requires_grad=self.is_trainable)
        self.is_hooked = False
        if not isinstance(self.split, FlatSplit) and self.dtype.is_floating_point:
            # A gradient narrower than its bucket is cast when it is copied there; a wider one is
            # cast by autograd, as in torch.
            reduced = self.dtypes.reduced
            is_any = self.dtypes.grad is None or reduced.itemsize > self.dtypes.computed.itemsize
            set_grad_dtype(self.full, None if is_any else reduced)

    def register(self, param: nn.Parameter) -> None:
        """Let the modules see the shard or the full parameter."""
        for location in self.locations:
            location.put(param)


@dataclass(slots=True, eq=False, kw_only=True)
class DTensorParam(ShardedParam):
    """A parameter of `fully_shard`: sharded along one dim, its shard a DTensor."""

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
        device: torch.device,
    ) -> DTensorParam:
        """Shard an original parameter. The shard may be a view of it until the unit is planned."""
        split = split_rows(placed.local.shape, placed.dim, axis.size)
        extension = Extension.of(name, placed.local)
        take = _rows if extension is None else _own_rows
        part = take(placed.local, split, axis.rank)
        if not has_no_memory(part):
            part = part.to(device)  # a DTensor's device is that of the tensor it is made with
        shard = nn.Parameter(as_dtensor(part, placed.shard_spec), original.requires_grad)
        if has_own_grad_dtype(original):
            set_grad_dtype(shard, grad_dtype_of(original))
        return cls(
            name=name,
            locations=list(locations),
            split=split,
            shard=shard,
            local=part,
            full_spec=placed.full_spec,
            extension=extension,
            shard_spec=placed.shard_spec,
        )

    @property
    def grad_dtype(self) -> torch.dtype | None:
        return grad_dtype_of(self.shard)

    @property
    def shape(self) -> torch.Size:
        return self.shard.shape

    def as_grad(self, part: torch.Tensor) -> torch.Tensor:
        return as_dtensor(part, with_dtype(self.shard_spec, part.dtype))

    @property
    def current_local(self) -> torch.Tensor:
        return local_tensor(self.shard)

    def view_in(self, buffer: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A view with a version counter and a storage object of its own.

        A DTensor takes over the storage offset of its local tensor but not the storage: an offset
        other than 0 breaks `copy.deepcopy` of a state dict.
        """
        view = ShardedParam.view_in(self, buffer, offset, shape)
        return with_own_storage(view) if view.numel() else buffer.new_empty(shape)

    def set_local(self, local: torch.Tensor) -> None:
        set_local_tensor(self.shard, local)
        self.shard_spec = spec_of(self.shard)
        self.local = local

    def is_in_buffer(self) -> bool:
        return local_tensor(self.shard) is self.local

    def follow_registered(self) -> bool:
        registered = self.locations[0].get()
        if registered is not self.shard:
            self._take_over(registered)
        found, own = local_tensor(self.shard), self.local
        if found is own and not has_no_memory(found):
            return True
        if type(found) is not torch.Tensor or has_no_memory(found):
            return False
        is_same = same_memory(found, own) and found.stride() == own.stride()
        if is_same:
            self.set_local(own)
        return is_same

    def _take_over(self, found: torch.Tensor | None) -> None:
        if not isinstance(found, DTensor) or found.placements != self.shard_spec.placements:
            kind = type(found).__name__
            placements = f" placed {found.placements}" if isinstance(found, DTensor) else ""
            raise ConfigError(
                f"{self.name}: a replaced parameter must be a DTensor placed "
                f"{self.shard_spec.placements}, found {kind}{placements}; copy the values into the "
                "existing parameter, or build the DTensor with distribute_tensor."
            )
        if has_own_grad_dtype(self.shard) and not has_own_grad_dtype(found):
            set_grad_dtype(found, self.grad_dtype)
        self.shard = found  # type: ignore[assignment]
        self.register(self.shard)

    def shard_of(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of a tensor shaped like what was sharded."""
        return _rows(whole, self.split, rank)


def _rows(whole: torch.Tensor, split: Split, rank: int) -> torch.Tensor:
    if not isinstance(split, RowSplit):
        return whole
    rows = split.rows(rank)
    return whole.narrow(split.dim, rows.start, len(rows))


def _own_rows(whole: torch.Tensor, split: Split, rank: int) -> torch.Tensor:
    """A copy of a rank's part, made by the operations that tensors with an all-gather implement.

    Those of quantized weights cut whole blocks (`chunk`), and quantize again when they are cloned.
    """
    if not isinstance(split, RowSplit):
        return whole.clone()
    chunks = torch.chunk(whole, split.num_ranks, split.dim)
    padded, num_rows = whole.new_zeros(chunks[0].size()), len(split.rows(rank))
    if num_rows:
        padded.narrow(split.dim, 0, num_rows).copy_(chunks[rank])
    return padded.narrow(split.dim, 0, num_rows)


def same_memory(found: torch.Tensor, own: torch.Tensor) -> bool:
    address = found.data_ptr()
    return (
        address == own.data_ptr()
        and found.dtype is own.dtype
        and found.shape == own.shape
        and (address != 0 or found.device == own.device)  # no two devices have an address in common
    )


class ShardBuffers:
    """One contiguous tensor per lane with this rank's shards, each shard a view of it."""

    def __init__(
        self,
        layout: UnitLayout,
        params: Sequence[ShardedParam],
        store: Store,
        rank: int,
    ) -> None:
        self.lanes: list[torch.Tensor] = []
        for lane in layout.lanes:
            buffer = store.allocate(lane.shard_numel, lane.dtypes.stored)
            self.lanes.append(buffer)
            for bucket in lane.buckets:
                for slot in bucket.slots:
                    param = params[slot.param_index]
                    offset = bucket.buffer_offset + slot.in_segment(rank)
                    view = param.view_in(buffer, offset, param.split.shard_shape(rank))
                    view.copy_(param.values_for(rank).reshape(view.shape))
                    param.set_local(view)
