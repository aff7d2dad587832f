"""Giving shards their gradients, and users' hooks their turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.device.storage import swift_attributes
from fullshard.device.streams import Device
from fullshard.unit.gradient_home import GradientHome
from fullshard.unit.member import Holder

Gift = tuple[Holder, int]
"""Who is given a gradient, and where in the lane's result it begins."""


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
        self.to_host = to_host
        self._pin_memory = pin_memory
        self._created = created
        self._events = events

    def give_home(self, home: GradientHome, holders: Sequence[Holder]) -> bool:
        """Hand over what lies in a gradient home that had room for it; whether some was added."""
        if len(holders) == len(home.params):
            places = home.params
        else:
            places = [(holder, holder.param, home.gifts[holder]) for holder in holders]
        others, created = [], self._created
        with swift_attributes():
            for place in places:
                holder, param, gift = place
                if param.grad is None:
                    param.grad = gift
                    created.append(holder)
                else:  # another reduction was concluded in the meantime
                    others.append(place)
        for holder, _, gift in others:
            self._give(holder, gift)
        return bool(others)

    def give_parts(self, result: torch.Tensor, gifts: Iterable[Gift]) -> None:
        """Hand over parts of a result that nobody else will write to."""
        gifts = list(gifts)
        if self.to_host:
            result = self._on_host(result, gifts)
        for holder, offset in gifts:
            self._give(holder, holder.gradient(result, offset))

    def _on_host(self, result: torch.Tensor, gifts: Iterable[Gift]) -> torch.Tensor:
        host = torch.empty(
            result.size(), dtype=result.dtype, device="cpu", pin_memory=self._pin_memory
        )
        host.copy_(result, non_blocking=self._pin_memory)
        event = self._device.record()
        # Adding to a gradient that is there, and users' hooks, read on the host right away.
        if any(h.param.grad is not None or _is_watched(h.param) for h, _ in gifts):
            self._device.synchronize(event)
        else:
            self._events.append(event)
        return host

    def _give(self, holder: Holder, grad: torch.Tensor) -> None:
        param = holder.param
        has_hooks = _is_watched(param)
        if has_hooks:
            for hook in (param._backward_hooks or {}).values():
                changed = hook(grad)
                grad = grad if changed is None else changed
        before = param.grad
        if before is not None:
            _local(before).add_(_local(grad))
        else:
            give_gradient(param, grad)
            self._created.append(holder)
        if has_hooks:
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


def can_add_to(home: GradientHome) -> bool:
    """Whether what all holders have as gradients is this home, and nobody listens."""
    with swift_attributes():
        return all(param.grad is gift and not _is_watched(param) for _, param, gift in home.params)


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def _is_watched(param: torch.Tensor) -> bool:
    """Whether someone reads the gradient as soon as it is there."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)
