"""A mesh, as the two axes that data parallelism has."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.api import DataParallelMeshDims
from fullshard.errors import ConfigError, TopologyError


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """One axis of a mesh, seen from this rank. An axis of one rank needs no group."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of_group(cls, group: dist.ProcessGroup) -> Axis:
        return cls(group.size(), group.rank(), group)

    @property
    def is_single(self) -> bool:
        return self.size == 1

    def global_ranks(self) -> list[int]:
        return [dist.get_rank()] if self.group is None else dist.get_process_group_ranks(self.group)


@dataclass(frozen=True, eq=False)
class Topology:
    """Where a unit's parameters are sharded and where they are replicated.

    `mesh` is the data-parallel mesh. With `dims`, parameters are DTensors on `full_mesh`, of
    which the data-parallel axes are named by `dims`.
    """

    mesh: DeviceMesh
    shard: Axis
    replicate: Axis
    dims: DataParallelMeshDims | None = None
    full_mesh: DeviceMesh | None = None
    _thin: dict[int, Axis] = field(default_factory=dict)
    _twins: list[Axis] = field(default_factory=list)

    @property
    def device_type(self) -> str:
        return self.mesh.device_type

    @property
    def num_ranks(self) -> int:
        return self.shard.size * self.replicate.size

    def thin_axis(self, size: int) -> Axis:
        """Groups of `size` neighbouring ranks of the shard axis; its ranks must ask alike."""
        if self.dims is not None:
            raise TopologyError(
                "reshard_after_forward: a number of ranks needs a mesh of one or two axes, "
                "found dp_mesh_dims on a full mesh; pass True or False."
            )
        if size not in self._thin:
            first = self.shard.rank // size * size
            ranks = self.shard.global_ranks()[first : first + size]
            # Locally: other slices of the same mesh may ask for other sizes, or not at all.
            group = dist.new_group(ranks, use_local_synchronization=True)
            self._thin[size] = Axis.of_group(group)
        return self._thin[size]

    def twin_shard_axis(self) -> Axis:
        """The shard axis over a second process group; all its ranks must ask alike."""
        if self.shard.group is None:
            return self.shard
        if not self._twins:
            ranks = self.shard.global_ranks()
            group = dist.new_group(ranks, use_local_synchronization=True)
            self._twins.append(Axis.of_group(group))
        return self._twins[0]

    def __repr__(self) -> str:
        sizes = f"replicate {self.replicate.size} x shard {self.shard.size}"
        return f"Topology({self.device_type}: {sizes})"


_known: dict[tuple[object, ...], Topology] = {}


def topology_of(mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> Topology:
    """The topology of a mesh. Units on one mesh share one, and with it their groups.

    Meshes of the same ranks are equal, even if they were made of different groups.
    """
    groups = [] if mesh.get_coordinate() is None else mesh.get_all_groups()
    key = (mesh, dims, *groups)
    known = _known.get(key)
    if known is not None and still_known(known):
        return known
    _known[key] = topology = _full_topology(mesh, dims) if dims else _plain_topology(mesh)
    return topology


def still_known(topology: Topology) -> bool:
    """Whether the groups still exist: a process group may be destroyed and made again."""
    groups = (topology.shard.group, topology.replicate.group)
    alive = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
    return all(group is None or group in alive for group in groups)


def require_initialized(subject: str) -> None:
    """Initialise the default process group from the environment, unless it is there."""
    if dist.is_initialized():
        return
    missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if n not in os.environ]
    if missing:
        raise TopologyError(
            f"{subject}: a process group must be initialised before sharding without a mesh, "
            f"found none and no {', '.join(missing)} in the environment; start the program "
            "with torchrun or call torch.distributed.init_process_group first."
        )
    dist.init_process_group()


def default_mesh() -> DeviceMesh:
    """All ranks on one axis, on the accelerator if there is one."""
    require_initialized("fully_shard")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this rank: the current one of the mesh's type."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(mesh.device_type)
    return torch.device(mesh.device_type, module.current_device())


def _plain_topology(mesh: DeviceMesh) -> Topology:
    if mesh.ndim not in (1, 2):
        raise TopologyError(
            f"mesh: one axis (shard) or two (replicate, shard) expected, found {mesh.ndim} in "
            f"{mesh}; pass a slice such as mesh['dp'], or name the axes with dp_mesh_dims."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise TopologyError(
            "mesh: the two axes of a mesh must have names, found none; pass "
            "mesh_dim_names=('replicate', 'shard') to init_device_mesh."
        )
    _require_member(mesh)
    shard = Axis.of_group(mesh.get_group(mesh.ndim - 1))
    replicate = Axis.of_group(mesh.get_group(0)) if mesh.ndim == 2 else Axis()
    return Topology(mesh, shard, replicate)


def _full_topology(mesh: DeviceMesh, dims: DataParallelMeshDims) -> Topology:
    names = mesh.mesh_dim_names
    if names is None:
        raise TopologyError(
            "mesh: its axes must have names when dp_mesh_dims is given, found none; pass "
            "mesh_dim_names to init_device_mesh."
        )
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise TopologyError(
                f"dp_mesh_dims: {name!r} must be an axis of the mesh, found {names}; "
                "correct the name or the mesh."
            )
    _require_member(mesh)
    shard_mesh = joined_axes(mesh, dims.shard_names)
    replicate_mesh = joined_axes(mesh, dims.replicate_names)
    dp_mesh = shard_mesh or replicate_mesh
    assert dp_mesh is not None  # DataParallelMeshDims has at least one name
    return Topology(
        dp_mesh,
        Axis.of_group(shard_mesh.get_group()) if shard_mesh else Axis(),
        Axis.of_group(replicate_mesh.get_group()) if replicate_mesh else Axis(),
        dims,
        mesh,
    )


def joined_axes(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    """The named axes of a mesh as one axis; None for no names."""
    if not names:
        return None
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def _require_member(mesh: DeviceMesh) -> None:
    if mesh.get_coordinate() is None:
        raise TopologyError(
            f"mesh: this rank ({dist.get_rank()}) must be part of it, found {mesh}; shard only "
            "on the ranks of the mesh."
        )


def thin_size(topology: Topology, value: int) -> bool | int:
    """Check `reshard_after_forward` as a number of ranks; the extremes are plain True and False."""
    size = topology.shard.size
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    if value not in divisors:
        raise ConfigError(
            f"reshard_after_forward: a number of ranks must divide the shard axis of size {size}, "
            f"found {value}; choose one of {divisors}."
        )
    if value == 1:
        return False
    return True if value == size else value
