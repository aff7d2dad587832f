"""One rank of a run: builds the model, trains, saves, samples, writes the report.

The launcher starts this module as a process for each rank.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from fullshard import RankFailedError
from fullshard.cli import wants_tracebacks
from fullshard.doctor import environment, measure_network
from fullshard.errors import CheckpointError, FullshardError, OtherRankError, TopologyError
from fullshard.formatting import readable
from fullshard.processes import machine_id, start_of
from fullshard.ranks import RankGroup
from fullshard.resilience import report_failure
from fullshard.state import tensor_shards
from fullshard_train.batches import Batches
from fullshard_train.config import KEYS, TrainConfig, value_of
from fullshard_train.config_file import config_as_toml, config_of
from fullshard_train.control import (
    PREDICTED,
    ReplicaPlace,
    StatusFolder,
    StopRequest,
    end_with_launcher,
    num_restarts,
)
from fullshard_train.corpus import Corpus, prepare_corpus, start_worker, stop_worker
from fullshard_train.display import Display, closing_lines
from fullshard_train.loggers import Loggers
from fullshard_train.models.optional import first_line
from fullshard_train.models.quantized import QuantizedLinear
from fullshard_train.models.sampling import sample
from fullshard_train.models.tokenizers import Tokenizer
from fullshard_train.optimizer import build_optimizer
from fullshard_train.output import MetricsLog, ReplicaLog, RunFolder
from fullshard_train.planning import predicted
from fullshard_train.report.page import write_report
from fullshard_train.report.record import read_record
from fullshard_train.run_tokenizer import (
    cache_folder,
    keep_tokenizer,
    tokenizer_for,
    tokenizer_of_run,
)
from fullshard_train.same_run import Inputs, facts_of, require_same, require_same_as_first
from fullshard_train.sharding import build_sharded_model
from fullshard_train.sources import Source
from fullshard_train.trainer import Parts, Trainer
from fullshard_train.world import World, joined, leave

STOPPED = 130
INVALID = 2
FAILED = 1
_SAMPLE_S = 60.0
_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")


class Run:
    """The work of one rank in a run."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self._world = world
        self._ranks = RankGroup.world()
        process = machine_id(), os.getpid(), start_of(os.getpid())
        everyone = self._ranks.all_gather((num_restarts(), *process))
        # torchrun counts restarts only on the host whose rank died.
        self._is_restarted = any(restarts for restarts, *_ in everyone)
        self._neighbors = [
            (pid, start)
            for _, machine, pid, start in everyone
            if machine == machine_id() and pid != os.getpid()
        ]
        # The clocks of hosts differ, so rank 0 names the folder.
        own = str(RunFolder.of(config).path), os.environ.get(PREDICTED, "{}")
        path, os.environ[PREDICTED] = self._ranks.all_gather(own)[0]
        self._folder = RunFolder(Path(path))
        self._config = self._written = replace(config, run=replace(config.run, out=path))
        self._replica = ReplicaPlace.of_launcher()
        if config.sharding.elastic_replicas:
            if self._replica is None:
                raise TopologyError(
                    "--elastic-replicas works only with ranks that fullshard train starts "
                    "itself, and another launcher has started these; leave out the option, or "
                    "start fullshard train on each host with --rendezvous."
                )
            self._replica_store = self._replica.store()
            # The mesh of a replica.
            sharding = replace(config.sharding, mesh=f"1x{world.size}")
            self._config = replace(self._written, sharding=sharding)
        self._is_late = self._replica is not None and self._replica.start > 0
        self._corpora: tuple[Corpus, ...] = ()

    def run(self, stop: StopRequest) -> bool:
        """Train, save, sample and report; return False if stopped before the last step."""
        if self._replica is None or self._replica.replica == 0:
            os.environ["FULLSHARD_WATCH_FILE"] = str(self._folder.places)
        stop.neighbors = self._neighbors
        try:
            return self._run(stop)
        finally:
            stop_worker(self._corpora)
            self._folder.unlock()

    def _run(self, stop: StopRequest) -> bool:
        config, world = self._config, self._world
        inputs = self._ranks.run("train", lambda: Inputs.of(config))
        facts, is_told = facts_of(config, inputs, world), world.local_rank == 0
        require_same(self._ranks, facts, is_told=is_told)
        if self._replica is not None:
            self._ranks.run_first(
                "train", lambda: require_same_as_first(self._replica_store, facts)
            )
        architecture = inputs.architecture
        found = self._prepare_folder()
        self._tokenizer = self._choose_tokenizer(inputs)
        parts = self._build(inputs)
        self._ranks.run_first("train", lambda: self._require_room(parts, len(found)))
        trainer = Trainer(
            config, world, parts, self._folder, environment() if world.is_first else {}
        )
        if self._replica is not None:
            trainer.join(self._replica, self._replica_store)
        if self._is_late:
            found = []  # another replica sends it the state
        elif not found or config.model.lora_rank:
            # A checkpoint of adapters does not contain the weights of the model.
            architecture.fill(parts.model, config.run.seed)
        fallback = self._resume(trainer, found)
        is_shown = world.is_first and trainer.leads
        display = Display(config.optimizer.steps, trainer.step, is_shown=is_shown)
        if fallback:
            display.say(fallback)
        display.say(self._opening(parts, trainer.step))
        log = self._log_of(trainer)
        with display:
            is_done = trainer.run(log, display, stop)
            if not trainer.num_nonfinite:
                display.say(f"saving step {trainer.step} ...")
            trainer.save(in_background=False)
        while True:
            display.is_shown = world.is_first and trainer.leads
            if trainer.leads:
                trainer.save(in_background=False)
                if log is not None:
                    log.close()
                self._finish(parts, display, is_done=is_done)
            if trainer.ends():
                return is_done

    def _resume(self, trainer: Trainer, found: list[Path]) -> str:
        """Load the newest undamaged checkpoint; return a message about damaged ones, if any."""
        failures: dict[Path, CheckpointError] = {}
        for path in found:
            try:
                trainer.resume(path)
            except CheckpointError as error:
                if self._config.run.resume_strict:
                    raise
                failures[path] = error
                continue
            damaged = self._ranks.run_first(
                "train", lambda: self._put_aside(failures) if trainer.leads else []
            )
            if not damaged:
                return ""
            folder = self._folder.path / "damaged"
            return f"{', '.join(damaged)}: damaged and moved to {folder}; resuming from {path.name}"
        for failure in failures.values():
            raise failure  # the newest one's: all are damaged, or the model is another one
        return ""

    def _put_aside(self, failed: Iterable[Path]) -> list[str]:
        damaged = [*self._folder.incomplete(), *failed]
        for path in damaged:
            self._folder.put_aside(path)
        return [path.name for path in damaged]

    def _prepare_folder(self) -> list[Path]:
        """Check that the run is possible, and create its folder, which all hosts must share.

        Returns the checkpoints to resume from, newest first, if there are any.
        """
        probe, world = self._ranks.run_first("train", self._claim_folder), self._world
        try:
            self._ranks.require_seen("--out", probe)
        finally:
            if self._world.is_first:
                probe.unlink(missing_ok=True)

        def begin() -> list[Path]:
            if self._replica is None or (self._replica.replica == 0 and not self._is_late):
                config, sizes = config_as_toml(self._written), (world.size, world.local_size)
                self._folder.begin(config, os.environ[PREDICTED], sizes)
            return self._folder.complete()

        return self._ranks.run_first("train", begin)

    def _claim_folder(self) -> Path:
        """Lock the folder for the run, and return a new file in it."""
        if not (self._is_restarted or self._is_late or self._folder.is_of_this_launch):
            self._folder.require_usable(self._config)
        if self._replica is None:
            self._folder.lock()  # with replicas, the launcher has the lock
        probe = self._folder.path / f".seen-{uuid.uuid4().hex}"
        probe.touch()
        return probe

    def _choose_tokenizer(self, inputs: Inputs) -> Tokenizer:
        """Return the tokenizer, which the first rank trains if need be, from the run's folder."""
        config, kind = self._config, inputs.tokenizer_kind
        is_alone = self._world.local_size == self._world.size
        cache = cache_folder(config) if is_alone or config.data.cache else self._folder.path
        self._tokens = cache / "tokens"
        self._tokenizer_kind, self._vocabulary = kind, inputs.architecture.vocabulary

        def keep() -> None:
            own = tokenizer_for(kind, inputs.tokenizer, inputs.sources, cache, self._say)
            keep_tokenizer(own, kind, self._folder)

        self._ranks.run_first("train", keep)
        return self._ranks.run(
            "train", lambda: tokenizer_of_run(inputs.architecture, config, self._folder.path)
        )

    def _require_room(self, parts: Parts, num_complete: int) -> None:
        """Raise if the disk has no room for the checkpoints that will exist at the same time."""
        run, is_adapted = self._config.run, bool(self._config.model.lora_rank)
        # Trainable parameters have two moments.
        num_bytes = sum(
            shard.shape.numel() * shard.tensor.itemsize * (3 if shard.is_trainable else 1)
            for shard in tensor_shards(parts.model)
            if shard.is_trainable or not is_adapted
        )
        num_saves = -(-self._config.optimizer.steps // run.save_every) if run.save_every else 1
        num_more = min(num_saves, max(run.keep, 2) + 1) + bool(run.eval_every) - num_complete
        expected, free = num_bytes * num_more, shutil.disk_usage(self._folder.path).free
        if free < expected:
            raise CheckpointError(
                f"{self._folder.checkpoints}: the disk has {readable(free)} free, but the "
                f"checkpoints of this run need {readable(expected)}; make room, or pass a smaller "
                "--keep or another --out."
            )

    def _build(self, inputs: Inputs) -> Parts:
        config, world, ranks = self._config, self._world, self._ranks
        architecture, data = inputs.architecture, config.data

        trained, evaluated = self._batches(inputs.sources, data.eval_share), None
        if inputs.eval_sources is not None:
            share = data.eval_share or 1.0
            evaluated = self._batches(inputs.eval_sources, share, is_eval=True)
        self._corpora = trained.corpora + (evaluated.corpora if evaluated else ())
        ranks.run("data", self._start_worker)
        model = ranks.run(
            "model", lambda: build_sharded_model(architecture, config.sharding, world)
        )
        optimizer = build_optimizer(model, config.optimizer, world.device)
        ranks.run("data", trained.begin)
        fingerprint = self._tokenizer.fingerprint
        return Parts(architecture, model, optimizer, trained, evaluated, fingerprint)

    def _batches(
        self, sources: Sequence[Source], held_out: float, *, is_eval: bool = False
    ) -> Batches:
        config, world, ranks = self._config, self._world, self._ranks

        def prepared(source: Source) -> Corpus:
            return prepare_corpus(
                source.documents,
                self._tokenizer,
                self._tokens,
                vocabulary=self._vocabulary,
                is_strict=config.data.strict_data,
                say=self._say if world.is_first else lambda line: None,
            )

        corpora = ranks.run("data", lambda: tuple(prepared(each) for each in sources))

        def clean() -> None:
            for each in corpora:
                each.folder.clean()

        ranks.run_first("data", clean)
        return Batches(
            corpora,
            weights=tuple(each.weight for each in sources),
            sequence=config.model.sequence,
            batch=config.optimizer.batch,
            rank=world.rank,
            num_ranks=world.size,
            seed=config.run.seed,
            end=self._tokenizer.end if config.data.mask_documents else None,
            held_out=held_out,
            is_eval=is_eval,
        )

    def _start_worker(self) -> None:
        kind, kept = self._tokenizer_kind, self._folder.kept_tokenizer
        num_threads = max(1, (os.cpu_count() or 1) // self._world.local_size)
        start_worker(self._corpora, "bytes" if kind == "bytes" else str(kept), num_threads)

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def _log_of(self, trainer: Trainer) -> MetricsLog | ReplicaLog | None:
        """Return the log of the first rank; a logger that cannot be used is an error on all."""
        made: list[MetricsLog | ReplicaLog] = []
        self._ranks.run_first("train", lambda: made.append(self._log(trainer)))
        return made[0] if made else None

    def _log(self, trainer: Trainer) -> MetricsLog | ReplicaLog:
        run = self._config.run
        names = [*run.loggers, *["tensorboard"] * run.tensorboard]
        settings = {key.subject: value_of(self._config, key) for key in KEYS.values()}
        shown = {subject.split()[0]: str(value) for subject, value in settings.items()}

        def make_loggers(last_step: int) -> Loggers:
            return Loggers.of(names, self._folder.path, shown, last_step)

        def make(last_step: int) -> MetricsLog:
            return MetricsLog(self._folder.metrics, make_loggers, last_step=last_step)

        if self._replica is None:
            return make(trainer.step)
        if trainer.leads:
            make(trainer.step).close()  # drops the steps that follow
        return ReplicaLog(make, lambda: trainer.leads)

    def _opening(self, parts: Parts, step: int) -> str:
        world = self._world
        numel = sum(shard.shape.numel() for shard in tensor_shards(parts.model))
        modules = parts.model.modules()
        numel += sum(each.num_more for each in modules if isinstance(each, QuantizedLinear))
        device = "CPU" if world.device.type == "cpu" else "GPU"
        ranks = f"{world.size} {device} rank{'s' * (world.size > 1)}"
        replicas = "" if self._replica is None else f"{self._replica.num_replicas} replicas of "
        line = f"{parts.architecture.name}: {numel:,} parameters on {replicas}{ranks}"
        return line if step == 0 else f"{line}, resuming from step {step}"

    def _finish(self, parts: Parts, display: Display, *, is_done: bool) -> None:
        """Write the sample and the report, and print where they are."""
        run, folder = self._config.run, self._folder
        text = ""
        if is_done and run.sample_tokens:
            with _reported("sample", display):
                text = self._sample(parts)
        if not self._world.is_first:
            return
        if text:
            folder.sample.write_text(text, encoding="utf-8")
            display.say(f"\n{text}\n")
        record = read_record(folder.path)
        if run.report:
            with _reported("report", display):
                write_report(record, folder.report)
        for line in closing_lines(folder, record, is_done=is_done):
            display.say(line)

    def _sample(self, parts: Parts) -> str:
        run = self._config.run
        tokenizer = self._tokenizer
        prompt = tokenizer.encode_prompt(run.prompt)
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
            within_s=_SAMPLE_S,
        )
        return run.prompt + tokenizer.decode_after(run.prompt, tokens)


@contextmanager
def _reported(what: str, display: Display) -> Iterator[None]:
    """Print an error and go on: the run is trained and saved, and a restart would not help."""
    try:
        yield
    except Exception as error:
        if wants_tracebacks():
            traceback.print_exc()
        display.say(f"{what}: failed ({first_line(error)})")


# The process


def run_rank(config: TrainConfig) -> int:
    """Run one of the ranks that a launcher started, and return the exit status."""
    status = StatusFolder.of_launcher()
    with StopRequest() as stop:
        if status is not None:
            status.report_ready()
        try:
            refusal = _predict(config) if status is None else None
            with joined(config.run.device) as world:
                RankGroup.world().run("train", lambda: _raise(refusal))
                is_done = Run(config, world).run(stop)
        except (FullshardError, OSError, RuntimeError) as error:
            if _is_lost_connection(error):
                stop.kill_stopped_neighbors()
            return exit_status_after(error, status)
    if status is not None:
        status.report_left()
        if not is_done:
            status.report_stopped()
        return 0
    return 0 if is_done else STOPPED


def _predict(config: TrainConfig) -> Exception | None:
    """Predict a step on the first rank of each host, and return why the run cannot be.

    The other ranks wait in `joined`, where other hosts hear of the reason, too. Ranks that torchrun
    has started again do not measure and predict again, which takes seconds.
    """
    size, local_size = (int(os.environ.get(name, "1")) for name in _SIZES)
    network = None
    if size > local_size:
        with joined(config.run.device, "fullshard/network") as world:
            known = RankGroup.world().run_first(
                "train", lambda: RunFolder.of(config).predicted_for((size, local_size))
            )
            if known:
                os.environ[PREDICTED] = known
                return None
            network = measure_network(world.device)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            os.environ[PREDICTED] = json.dumps(predicted(config, size, local_size, network))
        except (FullshardError, OSError) as error:
            if size == local_size:
                raise
            return error
    return None


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def run_and_leave(config: TrainConfig) -> NoReturn:
    """Run one rank in a process of its own, which ends without waiting for any thread."""
    try:
        status = run_rank(config)
    except BaseException:
        traceback.print_exc()
        status = FAILED
    leave(status)


def exit_status_after(error: Exception, status: StatusFolder | None) -> int:
    """Report an error once, from the rank on which it occurred; raise an unexpected one."""
    if _is_lost_connection(error):
        if wants_tracebacks():
            raise error
        found = "lost its connection to another rank"
        if isinstance(error, RankFailedError):
            found = f"gave up: {error}"
        elif isinstance(error, dist.DistNetworkError):
            found = f"{found}: {first_line(error)}"
        print(f"rank {os.environ.get('RANK', '?')}: {found}", file=sys.stderr, flush=True)
        # The launcher restarts the ranks, unless one says that this would not help.
        return int(status is None or status.error is None)
    is_own = not isinstance(error, OtherRankError)
    is_expected = isinstance(error, FullshardError | OSError)
    if status is not None and is_expected and is_own:
        status.report_error(str(error))
    report_failure(error)
    if not is_expected:
        raise error
    if wants_tracebacks():
        traceback.print_exception(error)
    if status is not None:
        return 0  # after any other status the launcher would restart the ranks, in vain
    # Other hosts have terminals of their own.
    is_elsewhere = getattr(error, "machine", "") not in ("", machine_id())
    if is_own or (is_elsewhere and os.environ.get("LOCAL_RANK", "0") == "0"):
        print(f"fullshard: {error}", file=sys.stderr, flush=True)
    return INVALID


def _is_lost_connection(error: Exception) -> bool:
    """Return whether an error, or the cause of a CheckpointError, says that another rank has died.

    The error of that rank is the one that matters.
    """
    messages = [f"Connection {how}" for how in ("closed by peer", "reset by peer", "refused")]
    messages += ["Broken pipe", "connectFullMesh failed"]  # a rank died while others began
    messages += ["another rank was lost"]  # while they saved
    is_told = isinstance(error, RuntimeError) and any(each in str(error) for each in messages)
    if is_told or isinstance(error, RankFailedError | dist.DistNetworkError):
        return True
    return isinstance(error.__cause__, Exception) and _is_lost_connection(error.__cause__)


def main() -> None:
    """Run one rank; the launcher passes the configuration file."""
    end_with_launcher()
    run_and_leave(config_of(Path(sys.argv[1]), {}))


if __name__ == "__main__":
    main()
