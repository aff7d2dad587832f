"""Custom collectives that count what goes through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard import AllGather, ReduceScatter


class Counted:
    """Records the elements of one rank's segment per call, and counts the buffers it allocated."""

    def __init__(self) -> None:
        self.numels: list[int] = []
        self.num_allocated = 0

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.num_allocated += 1
        return torch.empty(*size, dtype=dtype, device=device)


class CountedGather(Counted, AllGather):
    """Gathers through the process group."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.numels.append(input_tensor.numel())
        return group._allgather_base(output_tensor, input_tensor)


class CountedReduce(Counted, ReduceScatter):
    """Reduces through the process group; records the operations that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.numels.append(output_tensor.numel())
        self.ops.append(op)
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        return group._reduce_scatter_base(output_tensor, input_tensor, options)
