"""What a user may ask for. Names, fields and meaning are those of `torch.distributed.fsdp`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn.modules.batchnorm import _BatchNorm

from fullshard.errors import ConfigError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes that a unit computes and reduces in.

    `param_dtype` is the dtype of the full parameters and so of the gather and of the compute;
    `reduce_dtype` that of the gradient reduction (by default the compute dtype);
    `output_dtype` casts the floating-point outputs of forward, and `cast_forward_inputs` says
    whether floating-point inputs are cast to `param_dtype`. The shards, and the gradients that
    the optimizer sees, keep the dtype that the parameters were made with.

    `wire_dtype` is the dtype that gradients travel in over the shard axis, by default that of the
    reduction. A narrower one halves the bytes: gradients are cast to it on their way into a
    message, and added up in `reduce_dtype` where they arrive. Where they were computed in it,
    nothing is lost. Torch has no such field.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _require_wire("MixedPrecisionPolicy", self)


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


def own_offload(given: Any) -> OffloadPolicy:
    """A policy of ours that says what torch's own object, or one like it, does."""
    if isinstance(given, OffloadPolicy):
        return given
    if hasattr(given, "pin_memory"):
        return CPUOffloadPolicy(given.pin_memory)
    # The policy that keeps shards where they are has no fields to know it by.
    if type(given).__name__ != "OffloadPolicy":
        raise ConfigError(
            f"offload_policy: an OffloadPolicy is expected, found {given!r}; pass "
            "CPUOffloadPolicy() to offload, or leave it out."
        )
    return OffloadPolicy()


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


class ShardingStrategy(Enum):
    """What a wrapper splits over the ranks, and what it makes whole for how long."""

    FULL_SHARD = auto()
    """Parameters, gradients and optimizer state are split; full only while they compute."""
    SHARD_GRAD_OP = auto()
    """As FULL_SHARD, but parameters stay full from forward to backward."""
    NO_SHARD = auto()
    """Every rank keeps everything; gradients are averaged."""
    HYBRID_SHARD = auto()
    """FULL_SHARD inside a group of ranks, replicated over the groups."""
    _HYBRID_SHARD_ZERO2 = auto()
    """SHARD_GRAD_OP inside a group of ranks, replicated over the groups."""


class BackwardPrefetch(Enum):
    """When backward gathers the unit that it reaches next."""

    BACKWARD_PRE = auto()
    """Before the current unit computes: most overlap, two units whole at a time."""
    BACKWARD_POST = auto()
    """After the current unit has computed: less overlap, less memory."""


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes that a wrapper computes, reduces and keeps buffers in.

    `param_dtype`, `reduce_dtype` and `wire_dtype` are as in `MixedPrecisionPolicy`. `buffer_dtype`
    is the dtype of floating-point buffers while training; state dicts hold their original one.
    `keep_low_precision_grads` leaves gradients in the dtype of the compute, or of the reduction
    where nothing is sharded.
    `cast_forward_inputs` casts what any wrapper is given, `cast_root_forward_inputs` what the
    outermost one is. Modules of `_module_classes_to_ignore` compute in full precision, in a unit
    of their own, where a policy does the wrapping.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)
    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _require_wire("MixedPrecision", self)


def _require_wire(name: str, policy: MixedPrecisionPolicy | MixedPrecision) -> None:
    """Raise unless gradients can travel as a policy says."""
    wire, reduced = policy.wire_dtype, policy.reduce_dtype or policy.param_dtype
    if wire is None or wire == reduced:
        return
    is_dtype = isinstance(wire, torch.dtype)
    if not is_dtype or not wire.is_floating_point or wire.itemsize < 2:
        raise ConfigError(
            f"{name}: wire_dtype must be a floating-point dtype of at least 16 bits, found {wire}; "
            "pass for example torch.bfloat16, or leave it out."
        )
    if reduced is not None and wire.itemsize >= reduced.itemsize:
        raise ConfigError(
            f"{name}: wire_dtype must be narrower than the dtype that gradients are reduced in, "
            f"found {wire} and {reduced}; pass a wider reduce_dtype, or leave wire_dtype out."
        )


_Policy = TypeVar("_Policy", MixedPrecisionPolicy, MixedPrecision)


def own_precision(kind: type[_Policy], given: Any) -> _Policy:
    """A policy of ours that says what torch's own object, or one with its fields, does."""
    if isinstance(given, kind):
        return given
    names = [field.name for field in fields(kind)]
    found = {name: getattr(given, name) for name in names if hasattr(given, name)}
    missing = [name for name in names if name not in found and name != "wire_dtype"]
    if missing:
        raise ConfigError(
            f"precision: a {kind.__name__} is expected, found a {type(given).__name__} without "
            f"{', '.join(missing)}; import {kind.__name__} from fullshard."
        )
    return kind(**found)


@dataclass(frozen=True)
class CPUOffload:
    """Whether shards, their gradients and so the optimizer state live in host memory."""

    offload_params: bool = False


class StateDictType(Enum):
    """What `state_dict` and `load_state_dict` of a wrapped model deal in."""

    FULL_STATE_DICT = auto()
    """Whole tensors."""
    LOCAL_STATE_DICT = auto()
    """This rank's slices, as they lie in memory: only for the same wrapping and world."""
    SHARDED_STATE_DICT = auto()
    """Each parameter split along its first dim: for distributed checkpoints."""


@dataclass(frozen=True)
class StateDictConfig:
    """Options of a model's state dict. `offload_to_cpu` puts its tensors in host memory."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """`rank0_only` gives every rank but the first an empty state dict."""

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig(StateDictConfig):
    """Options of LOCAL_STATE_DICT."""


@dataclass(frozen=True)
class ShardedStateDictConfig(StateDictConfig):
    """`_use_dtensor` is set where a device mesh was given: DTensors instead of ShardedTensors."""

    _use_dtensor: bool = False


@dataclass(frozen=True)
class OptimStateDictConfig:
    """Options of an optimizer's state dict."""

    offload_to_cpu: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """`rank0_only` gives every rank but the first an empty state dict."""

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer's state under LOCAL_STATE_DICT."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """`_use_dtensor` is set where a device mesh was given: DTensors instead of ShardedTensors."""

    _use_dtensor: bool = False


@dataclass(frozen=True)
class StateDictSettings:
    """What `FullyShardedDataParallel.get_state_dict_type` returns."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


class OptimStateKeyType(Enum):
    """What parameters are called in an optimizer's state dict: by name, or by number."""

    PARAM_NAME = auto()
    PARAM_ID = auto()
