"""What one rank does in a run: assemble, train, save, sample, report."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullshard.models.architecture import Architecture
from fullshard.models.sampling import sample
from fullshard.report.reading import read_record
from fullshard.report.writing import write_report
from fullshard.state.rank_group import RankGroup
from fullshard.state.shards import tensor_shards
from fullshard.training.assembling import architecture_for, assembled
from fullshard.training.batches import Batches
from fullshard.training.closing import closing_lines
from fullshard.training.config import TrainConfig
from fullshard.training.config_file import config_as_toml
from fullshard.training.corpus import prepare_corpus
from fullshard.training.display import Display
from fullshard.training.documents import Documents
from fullshard.training.fitting import capacity_of, require_fit
from fullshard.training.leaving import Leaving
from fullshard.training.machine import environment
from fullshard.training.metrics import MetricsLog
from fullshard.training.optimizing import build_optimizer
from fullshard.training.run_folder import RunFolder, folder_for
from fullshard.training.trainer import Parts, Trainer
from fullshard.training.world import World


class Run:
    """What one rank does in a run."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self._world = world
        self._ranks = RankGroup.world()
        # On the host whose rank died, restarts are counted; on others they are not.
        num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._is_restarted = any(self._ranks.all_gather(num_restarts))
        # Ranks on other hosts may be a second apart: the first one names the folder.
        path = self._ranks.all_gather(str(folder_for(config).path))[0]
        self._folder = RunFolder(Path(path))
        self._config = replace(config, run=replace(config.run, out=path))

    def run(self, leaving: Leaving) -> bool:
        """Train, save, sample, report; False if it was left before the last step."""
        config, ranks = self._config, self._ranks
        architecture = architecture_for(config.model)
        found = ranks.run_first("train", lambda: self._prepare_folder(architecture))
        parts = self._parts(architecture)
        trainer = Trainer(config, self._world, parts, self._folder, self._environment())
        if found is None or config.model.lora_rank:
            # What adapters are added to is not in their checkpoint.
            architecture.fill(parts.model, config.run.seed)
        if found is not None:
            trainer.resume(found)
        display = Display(config.optimizer.steps, trainer.step, is_shown=self._world.is_first)
        display.say(self._opening(parts, trainer.step))
        log = self._log(trainer.step)
        with display:
            is_done = trainer.run(log, display, leaving)
            display.say(f"saving step {trainer.step} ...")
            trainer.save(in_background=False)
        if log is not None:
            log.close()
        self._finish(architecture, parts, display, is_done=is_done)
        return is_done

    def _prepare_folder(self, architecture: Architecture) -> Path | None:
        """On the first rank: refuse what cannot work before anything is made.

        The checkpoint to go on from, if there is one.
        """
        config, world = self._config, self._world
        if not self._is_restarted:
            self._folder.require_free(config)
        capacity = capacity_of(world.device, world.local_size)
        require_fit(config, architecture, world.size, world.device, capacity)
        self._folder.path.mkdir(parents=True, exist_ok=True)
        self._folder.config.write_text(config_as_toml(config), encoding="utf-8")
        return self._folder.newest()

    def _parts(self, architecture: Architecture) -> Parts:
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
        model = ranks.run("model", lambda: assembled(architecture, config.sharding, world))
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

    def _environment(self) -> dict[str, str]:
        return environment() if self._world.is_first else {}

    def _log(self, last_step: int) -> MetricsLog | None:
        if not self._world.is_first:
            return None
        board = self._folder.tensorboard if self._config.run.tensorboard else None
        return MetricsLog(self._folder.metrics, board, last_step=last_step)

    def _opening(self, parts: Parts, step: int) -> str:
        world = self._world
        numel = sum(shard.shape.numel() for shard in tensor_shards(parts.model))
        where = f"{world.size} {'CPU' if world.device.type == 'cpu' else 'GPU'} rank"
        what = (
            f"{parts.architecture.name}: {numel:,} parameters over {where}{'s' * (world.size > 1)}"
        )
        return what if step == 0 else f"{what}, going on from step {step}"

    def _finish(
        self, architecture: Architecture, parts: Parts, display: Display, *, is_done: bool
    ) -> None:
        """The sample, the report, and where everything is."""
        run, folder = self._config.run, self._folder
        text = self._sample(architecture, parts) if is_done and run.sample_tokens else ""
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

    def _sample(self, architecture: Architecture, parts: Parts) -> str:
        run = self._config.run
        tokenizer = architecture.tokenizer(self._config.data.tokenizer)
        prompt = tokenizer.encode(run.prompt)
        tokens = sample(
            architecture,
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
