"""Collectives in memory of a particular kind, behind the interface that users' own have."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist

from fullshard.api import AllGather, ReduceScatter
from fullshard.comm.collectives import Collectives, collectives_for
from fullshard.comm.mesh import MeshInfo
from fullshard.errors import UnsupportedError


class _GroupMemory:
    """Buffers from the backend's own allocator where it has one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        backend: Any = self._group._get_backend(device)
        if backend.supports_tensor_alloc(device):
            made: torch.Tensor = backend.allocate_tensor(prod(size), dtype=dtype, device=device)
            return made
        return torch.empty(*size, dtype=dtype, device=device)


class _SymmetricMemory:
    """Buffers from the pool of symmetric memory of a device."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        import torch.distributed._symmetric_memory as symmetric

        with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
            return torch.empty(*size, dtype=dtype, device=device)


def _default(tensor: torch.Tensor, group: dist.ProcessGroup) -> Collectives:
    return collectives_for(group, tensor.device)


class GroupMemoryAllGather(_GroupMemory, AllGather):
    """Gathers in memory of the process group."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        _default(output_tensor, group).all_gather([output_tensor], [input_tensor], group).wait()
        return None


class GroupMemoryReduceScatter(_GroupMemory, ReduceScatter):
    """Reduces in memory of the process group."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        average = op == dist.ReduceOp.AVG
        collectives = _default(output_tensor, group)
        collectives.reduce_scatter([output_tensor], [input_tensor], group, average=average).wait()
        return None


class SymmetricAllGather(_SymmetricMemory, AllGather):
    """Gathers in symmetric memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        import torch.distributed._symmetric_memory as symmetric

        symmetric.rendezvous(output_tensor, group=group.group_name)
        _default(output_tensor, group).all_gather([output_tensor], [input_tensor], group).wait()
        return None


def is_ours(comm: AllGather | ReduceScatter) -> bool:
    """Whether a collective was chosen by a setting rather than brought by the user."""
    return isinstance(comm, (GroupMemoryAllGather, GroupMemoryReduceScatter, SymmetricAllGather))


def process_group_comms(
    group: dist.ProcessGroup,
) -> tuple[GroupMemoryAllGather, GroupMemoryReduceScatter]:
    return GroupMemoryAllGather(group), GroupMemoryReduceScatter(group)


def symmetric_memory_comms(
    name: str, mesh_info: MeshInfo, backend: Literal["NCCL"]
) -> SymmetricAllGather:
    """A gather in symmetric memory, or an error that says why there is none here."""
    if mesh_info.device_type != "cuda" or not torch.cuda.is_available():
        raise UnsupportedError(
            f"{name}: symmetric memory needs CUDA devices, found a mesh of {mesh_info.device_type}; "
            "leave set_symm_mem_for_comm out."
        )
    import torch.distributed._symmetric_memory as symmetric

    try:
        symmetric.set_backend(backend)
        dist.barrier(group=mesh_info.shard.group)  # a rendezvous needs a live communicator
    except (RuntimeError, ValueError) as error:
        raise UnsupportedError(
            f"{name}: symmetric memory needs GPUs and a NCCL that support it, found that backend "
            f"{backend!r} cannot be set ({error}); leave set_symm_mem_for_comm out."
        ) from error
    return SymmetricAllGather()
