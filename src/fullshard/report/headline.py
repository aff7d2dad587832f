"""What is read first: a few numbers of the run."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from fullshard.report.curves import exposed_share, tokens_per_s
from fullshard.report.record import RunRecord
from fullshard.report.wording import (
    DASH,
    counted,
    middle,
    shown_bytes,
    shown_count,
    shown_number,
    shown_share,
    shown_time,
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A number, what it is, and what to compare it with."""

    name: str
    value: str
    note: str
    is_alarming: bool = False


def headline(record: RunRecord) -> list[Fact]:
    """The five facts; each is a dash where nothing was measured."""
    metrics = record.metrics
    speed = middle(tokens_per_s(each) for each in metrics)
    step_s = middle(each.step_s for each in metrics)
    slowest_s = max((each.step_s for each in metrics), default=float("nan"))
    memory = max((each.memory_bytes for each in metrics), default=None)
    return [
        _final_loss(record),
        Fact("Tokens per second", shown_count(speed) if isfinite(speed) else DASH, "median"),
        Fact("Step time", shown_time(step_s), f"median; slowest {shown_time(slowest_s)}"),
        Fact("Peak memory", DASH if memory is None else shown_bytes(memory), "most on any rank"),
        Fact(
            "Exposed communication",
            shown_share(middle(exposed_share(each) for each in metrics)),
            "of the step, median",
        ),
    ]


def subtitle(record: RunRecord) -> list[str]:
    """What was run, in a few words each."""
    found = []
    if record.metrics:
        found.append(counted(len(record.metrics), "step"))
    if record.timelines:
        found.append(counted(len(record.timelines), "rank"))
    if record.units:
        numel = sum(unit.numel for unit in record.units)
        found.append(f"{shown_count(numel)} parameters in {counted(len(record.units), 'unit')}")
    if record.metrics:
        found.append(f"{shown_count(sum(each.tokens for each in record.metrics))} tokens")
    return found


def _final_loss(record: RunRecord) -> Fact:
    if not record.metrics:
        return Fact("Final loss", DASH, "no step was recorded")
    first, last = record.metrics[0], record.metrics[-1]
    note = f"after step {last.step:,}"
    if len(record.metrics) > 1:
        note = f"from {shown_number(first.loss)} in {counted(len(record.metrics), 'step')}"
    return Fact("Final loss", shown_number(last.loss), note, not isfinite(last.loss))
