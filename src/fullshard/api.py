"""Policies, configurations and enums, with the names and meaning of `torch.distributed.fsdp`.

Classes whose fields torch's users assign to are not frozen, as in torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard._torch import BatchNormBase
from fullshard.errors import ConfigError
from fullshard.layout.wire import Plain, Wire, Wires, require_for_params

# These can also be imported from `fullshard`, and from the wrapper's module as in torch.
__all__ = [
    "AllGather",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ReduceScatter",
    "ShardPlacementResult",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes that a unit computes and reduces in.

    `param_dtype` is the dtype of the full parameters, of the all-gather and of the compute;
    `reduce_dtype` is the dtype of the gradient reduction, by default the `grad_dtype` of the
    parameters, and with torch before 2.15 the compute dtype, as in torch. `output_dtype`
    casts the outputs of forward, and `cast_forward_inputs` its inputs to `param_dtype`. Shards keep
    the original dtype of the parameters, and the gradients that the optimizer sees have the
    parameters' `grad_dtype`, which is the same unless it was set.

    `param_dtype_override_fn` is called once for each parameter, when it is sharded: if it returns
    the parameter's own dtype, that parameter is not cast to `param_dtype`. It must return the same
    on every rank.

    `wire_dtype`, which torch does not have, is the dtype in which gradients are sent over the shard
    axis, to be summed in `reduce_dtype` where they arrive. A narrower one halves the bytes.
    Gradients that were computed in it lose nothing. It is short for
    `reduce_wire=fullshard.wire.Plain(wire_dtype)`.

    `gather_wire` and `reduce_wire`, which torch does not have either, say how parameters and
    gradients travel: one of `fullshard.wire`, such as `Int8()`, for a quarter of the bytes of
    float32. Shards keep their values. Parameters with fewer than two dims, and those smaller than a
    block of the wire, travel as they are, except in a wrapper, which has one bucket for all. A
    function of a parameter's name and shape chooses a wire for each, or None. `replica_wire` says
    how replicas exchange their sums, if that is to be another wire than `reduce_wire`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    wire_dtype: torch.dtype | None = None
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )
    gather_wire: Wires = field(default=None, kw_only=True)
    reduce_wire: Wires = field(default=None, kw_only=True)
    replica_wire: Wires = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _require_wires("MixedPrecisionPolicy", self)

    @property
    def wires(self) -> tuple[Wires, Wires, Wires]:
        """How parameters, gradients, and sums of replicas travel; None for what is usual."""
        short = None if self.wire_dtype is None else Plain(self.wire_dtype)
        return self.gather_wire, self.reduce_wire or short, self.replica_wire


@dataclass
class OffloadPolicy:
    """Shards stay on the device that computes. The default."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards and their gradients, and so the optimizer state, are kept in host memory.

    With `pin_memory`, copies overlap with compute. Turn it off if host memory is short: pinned
    memory cannot be swapped.
    """

    pin_memory: bool = True


def own_offload(given: Any) -> OffloadPolicy | Mapping[str, OffloadPolicy]:
    """Convert offload policies of torch, or objects like them, to those of this package."""
    if isinstance(given, Mapping):
        return {name: _own_offload(policy) for name, policy in given.items()}
    return _own_offload(given)


def _own_offload(given: Any) -> OffloadPolicy:
    if isinstance(given, OffloadPolicy):
        return given
    if hasattr(given, "pin_memory"):
        return CPUOffloadPolicy(given.pin_memory)
    # A policy without offload has no fields to recognize it by.
    if type(given).__name__ != "OffloadPolicy":
        raise ConfigError(
            f"offload_policy must be an OffloadPolicy, not {given!r}; pass CPUOffloadPolicy() to "
            "offload, or leave it out."
        )
    return OffloadPolicy()


@dataclass
class DataParallelMeshDims:
    """Which axes of a full mesh are data parallel, by name; several names are one axis.

    This is for parameters that already are DTensors on one mesh with all axes.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise ConfigError(
                "At least one of shard or replicate must be set in DataParallelMeshDims; pass "
                "for example shard='dp'."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return (self.shard,) if isinstance(self.shard, str) else tuple(self.shard or ())

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return (self.replicate,) if isinstance(self.replicate, str) else tuple(self.replicate or ())


@dataclass
class ShardPlacementResult:
    """The result of a `shard_placement_fn` that gives a parameter its own dim and its own mesh.

    `mesh_info` is a DeviceMesh (shard, or replicate and shard), or has one as its `mesh`.
    """

    placement: Shard | None
    mesh_info: DeviceMesh | Any


class Comm(ABC):
    """A custom collective, with the memory that it runs in."""

    @abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer for one bucket."""


class AllGather(Comm):
    """Gathers the parameters of a unit; see `FSDPModule.set_custom_all_gather`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None: ...


class ReduceScatter(Comm):
    """Reduces the gradients of a unit; see `FSDPModule.set_custom_reduce_scatter`."""

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
    """What a wrapper shards over the ranks, and for how long it keeps parameters unsharded."""

    FULL_SHARD = auto()
    """Parameters, gradients and optimizer state are sharded; parameters are full only in use."""
    SHARD_GRAD_OP = auto()
    """As FULL_SHARD, but parameters stay full from forward to backward."""
    NO_SHARD = auto()
    """Every rank keeps everything; gradients are averaged."""
    HYBRID_SHARD = auto()
    """FULL_SHARD inside a group of ranks, replicated over the groups."""
    _HYBRID_SHARD_ZERO2 = auto()
    """SHARD_GRAD_OP inside a group of ranks, replicated over the groups."""


class BackwardPrefetch(Enum):
    """When backward gathers the unit that comes next."""

    BACKWARD_PRE = auto()
    """Before the current unit computes: most overlap, with two full units at a time."""
    BACKWARD_POST = auto()
    """After the current unit has computed: less overlap, less memory."""


@dataclass
class MixedPrecision:
    """The dtypes that a wrapper computes, reduces and keeps buffers in.

    `param_dtype`, `reduce_dtype`, `wire_dtype`, `gather_wire`, `reduce_wire` and
    `replica_wire` are as in `MixedPrecisionPolicy`. `buffer_dtype` is the dtype of floating-point
    buffers during training; state dicts have the original dtype.
    `keep_low_precision_grads` leaves gradients in the compute dtype, or in the reduction dtype if
    nothing is sharded. `cast_forward_inputs` casts the inputs of every wrapper,
    `cast_root_forward_inputs` those of the outermost. With a wrapping policy, modules of
    `_module_classes_to_ignore` compute in full precision, in units of their own.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (BatchNormBase,)
    wire_dtype: torch.dtype | None = None
    gather_wire: Wire | None = field(default=None, kw_only=True)
    reduce_wire: Wire | None = field(default=None, kw_only=True)
    replica_wire: Wire | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _require_wires("MixedPrecision", self)


def _require_wires(name: str, policy: MixedPrecisionPolicy | MixedPrecision) -> None:
    """Raise if parameters or gradients cannot travel as a policy says."""
    for key in ("gather_wire", "reduce_wire", "replica_wire"):
        given = getattr(policy, key)
        if callable(given) and isinstance(policy, MixedPrecision):
            raise ConfigError(
                f"{name}: {key} cannot be a function, because the parameters of a wrapper travel "
                "together; pass one wire, or use fully_shard."
            )
        if given is not None and not isinstance(given, Wire) and not callable(given):
            raise ConfigError(
                f"{name}: {key} must be a wire, such as fullshard.wire.Int8(), not {given!r}."
            )
    if isinstance(policy.gather_wire, Wire):
        require_for_params(f"{name}: gather_wire", policy.gather_wire)
    if policy.wire_dtype is not None and policy.reduce_wire is not None:
        raise ConfigError(
            f"{name}: wire_dtype and reduce_wire both say how gradients travel; pass one of them."
        )
    wire, reduced = policy.wire_dtype, policy.reduce_dtype or policy.param_dtype
    if wire is None or wire == reduced:
        return
    is_float = isinstance(wire, torch.dtype) and wire.is_floating_point and wire.itemsize > 1
    if not is_float or (reduced is not None and wire.itemsize >= reduced.itemsize):
        raise ConfigError(
            f"{name}: wire_dtype must be a floating-point dtype of at least 16 bits and narrower "
            f"than the dtype that gradients are reduced in, but is {wire} with {reduced}; pass a "
            "wider reduce_dtype, or leave wire_dtype out."
        )


def own_value(kind: type[Any], given: Any) -> Any:
    """Convert a value of torch's enum or settings class of the same name to ours.

    Anything else is returned as it is, for the caller to judge.
    """
    if isinstance(given, kind) or type(given).__name__ != kind.__name__:
        return given
    if isinstance(given, Enum):
        return kind.__members__.get(given.name, given)
    return kind(**{each.name: getattr(given, each.name) for each in fields(kind)})


_Policy = TypeVar("_Policy", MixedPrecisionPolicy, MixedPrecision)


def own_precision(kind: type[_Policy], given: Any) -> _Policy:
    """Convert a precision policy of torch, or an object with its fields, to our class."""
    if isinstance(given, kind):
        return given
    names = [field.name for field in fields(kind)]
    found = {name: getattr(given, name) for name in names if hasattr(given, name)}
    # Torch lacks the wires, and lacked the last before 2.15.
    optional = ["wire_dtype", "gather_wire", "reduce_wire", "replica_wire"]
    optional.append("param_dtype_override_fn")
    missing = [name for name in names if name not in found and name not in optional]
    if missing:
        raise ConfigError(
            f"precision: this {type(given).__name__} is not a {kind.__name__}: it has no "
            f"{', '.join(missing)}. Import {kind.__name__} from fullshard."
        )
    return kind(**found)


@dataclass
class CPUOffload:
    """Whether shards and their gradients, and so the optimizer state, are in host memory."""

    offload_params: bool = False


class StateDictType(Enum):
    """The kinds of `state_dict` and `load_state_dict` of a wrapped model."""

    FULL_STATE_DICT = auto()
    """Whole tensors."""
    LOCAL_STATE_DICT = auto()
    """This rank's slices as they are in memory, for the same wrapping and world size."""
    SHARDED_STATE_DICT = auto()
    """Each parameter sharded along its first dim, for distributed checkpoints."""


@dataclass
class StateDictConfig:
    """Options of a model's state dict. `offload_to_cpu` puts its tensors in host memory."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """`rank0_only` gives every rank but the first an empty state dict."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options of LOCAL_STATE_DICT."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """`_use_dtensor` is set where a device mesh was given: DTensors instead of ShardedTensors."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Options of an optimizer's state dict."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """`rank0_only` gives every rank but the first an empty state dict."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer's state under LOCAL_STATE_DICT."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """`_use_dtensor` is set where a device mesh was given: DTensors instead of ShardedTensors."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """What `FullyShardedDataParallel.get_state_dict_type` returns."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


class OptimStateKeyType(Enum):
    """The keys of parameters in an optimizer's state dict: names or numbers."""

    PARAM_NAME = auto()
    PARAM_ID = auto()
