"""`fully_shard` shards a module in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypedDict, Unpack, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard._torch import mark_as_fully_sharded
from fullshard.api import (
    AllGather,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
    ShardPlacementResult,
    own_offload,
    own_precision,
)
from fullshard.comm.allocating import (
    ProcessGroupAllGather,
    ProcessGroupMemory,
    ProcessGroupReduceScatter,
    SymmetricAllGather,
)
from fullshard.comm.mesh import current_device, default_mesh, mesh_info_of
from fullshard.compat.framework_attributes import FSDPState, state_of
from fullshard.errors import ConfigError, LifecycleError, MisuseError
from fullshard.optim.by_unit import watch_optimizers
from fullshard.runtime.build import build_hooks, reshard_of, share
from fullshard.runtime.hooks import (
    ModuleHooks,
    ShardRequest,
    UnshardHandle,
    hooks_of,
    require_hooks,
    units_below,
)
from fullshard.runtime.sharded_module import ShardedModule
from fullshard.runtime.step import GradientReductionHandle, Scheduler
from fullshard.unit.grad_lane import require_plain_wires
from fullshard.unit.settings import UnitSettings
from fullshard.unit.unit import Unit

PlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


class ShardOptions(TypedDict, total=False):
    """The options of `fully_shard`, which explains them."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: PlacementFn | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy | Mapping[str, OffloadPolicy]
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None


@overload
def fully_shard(module: nn.Module, **options: Unpack[ShardOptions]) -> FSDPModule: ...


