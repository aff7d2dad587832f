"""Where a run leaves what it makes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.state.store import latest
from fullshard.training.config import TrainConfig


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run, and the names in it."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.json"

    @property
    def sample(self) -> Path:
        return self.path / "sample.txt"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def tokens(self) -> Path:
        return self.path / "tokens"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def newest(self) -> Path | None:
        """The newest whole checkpoint."""
        return latest(self.checkpoints) if self.checkpoints.is_dir() else None

    def require_free(self, config: TrainConfig) -> None:
        """Raise if a run is there that was not asked to go on, or none that was."""
        found = self.newest()
        if config.run.resume and found is None:
            raise ConfigError(
                f"--resume: a checkpoint in {self.checkpoints} is expected, found none; leave out "
                "--resume to begin, or name another folder with --out."
            )
        if found is not None and not config.run.resume:
            raise ConfigError(
                f"--out: a folder without a run is expected, found {found.name} in {self.path}; "
                "pass --resume to go on with it, or name another folder."
            )


def folder_for(config: TrainConfig) -> RunFolder:
    """The folder that was asked for, or a new one by model and time."""
    if config.run.out:
        return RunFolder(Path(config.run.out))
    model = re.sub(r"[^\w.-]+", "-", Path(config.model.name).name) or "model"
    return RunFolder(Path("runs") / f"{model}-{datetime.now():%Y%m%d-%H%M%S}")
