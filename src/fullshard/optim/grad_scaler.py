"""Loss scaling for float16, where each rank has a part of the gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from fullshard._torch import unscale_and_check_finite_
from fullshard.errors import ConfigError, TopologyError, UnsupportedError


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
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each tensor of an iterable, by the scale; dtypes stay."""
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, torch.Tensor):
            if outputs.is_meta:
                raise UnsupportedError(
                    "ShardedGradScaler.scale: outputs must have values, found a tensor on meta; "
                    "compute the loss on a real device."
                )
            # A loss without dims would be promoted to the float32 of the scale.
            return super().scale(outputs).to(outputs.dtype)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled
        raise ConfigError(
            "ShardedGradScaler.scale: outputs must be a tensor or an iterable of tensors, found "
            f"{type(outputs).__name__}; pass the loss."
        )

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that was not done, and run `optimizer.step` unless a rank found an inf."""
        if not self._is_read_on_host(optimizer):
            return super().step(optimizer, *args, **kwargs)
        # Unscale and decide here instead of in the optimizer's kernel.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def _is_read_on_host(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a fused optimizer of offloaded parameters would read a device's scale and inf.

        It copies them to the host without waiting, and would step with stale values.
        """
        scale = self._get_scale_async() if self.is_enabled() else None
        if scale is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        params = _params_of(optimizer)
        return scale.device.type != "cpu" and any(p.device.type == "cpu" for p in params)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        # The base class calls this for every check: from `unscale_`, and for optimizers that
        # unscale in their own kernels. So this is where ranks agree. Gradients may be float16
        # whatever `allow_fp16` says: a unit that is kept in float16 reduces and steps in it.
        by_kind: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]]
        by_kind = defaultdict(list)
        with torch.no_grad():
            for values in _grad_values(optimizer):
                by_kind[values.device, values.dtype].append(values)
            # A loss on the host must not lead to a collective on the host. No copy here is
            # `non_blocking`: the host would read it before it has arrived.
            is_on_host = found_inf.device.type == "cpu"
            found = found_inf.to(torch.device(self._device) if is_on_host else found_inf.device)
            for (device, _), grads in by_kind.items():
                found_here = torch.zeros_like(found, device=device)
                unscale_and_check_finite_(grads, found_here, inv_scale.to(device))
                found += found_here.to(found.device)
            self._all_reduce(found, optimizer)
        return {found_inf.device: found.to(found_inf.device)}

    def _all_reduce(self, found_inf: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Let all ranks know of an inf on any. Every rank takes part, with gradients or without."""
        if dist.get_rank(self.process_group) < 0:
            raise TopologyError(
                f"ShardedGradScaler: this rank ({dist.get_rank()}) must be part of process_group, "
                "found a group without it; unscale and step only on the ranks of the group."
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


def _params_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _grad_values(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The memory of this rank's gradients, as plain dense tensors."""
    for param in _params_of(optimizer):
        grad = param.grad
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            grad = grad.to_local()
        if not grad.is_sparse:
            yield grad
            continue
        if grad.dtype is torch.float16:
            # Values with one index are summed later: that sum must be checked. Not every device
            # can sum them in float16.
            param.grad = grad = grad.float().coalesce().half()
        yield grad._values()
