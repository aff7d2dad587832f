"""Giving shards their gradients, and users' hooks their turn."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.comm.placement import with_dtype
from fullshard.device.streams import Device
from fullshard.unit.member import Member


class HandOver:
    """Hands the results of one reduction over as `.grad`.

    With offload, gradients go to host memory. `events` then holds what the host has to wait for
    before anyone may read them. Members that had no gradient before are added to `created`.
    """

    def __init__(
        self, device: Device, to_host: bool, pin_memory: bool, created: list[Member]
    ) -> None:
        self._device = device
        self._to_host = to_host
        self._pin_memory = pin_memory
        self._members: list[Member] = []
        self._source: list[tuple[torch.Tensor, int]] = []
        self._created = created
        self.events: list[Any] = []

    def add(self, member: Member, result: torch.Tensor, offset: int) -> None:
        self._members.append(member)
        self._source.append((result, offset))

    def finish(self) -> None:
        """Hand over everything that was added; runs on the stream that made the results."""
        arrived: dict[int, torch.Tensor] = {}
        pending: list[Member] = []
        for member, (result, offset) in zip(self._members, self._source, strict=True):
            if self._to_host:
                if id(result) not in arrived:
                    arrived[id(result)] = self._on_host(result)
                result = arrived[id(result)]
            local = member.local
            grad = result.as_strided(local.size(), local.stride(), offset)
            if _is_watched(member) and not pending:
                pending = self._members
                self._settle_host()
            self._give(member, grad)
        if self._to_host and not pending and arrived:
            self.events.append(self._device.record())
        self._members, self._source = [], []

    def _on_host(self, result: torch.Tensor) -> torch.Tensor:
        pinned = self._pin_memory
        host = torch.empty(result.size(), dtype=result.dtype, device="cpu", pin_memory=pinned)
        # Adding to a gradient that is there already happens on the host, which has to wait.
        blocking = any(member.shard.grad is not None for member in self._members)
        host.copy_(result, non_blocking=pinned and not blocking)
        return host

    def _settle_host(self) -> None:
        if self._to_host:
            self._device.synchronize(self._device.record())

    def _give(self, member: Member, local: torch.Tensor) -> None:
        shard = member.shard
        spec = with_dtype(member.shard_spec, local.dtype)
        grad: torch.Tensor = DTensor(local, spec, requires_grad=False)
        for hook in (shard._backward_hooks or {}).values():
            changed = hook(grad)
            grad = grad if changed is None else changed
        if shard.grad is None:
            shard.grad = grad
            self._created.append(member)
        else:
            shard.grad._local_tensor.add_(grad._local_tensor)  # type: ignore[attr-defined]
        for hook in (getattr(shard, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(shard)


def _is_watched(member: Member) -> bool:
    """Whether someone reads the gradient as soon as it is there."""
    shard = member.shard
    return bool(shard._backward_hooks or getattr(shard, "_post_accumulate_grad_hooks", None))
