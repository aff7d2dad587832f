"""One rank of a run: builds the model, trains, saves, samples, writes the report.

The launcher starts this module as a process for each rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullshard.errors import FullshardError
from fullshard.models.architecture import Architecture
from fullshard.models.sampling import sample
from fullshard.report.page import write_report
from fullshard.report.record import read_record
from fullshard.state.rank_group import OtherRankError, RankGroup
from fullshard.state.shards import tensor_shards
from fullshard.training.batches import Batches
from fullshard.training.config import TrainConfig
from fullshard.training.config_file import config_as_toml, config_of
from fullshard.training.control import StatusFolder, StopRequest, wants_tracebacks
from fullshard.training.corpus import Documents, prepare_corpus
from fullshard.training.display import Display, closing_lines
from fullshard.training.machine import environment
from fullshard.training.memory import capacity_of, require_fit
from fullshard.training.optimizer import build_optimizer
from fullshard.training.output import MetricsLog, RunFolder
from fullshard.training.sharding import architecture_for, build_sharded_model
from fullshard.training.trainer import Parts, Trainer
from fullshard.training.world import World, joined, leave

STOPPED = 130
INVALID = 2


class Run:
    """The work of one rank in a run."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self._world = world
        self._ranks = RankGroup.world()
        # torchrun counts restarts only on the host whose rank died.
        num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._is_restarted = any(self._ranks.all_gather(num_restarts))
        # The clocks of hosts differ, so rank 0 names the folder.
        path = self._ranks.all_gather(str(RunFolder.of(config).path))[0]
        self._folder = RunFolder(Path(path))
        self._config = replace(config, run=replace(config.run, out=path))

    def run(self, stop: StopRequest) -> bool:
        """Train, save, sample and report; return False if stopped before the last step."""
        config, world = self._config, self._world
        architecture = architecture_for(config.model)
        found = self._ranks.run_first("train", lambda: self._prepare_folder(architecture))
        parts = self._build(architecture)
        trainer = Trainer(
            config, world, parts, self._folder, environment() if world.is_first else {}
        )
        if found is None or config.model.lora_rank:
            # A checkpoint of adapters does not contain the weights of the model.
            architecture.fill(parts.model, config.run.seed)
        if found is not None:
            trainer.resume(found)
        display = Display(config.optimizer.steps, trainer.step, is_shown=world.is_first)
        display.say(self._opening(parts, trainer.step))
        log = self._log(trainer.step)
        with display:
            is_done = trainer.run(log, display, stop)
            display.say(f"saving step {trainer.step} ...")
            trainer.save(in_background=False)
        if log is not None:
            log.close()
        self._finish(parts, display, is_done=is_done)
        return is_done

    def _prepare_folder(self, architecture: Architecture) -> Path | None:
        """Check on rank 0 that the run is possible, and create its folder.

        Returns the checkpoint to resume from, if there is one.
        """
        config, world = self._config, self._world
        if not self._is_restarted:
            self._folder.require_usable(config)
        capacity = capacity_of(world.device, world.local_size)
        require_fit(config, architecture, world.size, world.device, capacity)
        self._folder.path.mkdir(parents=True, exist_ok=True)
        self._folder.config.write_text(config_as_toml(config), encoding="utf-8")
        return self._folder.newest()

    def _build(self, architecture: Architecture) -> Parts:
        config, world, ranks = self._config, self._world, self._ranks
        tokenizer = architecture.tokenizer(config.data.tokenizer)
        documents = ranks.run(
            "data", lambda: Documents.of(config.data.paths, config.data.text_field)
        )

        def prepared() -> Any:
            return prepare_corpus(
                documents,
                tokenizer,
                self._folder.tokens,
                sequence=config.model.sequence,
                vocabulary=architecture.vocabulary,
            )

        ranks.run_first("data", lambda: prepared() and None)
        corpus = ranks.run("data", prepared)
        model = ranks.run(
            "model", lambda: build_sharded_model(architecture, config.sharding, world)
        )
        optimizer = build_optimizer(model, config.optimizer, world.device)
        batches = Batches(
            corpus,
            sequence=config.model.sequence,
            batch=config.optimizer.batch,
            rank=world.rank,
            num_ranks=world.size,
            seed=config.run.seed,
        )
        return Parts(architecture, model, optimizer, batches)

    def _log(self, last_step: int) -> MetricsLog | None:
        if not self._world.is_first:
            return None
        board = self._folder.tensorboard if self._config.run.tensorboard else None
        return MetricsLog(self._folder.metrics, board, last_step=last_step)

    def _opening(self, parts: Parts, step: int) -> str:
        world = self._world
        numel = sum(shard.shape.numel() for shard in tensor_shards(parts.model))
        device = "CPU" if world.device.type == "cpu" else "GPU"
        ranks = f"{world.size} {device} rank{'s' * (world.size > 1)}"
        line = f"{parts.architecture.name}: {numel:,} parameters on {ranks}"
        return line if step == 0 else f"{line}, resuming from step {step}"

    def _finish(self, parts: Parts, display: Display, *, is_done: bool) -> None:
        """Write the sample and the report, and print where they are."""
        run, folder = self._config.run, self._folder
        text = self._sample(parts) if is_done and run.sample_tokens else ""
        if not self._world.is_first:
            return
        if text:
            folder.sample.write_text(text, encoding="utf-8")
            display.say(f"\n{text}\n")
        record = read_record(folder.path)
        if run.report:
            write_report(record, folder.report)
        for line in closing_lines(folder, record, is_done=is_done):
            display.say(line)

    def _sample(self, parts: Parts) -> str:
        run = self._config.run
        tokenizer = parts.architecture.tokenizer(self._config.data.tokenizer)
        prompt = tokenizer.encode(run.prompt)
        tokens = sample(
            parts.architecture,
            parts.model,
            prompt,
            run.sample_tokens,
            temperature=0.7,
            top_k=40,
            seed=run.seed,
            end=tokenizer.end,
            device=self._world.device,
        )
        return tokenizer.decode([*prompt, *tokens])


