"""The numbers of a step: taken while the device computes, read when it has."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.report.record import StepMetrics
from fullshard.trace.recording import Exposure, Waits, clock_for
from fullshard.training.world import World


@dataclass(frozen=True, slots=True)
class Figures:
    """One step of this rank, perhaps still under way on its device."""

    step: int
    lr: float
    tokens: int
    loss_and_norm: torch.Tensor
    began: Any
    ended: Any
    waits: Waits
    wants_to_leave: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """One step of all ranks."""

    metrics: StepMetrics
    is_leaving: bool


class Meter:
    """Measures steps of this rank, and joins them with those of the others.

    On a device with streams a step is read while the next one runs: nothing waits for it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._device = world.device
        self.exposure = Exposure(world.device)
        self._clock = clock_for(world.device)
        self._ended = self._clock.stamp()

    @property
    def num_under_way(self) -> int:
        """How many steps may be unread before the next one begins."""
        return 0 if self._device.type == "cpu" else 1

    def taken(
        self,
        step: int,
        lr: float,
        tokens: int,
        loss: torch.Tensor,
        norm: torch.Tensor,
        *,
        wants_to_leave: bool,
    ) -> Figures:
        """The figures of a step whose work has been issued."""
        both = torch.stack([loss.detach().double(), norm.detach().double()])
        if self._device.type != "cpu":
            host = torch.empty(2, dtype=torch.float64, pin_memory=True)
            both = host.copy_(both, non_blocking=True)
        began, self._ended = self._ended, self._clock.stamp()
        waits = self.exposure.taken()
        return Figures(step, lr, tokens, both, began, self._ended, waits, wants_to_leave)

    def settled(self, figures: Figures) -> Settled:
        """The step, over all ranks: the mean loss, the longest times, the most memory."""
        if self._device.type != "cpu":
            figures.ended.synchronize()
        step_s = self._clock.between(figures.began, figures.ended)
        loss, norm = figures.loss_and_norm.tolist()
        own = [loss, norm, step_s, figures.waits.seconds(), self._memory(), figures.wants_to_leave]
        columns = list(zip(*self._world.told(own), strict=True))
        losses, norms, steps_s, exposed_s, memory, leaving = columns
        metrics = StepMetrics(
            step=figures.step,
            loss=sum(losses) / len(losses),
            lr=figures.lr,
            grad_norm=norms[0],
            tokens=figures.tokens * self._world.size,
            step_s=max(steps_s),
            exposed_s=max(exposed_s),
            memory_bytes=int(max(memory)),
        )
        return Settled(metrics, is_leaving=any(leaving))

    def pause(self) -> None:
        """What happens from now until the next step is no part of it."""
        self._ended = self._clock.stamp()

    def _memory(self) -> int:
        if self._device.type == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return int(torch.get_device_module(self._device).max_memory_allocated(self._device))
