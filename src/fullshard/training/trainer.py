"""The loop: steps, checkpoints, and what is measured on the way."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm.placement import full_tensor
from fullshard.fully_sharded_data_parallel import FullyShardedDataParallel
from fullshard.models.architecture import Architecture
from fullshard.optim.grad_scaler import ShardedGradScaler
from fullshard.runtime.describing import unit_facts
from fullshard.state.checkpoint import load, save, save_async
from fullshard.state.rank_group import RankGroup
from fullshard.trace import seam
from fullshard.trace.recording import record
from fullshard.trace.seam import Activity
from fullshard.training.batches import Batches
from fullshard.training.config import TrainConfig
from fullshard.training.display import Display
from fullshard.training.figures import Figures, Meter
from fullshard.training.learning_rate import learning_rate
from fullshard.training.leaving import Leaving
from fullshard.training.metrics import MetricsLog
from fullshard.training.run_folder import RunFolder
from fullshard.training.world import World

# Steps before the one that a report shows: by then orders are known and caches warm.
_STEPS_BEFORE_TRACE = 8


@dataclass(frozen=True, slots=True)
class Parts:
    """What is trained, and by what."""

    architecture: Architecture
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches


class Trainer:
    """Trains until the last step or until it is asked to leave, and saves on the way."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        parts: Parts,
        folder: RunFolder,
        environment: Mapping[str, str],
    ) -> None:
        self._config = config
        self._world = world
        self._parts = parts
        self._folder = folder
        self._environment = environment
        self._scaler: ShardedGradScaler | None = None
        if config.sharding.precision == "fp16":
            self._scaler = ShardedGradScaler(device=world.device.type)
        self.step = 0
        self._saved_step = 0

    # State

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint."""
        parts = self._parts
        self.step = load(path, parts.model, parts.optimizer, extra=self._extra()).step or 0
        self._saved_step = self.step

    def _extra(self) -> dict[str, Any]:
        extra: dict[str, Any] = {"batches": self._parts.batches}
        if self._scaler is not None:
            extra["scaler"] = self._scaler
        return extra

    def save(self, *, in_background: bool) -> None:
        """Write a checkpoint of the last step, unless there is one."""
        if self._saved_step == self.step:
            return
        write = save_async if in_background else save
        write(
            self._folder.checkpoint(self.step),
            self._parts.model,
            self._parts.optimizer,
            extra=self._extra(),
            step=self.step,
            only="trainable" if self._config.model.lora_rank else None,
            keep=self._config.run.keep,
        )
        self._saved_step = self.step

    # Steps

    def run(self, log: MetricsLog | None, display: Display, leaving: Leaving) -> bool:
        """Train to the last step; False if it was left before."""
        num_steps = self._config.optimizer.steps
        traced_step = self._traced_step()
        meter = Meter(self._world)
        unread: deque[Figures] = deque()

        def read(num_unread: int) -> bool:
            """Whether a step that was read says that some rank wants to leave."""
            is_leaving = False
            while len(unread) > num_unread:
                settled = meter.settled(unread.popleft())
                is_leaving = is_leaving or settled.is_leaving
                display.show(settled.metrics)
                if log is not None:
                    log.add(settled.metrics)
            return is_leaving

        self._parts.model.train()
        with seam.observed(meter.exposure):
            while self.step < num_steps:
                is_traced = self.step + 1 == traced_step
                with self._traced(is_traced):
                    unread.append(self._one_step(meter, leaving))
                is_due = self._is_save_due()
                is_leaving = read(0 if is_due or is_traced else meter.num_under_way)
                if is_leaving:
                    leaving.answer()
                    break
                if is_due:
                    self.save(in_background=True)
                if is_due or is_traced:
                    meter.pause()
            read(0)
        return self.step == num_steps

    def _is_save_due(self) -> bool:
        every = self._config.run.save_every
        return bool(every) and self.step % every == 0 and self.step < self._config.optimizer.steps

    def _one_step(self, meter: Meter, leaving: Leaving) -> Figures:
        section = self._config.optimizer
        optimizer, batches, scaler = self._parts.optimizer, self._parts.batches, self._scaler
        lr = learning_rate(self.step, section)
        for group in optimizer.param_groups:
            group["lr"] = lr
        total, tokens = torch.zeros((), device=self._world.device), 0
        for _ in range(section.accumulate):
            inputs, targets = batches.next()
            tokens += targets.numel()
            loss = self._loss(inputs, targets) / section.accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += loss.detach()
        with seam.doing(Activity.OPTIMIZER, "optimizer"):
            if scaler is not None:
                scaler.unscale_(optimizer)
            norm = self._clipped()
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return meter.taken(self.step, lr, tokens, total, norm, wants_to_leave=leaving.is_wanted)

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        device = self._world.device
        if device.type != "cpu":
            inputs, targets = (each.pin_memory() for each in (inputs, targets))
        inputs, targets = (each.to(device, non_blocking=True) for each in (inputs, targets))
        logits = self._parts.architecture.logits(self._parts.model, inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def _clipped(self) -> torch.Tensor:
        """The norm of the gradients, which is limited from here on."""
        model, limit = self._parts.model, self._config.optimizer.clip or math.inf
        if isinstance(model, FullyShardedDataParallel):
            norm = model.clip_grad_norm_(limit)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        if isinstance(norm, DTensor):
            norm = full_tensor(norm)
        return norm.to(self._world.device)

    # One step in detail

    def _traced_step(self) -> int | None:
        """The step whose timeline is kept."""
        asked, num_steps = self._config.run.trace_step, self._config.optimizer.steps
        if not self._config.run.report:
            return None
        return asked or min(self.step + 1 + _STEPS_BEFORE_TRACE, num_steps)

    @contextmanager
    def _traced(self, is_traced: bool) -> Iterator[None]:
        if not is_traced:
            yield
            return
        ranks = RankGroup.world()
        ranks.all_gather(None)  # so that the clocks of all ranks begin together
        with record(self._world.device, self._world.rank) as recording:
            yield
        timelines = ranks.all_gather(recording.timeline.as_json())
        if self._world.is_first:
            found = {
                "step": self.step,
                "ranks": timelines,
                "units": [asdict(facts) for facts in unit_facts(self._parts.model)],
                "environment": dict(self._environment),
            }
            self._folder.timeline.write_text(json.dumps(found), encoding="utf-8")