# The process


def run_rank(config: TrainConfig) -> int:
    """Run one of the ranks that a launcher started, and return the exit status."""
    status = StatusFolder.of_launcher()
    with StopRequest() as stop:
        if status is not None:
            status.report_ready()
        try:
            with joined(config.run.device) as world:
                is_done = Run(config, world).run(stop)
        except (FullshardError, OSError) as error:
            if wants_tracebacks():
                traceback.print_exc()
            return _report_error(error, status)
        except RuntimeError as error:
            if not _is_lost_connection(error) or wants_tracebacks():
                raise
            rank = os.environ.get("RANK", "?")
            print(f"rank {rank}: lost its connection to another rank", file=sys.stderr, flush=True)
            return 1
    if is_done:
        return 0
    if status is None:
        return STOPPED
    status.report_stopped()
    return 0


def _report_error(error: Exception, status: StatusFolder | None) -> int:
    """Report an error once, from the rank on which it occurred."""
    is_own = not isinstance(error, OtherRankError)
    if status is not None:
        if is_own:
            status.report_error(str(error))
        return 0  # after any other status the launcher would restart the ranks, in vain
    if is_own:
        print(f"fullshard: {error}", file=sys.stderr, flush=True)
    return INVALID


def _is_lost_connection(error: RuntimeError) -> bool:
    """Return whether another rank has died; its own error is the one that matters."""
    messages = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return any(message in str(error) for message in messages)


def _die_with_launcher() -> None:
    """On Linux, terminate this rank when its launcher is killed."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def main() -> None:
    """Run one rank; the launcher passes the configuration file."""
    _die_with_launcher()
    leave(run_rank(config_of(Path(sys.argv[1]), {})))


if __name__ == "__main__":
    main()
