"""The placements of a parameter's shard as a DTensor; the parameter may already be a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard._torch import (
    DTensorSpec,
    StridedShard,
    TensorMeta,
    concatenate_meshes,
    local_tensor,
    new_dtensor,
    spec_of,
)
from fullshard.api import DataParallelMeshDims
from fullshard.comm.collectives import all_gather_flat
from fullshard.comm.mesh import Axis, MeshInfo, current_device, joined_axes
from fullshard.errors import ConfigError, TopologyError, UnsupportedError
from fullshard.layout.split import Box, RowSplit


@dataclass(frozen=True, slots=True)
class Placed:
    """A parameter with its placements chosen.

    `local` is what this rank has of it before sharding; `shard_spec` describes the shard, and
    `full_spec` the full parameter where it is a DTensor itself (tensor parallelism).
    """

    local: torch.Tensor
    dim: int | None
    shard_spec: DTensorSpec
    full_spec: DTensorSpec | None


def place(name: str, param: torch.Tensor, dim: int | None, mesh_info: MeshInfo) -> Placed:
    """Choose the placements of a parameter that is cut along `dim` (None: kept whole)."""
    mesh, placements = mesh_info.mesh, [Replicate()] * mesh_info.mesh.ndim
    if not isinstance(param, DTensor):
        if mesh_info.dims is not None:
            raise ConfigError(
                f"{name}: When dp_mesh_dims is provided, all parameters must be DTensors on the "
                "full SPMD mesh, but this is a plain tensor; distribute the module first, or leave "
                "dp_mesh_dims out."
            )
        stride = torch.empty(param.size(), device="meta").stride()  # full parameters are contiguous
        meta = TensorMeta(param.size(), stride, param.dtype)
        cut = _cut(mesh, placements, mesh.ndim - 1, dim)
        return Placed(param.detach(), dim, DTensorSpec(mesh, cut, meta), None)
    full_spec = spec_of(param)
    if full_spec.mesh.device_type != mesh_info.device_type:
        raise TopologyError(
            f"{name}: its mesh is of device type {full_spec.mesh.device_type}, but it is sharded "
            f"on {mesh_info.device_type}; use one type."
        )
    if mesh_info.dims is not None:
        mesh, cut = _on_full_mesh(name, full_spec, dim, mesh_info, mesh_info.dims)
    else:
        try:
            mesh = concatenate_meshes([mesh_info.mesh, full_spec.mesh])
        except (RuntimeError, ValueError) as error:
            raise TopologyError(
                f"{name}: its mesh and the data-parallel mesh must be slices of one root mesh, "
                f"but are {full_spec.mesh} and {mesh_info.mesh}; slice both from one "
                "init_device_mesh."
            ) from error
        axis = mesh_info.mesh.ndim - 1
        cut = _cut(mesh, [*placements, *full_spec.placements], axis, dim)
    shard_spec = DTensorSpec(mesh, cut, full_spec.tensor_meta)
    return Placed(local_tensor(param).detach(), dim, shard_spec, full_spec)


def _on_full_mesh(
    name: str,
    full_spec: DTensorSpec,
    dim: int | None,
    mesh_info: MeshInfo,
    dims: DataParallelMeshDims,
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Place a shard on its parameter's own mesh, where data-parallel axes must be replicated."""
    mesh, placements = full_spec.mesh, full_spec.placements
    names = mesh.mesh_dim_names or ()
    if mesh is not mesh_info.full_mesh:
        raise TopologyError(
            f"{name}: Expected param's DTensor mesh to be the same mesh passed to fully_shard, but "
            f"got different mesh objects: found {mesh}; distribute it on {mesh_info.full_mesh}."
        )
    for axis in mesh_info.dp_axes:
        if not isinstance(placements[axis], Replicate):
            kind = "shard" if names[axis] in dims.shard_names else "replicate"
            raise ConfigError(
                f"{name}: Expected Replicate() on DP {kind} dim {names[axis]!r} (index {axis}) but "
                f"got {placements[axis]}; leave that axis to fully_shard."
            )
    first = mesh_info.dp_axes[0]
    cut = _cut(mesh, placements, first, dim if dims.shard_names else None)
    if len(dims.shard_names) < 2:
        return mesh, cut
    # The shard axes become one, in the place of the first.
    kept = [axis for axis, each in enumerate(names) if each not in dims.shard_names[1:]]
    joined = [dims.shard_names if axis == first else (names[axis],) for axis in kept]
    meshes = [joined_axes(mesh, each) for each in joined]
    return concatenate_meshes(meshes), tuple(cut[axis] for axis in kept)


def _cut(
    mesh: DeviceMesh, placements: Sequence[Placement], axis: int, dim: int | None
) -> tuple[Placement, ...]:
    """Placements where `axis` cuts a dim, after the axes to its right that do so already."""
    if dim is None:
        return tuple(placements)
    factor = prod(
        mesh.size(other)
        for other, each in enumerate(placements)
        if other > axis and isinstance(each, (Shard, StridedShard)) and each.dim == dim
    )
    shard = Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor)
    return (*placements[:axis], shard, *placements[axis + 1 :])


