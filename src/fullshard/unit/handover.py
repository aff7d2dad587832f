"""Giving shards their gradients, and users' hooks their turn."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.device.streams import Device
from fullshard.unit.member import Holder


class HandOver:
    """Hands the results of one reduction over as `.grad`.

    With offload, gradients go to host memory. `events` then holds what the host has to wait for
    before anyone may read them. Holders that had no gradient before are added to `created`.
    """

    def __init__(
        self,
        device: Device,
        to_host: bool,
        pin_memory: bool,
        created: list[Holder],
        events: list[Any],
    ) -> None:
        self._device = device
        self._to_host = to_host
        self._pin_memory = pin_memory
        self._created = created
        self._events = events
        self._results: list[torch.Tensor] = []
        self._gifts: list[tuple[Holder, int, int]] = []

    def add_result(self, result: torch.Tensor) -> None:
        """The reduced gradients of one more lane; holders added next lie in it."""
        self._results.append(result)

    def add(self, holder: Holder, offset: int) -> None:
        """A holder whose gradient starts at `offset` of the result added last."""
        self._gifts.append((holder, len(self._results) - 1, offset))

    def finish(self) -> None:
        """Hand over everything that was added; runs on the stream that made the results."""
        results = self._on_host() if self._to_host else self._results
        for holder, lane, offset in self._gifts:
            self._give(holder, holder.gradient(results[lane], offset))
        self._gifts, self._results = [], []

    def _on_host(self) -> list[torch.Tensor]:
        hosts = []
        for result in self._results:
            host = torch.empty(
                result.size(), dtype=result.dtype, device="cpu", pin_memory=self._pin_memory
            )
            hosts.append(host.copy_(result, non_blocking=self._pin_memory))
        event = self._device.record()
        # Adding to a gradient that is there, and users' hooks, read on the host right away.
        if any(h.param.grad is not None or _is_watched(h.param) for h, _, _ in self._gifts):
            self._device.synchronize(event)
        else:
            self._events.append(event)
        return hosts

    def _give(self, holder: Holder, grad: torch.Tensor) -> None:
        param = holder.param
        is_watched = _is_watched(param)
        if is_watched:
            for hook in (param._backward_hooks or {}).values():
                changed = hook(grad)
                grad = grad if changed is None else changed
        before = param.grad
        if before is not None:
            _local(before).add_(_local(grad))
        else:
            give_gradient(param, grad)
            self._created.append(holder)
        if is_watched:
            for hook in (param._post_accumulate_grad_hooks or {}).values():
                hook(param)


def give_gradient(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Make a tensor the gradient of a parameter, also one of another dtype."""
    if grad.dtype == param.dtype:
        param.grad = grad
        return
    # torch wants a gradient in its parameter's dtype, but does not look at it twice.
    param.grad = torch.empty_like(param, requires_grad=False)
    param.grad.data = grad


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def _is_watched(param: torch.Tensor) -> bool:
    """Whether someone reads the gradient as soon as it is there."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)
