"""Giving shards their gradients, and users' hooks their turn."""

from __future__ import annotations

from typing import Any

import torch

from fullshard.comm.placement import as_dtensor, with_dtype
from fullshard.device.streams import Device
from fullshard.unit.member import Member


class HandOver:
    """Hands the results of one reduction over as `.grad`.

    With offload, gradients go to host memory. `events` then holds what the host has to wait for
    before anyone may read them. Members that had no gradient before are added to `created`.
    """

    def __init__(
        self,
        device: Device,
        to_host: bool,
        pin_memory: bool,
        created: list[Member],
        events: list[Any],
    ) -> None:
        self._device = device
        self._to_host = to_host
        self._pin_memory = pin_memory
        self._created = created
        self._events = events
        self._results: list[torch.Tensor] = []
        self._gifts: list[tuple[Member, int, int]] = []

    def add_result(self, result: torch.Tensor) -> None:
        """The reduced gradients of one more lane; members added next lie in it."""
        self._results.append(result)

    def add(self, member: Member, offset: int) -> None:
        """A member whose gradient starts at `offset` of the result added last."""
        self._gifts.append((member, len(self._results) - 1, offset))

    def finish(self) -> None:
        """Hand over everything that was added; runs on the stream that made the results."""
        results = self._on_host() if self._to_host else self._results
        for member, lane, offset in self._gifts:
            local = member.local
            self._give(member, results[lane].as_strided(local.size(), local.stride(), offset))
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
        if any(m.shard.grad is not None or _is_watched(m) for m, _, _ in self._gifts):
            self._device.synchronize(event)
        else:
            self._events.append(event)
        return hosts

    def _give(self, member: Member, local: torch.Tensor) -> None:
        shard = member.shard
        spec = with_dtype(member.shard_spec, local.dtype)
        grad: torch.Tensor = as_dtensor(local, spec)
        is_watched = _is_watched(member)
        if is_watched:
            for hook in (shard._backward_hooks or {}).values():
                changed = hook(grad)
                grad = grad if changed is None else changed
        before = shard.grad
        if before is None:
            shard.grad = grad
            self._created.append(member)
        else:
            before._local_tensor.add_(grad._local_tensor)  # type: ignore[attr-defined]
        if is_watched:
            for hook in (shard._post_accumulate_grad_hooks or {}).values():
                hook(shard)


def _is_watched(member: Member) -> bool:
    """Whether someone reads the gradient as soon as it is there."""
    shard = member.shard
    return bool(shard._backward_hooks or shard._post_accumulate_grad_hooks)
