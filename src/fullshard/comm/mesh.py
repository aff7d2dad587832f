"""A mesh, as the two axes of data parallelism."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard._torch import flatten_mesh, is_registered, lifetime_of, local_group, timeout_of
from fullshard.api import DataParallelMeshDims, ShardingStrategy
from fullshard.device import simulation
from fullshard.errors import ConfigError, LifecycleError, TopologyError, UnsupportedError


class Axis:
    """One axis of a mesh, seen from this rank. An axis of one rank needs no group.

    It does not keep its group alive: an object that refers to an axis (a model, say) must not keep
    the threads and sockets of a group that was destroyed.
    """

    __slots__ = ("_group", "rank", "size")

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        # torch.distributed refers to the groups that it made until they are destroyed.
        self._group: Callable[[], dist.ProcessGroup | None] = lambda: group
        if group is not None and is_registered(group):
            self._group = weakref.ref(group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        group = self._group()
        if group is None and isinstance(self._group, weakref.ref):
            raise LifecycleError(
                f"mesh: the process group of an axis of {self.size} ranks was destroyed, but the "
                "model still needs it; build the model again after init_process_group."
            )
        return group

    @property
    def is_alive(self) -> bool:
        """Whether its group was not destroyed."""
        group = self._group()
        is_held = not isinstance(self._group, weakref.ref)
        return is_held or (group is not None and is_registered(group))

    @property
    def is_single(self) -> bool:
        return self.size == 1

    def global_ranks(self) -> list[int]:
        return [dist.get_rank()] if self.group is None else dist.get_process_group_ranks(self.group)


@dataclass(frozen=True, eq=False)
class MeshInfo:
    """Where a unit's parameters are sharded and where they are replicated.

    `mesh` is the data-parallel mesh. With `dims`, parameters are DTensors on `full_mesh`, of
    which the data-parallel axes are named by `dims` and numbered by `dp_axes`.
    """

    mesh: DeviceMesh
    shard: Axis
    replicate: Axis
    dims: DataParallelMeshDims | None = None
    full_mesh: DeviceMesh | None = None
    dp_axes: tuple[int, ...] = ()
    _subgroups: dict[int, Axis] = field(default_factory=dict)

    @property
    def device_type(self) -> str:
        return self.mesh.device_type

    @property
    def num_ranks(self) -> int:
        return self.shard.size * self.replicate.size

    @property
    def main(self) -> Axis:
        """The shard axis, or the replicate axis if nothing is sharded."""
        return self.replicate if self.shard.group is None else self.shard

    @property
    def is_alive(self) -> bool:
        return self.shard.is_alive and self.replicate.is_alive

    @property
    def timeout_s(self) -> float:
        """How long a collective may take."""
        return inf if self.main.group is None else timeout_of(self.main.group).total_seconds()

    def subgroup_axis(self, size: int) -> Axis:
        """Groups of `size` neighbors on the shard axis; all its ranks must call this alike."""
        return self._new_axis(size)

    def second_shard_axis(self) -> Axis:
        """The shard axis over a second process group; all its ranks must call this alike."""
        return self.shard if self.shard.group is None else self._new_axis(self.shard.size)

    def _new_axis(self, size: int) -> Axis:
        if size not in self._subgroups:
            assert self.shard.group is not None
            first = self.shard.rank // size * size
            ranks = self.shard.global_ranks()[first : first + size]
            # Synchronized locally: other slices of the mesh may use other sizes, or none.
            self._subgroups[size] = Axis(local_group(ranks, timeout_of(self.shard.group)))
        return self._subgroups[size]

    def __repr__(self) -> str:  # the same on all ranks
        sizes = f"replicate {self.replicate.size} x shard {self.shard.size}"
        return f"MeshInfo({self.device_type}: {sizes})"


# Units that are given the same mesh share one MeshInfo, and with it the groups that it makes. It
# cannot live on the mesh: equal meshes are made again and again. The key is the lifetime of the
# default process group: all other groups and meshes end with it.
_mesh_infos: weakref.WeakKeyDictionary[object, dict[tuple[Any, ...], MeshInfo]] = (
    weakref.WeakKeyDictionary()
)


def _shared(key: tuple[Any, ...], make: Callable[[], MeshInfo]) -> MeshInfo:
    """The MeshInfo of a key; a new one is made if there is none or its groups were destroyed."""
    world = dist.group.WORLD
    if world is None:
        raise TopologyError(
            "mesh: its process groups no longer exist, because the default process group was "
            "destroyed; make the mesh again after init_process_group."
        )
    infos = _mesh_infos.setdefault(lifetime_of(world), {})
    if key not in infos or not infos[key].is_alive:
        infos[key] = make()
    return infos[key]


def mesh_info_of(mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> MeshInfo:
    """The data-parallel axes of a mesh."""
    if mesh.get_coordinate() is None:
        raise TopologyError(
            f"mesh: {mesh} does not contain this rank ({dist.get_rank()}); shard only on the "
            "ranks of the mesh."
        )
    make, names = partial(_of_plain_mesh, mesh), None
    if dims is not None:
        dims = DataParallelMeshDims(dims.shard, dims.replicate)  # torch's too; users may change it
        make, names = partial(_of_full_mesh, mesh, dims), (dims.shard_names, dims.replicate_names)
    # Meshes of the same ranks are equal, even if they were made of different groups.
    return _shared((mesh, names, *mesh.get_all_groups()), make)


def require_initialized(subject: str) -> None:
    """Initialize the default process group from the environment, unless it is there."""
    if dist.is_initialized():
        return
    missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if n not in os.environ]
    if missing:
        raise TopologyError(
            f"{subject}: without a mesh, a process group must be initialized before sharding, "
            f"and {', '.join(missing)} are not in the environment; start the program with "
            "torchrun or call torch.distributed.init_process_group first."
        )
    dist.init_process_group()


def default_mesh() -> DeviceMesh:
    """All ranks on one axis, on the accelerator if there is one."""
    require_initialized("fully_shard")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def current_device(device_type: str) -> torch.device:
    """The device of this rank: the current device of a type."""
    simulated = simulation()
    if simulated is not None:
        return simulated.device.torch_device
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _of_plain_mesh(mesh: DeviceMesh) -> MeshInfo:
    if mesh.ndim not in (1, 2):
        raise TopologyError(
            f"mesh: fully_shard expects a 1D or 2D DeviceMesh but got {mesh}; pass a slice such "
            "as mesh['dp'], or name the axes with dp_mesh_dims."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise TopologyError(
            "mesh: the axes to replicate and to shard over must have names. Please "
            "init the 2D mesh for HSDP with mesh_dim_names specified; these are usually "
            "('replicate', 'shard')."
        )
    replicate = Axis(mesh.get_group(0)) if mesh.ndim == 2 else Axis()
    return MeshInfo(mesh, Axis(mesh.get_group(mesh.ndim - 1)), replicate)


def _of_full_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims) -> MeshInfo:
    names = mesh.mesh_dim_names
    if names is None:
        raise TopologyError(
            "dp_mesh_dims: mesh must have mesh_dim_names when dp_mesh_dims is provided; pass "
            "them to init_device_mesh."
        )
    dp_names = (*dims.shard_names, *dims.replicate_names)
    for name in dp_names:
        if name not in names:
            raise TopologyError(
                f"dp_mesh_dims: Mesh dim name {name!r} not found in mesh.mesh_dim_names {names}; "
                "correct the name."
            )
    meshes = [
        joined_axes(mesh, each) if each else None
        for each in (dims.shard_names, dims.replicate_names)
    ]
    shard, replicate = (Axis(each.get_group() if each else None) for each in meshes)
    dp_mesh = meshes[0] or meshes[1]
    assert dp_mesh is not None  # DataParallelMeshDims has at least one name
    dp_axes = tuple(map(names.index, dp_names))
    return MeshInfo(dp_mesh, shard, replicate, dims, mesh, dp_axes)


def joined_axes(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The named axes of a mesh as one axis."""
    return mesh[names[0]] if len(names) == 1 else flatten_mesh(mesh[names], "_".join(names))


