"""What a user may ask for. Names, fields and meaning are those of `torch.distributed.fsdp`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.errors import ConfigError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes that a unit computes and reduces in.

    `param_dtype` is the dtype of the full parameters and so of the gather and of the compute;
    `reduce_dtype` that of the gradient reduction (by default the compute dtype);
    `output_dtype` casts the floating-point outputs of forward, and `cast_forward_inputs` says
    whether floating-point inputs are cast to `param_dtype`. The shards, and the gradients that
    the optimizer sees, keep the dtype that the parameters were made with.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards stay on the device that computes. The default."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and so the optimizer state live in host memory.

    `pin_memory` makes the copies both ways run beside the compute; pinned memory cannot be
    swapped or shared, so turn it off where host memory is short.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a full mesh are data parallel, by name.

    For parameters that already are DTensors on one mesh of all axes. Several names are treated
    as one axis. At least one of `shard` and `replicate` must be given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise ConfigError(
                "DataParallelMeshDims: at least one of shard and replicate must name a mesh axis, "
                "found neither; pass for example shard='dp'."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True)
class ShardPlacementResult:
    """What a `shard_placement_fn` returns to give one parameter its own dim and its own mesh.

    `mesh_info` is a DeviceMesh (1D: shard; 2D: replicate, shard), or any object with such a
    mesh as its attribute `mesh`.
    """

    placement: Shard | None
    mesh_info: DeviceMesh | Any


class Comm(ABC):
    """A collective that the user brings, with the memory that it wants to run in."""

    @abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer for one message."""


class AllGather(Comm):
    """Gathers the parameters of a unit: see `FSDPModule.set_custom_all_gather`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None: ...


class ReduceScatter(Comm):
    """Reduces the gradients of a unit: see `FSDPModule.set_custom_reduce_scatter`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None: ...
