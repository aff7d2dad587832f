"""What a run leaves to be looked at: metrics of every step, one step in detail, the setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fullshard.trace.timeline import Timeline, UnitFacts


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step, over all ranks: one line of `metrics.jsonl`.

    `memory_bytes` is the most that any rank had in use so far (allocated on the device; the
    process's own memory on a CPU), `exposed_s` the longest that compute stood still for
    communication on any rank.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    step_s: float
    exposed_s: float
    memory_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s


@dataclass(frozen=True, slots=True)
class RunRecord:
    """All that a report shows."""

    title: str
    metrics: Sequence[StepMetrics]
    timelines: Sequence[Timeline]
    traced_step: int | None
    units: Sequence[UnitFacts]
    config: Mapping[str, Mapping[str, object]]
    environment: Mapping[str, str]
    sample: str = ""
