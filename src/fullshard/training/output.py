"""The files that a run writes: their names, and the log of metrics."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.report.record import CONFIG, METRICS, SAMPLE, TIMELINE, StepMetrics
from fullshard.state.store import latest
from fullshard.training.config import TrainConfig


class RunFolder:
    """The folder of a run, and the paths of the files in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG
        self.metrics = path / METRICS
        self.timeline = path / TIMELINE
        self.sample = path / SAMPLE
        self.report = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.tokens = path / "tokens"
        self.tensorboard = path / "tensorboard"

    @classmethod
    def of(cls, config: TrainConfig) -> RunFolder:
        """Return the folder that was asked for, or a new one named by model and time."""
        if config.run.out:
            return cls(Path(config.run.out))
        model = re.sub(r"[^\w.-]+", "-", Path(config.model.name).name) or "model"
        return cls(Path("runs") / f"{model}-{datetime.now():%Y%m%d-%H%M%S}")

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint."""
        return latest(self.checkpoints) if self.checkpoints.is_dir() else None

    def require_usable(self, config: TrainConfig) -> None:
        """Raise if the folder contains a run that is not resumed, or none that could be."""
        found = self.newest()
        if config.run.resume and found is None:
            raise ConfigError(
                f"--resume: a checkpoint in {self.checkpoints} is expected, found none; leave out "
                "--resume to start a run, or pass another folder with --out."
            )
        if found is not None and not config.run.resume:
            raise ConfigError(
                f"--out: a folder without a run is expected, found {found.name} in {self.path}; "
                "pass --resume to continue it, or pass another folder."
            )


class MetricsLog:
    """Writes the metrics of every step as a line of JSON, and optionally for TensorBoard.

    Lines after `last_step`, from before a restart, are dropped.
    """

    def __init__(self, path: Path, tensorboard: Path | None, *, last_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_after(path, last_step)
        self._file = path.open("a", encoding="utf-8")
        self._writer = None if tensorboard is None else _summary_writer(tensorboard, last_step)

    def add(self, metrics: StepMetrics) -> None:
        self._file.write(json.dumps(dataclasses.asdict(metrics)) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name in ("loss", "lr", "grad_norm", "tokens_per_s", "step_s", "exposed_s"):
                self._writer.add_scalar(name, getattr(metrics, name), metrics.step)
            self._writer.add_scalar("memory_GiB", metrics.memory_bytes / 2**30, metrics.step)

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def _drop_after(path: Path, last_step: int) -> None:
    """Keep the complete lines of steps up to `last_step`; the file is replaced atomically."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # incomplete: a rank died
        if step <= last_step:
            kept.append(line + "\n")
    incoming = path.with_name(f".{path.name}.{os.getpid()}")
    incoming.write_text("".join(kept), encoding="utf-8")
    incoming.replace(path)


def _summary_writer(folder: Path, last_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "--tensorboard: the package tensorboard is needed, found none; run: pip install "
            "'fullshard[tensorboard]'"
        ) from None
    return SummaryWriter(str(folder), purge_step=last_step + 1)
