"""Every private name of torch that fullshard uses, and every branch by torch version.

Nothing else under src/ touches a private name of torch. All names are checked when the package is
imported, except those of modules that few programs need (`symmetric_memory` and the fake backend):
they are checked when they are first asked for. A missing name is an ImportError that says which
name and which torch. The names are the same in torch 2.11 to 2.15 unless a comment says more.

torch.distributed itself has the public names `ReduceOp`, `AllreduceOptions`, `AllToAllOptions`,
`ReduceScatterOptions`, `DebugLevel`, `get_debug_level`, `Store`, `TCPStore` and `HashStore`.
"""

# ruff: noqa: I001, N812, N813 - names are imported under names that say what they are

from __future__ import annotations

import hashlib
import importlib.util
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from operator import attrgetter, methodcaller
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# Names imported here for other modules; names defined here need no list.
__all__ = ["AllgatherOptions", "BatchNormBase", "DTensorSpec", "FakeStore", "FakeTensor"]
__all__ += ["FakeTensorMode"]
__all__ += [
    "RemoteDevice",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
]
__all__ += ["ShardedTensorShard", "StorageInfo", "StridedShard", "TensorMeta", "TensorProperties"]
__all__ += ["create_fake_group", "current_transform", "default_store", "disable_torch_function"]
__all__ += ["outside_transforms"]
__all__ += ["TorchDispatchMode", "sequence_nr", "symmetric_memory", "tree_leaves", "tree_map_only"]

_F = TypeVar("_F", bound=Callable[..., Any])


TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

if TORCH > (2, 15):
    warnings.warn(
        f"fullshard: torch {torch.__version__} is newer than the versions that fullshard was "
        "tested with (2.11 to 2.15); if something fails, look for a newer fullshard.",
        stacklevel=2,
    )

# Without a reduce_dtype, torch's `fully_shard` reduces gradients in param_dtype before 2.15, and in
# the dtype of the parameter since then.
REDUCES_IN_PARAM_DTYPE = TORCH < (2, 15)


def _missing(name: str) -> ImportError:
    return ImportError(
        f"fullshard: torch {torch.__version__} lacks {name}; fullshard supports torch from 2.11 "
        "to 2.15. Install one of these, or a fullshard that supports this one."
    )


def _require(owner: object, *names: str) -> None:
    """Check names that are used as attributes."""
    for name in names:
        if not hasattr(owner, name):
            where = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))
            raise _missing(f"{where}.{name}")


try:
    # Reads of a DTensor's attributes are three times as fast without its __torch_function__.
    from torch._C import DisableTorchFunctionSubclass as disable_torch_function

    # The backward that runs in this thread, and the number that autograd's next node will get:
    # torch.autograd.graph offers neither.
    from torch._C import _current_graph_task_id
    from torch._C._autograd import _get_sequence_nr as sequence_nr

    # torch.distributed has the options of all other collectives.
    from torch._C._distributed_c10d import AllgatherOptions

    # `torch.compiler.disable` wraps a function, which takes longer than most of what is wrapped
    # here, and imports the compiler.
    from torch._C._dynamo import eval_frame as _eval_frame

    # Inside of torch.func's transforms, new tensors have no storage.
    from torch._C._functorch import peek_interpreter_stack as current_transform
    from torch._functorch.pyfunctorch import (
        temporarily_clear_interpreter_stack as outside_transforms,
    )

    # Counts what autograd would save, without memory.
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    # The registry in which torch's composable APIs tell each other which modules are theirs.
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    # FSDP1's sharded state dicts are made of these; torch has no public form of them.
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard as ShardedTensorShard
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    # torch.distributed neither tells when a group was destroyed nor gives its store.
    from torch.distributed import distributed_c10d as _c10d
    from torch.distributed.device_mesh import _mesh_resources
    from torch.distributed.distributed_c10d import _get_default_store as default_store
    from torch.distributed.remote_device import _remote_device as RemoteDevice

    # A DTensor of a known spec needs none of the checks of `from_local`, which take longer than a
    # step may spend on a parameter. No public placement describes a dim that two mesh axes cut.
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

    # The common base class of batch norms, and where optimizers look up devices of fused kernels.
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
    from torch.optim import optimizer as _optimizer

    # A mode sees every operation: for simulations.
    from torch.utils._python_dispatch import TorchDispatchMode

    # torch.utils has no public module for trees of containers.
    from torch.utils._pytree import tree_leaves, tree_map_only
