"""Parameters annotated by `spmd_types`: stored as DTensors, computed with as plain tensors.

An annotation says what a plain tensor is on each axis of a mesh, and so what its gradient is there:
of a replicated tensor (R) a partial sum, of a partial one (P) the whole, of an invariant or a
sharded one (I, S) the like. Data-parallel axes are R, or not annotated. The package works with
torch 2.14 and later; a program that uses it has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from fullshard.comm.mesh import MeshInfo
from fullshard.errors import ConfigError

_PACKAGE = "spmd_types"


@dataclass(frozen=True, slots=True)
class Annotations:
    """What a parameter is where modules compute with it, and where its gradient is."""

    types: dict[Any, Any]
    partition_spec: Any
    grad_placements: tuple[Placement, ...]

    def restore(self, full: torch.Tensor) -> None:
        """Annotate a full parameter, if types are checked now."""
        spmd = sys.modules[_PACKAGE]
        if spmd.is_type_checking() and self.types:
            spmd.assert_type(full, self.types, partition_spec=self.partition_spec)

    def placed(self, grad: torch.Tensor, mesh: Any) -> DTensor:
        """The gradient of a full parameter, as a DTensor."""
        return DTensor.from_local(grad, mesh, self.grad_placements, run_check=False)


def unchecked() -> AbstractContextManager[object]:
    """A context in which the package checks no types, if it is used at all."""
    spmd = sys.modules.get(_PACKAGE)
    return nullcontext() if spmd is None else spmd.no_typecheck()


def is_checked() -> bool:
    spmd = sys.modules.get(_PACKAGE)
    return spmd is not None and bool(spmd.is_type_checking())


def read_annotations(
    name: str, param: nn.Parameter, mesh_info: MeshInfo
) -> tuple[nn.Parameter, Annotations | None]:
    """A parameter as it is stored, a DTensor if it is annotated, and its annotations."""
    spmd = sys.modules.get(_PACKAGE)
    if spmd is None or isinstance(param, DTensor) or not spmd.get_local_type(param):
        return param, None
    mesh, dims = mesh_info.full_mesh, mesh_info.dims
    if mesh is None or dims is None:
        raise ConfigError(
            f"{name}: spmd_types parameters require fully_shard() to be called with both a named "
            "full DeviceMesh for FSDP storage and dp_mesh_dims=DataParallelMeshDims(shard=..., "
            f"replicate=...), not with {mesh_info.mesh} alone."
        )
    stored = {each: spmd.MeshAxis.of(mesh.get_group(each)) for each in mesh.mesh_dim_names or ()}
    local_types, spec = dict(spmd.get_local_type(param)), spmd.get_partition_spec(param)
    types = dict(local_types)
    if spec is not None:
        types.update(spmd.types.partition_spec_to_shard_types(spec))
    shown = f"annotated axes {tuple(types)}, storage mesh axes {tuple(stored.values())}"
    computes_on = _mesh_of(name, spmd, types, stored.values(), shown)
    if unknown := tuple(axis for axis in local_types if axis not in computes_on):
        raise ConfigError(
            f"{name}: FSDP found spmd_types annotations on axes {unknown} that are not in the mesh "
            f"that it computes on, {computes_on}; annotate only axes of that mesh."
        )
    data = {axis for each, axis in stored.items() if each in dims.shard_names}
    data |= {axis for each, axis in stored.items() if each in dims.replicate_names}
    others = [axis for axis in stored.values() if axis not in data]
    of_storage = dict.fromkeys(stored.values(), spmd.R)
    for axis, kind in types.items():
        if axis in others:
            of_storage[axis] = kind
        elif not _is_within(axis, data):
            raise ConfigError(
                f"{name}: found an spmd_types annotation on axis {axis}, which is neither a "
                "non-FSDP storage-mesh axis nor contained in the FSDP DP mesh; annotate axes of "
                "the mesh that fully_shard was given."
            )
        elif kind is not spmd.R:
            raise ConfigError(
                f"{name}: Expected spmd.R on FSDP DP axis {axis} but got {kind}; FSDP reduces "
                "gradients there, so annotate the parameter as R, or leave the axis out."
            )
    if missing := tuple(axis for axis in others if axis not in types):
        raise ConfigError(
            f"{name}: found incomplete spmd_types annotations for FSDP storage: {shown}. Missing "
            f"non-FSDP storage axes: {missing}; annotate these, too."
        )
    placement = spmd.spmd_type_to_dtensor_placement
    placements = [placement(kind) for kind in of_storage.values()]
    grads = tuple(placement(kind.backward_type()) for kind in of_storage.values())
    dtensor = DTensor.from_local(param.data, mesh, placements, run_check=False)
    restored = {axis: local_types.get(axis, spmd.R) for axis in computes_on}
    return nn.Parameter(dtensor, param.requires_grad), Annotations(restored, spec, grads)


def _mesh_of(
    name: str, spmd: Any, types: Iterable[Any], stored: Collection[Any], shown: str
) -> tuple[Any, ...]:
    """The axes of the mesh on which types are checked."""
    if _span_alike(spmd, types, stored):
        return tuple(types)
    current = spmd.current_mesh()
    if current is None:
        raise ConfigError(
            f"{name}: found partial spmd_types annotations that cannot be restored from its FSDP "
            f"storage mesh: {shown}. Annotate the parameter on all axes, or call fully_shard "
            "inside spmd_types.set_current_mesh(...)."
        )
    if not _span_alike(spmd, current, stored):
        raise ConfigError(
            f"{name}: uses spmd_types annotations on a typechecking mesh that does not span the "
            f"same ranks as its FSDP storage mesh: {tuple(current)} and {tuple(stored)}; set a "
            "mesh of the same ranks."
        )
    return tuple(current)


def _span_alike(spmd: Any, one: Iterable[Any], other: Iterable[Any]) -> bool:
    spanned = [spmd.normalize_mesh(frozenset(axes)) for axes in (one, other)]
    return _ranks(spanned[0]) == _ranks(spanned[1])


def _is_within(axis: Any, axes: Iterable[Any]) -> bool:
    return _ranks([axis]) <= _ranks(axes)


def _ranks(axes: Iterable[Any]) -> set[int]:
    """The ranks that orthogonal axes span together, from rank 0 on."""
    found = {0}
    for axis in axes:
        found = {each + step for each in found for step in axis.layout.all_ranks_from_zero()}
    return found