as_dtensor = new_dtensor


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The same placements for a tensor of another dtype."""
    meta = spec.tensor_meta
    if meta is None or meta.dtype == dtype:
        return spec
    return replace(spec, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))


def local_gradient(
    grad: torch.Tensor, full_spec: DTensorSpec | None, mesh_info: MeshInfo
) -> torch.Tensor:
    """This rank's part of a full parameter's gradient, before any data-parallel reduce."""
    if full_spec is None:
        return grad
    if not isinstance(grad, DTensor):
        raise TopologyError(
            f"gradient: it is a {type(grad).__name__}, but the parameter is a DTensor placed "
            f"{full_spec.placements}; return DTensors from custom backward functions."
        )
    wanted = list(full_spec.placements)
    # We reduce over the data-parallel axes: a redistribution there would reduce twice.
    for axis in mesh_info.dp_axes:
        wanted[axis] = grad.placements[axis]
    if tuple(wanted) != grad.placements:
        grad = grad.redistribute(placements=wanted)
    return _arrived(local_tensor(grad))


def _arrived(local: torch.Tensor) -> torch.Tensor:
    """A local tensor, after the collective that fills it."""
    return local.wait() if hasattr(local, "wait") else local


def full_tensor(dtensor: DTensor) -> torch.Tensor:
    """The full tensor of a DTensor on this rank's device of the mesh, without a history.

    A collective over the mesh. `DTensor.full_tensor()` gathers with operations whose names are too
    long for gloo (see GlooCollectives).
    """
    mesh, placements = dtensor.device_mesh, dtensor.placements
    if any(each.is_partial() for each in placements):
        summed = [Replicate() if each.is_partial() else each for each in placements]
        return full_tensor(dtensor.redistribute(placements=summed))
    local = _arrived(local_tensor(dtensor)).detach().to(current_device(mesh.device_type))
    for dim, full_size in enumerate(dtensor.shape):
        sizes, axes = [full_size], _axes_in_order(mesh, placements, dim)
        for axis in axes:
            cut = RowSplit((sizes[-1],), 0, mesh.size(axis))
            sizes.append(len(cut.rows(mesh.get_local_rank(axis))))
        if sizes[-1] != local.size(dim):
            raise TopologyError(
                f"full_tensor: dim {dim} has size {local.size(dim)} on this rank, but {placements} "
                f"on a mesh of {tuple(mesh.shape)} means {sizes[-1]}; cut dims as torch.chunk does."
            )
        for axis, size in reversed(list(zip(axes, sizes, strict=False))):  # the last cut first
            cut = RowSplit((size,), 0, mesh.size(axis))
            padded = local.new_zeros([*local.shape[:dim], cut.chunk_rows, *local.shape[dim + 1 :]])
            padded.narrow(dim, 0, local.size(dim)).copy_(local)
            gathered = all_gather_flat(padded.view(-1), Axis(mesh.get_group(axis)))
            chunks = enumerate(gathered.view(mesh.size(axis), *padded.shape))
            local = torch.cat([each.narrow(dim, 0, len(cut.rows(n))) for n, each in chunks], dim)
    return local


def own_box(spec: DTensorSpec, shape: Sequence[int]) -> Box:
    """This rank's part of a full tensor with these placements."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim in range(len(shape)):
        for axis in _axes_in_order(spec.mesh, spec.placements, dim):
            rows = RowSplit((sizes[dim],), 0, spec.mesh.size(axis)).rows(
                spec.mesh.get_local_rank(axis)
            )
            offsets[dim], sizes[dim] = offsets[dim] + rows.start, len(rows)
    return Box(tuple(offsets), tuple(sizes))


def _axes_in_order(mesh: DeviceMesh, placements: Sequence[Placement], dim: int) -> list[int]:
    """The axes of the mesh that cut a dim, in the order in which they do."""
    axes: list[int] = []
    for axis, placement in reversed(list(enumerate(placements))):
        if isinstance(placement, StridedShard) and placement.dim == dim:
            # It cuts what axes to its right have cut into `split_factor` pieces already.
            sizes = [prod(mesh.size(each) for each in axes[:num]) for num in range(len(axes) + 1)]
            if placement.split_factor not in sizes:
                raise UnsupportedError(
                    f"full_tensor: {placements} on a mesh of {tuple(mesh.shape)} does not cut dim "
                    f"{dim} into the {placement.split_factor} pieces of {placement}; redistribute "
                    "the tensor first."
                )
            axes.insert(sizes.index(int(placement.split_factor)), axis)
        elif isinstance(placement, Shard) and placement.dim == dim:
            axes.insert(0, axis)
    return axes


def shard_dim(name: str, param: torch.Tensor, placement: Shard | None) -> int | None:
    """The dim that a parameter is cut along, counted from the front; None for a 0-dim one."""
    if placement is not None and not isinstance(placement, Shard):
        raise UnsupportedError(
            f"{name}: Invalid shard_placement_fn result: placement {placement!r}; return a Shard "
            "such as Shard(0)."
        )
    if param.ndim == 0:
        return None
    dim = 0 if placement is None else placement.dim
    if not -param.ndim <= dim < param.ndim:
        raise UnsupportedError(
            f"{name}: Shard dim {dim} is invalid for {param.ndim}D tensor: {param.shape}; "
            f"return a dim between 0 and {param.ndim - 1}."
        )
    return dim % param.ndim
