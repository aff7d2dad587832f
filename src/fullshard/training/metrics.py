"""Metrics of every step: a line of JSON each, and TensorBoard's files if they are wanted."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.report.record import StepMetrics


class MetricsLog:
    """Writes the metrics of a run. What an earlier start wrote after `last_step` is dropped."""

    def __init__(self, path: Path, tensorboard: Path | None, *, last_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_after(path, last_step)
        self._file = path.open("a", encoding="utf-8")
        self._board = None if tensorboard is None else _board(tensorboard, last_step)

    def add(self, metrics: StepMetrics) -> None:
        self._file.write(json.dumps(dataclasses.asdict(metrics)) + "\n")
        self._file.flush()
        if self._board is not None:
            for name in ("loss", "lr", "grad_norm", "tokens_per_s", "step_s", "exposed_s"):
                self._board.add_scalar(name, getattr(metrics, name), metrics.step)
            self._board.add_scalar("memory_GiB", metrics.memory_bytes / 2**30, metrics.step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _drop_after(path: Path, last_step: int) -> None:
    """Keep whole lines of steps up to `last_step`; the file is replaced, or stays as it was."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # torn when a rank died
        if step <= last_step:
            kept.append(line + "\n")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text("".join(kept), encoding="utf-8")
    beside.replace(path)


def _board(folder: Path, last_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "--tensorboard: the package tensorboard is needed, found none; run: pip install "
            "'fullshard[tensorboard]'"
        ) from None
    return SummaryWriter(str(folder), purge_step=last_step + 1)
