"""A run of `fullshard train` that takes seconds, and what it leaves behind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullshard_train import meter
from fullshard_train.config import TrainConfig

TEXT = "".join(f"line {n}: the quick brown fox jumps over {n * n % 97} dogs\n" for n in range(800))

_TINY: dict[str, dict[str, Any]] = {
    "model": {"name": "tiny", "sequence": 32},
    "optimizer": {"steps": 6, "batch": 2, "lr": 4e-3, "warmup": 2},
    "run": {"device": "cpu", "save_every": 0, "sample_tokens": 0, "report": False},
}


def configured(folder: Path, out: str, **changes: dict[str, Any]) -> TrainConfig:
    """A run on the text in a folder, into another folder beside it; `changes` by section."""
    config = TrainConfig()
    places = {"data": {"paths": (str(folder / "text.txt"),)}, "run": {"out": str(folder / out)}}
    for values in (_TINY, places, changes):
        sections = {name: replace(getattr(config, name), **some) for name, some in values.items()}
        config = replace(config, **sections)
    return config


_estimates: dict[Any, Any] = {}


def estimate_once() -> None:
    """Count the operations of equal models once per process: they are much of what a run takes."""
    if not _estimates:
        meter.step_tflop = _once(meter.step_tflop)


def _once(estimate: Callable[..., Any]) -> Callable[..., Any]:
    def remembered(config: TrainConfig, architecture: Any, *where: Any) -> Any:
        sections = (config.model, replace(config.optimizer, lr=1.0, steps=1), config.sharding)
        key = (estimate, sections, where)
        if key not in _estimates:
            _estimates[key] = estimate(config, architecture, *where)
        return _estimates[key]

    _estimates[remembered] = None
    return remembered


def losses(folder: Path) -> list[float]:
    """The losses of all steps, each of which is there once."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in found] == list(range(1, len(found) + 1))
    return [math.nan if each["loss"] is None else each["loss"] for each in found]
