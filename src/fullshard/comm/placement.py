"""What a parameter's shard is as a DTensor, also of one that already is a DTensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

# torch 2.11 to 2.13 keep the spec of a DTensor and the placement of a dim that two axes share
# in these modules, without a public name.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from fullshard.comm.mesh import MeshInfo, joined_axes
from fullshard.errors import ConfigError, TopologyError, UnsupportedError

__all__ = [
    "DTensorSpec",
    "Placed",
    "as_dtensor",
    "local_gradient",
    "place",
    "shard_dim",
    "with_dtype",
]


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
    if not isinstance(param, DTensor):
        if mesh_info.dims is not None:
            raise ConfigError(
                f"{name}: with dp_mesh_dims every parameter must be a DTensor on the full mesh, "
                "found a plain tensor; distribute the module first, or leave dp_mesh_dims out."
            )
        stride = torch.empty(param.size(), device="meta").stride()  # full parameters are contiguous
        meta = TensorMeta(param.size(), stride, param.dtype)
        placements = _dp_placements(mesh_info, dim)
        return Placed(param.detach(), dim, DTensorSpec(mesh_info.mesh, placements, meta), None)
    full_spec = param._spec
    if param.device_mesh.device_type != mesh_info.device_type:
        raise TopologyError(
            f"{name}: its mesh must be of the device type that it is sharded on "
            f"({mesh_info.device_type}), found {param.device_mesh.device_type}; use one device type."
        )
    if mesh_info.dims is not None:
        shard_spec = _on_full_mesh(name, full_spec, dim, mesh_info)
    else:
        shard_spec = _beside_other_axes(name, full_spec, dim, mesh_info)
    return Placed(param._local_tensor.detach(), dim, shard_spec, full_spec)


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around a local tensor, for as little host time as there is.

    `DTensor.__init__` does nothing, through two wrappers, in torch 2.11 to 2.13.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


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
            f"gradient: a DTensor expected for a parameter placed {full_spec.placements}, found "
            f"{type(grad).__name__}; return DTensors from custom backward functions."
        )
    wanted = list(full_spec.placements)
    if mesh_info.dims is not None:
        # The data-parallel axes are ours to reduce: a redistribution there would do it twice.
        for axis in _dp_axes(mesh_info):
            wanted[axis] = grad.placements[axis]
    if tuple(wanted) != grad.placements:
        grad = grad.redistribute(placements=wanted)
    local = grad._local_tensor
    return local.wait() if hasattr(local, "wait") else local


def _dp_placements(mesh_info: MeshInfo, dim: int | None) -> tuple[Placement, ...]:
    shard: Placement = Replicate() if dim is None else Shard(dim)
    return (Replicate(), shard) if mesh_info.mesh.ndim == 2 else (shard,)


def _beside_other_axes(
    name: str, full_spec: DTensorSpec, dim: int | None, mesh_info: MeshInfo
) -> DTensorSpec:
    """Data-parallel axes to the left of the axes that the parameter is already placed on."""
    try:
        mesh = DeviceMesh._concatenate([mesh_info.mesh, full_spec.mesh])
    except (RuntimeError, ValueError) as error:
        raise TopologyError(
            f"{name}: its mesh and the data-parallel mesh must be slices of one root mesh, found "
            f"{full_spec.mesh} and {mesh_info.mesh}; slice both from one init_device_mesh."
        ) from error
    placements = (*_dp_placements(mesh_info, dim), *full_spec.placements)
    if dim is not None:
        index = mesh_info.mesh.ndim - 1
        placements = _interleaved(placements, index, dim, mesh)
    return DTensorSpec(mesh, placements, full_spec.tensor_meta)


def _on_full_mesh(
    name: str, full_spec: DTensorSpec, dim: int | None, mesh_info: MeshInfo
) -> DTensorSpec:
    """Data-parallel axes are axes of the parameter's own mesh, where it must be replicated."""
    mesh, dims = full_spec.mesh, mesh_info.dims
    assert dims is not None
    assert mesh.mesh_dim_names is not None
    if mesh is not mesh_info.full_mesh:
        raise TopologyError(
            f"{name}: a parameter must be on the mesh that fully_shard was given, found "
            f"{mesh}; distribute it on {mesh_info.full_mesh}."
        )
    for axis in _dp_axes(mesh_info):
        if not isinstance(full_spec.placements[axis], Replicate):
            raise ConfigError(
                f"{name}: a parameter must be Replicate() on the data-parallel axis "
                f"{mesh.mesh_dim_names[axis]!r}, found {full_spec.placements[axis]}; leave that "
                "axis to fully_shard."
            )
    placements = tuple(full_spec.placements)
    if dim is not None and dims.shard_names:
        first = mesh.mesh_dim_names.index(dims.shard_names[0])
        placements = (*placements[:first], Shard(dim), *placements[first + 1 :])
        placements = _interleaved(placements, first, dim, mesh)
    if len(dims.shard_names) > 1:
        return _joined_spec(full_spec, placements, mesh_info)
    return DTensorSpec(mesh, placements, full_spec.tensor_meta)


def _joined_spec(
    full_spec: DTensorSpec, placements: tuple[Placement, ...], mesh_info: MeshInfo
) -> DTensorSpec:
    """The spec on a mesh in which the shard axes are one axis."""
    mesh, dims = full_spec.mesh, mesh_info.dims
    assert dims is not None
    assert mesh.mesh_dim_names is not None
    meshes: list[DeviceMesh] = []
    kept: list[Placement] = []
    for name, placement in zip(mesh.mesh_dim_names, placements, strict=True):
        if name in dims.shard_names[1:]:
            continue
        joined = joined_axes(mesh, dims.shard_names if name in dims.shard_names else (name,))
        assert joined is not None
        meshes.append(joined)
        kept.append(placement)
    return DTensorSpec(DeviceMesh._concatenate(meshes), tuple(kept), full_spec.tensor_meta)


def _interleaved(
    placements: tuple[Placement, ...], axis: int, dim: int, mesh: DeviceMesh
) -> tuple[Placement, ...]:
    """Mark `axis` as cutting last where axes to its right already cut the same dim."""
    factor = 1
    for other in range(axis + 1, len(placements)):
        placement = placements[other]
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim:
            factor *= mesh.size(other)
    if factor == 1:
        return placements
    strided = _StridedShard(dim, split_factor=factor)
    return (*placements[:axis], strided, *placements[axis + 1 :])


def _dp_axes(mesh_info: MeshInfo) -> list[int]:
    dims, mesh = mesh_info.dims, mesh_info.full_mesh
    assert dims is not None
    assert mesh is not None
    assert mesh.mesh_dim_names is not None
    return [mesh.mesh_dim_names.index(n) for n in (*dims.shard_names, *dims.replicate_names)]


def shard_dim(name: str, param: torch.Tensor, placement: Shard | None) -> int | None:
    """The dim that a parameter is cut along, counted from the front; None for a 0-dim one."""
    if placement is not None and not isinstance(placement, Shard):
        raise UnsupportedError(
            f"{name}: shard_placement_fn must return a Shard, a ShardPlacementResult or None, "
            f"found {placement!r}; return for example Shard(0)."
        )
    if param.ndim == 0:
        return None
    dim = 0 if placement is None else placement.dim
    if not -param.ndim <= dim < param.ndim:
        raise ConfigError(
            f"{name}: the dim to shard must be one of its {param.ndim} dims, found Shard({dim}) "
            f"for shape {tuple(param.shape)}; return a dim between 0 and {param.ndim - 1}."
        )
    return dim % param.ndim