except ImportError as error:
    raise _missing(f"a name ({error})") from error

_require(torch.Tensor, "_version", "_base", "_use_count", "_values")
_require(torch.Tensor, "_backward_hooks", "_post_accumulate_grad_hooks")
_require(torch.UntypedStorage, "_cdata")
_require(torch._C, "_storage_Use_Count")
_require(torch._C._distributed_c10d, "_create_work_from_future")
_require(torch, "_foreach_add_", "_foreach_copy_", "_foreach_norm", "_foreach_mul_")
_require(torch, "_foreach_lerp", "_foreach_lerp_", "_foreach_addcmul_")
_require(torch, "_amp_foreach_non_finite_check_and_unscale_", "_fused_sdp_choice")
_require(_optimizer, "_get_fused_kernels_supported_devices")
_require(GradScaler, "_unscale_grads_")
_require(dist, "_broadcast_coalesced")
_require(torch.autograd.Variable, "_execution_engine")
_require(torch.autograd.Variable._execution_engine, "queue_callback")
_require(_eval_frame, "_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy")
_require(DTensor, "_local_tensor", "_spec")
_require(DeviceMesh, "_concatenate", "_flatten")
_require(ShardedTensor, "_init_from_local_shards_and_global_metadata")
_require(dist.ProcessGroup, "_get_backend", "_device_types", "_register_backend")
_require(_c10d, "_world", "_get_default_group", "_new_process_group_helper")
_require(_c10d._world, "pg_map", "pg_group_ranks")


# Tensors. `attrgetter` is called without a Python frame.

# The local tensor of a DTensor, the object itself: `DTensor.to_local` makes a view for autograd.
local_tensor: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")
# The mesh, placements and metadata of a DTensor as one object.
spec_of: Callable[[torch.Tensor], DTensorSpec] = attrgetter("_spec")
# How often a tensor was written in place, and the tensor that a view was made of.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
# The versions of the parameter and of the local tensor of a `ShardedParam`.
shard_versions: Callable[[Any], tuple[int, int]] = attrgetter("param._version", "local._version")
view_base: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
# A number that two storage objects share if they are one storage.
storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
_Hooks = Callable[[torch.Tensor], dict[int, Any] | None]
backward_hooks: _Hooks = attrgetter("_backward_hooks")
post_accumulate_grad_hooks: _Hooks = attrgetter("_post_accumulate_grad_hooks")


def set_grad_dtype(param: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Set the dtype in which autograd gives a parameter gradients; None for the computed one.

    torch's `fully_shard` does this since 2.15. Before, gradients have the parameter's dtype.
    """
    if TORCH >= (2, 15):
        param.grad_dtype = dtype


def grad_dtype_of(param: torch.Tensor) -> torch.dtype | None:
    """The dtype that a parameter's gradient must have; None for any. Its own before 2.15."""
    return param.grad_dtype if TORCH >= (2, 15) else param.dtype


def has_own_grad_dtype(param: torch.Tensor) -> bool:
    """Whether a user set the `grad_dtype` of a parameter."""
    return TORCH >= (2, 15) and bool(getattr(param, "_has_grad_dtype_override"))  # noqa: B009


# How many tensors in Python and C++ share a storage, and how many references a tensor has in C++.
_use_count_of_data: Callable[[int], int] = torch._C._storage_Use_Count
tensor_references: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]

# The fused operations that torch.optim and torch.amp use; there are no public forms.
foreach_add_ = torch._foreach_add_
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
unscale_and_check_finite_ = torch._amp_foreach_non_finite_check_and_unscale_


# From this size on, foreach casts a single tensor to a wider dtype faster than `copy_`: at 3.3
# against 2.1 TB/s on an H200 at 60 M elements. Otherwise it gives too few blocks to one tensor.
_LARGE_WIDENED_NUMEL = 4 << 20