def subgroup_size(mesh_info: MeshInfo, value: int) -> bool | int:
    """Check `reshard_after_forward` as a number of ranks; the extremes are plain True and False."""
    if mesh_info.dims is not None:
        raise UnsupportedError(
            "fully_shard: reshard_after_forward as int is not yet supported with SPMD mesh "
            f"(dp_mesh_dims); pass True or False, not {value}."
        )
    size = mesh_info.shard.size
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    if value not in divisors:
        raise ConfigError(
            "fully_shard: If passing reshard_after_forward as an int, it should be a factor of "
            f"{size}, not {value}; choose one of {divisors}."
        )
    if value == 1:
        return False
    return True if value == size else value


HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def mesh_info_for_strategy(
    strategy: ShardingStrategy, process_group: Any, device_mesh: DeviceMesh | None, device_type: str
) -> MeshInfo:
    """The axes of a wrapper. Wrappers with the same arguments share one MeshInfo."""
    if process_group is not None and device_mesh is not None:
        raise ConfigError(
            "FullyShardedDataParallel: Cannot pass both process_group and device_mesh at the same "
            "time; pass the device mesh alone."
        )
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise ConfigError(
            f"device_mesh must be a DeviceMesh, not a {type(device_mesh).__name__}; make one "
            "with torch.distributed.device_mesh.init_device_mesh."
        )
    if isinstance(process_group, list):
        process_group = tuple(process_group)
    require_initialized("FullyShardedDataParallel")
    given = (strategy, process_group, device_mesh, device_type)
    return _shared(given, partial(_of_strategy, *given))


