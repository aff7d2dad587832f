"""Loss scaling for float16, where each rank has a part of the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._torch import UNSCALES_IN_STEP, sparse_values, to_local, unscale_and_check_finite_
from fullshard.errors import ConfigError, TopologyError, UnsupportedError
from fullshard.optim.clip import by_kind


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` that skips a step on all ranks if any rank found an inf or a nan.

    Used like its base, by all ranks of `process_group` (None: the default group) alike:

        scaler = ShardedGradScaler()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    `unscale_`, or a `step` that unscales, is a collective: one all-reduce of one number per
    optimizer. Ranks may hold different gradients, on different devices, or none. Gradients may be
    `DTensor`s or plain tensors, and float16. `scale` keeps the dtype of what it scales.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.device = torch.device(device)
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each tensor of an iterable, by the scale; dtypes stay."""
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, torch.Tensor):
            if outputs.is_meta:
                raise UnsupportedError(
                    "ShardedGradScaler.scale: a tensor on meta has no values to scale; compute "
                    "the loss on a real device."
                )
            # A loss without dims would be promoted to the float32 of the scale.
            return super().scale(outputs).to(outputs.dtype)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled
        raise ConfigError(
            "ShardedGradScaler.scale: outputs must be a tensor or an iterable of tensors, not a "
            f"{type(outputs).__name__}; pass the loss."
        )

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that was not done, and run `optimizer.step` unless a rank found an inf."""
        unscales_in_step = getattr(optimizer, UNSCALES_IN_STEP, False)
        if not unscales_in_step or all(p.device.type != "cpu" for p in _params_of(optimizer)):
            return super().step(optimizer, *args, **kwargs)
        # A fused optimizer of offloaded parameters copies the scale and the inf to the host without
        # waiting, and would step with stale values: unscale and decide here instead.
        setattr(optimizer, UNSCALES_IN_STEP, False)
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            setattr(optimizer, UNSCALES_IN_STEP, True)

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        # The base class calls this for every check: from `unscale_`, and for optimizers that
        # unscale in their own kernels. So this is where ranks agree. Gradients may be float16
        # whatever `allow_fp16` says: a unit that is kept in float16 reduces and steps in it.
        with torch.no_grad():
            # A loss on the host must not lead to a collective on the host. No copy here is
            # `non_blocking`: the host would read it before it has arrived.
            is_on_host = found_inf.device.type == "cpu"
            found = found_inf.to(self.device if is_on_host else found_inf.device)
            for grads in by_kind(_grad_values(optimizer)):
                found_here = torch.zeros_like(found, device=grads[0].device)
                unscale_and_check_finite_(grads, found_here, inv_scale.to(grads[0].device))
                found += found_here.to(found.device)
            self._all_reduce(found, optimizer)
        return {found_inf.device: found.to(found_inf.device)}

    def _all_reduce(self, found_inf: torch.Tensor, optimizer: Optimizer) -> None:
        """Let all ranks know of an inf on any. Every rank takes part, with gradients or without."""
        if dist.get_rank(self.process_group) < 0:
            raise TopologyError(
                "ShardedGradScaler: process_group does not contain this rank "
                f"({dist.get_rank()}); unscale and step only on the ranks of the group."
            )
        ranks = set(dist.get_process_group_ranks(self.process_group))
        if len(ranks) < dist.get_world_size():
            # The group may leave out ranks that hold other parts of the same parameters. Meshes are
            # those of the parameters, not of the gradients: all ranks of a mesh have the same ones.
            params = (param for param in _params_of(optimizer) if isinstance(param, DTensor))
            for mesh in dict.fromkeys(param.device_mesh for param in params):
                if not ranks.issuperset(mesh.mesh.flatten().tolist()):
                    for axis in range(mesh.ndim):
                        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=mesh.get_group(axis))
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self.process_group)


def _params_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _grad_values(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The memory of this rank's gradients, as plain dense tensors."""
    for param in _params_of(optimizer):
        if param.grad is None:
            continue
        grad = to_local(param.grad)
        if not grad.is_sparse:
            yield grad
            continue
        if grad.dtype is torch.float16:
            # Values with one index are summed later: that sum must be checked. Not every device
            # can sum them in float16.
            param.grad = grad = grad.float().coalesce().half()
        yield sparse_values(grad)