@overload
def fully_shard(module: list[nn.Module], **options: Unpack[ShardOptions]) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy | Mapping[str, OffloadPolicy] = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of a module over the ranks of a mesh, in place.

    The parameters below `module` that no earlier call has taken become one unit: gathered
    together before forward, freed after it, gathered again for backward, their gradients reduced
    together. So call it on the inner modules first, then on the outer ones, last on the model.
    A list of modules becomes one unit; a forward may run any of them.

    Args:
        module: The module, or a list of modules. Modules without a forward (ModuleList) are
            refused.
        mesh: One axis (shard), or two named ones (replicate, shard). By default all ranks on one
            axis. Its device type says where the unit computes.
        reshard_after_forward: True frees the full parameters after forward; False keeps them for
            backward; None means True except for the root of a forward that takes gradients. An
            int keeps them spread over that many neighboring ranks, so that backward gathers over
            a smaller group.
        shard_placement_fn: Chooses the dim to shard for each parameter (`Shard(dim)`, which need
            not divide evenly), and its own mesh with a `ShardPlacementResult`.
        mp_policy: The dtypes to compute and reduce in.
        offload_policy: Where the shards live. A mapping from names of parameters, relative to
            `module`, to policies says it for each of them; others stay on the device.
        ignored_params: Parameters to leave alone: not sharded, not moved, not reduced.
        dp_mesh_dims: Which axes of `mesh` are data parallel, for parameters that are DTensors
            on all of it.

    Returns:
        What was given; the class of each module is also an `FSDPModule`.
    """
    modules = _checked_modules(module)
    mesh = default_mesh() if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh must be a DeviceMesh, not a {type(mesh).__name__}; make one with "
            "torch.distributed.device_mesh.init_device_mesh."
        )
    request = ShardRequest(
        modules=modules,
        mesh_info=mesh_info_of(mesh, dp_mesh_dims),
        device=current_device(mesh.device_type),
        policy=own_precision(MixedPrecisionPolicy, mp_policy),
        offload=own_offload(offload_policy),
        settings=UnitSettings(reshard_after_forward),
        placement_fn=shard_placement_fn,
        ignored=ignored_params or (),
    )
    build_hooks(request)
    watch_optimizers()
    for each in modules:
        each.__class__ = _sharded_class(type(each))  # type: ignore[arg-type]
        mark_as_fully_sharded(each)
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


def _checked_modules(module: Any) -> tuple[nn.Module, ...]:
    given = list(module) if isinstance(module, (list, tuple)) else [module]
    if not given or not all(isinstance(each, nn.Module) for each in given):
        found = ", ".join(type(each).__name__ for each in given) or "an empty list"
        raise ConfigError(
            f"fully_shard takes an nn.Module or a list of them, not {found}; pass the module "
            "itself."
        )
    for each in given:
        kind = type(each).__name__
        is_container = isinstance(each, (nn.ModuleList, nn.ModuleDict))
        if is_container and type(each).forward is nn.Module.forward:
            raise ConfigError(
                "fully_shard does not support containers that do not implement forward, such as a "
                f"{kind}; call fully_shard on each of its modules, or on a list of them."
            )
        if hooks_of(each) is not None:
            raise MisuseError(
                "Each distinct composable distributed API can only be applied to a module once, "
                f"and fully_shard has already been applied to {kind}; call it on each module once, "
                "inner modules first."
            )
    inner = {child for each in given for child in each.modules() if child is not each}
    return tuple(dict.fromkeys(each for each in given if each not in inner))


@functools.cache
def _sharded_class(original: type) -> type:
    """A subclass of the original class that is an FSDPModule, too."""
    name = f"FSDP{original.__name__}"
    return type(name, (FSDPModule, original), {"__module__": original.__module__})


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make another method of a sharded module unshard and reshard as its forward does.

    Does nothing on a module that is not sharded, so that a program can call it either way.
    """
    hooks = hooks_of(module)
    if hooks is None:
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ConfigError(
            f"register_fsdp_forward_method: {type(module)} does not have a method {method_name}; "
            "correct the name."
        )

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks.pre_forward(module, args, kwargs)
        return hooks.post_forward(module, args, method(*args, **kwargs))

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return hooks.guarded(run, args, kwargs)

    setattr(module, method_name, guarded)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Share one comm context between several roots, for example the chunks of a pipeline."""
    hooks_list = _hooks_of_all("share_comm_ctx: Expects list of FSDPModules", modules)
    for hooks in hooks_list:
        comm_ctx = hooks_list[0].units[0].comm_ctx
        if hooks.scheduler is None:
            share(comm_ctx, hooks.units)  # the scheduler will use that of the root
        else:
            share(comm_ctx, hooks.scheduler.units)
            hooks.scheduler.comm_ctx = comm_ctx


def _hooks_of_all(wanted: str, modules: Sequence[Any]) -> list[ModuleHooks]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigError(f"{wanted} but got {type(module)}; call fully_shard on it first.")
    return [require_hooks(module) for module in modules]


@contextmanager
def settings_scope(units: Sequence[Unit], **changes: Any) -> Iterator[None]:
    """Change settings of units inside a scope."""
    before = [unit.settings for unit in units]
    try:
        _change(units, **changes)
        yield
    finally:
        for unit, settings in zip(units, before, strict=True):
            unit.settings = settings


def _change(units: Sequence[Unit], **changes: Any) -> None:
    for unit in units:
        known = type(unit.settings).__slots__
        unknown = sorted(set(changes).difference(known))
        if unknown:
            raise ConfigError(
                f"{unit.name}: there are no settings {unknown}; choose from {sorted(known)}."
            )
        own = dict(changes)
        if "reshard_after_forward" in changes:
            own["reshard_after_forward"] = reshard_of(unit, changes["reshard_after_forward"])
        unit.set(**own)


class FSDPModule(ShardedModule):
    """The methods that `fully_shard` adds to a module.

    Setters act on the module and, unless `recurse=False`, on all sharded modules below it. Settings
    that make sense for a limited time have a scoped form: `with model.settings(...)`, and
    `with model.no_sync()` for the most common.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original class, so that a slice of a container is not sharded."""
        original: Any = cls.__bases__[-1]  # of (FSDPModule, Linear)
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    # Unshard and reshard

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's parameters, but not those of sharded modules below it.

        With `async_op`, returns a handle; forward waits by itself if `wait()` was not called.
        """
        return require_hooks(self).unshard(async_op)

    def reshard(self) -> None:
        """Register the shards of this module and free the full parameters."""
        hooks = require_hooks(self)
        hooks.require_not_computing("reshard")
        for unit in hooks.units:
            unit.reshard_now()

    def reset_iter_state(self) -> None:
        """Reset everything that an aborted step left unfinished.

        The next forward does this by itself; call it to free memory at once. Only on the root.
        """
        if require_hooks(self).scheduler is not None:
            self._root_scheduler("reset_iter_state").abort()

    # Settings

    @contextmanager
    def settings(
        self, *, recurse: bool = True, is_last_backward: bool | None = None, **changes: Any
    ) -> Iterator[None]:
        """Change settings in a scope and restore them at its end, also after an error.

        Takes the names of the setters: `reshard_after_forward`, `reshard_after_backward`,
        `requires_gradient_sync`, `requires_all_reduce`, `gradient_divide_factor`,
        `force_sum_reduction_for_comms`, `reduce_scatter_unused_params`,
        `reduce_scatter_max_input_buffers`, `unshard_in_backward`, `keep_unsharded_storage`, and
        `is_last_backward`.
        """
        with settings_scope(self._units(recurse), **changes):
            if is_last_backward is None:
                yield
                return
            scheduler = require_hooks(self).ensure_scheduler()
            before, scheduler.is_last_backward = scheduler.is_last_backward, is_last_backward
            try:
                yield
            finally:
                scheduler.is_last_backward = before

    def no_sync(self, *, recurse: bool = True) -> AbstractContextManager[None]:
        """Accumulate gradients without communication inside this scope."""
        return self.settings(
            recurse=recurse, requires_gradient_sync=False, requires_all_reduce=False
        )

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last of a step, which waits for all reductions."""
        require_hooks(self).ensure_scheduler().is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether the caller completes backward, by `finalize_backward`. Only on the root."""
        self._root_scheduler("set_manual_backward_finalization").set_manual_finalization(enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Complete pending reductions and resharding, after one backward or several.

        For several, disable gradient synchronization, and enable it again before this call. With
        `async_op`, returns a handle; wait for it before using gradients or running the model.
        """
        hooks = require_hooks(self)
        if hooks.scheduler is None:  # nothing has run
            return GradientReductionHandle() if async_op else None
        return self._root_scheduler("finalize_backward").finalize_backward(async_op=async_op)

    def _root_scheduler(self, method: str) -> Scheduler:
        hooks = require_hooks(self)
        scheduler = hooks.ensure_scheduler()
        if not hooks.is_root:
            raise LifecycleError(
                f"{hooks.name}: {method} must be called on the root FSDP module; call it on "
                f"{scheduler.root.name}."
            )
        return scheduler

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients, or accumulates them unreduced on each rank."""
        value = requires_gradient_sync
        _change(self._units(recurse), requires_gradient_sync=value, requires_all_reduce=value)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether gradients are also all-reduced over the replicate axis of a 2D mesh."""
        _change(self._units(recurse), requires_all_reduce=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what the sum of gradients is divided by, instead of the number of ranks."""
        _change(self._units(False), gradient_divide_factor=float(factor))

    # Its former name.
    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether collectives only sum, with a separate division."""
        _change(self._units(False), force_sum_reduction_for_comms=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether zeros are reduced for parameters that got no gradient on this rank."""
        value = reduce_scatter_unused_params
        _change(self._units(recurse), reduce_scatter_unused_params=value)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many units' gradients may be in flight: more overlap, more memory."""
        is_int = isinstance(max_input_buffers, int) and not isinstance(max_input_buffers, bool)
        if not is_int or max_input_buffers < 1:
            kind = type(max_input_buffers).__name__
            wrong = f"a positive int, got {max_input_buffers}" if is_int else f"an int, got {kind}"
            raise (ConfigError if is_int else TypeError)(
                f"set_reduce_scatter_max_input_buffers: max_input_buffers must be {wrong}; pass 1 "
                "or more."
            )
        _change(self._units(recurse), reduce_scatter_max_input_buffers=max_input_buffers)

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | int, recurse: bool = True
    ) -> None:
        """Change `reshard_after_forward` from the next forward on."""
        _change(self._units(recurse), reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether full parameters are freed after backward; False saves an all-gather."""
        _change(self._units(recurse), reshard_after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether full parameters keep their memory, and data pointers, while sharded."""
        _change(self._units(recurse), keep_unsharded_storage=keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward needs this module's parameters; that of an embedding does not."""
        _change(self._units(False), unshard_in_backward=unshard_in_backward)

    # Order

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set the modules to all-gather while this one runs forward, instead of the next."""
        require_hooks(self).forward_prefetch = _hooks_of_all(
            "prefetch: Expects FSDPModule", modules
        )

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set the modules to all-gather while this one runs backward, instead of the previous."""
        require_hooks(self).backward_prefetch = _hooks_of_all(
            "prefetch: Expects FSDPModule", modules
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for compatibility with torch: all-gathers return memory to their stream."""

    def set_post_optim_event(self, event: Any) -> None:
        """Make the next forward's all-gathers wait for this event, not for all of compute."""
        require_hooks(self).ensure_scheduler().post_optim_event = event

    # Collectives

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None
    ) -> None:
        """Call `hook(reduced)` on the unit's reduced gradients before they are assigned."""
        for unit in self._units_of_one_mesh("set_all_reduce_hook"):
            if stream is not None and not unit.mesh_info.replicate.is_single:
                raise ConfigError(
                    f"{unit.name}: stream cannot be set when using native HSDP; leave it out: the "
                    "hook runs on the stream of the all-reduce."
                )
            unit.comm.all_reduce_hook, unit.comm.all_reduce_stream = hook, stream

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """All-gather this unit through a custom collective, in memory that it allocates."""
        for unit in self._units_of_one_mesh("set_custom_all_gather"):
            require_plain_wires("set_custom_all_gather", unit.name, unit.layout, gathers=True)
            unit.comm.customize(all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter this unit through a custom collective, in memory that it allocates."""
        for unit in self._units_of_one_mesh("set_custom_reduce_scatter"):
            require_plain_wires("set_custom_reduce_scatter", unit.name, unit.layout)
            unit.comm.customize(reduce_scatter=comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Communicate in memory that the process group's backend allocates, if it can."""
        for unit in self._units_without("set_allocate_memory_from_process_group_for_comm"):
            unit.comm.current = unit.comm.default
            group = unit.mesh_info.shard.group
            if enable and group is not None:
                if not all(lane.dtypes.reduce_wire.is_plain for lane in unit.layout.lanes):
                    what = "set_allocate_memory_from_process_group_for_comm"
                    require_plain_wires(what, unit.name, unit.layout)
                gather, reduce = ProcessGroupAllGather(group), ProcessGroupReduceScatter(group)
                unit.comm.customize(all_gather=gather, reduce_scatter=reduce)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """All-gather in symmetric memory; needs GPUs on which NCCL can register it."""
        for unit in self._units_without("set_symm_mem_for_comm"):
            gather = SymmetricAllGather(unit.name, unit.mesh_info, backend)
            unit.comm.customize(all_gather=gather)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce over a separate process group, so that all-gathers and reductions overlap.

        A collective call: all ranks of the mesh must make it.
        """
        for unit in self._units(recurse):
            mesh_info = unit.mesh_info
            unit.comm.reduce_axis = mesh_info.second_shard_axis() if enable else mesh_info.shard

    def _get_fsdp_state(self) -> FSDPState:
        state = state_of(cast(nn.Module, self))
        assert state is not None  # its class was changed when it was sharded
        return state

    def _units(self, recurse: bool) -> list[Unit]:
        return units_below(cast(nn.Module, self)) if recurse else require_hooks(self).units

    def _units_of_one_mesh(self, what: str) -> list[Unit]:
        own = require_hooks(self).units
        units = [unit for unit in own if unit.params] or own[:1]
        num_meshes = len({unit.mesh_info for unit in units})
        if num_meshes > 1:
            raise ConfigError(
                f"{units[0].name}: {what} is not supported with multiple param groups, here on "
                f"{num_meshes} meshes; leave parameters with a mesh of their own to another "
                "fully_shard call."
            )
        return units

    def _units_without(self, what: str) -> list[Unit]:
        """The units, which must not have custom collectives."""
        units = self._units(recurse=False)
        for unit in units:
            own = (unit.comm.current.custom_all_gather, unit.comm.current.custom_reduce_scatter)
            if not all(isinstance(each, ProcessGroupMemory | None) for each in own):
                raise MisuseError(
                    f"{unit.name}: {what} cannot be combined with custom collectives; choose one "
                    "of the two."
                )
        return units
