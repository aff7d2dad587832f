"""A run's folder, read back into what a report shows."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.report.record import RunRecord, StepMetrics
from fullshard.trace.timeline import Timeline, UnitFacts

METRICS = "metrics.jsonl"
TIMELINE = "timeline.json"
CONFIG = "config.toml"
SAMPLE = "sample.txt"


def read_record(folder: Path) -> RunRecord:
    """What the run in `folder` has left so far: any of its files may be missing.

    A run that was killed leaves a torn line, and one that went on from a checkpoint does some
    steps again: of the steps, those count that were done last.
    """
    if not any((folder / name).is_file() for name in (METRICS, TIMELINE, CONFIG)):
        raise ConfigError(
            f"{folder}: the folder of a run is expected, found none of {METRICS}, {TIMELINE} and "
            f"{CONFIG}; give the folder that fullshard train wrote."
        )
    traced = _traced(folder / TIMELINE)
    return RunRecord(
        title=folder.resolve().name,
        metrics=_metrics(folder / METRICS),
        timelines=traced.timelines,
        traced_step=traced.step,
        units=traced.units,
        config=_config(folder / CONFIG),
        environment=traced.environment,
        sample=_text(folder / SAMPLE),
    )


@dataclass(frozen=True, slots=True)
class _Traced:
    """The content of `timeline.json`."""

    step: int | None
    timelines: tuple[Timeline, ...]
    units: tuple[UnitFacts, ...]
    environment: Mapping[str, str]


def _metrics(path: Path) -> list[StepMetrics]:
    lines = [line for line in _text(path).splitlines() if line.strip()]
    found: list[StepMetrics] = []
    for step in _readable_steps(lines):
        while found and found[-1].step >= step.step:
            found.pop()
        found.append(step)
    # One line may be torn; if no line can be read, this is some other file.
    if len(lines) > 1 and not found:
        raise ConfigError(
            f"{path}: lines of {', '.join(_names_of(StepMetrics))} are expected, found "
            f"{lines[0][:80]!r}; move the file away to draw the report without it."
        )
    return found


def _readable_steps(lines: list[str]) -> Iterator[StepMetrics]:
    for line in lines:
        try:
            found = json.loads(line)
            values = {name: found[name] for name in _names_of(StepMetrics)}
            yield StepMetrics(
                step=int(values["step"]),
                loss=_number(values["loss"]),
                lr=_number(values["lr"]),
                grad_norm=_number(values["grad_norm"]),
                tokens=int(values["tokens"]),
                step_s=_number(values["step_s"]),
                exposed_s=_number(values["exposed_s"]),
                memory_bytes=int(values["memory_bytes"]),
            )
        except (ValueError, KeyError, TypeError):
            continue  # torn when the run was killed


def _number(value: Any) -> float:
    """Of JSON that has no word for what is not finite, null is not a number."""
    return float("nan") if value is None else float(value)


def _traced(path: Path) -> _Traced:
    text = _text(path)
    if not text.strip():
        return _Traced(None, (), (), {})
    try:
        found = json.loads(text)
        return _Traced(
            found.get("step"),
            tuple(Timeline.from_json(each) for each in found.get("ranks", ())),
            tuple(
                UnitFacts(**{name: each[name] for name in _names_of(UnitFacts)})
                for each in found.get("units", ())
            ),
            {str(key): str(value) for key, value in found.get("environment", {}).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: a step of every rank is expected as JSON, found something else "
            f"({type(error).__name__}: {error}); move the file away to draw the report without it."
        ) from error


def _config(path: Path) -> Mapping[str, Mapping[str, object]]:
    try:
        found = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path}: TOML is expected, found something else ({error}); mend it, or move it away "
            "to draw the report without it."
        ) from error
    return {name: keys for name, keys in found.items() if isinstance(keys, dict)}


def _names_of(kind: type[StepMetrics] | type[UnitFacts]) -> list[str]:
    return [field.name for field in fields(kind)]


def _text(path: Path) -> str:
    """The text of a file, or nothing; bytes that are no text are replaced."""
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
