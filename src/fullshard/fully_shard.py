"""`fully_shard` shards a module in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

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
from fullshard.comm.collectives import (
    CustomCollectives,
    ProcessGroupAllGather,
    ProcessGroupReduceScatter,
    is_ours,
    symmetric_all_gather,
)
from fullshard.comm.mesh import MeshInfo, default_mesh, device_of, mesh_info_of, subgroup_size
from fullshard.errors import ConfigError, LifecycleError, MisuseError
from fullshard.runtime.build import ShardRequest, build_hooks
from fullshard.runtime.hooks import ModuleHooks, UnshardHandle, hooks_of
from fullshard.runtime.scheduler import Scheduler
from fullshard.unit.reduce_scatter import require_no_wire_dtype
from fullshard.unit.settings import UnitSettings
from fullshard.unit.unit import Unit

PlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]

_sharded_classes: dict[type, type] = {}


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of a module over the ranks of a mesh, in place.

    The parameters below `module` that no earlier call has taken become one unit: gathered
    together before forward, freed after it, gathered again for backward, their gradients reduced
    together. So call it on the inner modules first, then on the outer ones, last on the model.
    A list of modules becomes one unit, of which a forward may run any part.

    Args:
        module: The module, or a list of modules. Modules without a forward (ModuleList) are
            refused.
        mesh: One axis (shard), or two named ones (replicate, shard). By default all ranks on one
            axis. Its device type says where the unit computes.
        reshard_after_forward: True frees the full parameters after forward; False keeps them for
            backward; None means True except for the root of a forward that takes gradients. An
            int keeps them spread over that many neighbouring ranks, so that backward gathers over
            a smaller group.
        shard_placement_fn: Chooses per parameter the dim to shard (`Shard(dim)`, also where it
            does not divide evenly), and with a `ShardPlacementResult` its own mesh.
        mp_policy: The dtypes to compute and reduce in.
        offload_policy: Where the shards live.
        ignored_params: Parameters to leave alone: not sharded, not moved, not reduced.
        dp_mesh_dims: Which axes of `mesh` are data parallel, for parameters that are DTensors
            on all of it.

    Returns:
        What was given, its class now also an `FSDPModule`.
    """
    modules = _checked_modules(module)
    mesh = default_mesh() if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh: a DeviceMesh is expected, found {type(mesh).__name__}; make one with "
            "torch.distributed.device_mesh.init_device_mesh."
        )
    mesh_info = mesh_info_of(mesh, dp_mesh_dims)
    request = ShardRequest(
        modules=modules,
        mesh_info=mesh_info,
        device=device_of(mesh),
        policy=own_precision(MixedPrecisionPolicy, mp_policy),
        offload=own_offload(offload_policy),
        settings=UnitSettings(
            reshard_after_forward=_checked_reshard_arg(reshard_after_forward, mesh_info)
        ),
        placement_fn=shard_placement_fn,
        ignored=frozenset(ignored_params or ()),
    )
    build_hooks(request)
    for each in modules:
        each.__class__ = _sharded_class(type(each))
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make another method of a sharded module unshard and reshard as its forward does.

    Does nothing on a module that is not sharded, so that a program can call it either way.
    """
    hooks = hooks_of(module)
    if hooks is None:
        return
    if not hasattr(module, method_name):
        raise ConfigError(
            f"{type(module).__name__}: a method to register must exist, found no {method_name!r}; "
            "correct the name."
        )
    method = getattr(module, method_name)

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks.pre_forward(module, args, kwargs)
        return hooks.post_forward(module, args, method(*args, **kwargs))

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return hooks.guarded(run, args, kwargs)

    setattr(module, method_name, guarded)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Share one comm context between several roots, for example the chunks of a pipeline."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigError(
                "share_comm_ctx: a list of sharded modules is expected, found "
                f"{type(module).__name__}; call fully_shard on it first."
            )
    hooks_list = [hooks for m in modules if isinstance(m, nn.Module) and (hooks := hooks_of(m))]
    if not hooks_list:
        return
    first = hooks_list[0]
    comm_ctx = first.scheduler.comm_ctx if first.scheduler is not None else first.units[0].comm_ctx
    for hooks in hooks_list:
        hooks.shared_comm_ctx = comm_ctx
        if hooks.scheduler is not None:
            hooks.scheduler.share(comm_ctx)


def _checked_modules(module: Any) -> tuple[nn.Module, ...]:
    given = list(module) if isinstance(module, (list, tuple)) else [module]
    if not given:
        raise ConfigError(
            "fully_shard: a module or a list of modules is expected, found an empty list; pass at "
            "least one module."
        )
    for each in given:
        kind = type(each).__name__
        if not isinstance(each, nn.Module):
            raise ConfigError(
                f"fully_shard: an nn.Module or a list of them is expected, found {kind}; pass the "
                "module itself."
            )
        is_container = isinstance(each, (nn.ModuleList, nn.ModuleDict))
        if is_container and type(each).forward is nn.Module.forward:
            raise ConfigError(
                f"fully_shard: a module with a forward is expected, found the container {kind}; "
                "call fully_shard on each of its modules, or on a list of them."
            )
        if hooks_of(each) is not None:
            raise MisuseError(
                f"{kind}: a module can be sharded once, found it sharded already; call fully_shard "
                "on each module once, inner modules first."
            )
    inner = {child for each in given for child in each.modules() if child is not each}
    return tuple(dict.fromkeys(each for each in given if each not in inner))


def _checked_reshard_arg(value: bool | int | None, mesh_info: MeshInfo) -> bool | int | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ConfigError(
            "reshard_after_forward: a bool, a number of ranks or None is expected, found "
            f"{value!r}; pass True, False or a divisor of {mesh_info.shard.size}."
        )
    return subgroup_size(mesh_info, value)


def _sharded_class(original: type) -> type:
    """A subclass of the original class that is an FSDPModule, too."""
    if original not in _sharded_classes:
        name = f"FSDP{original.__name__}"
        made = type(name, (FSDPModule, original), {"__module__": original.__module__})
        _sharded_classes[original] = made
    return _sharded_classes[original]


class FSDPModule:
    """The methods that `fully_shard` adds to a module.

    Setters act on the module and, unless `recurse=False`, on all sharded modules below it. Every
    one that makes sense for a while has a scoped form: `with model.settings(...)`, and
    `with model.no_sync()` for the most common.
    """

    _original_class_index = 2  # of [FSDPLinear, FSDPModule, Linear, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original class, so that a slice of a container is not sharded."""
        original: Any = cls.__mro__[cls._original_class_index]
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; if it raises, reset the scheduler."""
        return _hooks(self).guarded(super().__call__, args, kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise MisuseError(
            f"{type(self).__name__}: a sharded module must not be copied object by object, found "
            "copy.deepcopy on it; copy before fully_shard, or build a second model, shard it alike "
            "and load the state dict of this one."
        )

    # Unshard and reshard

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's parameters, but not those of sharded modules below it.

        With `async_op`, returns a handle; forward waits by itself for what nobody waited for.
        """
        return _hooks(self).unshard(async_op)

    def reshard(self) -> None:
        """Register the shards of this module and free the full parameters."""
        hooks = _hooks(self)
        hooks.require_not_computing("reshard")
        for unit in hooks.units:
            unit.reshard_now()

    def reset_iter_state(self) -> None:
        """Reset everything that an aborted step left unfinished.

        The next forward does this by itself; call it to free memory at once. Only on the root.
        """
        hooks = _hooks(self)
        if hooks.scheduler is None:
            return
        if not hooks.is_root:
            raise LifecycleError(
                f"{hooks.name}: reset_iter_state() must be called on the root module, found a "
                f"module below {hooks.scheduler.root.name}; call it there."
            )
        hooks.scheduler.abort()

    # Gradients

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last of a step, which waits for all reductions."""
        _scheduler(self).is_last_backward = is_last_backward

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients, or accumulates them unreduced on each rank."""
        self._set(
            recurse,
            requires_gradient_sync=requires_gradient_sync,
            requires_all_reduce=requires_gradient_sync,
        )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether gradients are also all-reduced over the replicate axis of a 2D mesh."""
        self._set(recurse, requires_all_reduce=requires_all_reduce)

    @contextmanager
    def no_sync(self, *, recurse: bool = True) -> Iterator[None]:
        """Accumulate gradients without communication inside this scope."""
        with self.settings(
            recurse=recurse, requires_gradient_sync=False, requires_all_reduce=False
        ):
            yield

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what the sum of gradients is divided by, instead of the number of ranks."""
        self._set(False, gradient_divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The former name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether collectives only sum, with a separate division."""
        self._set(False, force_sum_reduction_for_comms=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether zeros are reduced for parameters that got no gradient on this rank."""
        self._set(recurse, reduce_scatter_unused_params=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many units' gradients may be in flight: more overlap, more memory."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                "set_reduce_scatter_max_input_buffers: max_input_buffers must be an int, found "
                f"{type(max_input_buffers).__name__}; pass 1 or more."
            )
        if max_input_buffers < 1:
            raise ConfigError(
                "set_reduce_scatter_max_input_buffers: max_input_buffers must be at least 1, found "
                f"{max_input_buffers}; pass 1 or more."
            )
        self._set(recurse, reduce_scatter_max_input_buffers=max_input_buffers)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None
    ) -> None:
        """Call `hook(reduced)` on the unit's reduced gradients before they are assigned."""
        unit = self._only_unit("set_all_reduce_hook")
        if stream is not None and not unit.mesh_info.replicate.is_single:
            raise ConfigError(
                f"{unit.name}: stream must be left out on a mesh with a replicate axis, found "
                f"{stream}; the hook runs on the stream of the all-reduce."
            )
        unit.comm.all_reduce_hook, unit.comm.all_reduce_stream = hook, stream

    # Resharding

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | int, recurse: bool = True
    ) -> None:
        """Change `reshard_after_forward` from the next forward on."""
        for unit in self._units(recurse):
            unit.set(reshard_after_forward=_checked_reshard(unit, reshard_after_forward))

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether full parameters are freed after backward; False saves an all-gather."""
        self._set(recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward needs this module's parameters; that of an embedding does not."""
        self._set(False, unshard_in_backward=unshard_in_backward)

    @contextmanager
    def settings(self, *, recurse: bool = True, **changes: Any) -> Iterator[None]:
        """Change settings in a scope and restore them at its end, also after an error.

        Takes the names of the setters: `reshard_after_forward`, `reshard_after_backward`,
        `requires_gradient_sync`, `requires_all_reduce`, `gradient_divide_factor`,
        `force_sum_reduction_for_comms`, `reduce_scatter_unused_params`,
        `reduce_scatter_max_input_buffers`, `unshard_in_backward`, and `is_last_backward`.
        """
        units = self._units(recurse)
        before = [unit.settings for unit in units]
        root = _scheduler(self) if "is_last_backward" in changes else None
        was_last = root.is_last_backward if root is not None else True
        try:
            if root is not None:
                root.is_last_backward = changes.pop("is_last_backward")
            for unit in units:
                unit.set(**_checked_changes(unit, changes))
            yield
        finally:
            for unit, settings in zip(units, before, strict=True):
                unit.settings = settings
            if root is not None:
                root.is_last_backward = was_last

    # Order

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set the modules to all-gather while this one runs forward, instead of the next."""
        _hooks(self).forward_prefetch = _hooks_of_all(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set the modules to all-gather while this one runs backward, instead of the previous."""
        _hooks(self).backward_prefetch = _hooks_of_all(modules)

    def set_post_optim_event(self, event: Any) -> None:
        """Make the next forward's all-gathers wait for this event, not for all of compute."""
        _scheduler(self).post_optim_event = event

    # Collectives

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """All-gather this unit through a custom collective, in memory that it allocates."""
        self._only_unit("set_custom_all_gather").comm.customize(all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter this unit through a custom collective, in memory that it allocates."""
        unit = self._only_unit("set_custom_reduce_scatter")
        require_no_wire_dtype("set_custom_reduce_scatter", unit.name, unit.mesh_info, unit.policy)
        unit.comm.customize(reduce_scatter=comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Communicate in memory that the process group's backend allocates, if it can."""
        for unit in self._units(recurse=False):
            _require_own_collectives(unit, "set_allocate_memory_from_process_group_for_comm")
            unit.comm.current = unit.comm.default
            group = unit.mesh_info.shard.group
            if enable and group is not None:
                gather, reduce = ProcessGroupAllGather(group), ProcessGroupReduceScatter(group)
                unit.comm.customize(all_gather=gather, reduce_scatter=reduce)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """All-gather in symmetric memory; needs GPUs on which NCCL can register it."""
        for unit in self._units(recurse=False):
            _require_own_collectives(unit, "set_symm_mem_for_comm")
            gather = symmetric_all_gather(unit.name, unit.mesh_info, backend)
            unit.comm.customize(all_gather=gather)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce over a separate process group, so that all-gathers and reductions overlap.

        A collective call: all ranks of the mesh must make it.
        """
        for unit in self._units(recurse):
            unit.comm.reduce_axis = (
                unit.mesh_info.second_shard_axis() if enable else unit.mesh_info.shard
            )

    def _set(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            unit.set(**changes)

    def _units(self, recurse: bool) -> list[Unit]:
        module = cast(nn.Module, self)
        modules = module.modules() if recurse else [module]
        hooks_list = dict.fromkeys(r for m in modules if (r := hooks_of(m)) is not None)
        return [unit for hooks in hooks_list for unit in hooks.units]

    def _only_unit(self, what: str) -> Unit:
        units = [unit for unit in _hooks(self).units if unit.params] or _hooks(self).units[:1]
        if len(units) > 1:
            raise ConfigError(
                f"{units[0].name}: {what} needs parameters on one mesh, found {len(units)} meshes; "
                "leave parameters with a mesh of their own to another fully_shard call."
            )
        return units[0]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or convert the shards, and plan the units again."""
        hooks = _hooks(self)
        for unit in hooks.reads:
            unit.reshard_now()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for unit in hooks.units:
            unit.refresh()
        return result


def _hooks(module: Any) -> ModuleHooks:
    hooks = hooks_of(module)
    if hooks is None:
        raise LifecycleError(
            f"{type(module).__name__}: a module that fully_shard was called on is expected, found "
            "one without a unit; call fully_shard on it first."
        )
    return hooks


def _scheduler(module: Any) -> Scheduler:
    return _hooks(module).ensure_scheduler()


def _hooks_of_all(modules: Sequence[Any]) -> list[ModuleHooks]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigError(
                "prefetch: a list of sharded modules is expected, found "
                f"{type(module).__name__}; call fully_shard on it first."
            )
    return [_hooks(module) for module in modules]


def _checked_reshard(unit: Unit, value: Any) -> bool | int:
    if isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ConfigError(
            f"{unit.name}: reshard_after_forward must be a bool or a number of ranks, found "
            f"{value!r}; pass True, False or a divisor of {unit.mesh_info.shard.size}."
        )
    size = subgroup_size(unit.mesh_info, value)
    if not isinstance(size, bool):
        unit.require_plain_params()
        unit.mesh_info.subgroup_axis(size)
    return size


def _checked_changes(unit: Unit, changes: dict[str, Any]) -> dict[str, Any]:
    known = set(type(unit.settings).__slots__)
    unknown = sorted(set(changes) - known)
    if unknown:
        raise ConfigError(
            f"{unit.name}: settings must be among {sorted(known)}, found {unknown}; correct the "
            "name."
        )
    if changes.get("reshard_after_forward") is not None:
        value = _checked_reshard(unit, changes["reshard_after_forward"])
        return {**changes, "reshard_after_forward": value}
    return changes


def _require_own_collectives(unit: Unit, what: str) -> None:
    current = unit.comm.current
    if isinstance(current, CustomCollectives) and not all(map(is_ours, current.replaced)):
        raise MisuseError(
            f"{unit.name}: {what} must come without custom collectives, found them set; choose one "
            "of the two."
        )