def foreach_copy_(
    targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False
) -> None:
    """Copy tensors to others; a single tensor with the kernel that uses more of a GPU."""
    to, source = targets[0], sources[0]
    is_many = len(targets) > 1
    if is_many or (to.numel() >= _LARGE_WIDENED_NUMEL and to.itemsize > source.itemsize):
        torch._foreach_copy_(targets, sources, non_blocking)
    else:
        to.copy_(source, non_blocking)


# The values of a sparse tensor that is not coalesced, and the attribute that tells a GradScaler
# that an optimizer's kernel unscales.
sparse_values: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._values
UNSCALES_IN_STEP = "_step_supports_amp_scaling"
if UNSCALES_IN_STEP not in GradScaler.step.__code__.co_consts:
    raise _missing(f"GradScaler.step with {UNSCALES_IN_STEP}")

# The hooks after an optimizer's step: an OrderedDict keyed by the ids of their handles.
_STEP_POST_HOOKS = "_optimizer_step_post_hooks"
step_post_hooks: Callable[[Any], Any] = attrgetter(_STEP_POST_HOOKS)
if _STEP_POST_HOOKS not in _optimizer.Optimizer.register_step_post_hook.__code__.co_names:
    raise _missing(f"Optimizer.{_STEP_POST_HOOKS}")


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; any other tensor as it is."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def set_local_tensor(dtensor: torch.Tensor, local: torch.Tensor) -> None:
    dtensor._local_tensor = local  # type: ignore[attr-defined]


def new_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around a local tensor. Skips `DTensor.__init__`: two wrappers around nothing."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def copy_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let the hooks on one tensor's gradient also act on the gradient of another."""
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def storage_references(storage: torch.UntypedStorage) -> int:
    return _use_count_of_data(storage._cdata)


@cache
def python_references_of_graph() -> int:
    """How often a graph holds a leaf as a Python object, as C++ may for its `AccumulateGrad`."""
    leaf = torch.ones(1, requires_grad=True)
    with torch.inference_mode(False), torch.enable_grad():
        before = sys.getrefcount(leaf)
        used = leaf.view(1)
        held = sys.getrefcount(leaf) - before
    del used
    return held


# Modules.


def mark_as_fully_sharded(module: torch.nn.Module) -> None:
    """Let torch's `replicate` leave the parameters of a module alone."""
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


# Simulations.


def has_own_dispatch(kind: type) -> bool:
    """Whether a tensor class handles operations itself, unlike torch's own and fake tensors."""
    own: Any = torch.Tensor
    dispatch: Any = kind.__torch_dispatch__  # type: ignore[attr-defined]
    return dispatch is not own.__torch_dispatch__ and kind is not FakeTensor


@contextmanager
def fused_optimizers_on(device_type: str) -> Iterator[None]:
    """Let optimizers take `fused=True` for parameters on another device."""
    optimizer: Any = _optimizer
    known = optimizer._get_fused_kernels_supported_devices
    optimizer._get_fused_kernels_supported_devices = lambda: [*known(), device_type]
    try:
        yield
    finally:
        optimizer._get_fused_kernels_supported_devices = known


@contextmanager
def hosts_of_meta_devices(num_devices: int) -> Iterator[None]:
    """Tell how many devices a host has: DTensor asks for it since torch 2.15, also on meta."""
    resources: Any = _mesh_resources
    resources.num_devices_per_host = lambda _: num_devices
    try:
        yield
    finally:
        del resources.num_devices_per_host


def cpu_attention_backend(*args: Any) -> int:
    """Which kernel `scaled_dot_product_attention` uses on a CPU, asked for tensors on meta."""
    on_cpu: list[Any] = [
        torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype)
        if isinstance(arg, torch.Tensor)
        else arg
        for arg in args
    ]
    return int(torch._fused_sdp_choice(*on_cpu[:6], scale=on_cpu[6], enable_gqa=on_cpu[7]))


# Autograd.

