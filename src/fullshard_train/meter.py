"""The metrics of steps: times, losses and memory over all ranks."""

from __future__ import annotations

import math
import resource
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from fullshard.processes import machine_id
from fullshard.ranks import RankGroup
from fullshard.trace import StepTime, StepTimes
from fullshard_train.config import TrainConfig
from fullshard_train.flops import peak_tflops, step_tflop
from fullshard_train.links import Links, Sent, of_floats
from fullshard_train.models.architecture import Architecture
from fullshard_train.report.record import StepMetrics
from fullshard_train.slowest import slow_link, slowest_ranks
from fullshard_train.world import World

# A rank is named if the others wait for it for this share of a step, in the mean of some steps.
_WORTH_NAMING = 0.1
_NUM_RECENT = 8


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step of this rank that may still be running on its device.

    `facts` are the known metrics. `own` is how long the host was busy with the step, and whether
    the run must stop. Waits of a step that was replayed as a CUDA graph were not measured.
    """

    facts: Mapping[str, Any]
    loss_and_norm: torch.Tensor
    own: tuple[float, bool]
    time: StepTime
    is_replayed: bool


class Meter:
    """Measures the steps of this rank, and combines them with those of the other ranks.

    On a device with streams, a step is read while the next one runs, so that no stream waits.
    `times` is an observer of the steps. `host_share` is the share of the last read step in which
    the busiest host was busy.
    """

    def __init__(self, world: World, config: TrainConfig, architecture: Architecture) -> None:
        self._world = world
        self._ranks = RankGroup.world()
        places = self._ranks.all_gather((machine_id(), socket.gethostname()))
        self._hosts, self._names = zip(*places, strict=True)
        self._are_several, self._links = len({*self._hosts}) > 1, Links()
        self._waits: deque[Sequence[float]] = deque(maxlen=_NUM_RECENT)
        self._step_tflop = step_tflop(config, architecture) if world.is_first else math.nan
        self._peak_tflops = peak_tflops(config, world.device)
        self.times = StepTimes(world.device)
        self.host_share = 0.0
        # How many steps may be unread when the next one begins.
        self.max_pending = 0 if world.device.type == "cpu" else 1

    def start(
        self, facts: Mapping[str, Any], both: torch.Tensor, own: Any, *, is_replayed: bool
    ) -> PendingStep:
        """Start reading the loss, the norm and the times of a step that has been issued."""
        if self._world.device.type != "cpu":
            host = torch.empty(2, dtype=torch.float64, pin_memory=True)
            both = host.copy_(both, non_blocking=True)
        return PendingStep(facts, both, own, self.times.end_step(), is_replayed)

    def finish(self, pending: PendingStep) -> tuple[StepMetrics, bool]:
        """Return the metrics of a step over all ranks, and whether any of them must stop."""
        step_s = pending.time.duration_s  # once the step has ended, its loss can be read, too
        exposed_s = math.nan if pending.is_replayed else pending.time.exposed_s
        loss, norm = pending.loss_and_norm.tolist()
        links = self._links.slowest_and_fastest() if self._are_several else []
        own = [loss, norm, step_s, exposed_s, self._memory(), *pending.own, *links]
        columns = zip(*self._world.all_gather(own), strict=True)
        losses, norms, steps_s, waits_s, memory, hosts_s, must_stop, *links_of = columns
        self.host_share = max(hosts_s) / max(steps_s)
        tflops = self._step_tflop / max(steps_s)
        sent = [of_floats([*each]) for each in zip(*links_of, strict=True)]
        slowest, slowest_s = self._slowest(waits_s, sent, max(steps_s))
        metrics = StepMetrics(
            **pending.facts,
            loss=sum(losses) / len(losses),
            grad_norm=norms[0],
            step_s=max(steps_s),
            exposed_s=max(waits_s),
            memory_bytes=int(max(memory)),
            tflops=tflops,
            mfu=tflops / self._peak_tflops,
            slowest=slowest,
            slowest_s=slowest_s,
        )
        return metrics, any(must_stop)

    def _slowest(
        self, waits_s: Sequence[float], sent: Sequence[Sequence[Sent]], step_s: float
    ) -> tuple[str, float]:
        """What ranks have waited for in the last steps, if it has a name, and how long in each."""
        self._waits.append(waits_s)
        means = [sum(of_rank) / len(self._waits) for of_rank in zip(*self._waits, strict=True)]
        ranks, link = slowest_ranks(means, self._hosts), slow_link([*chain(*sent)])
        ranks_s, link_s = (0.0 if each is None else each.cost_s for each in (ranks, link))
        if not max(ranks_s, link_s) > _WORTH_NAMING * step_s:
            return "", math.nan
        if ranks is not None and ranks_s > link_s:
            return self._ranks.named(ranks.ranks), ranks_s
        assert link is not None
        names = {each[0].source: host for each, host in zip(sent, self._names, strict=True) if each}
        ends = [names.get(end, "another host") for end in link.ends]
        way = "the link of " if len(ends) == 1 else "the way from "
        return way + " to ".join(ends), link_s

    def restart(self) -> None:
        """Exclude the time since the last step from the next one."""
        self.times.end_step()

    def _memory(self) -> int:
        device = self._world.device
        if device.type == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return int(torch.get_device_module(device).max_memory_allocated(device))
