"""The memory of gradients that optimizers are given, and how a gradient is assigned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from fullshard._torch import (
    backward_hooks,
    grad_dtype_of,
    local_tensor,
    post_accumulate_grad_hooks,
)
from fullshard.device import ResizableBuffer, reference_counts
from fullshard.unit.flat_param import FlatParamHolder
from fullshard.unit.param import ShardedParam

GradTarget = ShardedParam | FlatParamHolder
GradSlot = tuple[GradTarget, int]
"""What receives a gradient, and where in a bucket's sums it begins."""


class GradBuffer:
    """The gradients of a lane, arranged like its shard buffer, and the tensors that become `.grad`.

    They are made once: a step fills `result` and assigns `grads` to their targets (rule 8: one
    buffer for a lane). If anything from the previous step is still held, another buffer is made.
    Memory is freed between steps if the gradients were dropped. `num_reserved` counts the
    reductions that have not assigned their gradients yet.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, slots: Sequence[GradSlot], device: torch.device
    ) -> None:
        self.memory = ResizableBuffer(numel * dtype.itemsize, device, "gradient shards")
        self.result = self.memory.view(0, (numel,), dtype)
        self.grads = {
            target: target.as_grad(part_of(self.result, target, offset)) for target, offset in slots
        }
        self.num_reserved = 0
        self._watched = list(self.grads.values())
        self._watched += [local_tensor(grad) for grad in self._watched if isinstance(grad, DTensor)]
        self._counts = self._references()

    @property
    def is_unused(self) -> bool:
        """Whether nothing but this object holds a gradient, a part of one, or the memory."""
        if self.num_reserved:
            return False
        # Gradients without memory were not assigned to anything.
        return not self.memory.is_allocated or self._counts == self._references()

    def _references(self) -> list[int]:
        return [self.memory.use_count, *reference_counts(self._watched)]


def part_of(sums: torch.Tensor, target: GradTarget, offset: int) -> torch.Tensor:
    """The part of `sums` that a target receives. They may begin anywhere in their memory."""
    local = target.local
    return sums.as_strided(local.size(), local.stride(), sums.storage_offset() + offset)


def set_grad(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Make a tensor the gradient of a parameter, even if its dtype is another."""
    if grad_dtype_of(param) in (grad.dtype, None):
        param.grad = grad
        return
    # torch wants a gradient in its parameter's dtype, but checks that only here.
    param.grad = torch.empty_like(param, requires_grad=False)
    param.grad.data = grad


def has_hooks(param: torch.Tensor) -> bool:
    """Whether a user's hook reads the gradient as soon as it is there."""
    return bool(backward_hooks(param) or post_accumulate_grad_hooks(param))