# Calls a function when the backward that runs in this thread ends.
queue_backward_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
# The number that autograd gave a node of its graph when it made it.
node_sequence_nr: Callable[[Any], int] = methodcaller("_sequence_nr")


def in_backward() -> bool:
    """Whether this thread runs a backward (or recomputes a forward in one)."""
    return bool(_current_graph_task_id() != -1)


# CUDA: torch.cuda's own functions look up devices and make objects each time. These are None in a
# torch without CUDA.
_CUDA = ("_cuda_getCurrentStream", "_cuda_setStream", "_cuda_getDevice", "_CudaEventBase")
if torch.backends.cuda.is_built():
    _require(torch._C, *_CUDA)
cuda_current_stream: Any = getattr(torch._C, "_cuda_getCurrentStream", None)
cuda_set_stream: Any = getattr(torch._C, "_cuda_setStream", None)
cuda_get_device: Any = getattr(torch._C, "_cuda_getDevice", None)
CudaEvent: Any = getattr(torch._C, "_CudaEventBase", None)


@cache
def triton_kernels(module: str) -> ModuleType | None:
    """A module of kernels; None in a build of torch without Triton."""
    return importlib.import_module(module) if importlib.util.find_spec("triton") else None


# The compiler.


def untraced(function: _F) -> _F:
    """Keep dynamo out of a function and of all that it calls.

    Dynamo reads the attributes while it traces a caller; the interpreter follows the strategy of
    the code.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "fullshard runs between graphs"  # type: ignore[attr-defined]
    function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    skip = _eval_frame._FrameAction.SKIP
    strategy = _eval_frame._FrameExecStrategy(skip, skip)
    _eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


# Process groups.
# Broadcasts many tensors in few collectives: (group, tensors, bucket bytes, source).
broadcast_coalesced: Callable[..., None] = dist._broadcast_coalesced  # type: ignore[attr-defined]
# The backend that moves a group's tensors on a device; `dist.get_backend` has one for all devices.
backend_of: Callable[[dist.ProcessGroup, torch.device], Any] = dist.ProcessGroup._get_backend
# Gives a group that is written in Python a backend: (group, device, backend type, backend).
register_backend: Callable[..., None] = dist.ProcessGroup._register_backend


def devices_of(group: dist.ProcessGroup) -> list[torch.device]:
    """The devices that a group has a backend for: none if it is written in Python."""
    devices: list[torch.device] = getattr(group, "_device_types", [])
    return devices


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    name: str = group._get_backend(device).name()
    return name


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of a group may take: torch's default if its backends do not tell."""
    for device in devices_of(group):
        with suppress(AttributeError, RuntimeError):  # not every backend has options
            timeout: timedelta = group._get_backend(device).options._timeout
            return timeout
    return default_pg_timeout


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed made a group and has not destroyed it yet."""
    return group in _c10d._world.pg_map


def all_groups() -> list[dist.ProcessGroup]:
    """All process groups of this process."""
    return list(_c10d._world.pg_map)


def store_of(group: dist.ProcessGroup) -> Any:
    """The part of the store that torch.distributed gave to a group, which only its ranks use."""
    return _c10d._world.pg_map[group][1]


def lifetime_of(group: dist.ProcessGroup) -> object:
    """An object that lives until a group is destroyed, even if the group is still referred to.

    It is the store that torch.distributed made for the group and drops in destroy_process_group.
    A group that torch.distributed does not know lives as long as it is referred to.
    """
    return store_of(group) if is_registered(group) else group


def local_group(
    ranks: list[int], timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """A new group that only its own ranks make, in the order in which these ranks make them.

    `dist.new_group(use_local_synchronization=True)` names a group by its ranks and by how many
    groups its process has. Ranks that have other numbers of groups never find each other, and once
    a group was destroyed, its name comes again: gloo then may connect to the addresses that the
    destroyed group has left in the store.
    """
    world = _c10d._get_default_group()
    if hasattr(world, "new_group"):  # of a process group in Python
        made = dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
        return cast(dist.ProcessGroup, made)
    made_before = _local_groups.setdefault(lifetime_of(world), Counter())
    key = hashlib.sha256(repr(ranks).encode()).hexdigest()[:20]
    made_before[key] += 1
    name: Any = f"fullshard/{key}/{made_before[key]}"
    default_backend, store = _c10d._world.pg_map[world]
    group: dist.ProcessGroup
    group, _ = _c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend or default_backend),
        store,
        name,
        timeout=timeout,
        device_id=world.bound_device_id,
    )
    _c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


# How many groups of the same ranks have been made, by the lifetime of the default group.
_local_groups: weakref.WeakKeyDictionary[object, Counter[str]]
_local_groups = weakref.WeakKeyDictionary()


def finished_work() -> dist.Work:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([])
    make: Callable[..., dist.Work] = torch._C._distributed_c10d._create_work_from_future  # type: ignore[attr-defined]
    return make(future)


# Collectives with options and without the checks of `dist.all_gather_into_tensor`, which take
# longer than a small collective. torch 2.13 gave them public names. They are looked up on the
# group, which may be a subclass in Python.


def _collective(name: str, name_before_2_13: str) -> Callable[..., dist.Work]:
    if not hasattr(dist.ProcessGroup, name):
        name = name_before_2_13
        _require(dist.ProcessGroup, name)

    def start(group: dist.ProcessGroup, *args: Any) -> dist.Work:
        work: dist.Work = getattr(group, name)(*args)
        return work

    return start


# (group, out, inp, [options])
all_gather_single = _collective("all_gather_single", "_allgather_base")
reduce_scatter_single = _collective("reduce_scatter_single", "_reduce_scatter_base")
# (group, outs, ins, [options]). Never on gloo: its threads race on operation names that are longer
# than 15 characters, and these are.
all_gather_coalesced = _collective("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
reduce_scatter_coalesced = _collective(
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
)
# (group, out, inp, out_splits, in_splits, [options])
all_to_all_single = _collective("all_to_all_single", "alltoall_base")


# Meshes: slices of one mesh side by side, and several axes as one under a name.
concatenate_meshes: Callable[[list[DeviceMesh]], DeviceMesh] = DeviceMesh._concatenate
flatten_mesh: Callable[[DeviceMesh, str], DeviceMesh] = DeviceMesh._flatten


def sharded_tensor_from_local(
    shards: list[ShardedTensorShard],
    metadata: ShardedTensorMetadata,
    group: dist.ProcessGroup | None,
) -> ShardedTensor:
    """A ShardedTensor whose metadata all ranks know: the public constructors communicate."""
    made = ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=group
    )
    # Otherwise it is of a class that programs do not allow `torch.load` to read, if shards are not
    # of the sizes that `torch.chunk` makes. Sizes are read from the metadata.
    placements: list[Any] = [each.placement for each in metadata.shards_metadata]
    made._sharding_spec = ChunkShardingSpec(0, placements)
    return made


# What copies a state dict before `async_save` writes it, and its method that copies a tensor.
STAGER = "torch.distributed.checkpoint._state_dict_stager"
STAGER_COPY = "_offload_tensor"

sharded_tensor_group: Callable[[ShardedTensor], dist.ProcessGroup] = attrgetter("_process_group")


# Modules that few programs need. Loading the module of the fake backend registers the backend.

if TYPE_CHECKING:
    from torch.distributed import _symmetric_memory as symmetric_memory
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.testing._internal.distributed.fake_pg import _create_fake_pg as create_fake_group

_FAKE_BACKEND = "torch.testing._internal.distributed.fake_pg"
_LOADED_LATE = {
    "symmetric_memory": ("torch.distributed._symmetric_memory", None),
    # The index of a checkpoint uses these to say in which file, and where in it, an entry is.
    "StorageInfo": ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    "FakeStore": (_FAKE_BACKEND, "FakeStore"),
    "create_fake_group": (_FAKE_BACKEND, "_create_fake_pg"),
}


def __getattr__(name: str) -> Any:
    if name not in _LOADED_LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LOADED_LATE[name]
    try:
        loaded = importlib.import_module(module)
        return loaded if attribute is None else getattr(loaded, attribute)
    except (ImportError, AttributeError) as error:
        raise _missing(f"a name ({error})") from error