def _of_strategy(
    strategy: ShardingStrategy, process_group: Any, mesh: DeviceMesh | None, device_type: str
) -> MeshInfo:
    ndim = 2 if strategy in HYBRID else 1
    if mesh is None and process_group is None and ndim == 2:
        mesh = _mesh_of_hosts(device_type)
    elif ndim == 1 and _is_group(process_group) and not is_registered(process_group):
        # It cannot be part of a mesh, but only these attributes of a mesh are needed.
        unregistered: Any = SimpleNamespace(ndim=1, device_type=device_type)
        unregistered.get_group = lambda: process_group
        mesh = unregistered
    elif mesh is None:
        mesh = _mesh_of_groups(strategy, process_group or dist.group.WORLD, device_type)
    if mesh.ndim != ndim:
        raise TopologyError(
            f"{strategy}: Expected device_mesh to have ndim={ndim} but got {mesh.ndim} in "
            f"{mesh}; pass a slice of it, or another strategy."
        )
    if ndim == 2:
        return MeshInfo(mesh, Axis(mesh.get_group(1)), Axis(mesh.get_group(0)))
    axis = Axis(mesh.get_group())
    is_replicated = strategy is ShardingStrategy.NO_SHARD
    return MeshInfo(mesh, Axis(), axis) if is_replicated else MeshInfo(mesh, axis, Axis())


def _is_group(given: Any) -> bool:
    """Whether something is a process group, either torch's or one that is like it."""
    return callable(getattr(given, "rank", None)) and callable(getattr(given, "size", None))


def _mesh_of_groups(strategy: ShardingStrategy, given: Any, device_type: str) -> DeviceMesh:
    """The mesh whose axes are the given groups. For two, a collective over the second."""
    groups = given if isinstance(given, tuple) else (given,)
    is_hybrid = strategy in HYBRID
    if len(groups) != 1 + is_hybrid or not all(map(_is_group, groups)):
        pair = "Tuple[dist.ProcessGroup, dist.ProcessGroup]"  # to shard in, to replicate over
        raise ConfigError(
            f"{strategy}: Expected process_group to be passed in as either None or "
            f"{pair if is_hybrid else 'one process group'} but got {type(given)}; "
            "pass that, a device mesh, or neither."
        )
    if not is_hybrid:
        return DeviceMesh.from_group(groups[0], device_type)
    shard, replicate = groups
    rows: list[Any] = [None] * replicate.size()
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
    num_ranks = len({rank for row in rows for rank in row})
    if {len(row) * len(rows) for row in rows} != {num_ranks}:
        raise TopologyError(
            f"process_group: the groups to shard in, {rows}, must have one size and no rank in "
            "common; make them with init_device_mesh and pass device_mesh."
        )
    return DeviceMesh.from_group(
        [replicate, shard],
        device_type,
        mesh=torch.tensor(rows, dtype=torch.int),
        mesh_dim_names=("replicate", "shard"),
    )


def _mesh_of_hosts(device_type: str) -> DeviceMesh:
    """Shard inside a host, replicate over hosts."""
    world = dist.get_world_size()
    if "LOCAL_WORLD_SIZE" in os.environ:
        num_local = int(os.environ["LOCAL_WORLD_SIZE"])
    elif device_type == "cpu":
        num_local = world
    else:
        num_local = torch.get_device_module(device_type).device_count()
    num_local = min(num_local, world)
    if world % num_local:
        raise TopologyError(
            "FullyShardedDataParallel: hybrid sharding needs as many ranks on every host, but "
            f"of {world} ranks {num_local} are on this one; pass a 2D device mesh."
        )
    return init_device_mesh(
        device_type, (world // num_local, num_local), mesh_dim_names=("replicate", "shard")
    )
