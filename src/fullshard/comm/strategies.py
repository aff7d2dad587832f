"""What a sharding strategy makes of process groups and meshes."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.api import ShardingStrategy
from fullshard.comm.topology import Axis, Topology, require_initialized, still_known
from fullshard.errors import ConfigError, TopologyError

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

_known: dict[tuple[Any, ...], Topology] = {}


def strategy_topology(
    strategy: ShardingStrategy,
    process_group: Any,
    device_mesh: DeviceMesh | None,
    device_type: str,
) -> Topology:
    """The axes of a wrapper. Wrappers that are given the same share one topology."""
    if process_group is not None and device_mesh is not None:
        raise ConfigError(
            "FullyShardedDataParallel: a process group or a device mesh is expected, found both; "
            "pass the device mesh alone."
        )
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise ConfigError(
            f"device_mesh: a DeviceMesh is expected, found {type(device_mesh).__name__}; make one "
            "with torch.distributed.device_mesh.init_device_mesh."
        )
    if isinstance(process_group, list):
        process_group = tuple(process_group)
    require_initialized("FullyShardedDataParallel")
    key = (strategy, process_group, device_mesh, device_type, dist.group.WORLD)
    known = _known.get(key)
    if known is None or not still_known(known):
        make = _hybrid if strategy in HYBRID else _plain
        _known[key] = known = make(strategy, process_group, device_mesh, device_type)
    return known


def _plain(
    strategy: ShardingStrategy, process_group: Any, mesh: DeviceMesh | None, device_type: str
) -> Topology:
    if mesh is not None:
        _require_ndim(mesh, 1, strategy)
    else:
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"process_group: {strategy} needs one process group, found {process_group!r}; pass "
                "a group, or leave it out for all ranks."
            )
        mesh = DeviceMesh.from_group(group, device_type)
    axis = Axis.of_group(mesh.get_group())
    if strategy is ShardingStrategy.NO_SHARD:
        return Topology(mesh, Axis(), axis)
    return Topology(mesh, axis, Axis())


def _hybrid(
    strategy: ShardingStrategy, process_group: Any, mesh: DeviceMesh | None, device_type: str
) -> Topology:
    if mesh is not None:
        _require_ndim(mesh, 2, strategy)
        return Topology(mesh, Axis.of_group(mesh.get_group(1)), Axis.of_group(mesh.get_group(0)))
    if process_group is None:
        mesh = _mesh_of_hosts(device_type)
        return Topology(mesh, Axis.of_group(mesh.get_group(1)), Axis.of_group(mesh.get_group(0)))
    is_pair = isinstance(process_group, tuple) and len(process_group) == 2
    if not is_pair or not all(isinstance(each, dist.ProcessGroup) for each in process_group):
        raise ConfigError(
            f"process_group: {strategy} needs a pair of groups (to shard in, to replicate over), "
            f"found {process_group!r}; pass a pair, a 2D device mesh, or neither."
        )
    shard, replicate = process_group
    return Topology(
        _mesh_of_groups(shard, replicate, device_type),
        Axis.of_group(shard),
        Axis.of_group(replicate),
    )


def _mesh_of_groups(
    shard: dist.ProcessGroup, replicate: dist.ProcessGroup, device_type: str
) -> DeviceMesh:
    """The mesh whose axes two groups are: a collective over the second."""
    rows: list[Any] = [None] * replicate.size()
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
    if len({len(row) for row in rows}) > 1 or len({r for row in rows for r in row}) < sum(
        len(row) for row in rows
    ):
        raise TopologyError(
            "process_group: the groups to shard in must be of one size and have no rank in common, "
            f"found {rows}; make them with init_device_mesh and pass device_mesh."
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
            f"FullyShardedDataParallel: hybrid sharding needs as many ranks on every host, found "
            f"{world} ranks and {num_local} on this one; pass a 2D device mesh."
        )
    return init_device_mesh(
        device_type, (world // num_local, num_local), mesh_dim_names=("replicate", "shard")
    )


def _require_ndim(mesh: DeviceMesh, ndim: int, strategy: ShardingStrategy) -> None:
    if mesh.ndim != ndim:
        raise TopologyError(
            f"device_mesh: {strategy} needs a mesh of {ndim} axes, found {mesh.ndim} in {mesh}; "
            "pass a slice of it, or another strategy."
        )
