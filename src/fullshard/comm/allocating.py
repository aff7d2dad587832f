"""Collectives in memory of a particular kind, behind the interface of custom collectives.

`FSDPModule.set_allocate_memory_from_process_group_for_comm` and `set_symm_mem_for_comm` use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist

from fullshard import _torch
from fullshard._torch import backend_of
from fullshard.api import AllGather, ReduceScatter
from fullshard.comm.collectives import collectives_for
from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.errors import UnsupportedError

Group = dist.ProcessGroup


class ProcessGroupMemory:
    """Buffers from the backend's own allocator where it has one."""

    def __init__(self, group: Group | None) -> None:
        self._axis = Axis(group)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        group = self._axis.group
        assert group is not None
        backend: Any = backend_of(group, device)
        if backend.supports_tensor_alloc(device):
            made: torch.Tensor = backend.allocate_tensor(prod(size), dtype=dtype, device=device)
            return made
        return torch.empty(*size, dtype=dtype, device=device)


class ProcessGroupAllGather(ProcessGroupMemory, AllGather):
    """All-gathers in memory of the process group."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Group,
        async_op: bool = False,
    ) -> None:
        collectives = collectives_for(group, output_tensor.device)
        collectives.all_gather([output_tensor], [input_tensor], group).wait()


class ProcessGroupReduceScatter(ProcessGroupMemory, ReduceScatter):
    """Reduce-scatters in memory of the process group."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Group,
        op: Any,
        async_op: bool = False,
    ) -> None:
        average = op == dist.ReduceOp.AVG
        collectives = collectives_for(group, output_tensor.device)
        collectives.reduce_scatter([output_tensor], [input_tensor], group, average=average).wait()


class SymmetricAllGather(ProcessGroupAllGather):
    """All-gathers in symmetric memory, from a device's pool of it."""

    def __init__(self, name: str, mesh_info: MeshInfo, backend: Literal["NCCL"]) -> None:
        if mesh_info.device_type != "cuda" or not torch.cuda.is_available():
            raise UnsupportedError(
                f"{name}: symmetric memory needs CUDA devices, but the mesh is on "
                f"{mesh_info.device_type}; leave set_symm_mem_for_comm out."
            )
        super().__init__(mesh_info.shard.group)
        try:
            _torch.symmetric_memory.set_backend(backend)
            dist.barrier(group=mesh_info.shard.group)  # a rendezvous needs a live communicator
        except (RuntimeError, ValueError) as error:
            raise UnsupportedError(
                f"{name}: symmetric memory needs GPUs and a NCCL that support it, but backend "
                f"{backend!r} cannot be set ({error}); leave set_symm_mem_for_comm out."
            ) from error

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        with torch.cuda.use_mem_pool(_torch.symmetric_memory.get_mem_pool(device)):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Group,
        async_op: bool = False,
    ) -> None:
        _torch.symmetric_memory.rendezvous(output_tensor, group=group.group_name)
        super().__call__(output_tensor, input_tensor, group)
