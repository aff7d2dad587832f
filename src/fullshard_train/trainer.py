"""The training loop: steps, checkpoints, metrics and the traced step."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from fullshard import FullyShardedDataParallel, ReplicaGroup, capture, oom_guard
from fullshard.captured_step import CapturedStep
from fullshard.errors import ConfigError, FullshardError, OtherRankError
from fullshard.facts import memory_by_kind, unit_facts
from fullshard.optim import Muon
from fullshard.processes import machine_id
from fullshard.ranks import RankGroup
from fullshard.resilience import explain_out_of_memory, first_nonfinite
from fullshard.sharded_grad_scaler import ShardedGradScaler
from fullshard.state import Handle, load, save, save_async
from fullshard.trace import Activity, doing, observed, profiled, record
from fullshard_train.attention import attention_of
from fullshard_train.batches import Batches
from fullshard_train.config import TrainConfig
from fullshard_train.control import PREDICTED, ReplicaPlace, StopRequest
from fullshard_train.display import Display
from fullshard_train.meter import Meter, PendingStep
from fullshard_train.models.architecture import Architecture
from fullshard_train.optimizer import learning_rate, make_state
from fullshard_train.output import MetricsLog, ReplicaLog, RunFolder
from fullshard_train.report.record import StepMetrics
from fullshard_train.step_parts import timed_parts
from fullshard_train.traffic import counted_traffic, hosts_of
from fullshard_train.world import World

# Steps before the traced one: by then the execution order is known and caches are warm.
_STEPS_BEFORE_TRACE = 8
# Steps after which it is decided whether to capture the others, and the share of a step's time in
# which the host must have been busy.
_STEPS_BEFORE_CAPTURE = 5
_HOST_BOUND = 0.9
_JOINED_STATE = ("step", "num_nonfinite", "_cause", "_best", "_num_parts", "_is_stopping")


@dataclass(frozen=True, slots=True)
class Parts:
    """The model that a run trains, its optimizer and its data."""

    architecture: Architecture
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    eval_batches: Batches | None = None
    tokenizer: str = ""  # its fingerprint


class Trainer:
    """Trains until the last step or until a stop is requested, and saves checkpoints."""

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
        self._predicted = json.loads(os.environ.get(PREDICTED, "{}"))
        is_fp16 = config.sharding.precision == "fp16"
        self._scaler = ShardedGradScaler(device=world.device.type) if is_fp16 else None
        self.step = 0
        # Inputs and targets of steps that are not read yet. Steps in a row that were not finite,
        # where they began, and the checkpoints that the run was rolled back to because of them.
        self._tensors: deque[list[torch.Tensor]] = deque()
        self.num_nonfinite, self._cause = 0, ""
        self._rollbacks: list[list[Path]] = []
        self._parts_s: dict[str, float] = {}  # where the time of a step goes
        self._saved_step = 0
        self._best, self._restarted_at = (math.inf, 0), 0  # a validation loss and its step
        self._saving: Handle | None = None
        self._num_run = 0
        self._is_repeating = False
        self._is_8bit = config.optimizer.name == "adamw8bit"
        # For other optimizers, the host decides whether to apply a step.
        is_muon = isinstance(parts.optimizer, Muon)
        self._is_fused = is_muon or bool(parts.optimizer.defaults.get("fused"))
        is_possible = world.device.type == "cuda" and not config.sharding.offload and self._is_fused
        self._on_oom, self._num_parts = config.run.on_oom, 1  # of a micro-batch
        is_possible = is_possible and not config.sharding.elastic_replicas
        self._may_capture = is_possible and config.run.capture != "off" and self._on_oom == "stop"
        self._captured: CapturedStep[Any, torch.Tensor] | None = None
        if config.run.capture == "on":
            self._captured = capture(self._update)
        # With replicas: those that took part in the last step, and whether all of them stop.
        self._replicas: ReplicaGroup | None = None
        self._took_part: tuple[int | None, ...] = ()
        self._must_stop, self._is_stopping = False, False

    # Replicas

    def join(self, place: ReplicaPlace, store: Any) -> None:
        """Train together with other replicas."""
        self._replicas = ReplicaGroup(
            store,
            place.replica,
            place.num_replicas,
            model=self._parts.model,
            optimizer=self._parts.optimizer,
            extra={**self._extra(), "trainer": self},
            start=place.start,
        )

    @property
    def leads(self) -> bool:
        """Whether the replica of this rank writes the files of the run."""
        return self._replicas is None or self._replicas.is_leader

    def ends(self) -> bool:
        """Return whether no replica died before the leader was done."""
        return self._replicas is None or self._replicas.barrier()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a joining replica needs beyond that of a checkpoint."""
        return {name: getattr(self, name) for name in _JOINED_STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _JOINED_STATE:
            setattr(self, name, state[name])

    def _goes_on(self, display: Display) -> bool:
        """Return whether there is a step to do, with the replicas that are there now."""
        if self._replicas is not None:
            batches, num_shards = self._parts.batches, self._world.size
            batches.num_ranks = len(self._replicas.begin_step()) * num_shards
            batches.rank = self._replicas.index * num_shards + self._world.rank
            display.is_shown = self._world.is_first and self.leads
        return self.step < self._config.optimizer.steps and not self._is_stopping

    def _average(self, loss: torch.Tensor) -> torch.Tensor:
        """Average gradients and losses over replicas, and learn whether any of them must stop."""
        if self._replicas is None:
            return loss
        present = self._replicas.present
        both = torch.stack([loss.float(), loss.new_tensor(self._must_stop, dtype=torch.float32)])
        averaged = self._replicas.average(both)
        assert averaged.extra is not None
        self._took_part = tuple(each if each in averaged.replicas else None for each in present)
        self._must_stop = bool(averaged.extra[1] > 0)
        return averaged.extra[0]

    # State

    def resume(self, path: Path) -> None:
        """Load a checkpoint."""
        parts = self._parts
        if self._is_8bit:
            make_state(parts.optimizer)
        loaded = load(path, parts.model, parts.optimizer, extra=self._extra())
        self.step = self._saved_step = loaded.step or 0
        self._restarted_at = self.step + 1
        self._best = loaded.extra.get("best", (math.inf, 0))
        was, own = loaded.extra.get("optimizer", "adamw"), self._config.optimizer.name
        if was != own:
            raise ConfigError(f"--optimizer: the run was started with {was}, not {own}; pass it.")
        was, own = loaded.extra.get("lora_base", "plain"), self._config.model.lora_base
        if was != own:
            raise ConfigError(f"--lora-base: the adapters are for {was}, not {own}; pass it.")

    def _extra(self) -> dict[str, Any]:
        scaler = {} if self._scaler is None else {"scaler": self._scaler}
        return {"batches": self._parts.batches, **scaler}

    def save(self, *, in_background: bool) -> None:
        """Write a checkpoint of the last step, unless there is one or the step was not finite."""
        if self._saved_step == self.step or self.num_nonfinite or not self.leads:
            return
        keep = self._config.run.keep
        write = save_async if in_background else save
        written = write(
            self._folder.checkpoint(self.step),
            self._parts.model,
            self._parts.optimizer,
            extra={**self._extra(), **self._about()},
            step=self.step,
            only="trainable" if self._config.model.lora_rank else None,
            # Only the next step shows whether this checkpoint is any good.
            keep=max(keep, 2) if in_background else keep,
            pinned=self._folder.checkpoint(self._best[1]).name,
        )
        self._saving = written if isinstance(written, Handle) else None
        self._saved_step = self.step

    def _about(self) -> dict[str, Any]:
        return {
            "best": self._best,
            "optimizer": self._config.optimizer.name,
            "tokenizer": self._parts.tokenizer,
            "lora_base": self._config.model.lora_base,
        }

    def _has_failed_save(self) -> bool:
        saving = self._saving
        with suppress(Exception):
            return bool(saving is not None and saving.done() and not saving.wait())
        return True

    # Steps

    def run(self, log: MetricsLog | ReplicaLog | None, display: Display, stop: StopRequest) -> bool:
        """Train to the last step; return False if a stop was requested before."""
        num_steps = self._config.optimizer.steps
        traced_step = self._traced_step()
        self._say = display.say
        self._parts.model.train()
        if self._on_oom != "stop":
            self._rehearse()
        meter = Meter(self._world, self._config, self._parts.architecture)
        if self._replicas is not None:
            meter.max_pending = 0  # a replica that joins has no step before
        pending: deque[PendingStep] = deque()
        is_eval_due = False

        def finish(num_pending: int) -> bool:
            """Read all but the last `num_pending` steps; return whether any rank must stop."""
            must_stop = False
            while len(pending) > num_pending:
                metrics, is_requested = meter.finish(pending.popleft())
                is_finite = math.isfinite(metrics.loss + metrics.grad_norm)
                if is_eval_due and self._parts.eval_batches and is_finite and not pending:
                    metrics = replace(metrics, eval_loss=self._evaluate())
                if metrics.step == self._restarted_at:
                    metrics = replace(metrics, is_restart=True)
                tensors = self._tensors.popleft()
                must_stop = must_stop or is_requested
                display.show(metrics)
                if log is not None:
                    log.add(metrics)
                self._decide_on_capture(meter.host_share)
                if self._must_go_back(metrics, tensors, display):
                    self._go_back(log, display)
                    pending.clear()
                    self._tensors.clear()
                if not is_finite:
                    meter.restart()  # a second pass is no part of a step
            return must_stop

        remedies = self._predicted.get("remedies", "")
        explained = explain_out_of_memory(self._parts.model, self._parts.optimizer, remedies)
        with observed(meter.times), explained, attention_of(self._world.device, self._config):
            while self._goes_on(display):
                is_traced = self.step + 1 == traced_step
                is_profiled = self.step + 1 == self._config.run.profile
                is_timed = self.step + 2 == traced_step and not is_profiled
                with self._traced(is_traced), self._profiled(is_profiled), self._timed(is_timed):
                    is_eager = is_traced or is_profiled or is_timed
                    pending.append(self._one_step(meter, stop, is_eager=is_eager))
                is_last = self.step == num_steps
                is_save_due = self._is_due(self._config.run.save_every) and not is_last
                is_eval_due = self._is_due(self._config.run.eval_every) or is_last
                is_read = is_save_due or is_eval_due or is_traced or is_profiled or is_timed
                must_stop = finish(0 if is_read else meter.max_pending)
                if must_stop:
                    stop.acknowledge()
                    self._is_stopping = True
                    continue
                if is_save_due or (self._best[1] == self.step and not is_last):
                    self.save(in_background=True)
                if is_read:
                    meter.restart()
            finish(0)
        return self.step == num_steps

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _evaluate(self) -> float:
        """Return the validation loss: the mean over the tokens with a loss, on all ranks."""
        model, batches = self._parts.model, cast(Batches, self._parts.eval_batches)
        batches.restart()
        total = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        model.eval()
        with torch.no_grad():
            for _ in range(self._config.run.eval_batches):
                total += torch.stack(self._loss_and_count(*self._on_device(batches.next())))
                if batches.is_over:
                    break
        model.train()
        losses, counts = zip(*self._world.all_gather(total.tolist()), strict=True)
        loss: float = sum(losses) / max(sum(counts), 1)
        if loss < self._best[0]:
            self._best = (loss, self.step)
        return loss

    def _one_step(self, meter: Meter, stop: StopRequest, *, is_eager: bool) -> PendingStep:
        start = time.perf_counter()
        lr = learning_rate(self.step, self._config.optimizer)
        self._set_learning_rate(lr)
        tensors: list[torch.Tensor] = []
        for _ in range(self._config.optimizer.accumulate):
            tensors += self._parts.batches.next()
        if self._parts.batches.num_epochs and not self._is_repeating:
            self._is_repeating = True
            self._say(f"data: all sequences were used before step {self.step + 2}; they repeat")
        tokens = tensors[1].numel() * self._config.optimizer.accumulate * self._world.size
        tensors = self._on_device(tensors)
        if self._replicas is not None:  # replicas agree on it in the step
            self._must_stop = stop.is_requested or self._has_failed_save()
        captured = None if is_eager else self._captured
        num_graphs = 0 if captured is None else captured.num_graphs
        loss_and_norm = (captured or self._update)(*tensors)
        self.step += 1
        self._tensors.append(tensors)
        if self._replicas is None:
            # The save at the end then raises what went wrong.
            self._must_stop = stop.is_requested or self._has_failed_save()
        own = (time.perf_counter() - start, self._must_stop)
        tokens *= sum(each is not None for each in self._took_part) or 1
        facts = {"step": self.step, "lr": lr, "tokens": tokens, "replicas": self._took_part}
        return meter.start(facts, loss_and_norm, own, is_replayed=num_graphs > 0)

    def _set_learning_rate(self, lr: float) -> None:
        for group in self._parts.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = self._may_capture
            rate = group["lr"]
            is_on_device = isinstance(rate, torch.Tensor) and rate.is_cuda
            if self._is_8bit or (self._may_capture and is_on_device):
                rate.fill_(lr)
            elif not self._may_capture:
                group["lr"] = lr
            else:
                group["lr"] = torch.tensor(lr, device=self._world.device)

    def _update(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Train on micro-batches of inputs and targets; return the loss and the gradient norm."""
        optimizer, scaler = self._parts.optimizer, self._scaler
        total = (self._backward if self._on_oom == "stop" else self._guarded_backward)(tensors)
        total = self._average(total)
        with doing(Activity.OPTIMIZER, "optimizer"), record_function("fullshard optimizer"):
            if scaler is not None:
                scaler.unscale_(optimizer)
            norm = self._clip_grad_norm()
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                # Where this is 1, a fused optimizer changes nothing; the host need not know.
                optimizer.found_inf = 1 - norm.isfinite().float()  # type: ignore[attr-defined]
                if self._is_fused or norm.isfinite():
                    optimizer.step()
            optimizer.zero_grad()
        return torch.stack([total.double(), norm.detach().double()])

    def _backward(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute gradients, and return the loss."""
        total = torch.zeros((), device=self._world.device)
        number = self._config.optimizer.accumulate
        width = len(tensors) // number
        for first in range(0, len(tensors), width):
            whole = tensors[first : first + width]
            count = whole[1].ge(0).sum().clamp(min=1)  # there may be no trained token
            for part in zip(*(each.tensor_split(self._num_parts) for each in whole), strict=True):
                loss = self._loss_and_count(*part)[0] / count / number
                (loss if self._scaler is None else self._scaler.scale(loss)).backward()
                total += loss.detach()
        return total

    def _guarded_backward(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute gradients, again if a rank runs out of memory, and return the loss."""
        section, model, is_last = self._config.optimizer, self._parts.model, False
        while True:
            number = section.accumulate * self._num_parts
            with oom_guard(model, optimizer=self._parts.optimizer, micro_batches=number) as guard:
                total = self._backward(tensors)
            if guard.error is None:
                return total
            if self._on_oom == "split":
                is_last = self._num_parts == section.batch
                self._num_parts = min(2 * self._num_parts, section.batch)
            if is_last:
                is_own = self._world.rank in guard.ranks
                raise guard.error if is_own else OtherRankError(str(guard.error))
            is_last, number = True, self._num_parts
            found = f"step {self.step + 1}: rank {guard.ranks[0]} ran out of memory; it is repeated"
            self._say(found + f", with micro-batches in {number} parts from now on" * (number > 1))

    def _rehearse(self) -> None:
        """Run two small dummy steps, which show the guard what a step has to issue."""
        device, number = self._world.device, self._config.optimizer.accumulate
        tokens = torch.zeros(1, min(16, self._config.model.sequence), dtype=torch.int64)
        tensors = self._on_device([tokens] * 2 * number)
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            for _ in range(2):
                self._guarded_backward(tensors)
                self._parts.optimizer.zero_grad()

    def _on_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        device = self._world.device
        if device.type == "cpu":
            return list(tensors)
        return [each.pin_memory().to(device, non_blocking=True) for each in tensors]

    def _loss_and_count(
        self, inputs: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of tokens, and the number of tokens that have one."""
        loss = self._parts.architecture.loss(self._parts.model, inputs, targets, positions)
        return loss, targets.ge(0).sum()

    def _decide_on_capture(self, host_share: float) -> None:
        """After a few eager steps, capture the others if the device waited for the host."""
        self._num_run += 1
        is_time = self._num_run == _STEPS_BEFORE_CAPTURE and self._captured is None
        if is_time and self._may_capture and host_share > _HOST_BOUND:
            self._captured = capture(self._update, warmup=1, fallback=True)

    def _clip_grad_norm(self) -> torch.Tensor:
        """Clip the gradients and return their norm before clipping."""
        model, limit = self._parts.model, self._config.optimizer.clip or math.inf
        if isinstance(model, FullyShardedDataParallel):
            norm = model.clip_grad_norm_(limit)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return norm.to(self._world.device)

    # Steps that are not finite

    def _must_go_back(
        self, metrics: StepMetrics, tensors: Sequence[torch.Tensor], display: Display
    ) -> bool:
        """Report the first step that is not finite; return whether to roll back, or raise."""
        run = self._config.run
        # A scaler finds its scale through gradients that overflow.
        norm = metrics.grad_norm if self._scaler is None else 0.0
        self.num_nonfinite += 1
        if math.isfinite(metrics.loss + norm):
            self.num_nonfinite = 0
            return False
        if self.num_nonfinite == 1:
            first = first_nonfinite(self._parts.model, lambda: self._backward(tensors))
            self._parts.optimizer.zero_grad()
            figures = f"loss {metrics.loss:.4g}, gradient norm {metrics.grad_norm:.4g}"
            self._cause = f"step {metrics.step}: {figures}; {first or 'a second pass is finite'}"
            display.say(self._cause)
        if run.on_nan == "skip" or self.num_nonfinite < run.nan_limit:
            return False
        if run.on_nan == "stop":
            self._stop("lower --lr, set --clip, or pass --on-nan skip or rollback")
        return True

    def _go_back(self, log: MetricsLog | ReplicaLog | None, display: Display) -> None:
        """Load the newest checkpoint, and go on with the data that follows."""
        if self._saving is not None:
            self._saving.wait()
        batches, complete = self._parts.batches, self._folder.complete
        position = batches.state_dict()
        found = RankGroup.world().run_first("train", lambda: complete()[:1])
        times = self._rollbacks.count(found)
        if not found or times == self._config.run.nan_limit:
            self._stop(f"lower --lr; it was rolled back {times} times to one checkpoint")
        self._rollbacks.append(found)
        self.resume(found[0])
        batches.load_state_dict(position)
        self.num_nonfinite = 0
        if log is not None:
            log.go_back(self.step)
        display.say(f"rolled back to step {self.step}; continuing with the data that follows")

    def _stop(self, remedy: str) -> NoReturn:
        if self._saving is not None:
            self._saving.wait()  # a rank that fails ends at once
        kind = FullshardError if self._world.is_first else OtherRankError
        raise kind(
            f"Loss or gradients were not finite in {self.num_nonfinite} steps in a row "
            f"({self._cause}); {remedy}. Checkpoints are from before them."
        )

    # The traced step

    def _traced_step(self) -> int | None:
        asked, num_steps = self._config.run.trace_step, self._config.optimizer.steps
        if not self._config.run.report:
            return None
        return asked or min(self.step + 1 + _STEPS_BEFORE_TRACE, num_steps)

    @contextmanager
    def _traced(self, is_traced: bool) -> Iterator[None]:
        """Write the timeline of the step in this context, if it is the traced one."""
        if not is_traced:
            yield
            return
        ranks = RankGroup.world()
        ranks.all_gather(None)  # so that the clocks of all ranks start together
        with counted_traffic() as traffic:
            with record(self._world.device, self._world.rank) as recording:
                yield
            ranks.all_gather(None)  # until all have received what they were sent
        model, timeline = self._parts.model, recording.timeline
        memory = ranks.all_gather(memory_by_kind(model, self._parts.optimizer, timeline))
        timelines = ranks.all_gather(timeline.as_json())
        everyone = ranks.all_gather((machine_id(), socket.gethostname(), asdict(traffic)))
        if self._world.is_first and self.leads:
            found = {
                "step": self.step,
                "ranks": timelines,
                "units": [asdict(facts) for facts in unit_facts(model)],
                "memory": max(memory, key=lambda kinds: sum(kinds.values())),
                "environment": dict(self._environment),
                "predicted": self._predicted,
                "hosts": hosts_of(everyone),
                "parts": {**self._parts_s, "waiting for communication": timeline.exposed_s()},
            }
            self._folder.timeline.write_text(json.dumps(found), encoding="utf-8")

    @contextmanager
    def _timed(self, is_timed: bool) -> Iterator[None]:
        """Find where the time of the step in this context goes, on the first rank."""
        if not (is_timed and self._world.is_first and self.leads):
            yield
            return
        with timed_parts(self._world.device) as self._parts_s:
            yield

    def _profiled(self, is_profiled: bool) -> AbstractContextManager[None]:
        file, rank = self._folder.profile / f"rank{self._world.rank}.json.gz", self._world.rank
        is_written = is_profiled and self.leads
        return profiled(file, self._world.device, rank) if is_written else nullcontext()
