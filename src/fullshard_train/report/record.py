"""The data of a report: metrics of every step, one traced step, configuration and environment."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import nan
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.trace import Timeline, UnitFacts

METRICS = "metrics.jsonl"
TIMELINE = "timeline.json"
CONFIG = "config.toml"
SAMPLE = "sample.txt"


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one step over all ranks: one line of `metrics.jsonl`.

    `memory_bytes` is the peak memory of any rank so far: allocated device memory, or the resident
    memory of the process on a CPU. `exposed_s` is the longest time that compute waited for
    communication on any rank; NaN for a step that was replayed as a CUDA graph. `tflops` is the
    TFLOP/s of each rank for the model, without recomputation, and `mfu` its share of the device's
    peak; NaN if unknown. `eval_loss` is the loss of a validation after the step, NaN if there was
    none. `is_restart` marks the first step after a checkpoint was loaded. `replicas`, with
    `--elastic-replicas`, are those that began the step, in the order in which they take parts of
    its batch; None stands for one that died in it. `slowest` names the ranks, or the link,
    that others wait for, for `slowest_s` of each of the last steps; it is empty if they do not.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    step_s: float
    exposed_s: float
    memory_bytes: int
    tflops: float = nan
    mfu: float = nan
    eval_loss: float = nan
    is_restart: bool = False
    replicas: tuple[int | None, ...] = ()
    slowest: str = ""
    slowest_s: float = nan

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s


@dataclass(frozen=True, slots=True)
class HostFacts:
    """A host in the traced step: its ranks, and the bytes between it and the others."""

    name: str
    ranks: tuple[int, ...]
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything that a report shows.

    `memory` has the bytes of each kind at the peak of the traced step, on the rank with the most.
    `predicted` has the `step_s`, `peak_bytes` and `memory` of a plan, if there was one. `held` is
    the memory that a planned step holds over time, by kind. `hosts` is empty if there was one.
    `parts` has the seconds of a step by what they went to.
    """

    title: str
    metrics: Sequence[StepMetrics]
    timelines: Sequence[Timeline]
    traced_step: int | None
    units: Sequence[UnitFacts]
    config: Mapping[str, Mapping[str, object]]
    environment: Mapping[str, str]
    sample: str = ""
    memory: Mapping[str, int] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    held: Sequence[tuple[float, Mapping[str, int]]] = ()
    hosts: Sequence[HostFacts] = ()
    parts: Mapping[str, float] = field(default_factory=dict)


def read_record(folder: Path) -> RunRecord:
    """Read what the run in `folder` has written so far. Any of its files may be missing.

    A killed run may leave an incomplete line, and a resumed run repeats the steps after its
    checkpoint: the last occurrence of each step counts.
    """
    if not any((folder / name).is_file() for name in (METRICS, TIMELINE, CONFIG)):
        raise ConfigError(
            f"{folder} is not the folder of a run: it has none of {METRICS}, {TIMELINE} and "
            f"{CONFIG}; pass the folder that fullshard train wrote."
        )
    return RunRecord(
        title=folder.resolve().name,
        metrics=_read_metrics(folder / METRICS),
        config=_read_config(folder / CONFIG),
        sample=_text(folder / SAMPLE),
        **_read_timeline(folder / TIMELINE),
    )


def _read_metrics(path: Path) -> list[StepMetrics]:
    lines = [line for line in _text(path).splitlines() if line.strip()]
    found: list[StepMetrics] = []
    for step in _complete_steps(lines):
        while found and found[-1].step >= step.step:
            found.pop()
        found.append(step)
    # One line may be incomplete; if no line can be read, this is another kind of file.
    if len(lines) > 1 and not found:
        raise ConfigError(
            f"{path}: {lines[0][:80]!r} is not a line of metrics "
            f"({', '.join(_names_of(StepMetrics))}); move the file away to draw the report "
            "without it."
        )
    return found


def _complete_steps(lines: list[str]) -> Iterator[StepMetrics]:
    for line in lines:
        try:
            found = json.loads(line)
            # Runs of earlier versions lack fields with a default. In JSON, null stands for NaN.
            values: dict[str, Any] = {
                each.name: found[each.name] if each.default is MISSING else found.get(each.name)
                for each in fields(StepMetrics)
            }
            counts = {name: int(values.pop(name)) for name in ("step", "tokens", "memory_bytes")}
            is_restart = bool(values.pop("is_restart"))
            replicas = tuple(values.pop("replicas") or ())
            slowest = str(values.pop("slowest") or "")
            numbers: dict[str, Any]
            numbers = {name: nan if v is None or v != v else float(v) for name, v in values.items()}
            yield StepMetrics(
                **counts, **numbers, is_restart=is_restart, replicas=replicas, slowest=slowest
            )
        except (ValueError, KeyError, TypeError):
            continue  # incomplete: the run was killed


def _read_timeline(path: Path) -> dict[str, Any]:
    """Return the fields of a `RunRecord` that `timeline.json` holds."""
    try:
        found = json.loads(_text(path).strip() or "{}")
        names = _names_of(UnitFacts)
        return {
            "traced_step": found.get("step"),
            "timelines": tuple(Timeline.from_json(each) for each in found.get("ranks", ())),
            "units": tuple(
                UnitFacts(**{name: each[name] for name in names}) for each in found.get("units", ())
            ),
            "environment": {str(k): str(v) for k, v in found.get("environment", {}).items()},
            "memory": {str(k): int(v) for k, v in found.get("memory", {}).items()},
            "parts": {str(k): float(v) for k, v in found.get("parts", {}).items()},
            "predicted": _prediction(found.get("predicted", {})),
            "hosts": tuple(
                HostFacts(
                    name=str(each["name"]),
                    ranks=tuple(map(int, each["ranks"])),
                    received_bytes=int(each["received_bytes"]),
                    sent_bytes=int(each["sent_bytes"]),
                )
                for each in found.get("hosts", ())
            ),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: the timeline cannot be read ({type(error).__name__}: {error}); move the "
            "file away to draw the report without it."
        ) from error


def _prediction(found: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: float(found[name]) for name in ("step_s", "peak_bytes") if name in found}
    kinds = {str(kind): int(size) for kind, size in found.get("memory", {}).items()}
    return {**numbers, "memory": kinds} if found else {}


def _read_config(path: Path) -> Mapping[str, Mapping[str, object]]:
    try:
        found = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not valid TOML ({error}); correct it, or move the file away to draw the "
            "report without it."
        ) from error
    return {name: keys for name, keys in found.items() if isinstance(keys, dict)}


def _names_of(kind: type[StepMetrics] | type[UnitFacts]) -> list[str]:
    return [each.name for each in fields(kind)]


def _text(path: Path) -> str:
    """Return the text of a file, or nothing; invalid UTF-8 is replaced."""
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
