"""The first door: `fully_shard` shards a module in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.api import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    own_offload,
    own_precision,
)
from fullshard.comm.mesh import MeshInfo, default_mesh, device_of, mesh_info_of, subgroup_size
from fullshard.errors import ConfigError, MisuseError
from fullshard.fsdp_module import FSDPModule
from fullshard.runtime.build import ShardRequest, build_hooks
from fullshard.runtime.hooks import hooks_of
from fullshard.unit.settings import Settings

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
        settings=Settings(reshard_after_forward=_checked_reshard(reshard_after_forward, mesh_info)),
        placement_fn=shard_placement_fn,
        ignored=frozenset(ignored_params or ()),
    )
    build_hooks(request)
    for each in modules:
        each.__class__ = _sharded_class(type(each))
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a sharded module unshard and reshard as its forward does.

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
    """Let several roots (the chunks of a pipeline, say) move their units on the same streams."""
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


def _checked_reshard(value: bool | int | None, mesh_info: MeshInfo) -> bool | int | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ConfigError(
            "reshard_after_forward: a bool, a number of ranks or None is expected, found "
            f"{value!r}; pass True, False or a divisor of {mesh_info.shard.size}."
        )
    return subgroup_size(mesh_info, value)


def _sharded_class(original: type) -> type:
    """A class named after the original that is an FSDPModule too."""
    if original not in _sharded_classes:
        name = f"FSDP{original.__name__}"
        made = type(name, (FSDPModule, original), {"__module__": original.__module__})
        _sharded_classes[original] = made
    return _sharded_classes[original]


__all__ = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]
