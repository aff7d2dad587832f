"""Curves of metrics over steps, as plain data that the page draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from fullshard_train.report.formatting import plain, shown_number
from fullshard_train.report.record import RunRecord, StepMetrics

MOST_POINTS = 2000
_MEAN_POINTS = 500
_SMOOTHED_FROM = 100  # steps
_SMOOTHED_PART = 25


@dataclass(frozen=True, slots=True)
class Curve:
    """One figure: `content` is plain JSON; `summary` and `note` describe it in words."""

    key: str
    title: str
    summary: str
    note: str
    content: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Metric:
    """A metric of a step, and how to show it. One with a unit is measured, and may be unknown."""

    key: str
    title: str
    axis: str
    of: Callable[[StepMetrics], float]
    format: str = ".4g"
    unit: str = ""


def tokens_per_s(step: StepMetrics) -> float:
    """Return the throughput, or NaN if no time was measured."""
    return step.tokens_per_s if step.step_s > 0 else float("nan")


def exposed_share(step: StepMetrics) -> float:
    """Return exposed communication as a fraction of the step, or NaN if no time was measured."""
    return step.exposed_s / step.step_s if step.step_s > 0 else float("nan")


def _exposed_percent(step: StepMetrics) -> float:
    return 100 * exposed_share(step)


_LOSS = _Metric("loss", "Loss", "loss", lambda s: s.loss, ".4f")
_LR = _Metric("lr", "Learning rate", "learning rate", lambda s: s.lr, ".3e")
_METRICS = (
    _LOSS,
    _LR,
    _Metric("grad-norm", "Gradient norm", "norm", lambda s: s.grad_norm),
    _Metric("tokens-per-s", "Tokens per second", "tokens/s", tokens_per_s, ".0f", "tokens/s"),
    _Metric("exposed", "Exposed communication", "% of step", _exposed_percent, ".1f", "%"),
)
_MFU = _Metric("mfu", "MFU", "% of the peak", lambda s: 100 * s.mfu, ".1f", "%")
_TFLOPS = _Metric("tflops", "TFLOP/s per rank", "TFLOP/s", lambda s: s.tflops, ".4g", "TFLOP/s")


def curves_of(records: Sequence[RunRecord]) -> list[Curve]:
    """Return the figures of one run or several, the loss first; none if there is no step."""
    steps = [step for each in records for step in each.metrics]
    if not steps:
        return []
    computed = [each for each in (_MFU, _TFLOPS) if any(isfinite(each.of(step)) for step in steps)]
    return [_curve(each, records) for each in (*_METRICS, *computed[:1])]


def _curve(metric: _Metric, records: Sequence[RunRecord]) -> Curve:
    most = max(len(each.metrics) for each in records)
    is_smoothed = metric is not _LR and most >= _SMOOTHED_FROM
    window = most // _SMOOTHED_PART // 2 * 2 + 1 if is_smoothed else 0
    runs = [_run(metric, each, window) for each in records]
    notes = []
    if window and metric is _LOSS:
        notes.append(f"thin: each step; thick: mean of {window:,} steps")
    values = [metric.of(step) for each in records for step in each.metrics]
    num_unknown = sum(not isfinite(value) for value in values)
    if num_unknown:
        what = "gaps: not measured" if metric.unit else "crosses: not finite"
        notes.append(f"{what} ({num_unknown:,} of {len(values):,} steps)")
    if metric is _LOSS and any(run["restarts"] for run in runs):
        notes.append("dashed: the run was resumed")
    if len(runs) > 1 and any(run["validation"][0] for run in runs):
        notes.append("dots: validation")
    return Curve(
        metric.key,
        metric.title,
        " ".join(_summary(metric, each, len(records) > 1) for each in records),
        "; ".join(notes),
        {"axis": metric.axis, "format": metric.format, "unit": metric.unit, "runs": runs},
    )


def _run(metric: _Metric, record: RunRecord, window: int) -> dict[str, Any]:
    """Return the line of a run, its moving mean, and what is marked in the figure."""
    steps = [each.step for each in record.metrics]
    values = [metric.of(each) for each in record.metrics]
    mean = smoothed(values, window) if window else []
    strange = [] if metric.unit else [v for v in enumerate(values) if not isfinite(v[1])]
    kept = [strange[index] for index in downsampled([float(index) for index, _ in strange])]
    checks = [each for each in record.metrics if metric is _LOSS and isfinite(each.eval_loss)]
    return {
        "name": plain(record.title),
        "line": _points(steps, values, MOST_POINTS),
        "mean": _points(steps, mean, _MEAN_POINTS),
        "validation": _points(
            [each.step for each in checks], [each.eval_loss for each in checks], _MEAN_POINTS
        ),
        "crosses": [[steps[index], shown_number(value)] for index, value in kept],
        "restarts": [each.step for each in record.metrics[1:] if each.is_restart],
    }


def _points(steps: Sequence[int], values: Sequence[float], most: int) -> list[list[Any]]:
    """Return steps and values; null, as JSON has no NaN, leaves a gap."""
    kept = downsampled(values, most)
    shown = [float(f"{v:.6g}") if isfinite(v) else None for v in (values[each] for each in kept)]
    return [[steps[index] for index in kept], shown]


def _summary(metric: _Metric, record: RunRecord, is_named: bool) -> str:
    title = f"{metric.title} of {plain(record.title)}" if is_named else metric.title
    finite = [(value, each.step) for each in record.metrics if isfinite(value := metric.of(each))]
    if not finite:
        return f"{title} by step: no finite number."
    low, high = min(finite), max(finite)
    return (
        f"{title} by step, from {shown_number(finite[0][0])} at step {finite[0][1]:,} to "
        f"{shown_number(finite[-1][0])} at step {finite[-1][1]:,}; lowest {shown_number(low[0])} "
        f"at step {low[1]:,}, highest {shown_number(high[0])} at step {high[1]:,}."
    )


def downsampled(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Return the indices of at most `most` values, in order.

    Keeps the first and last value and, from every interval in between, the lowest, the highest and
    one value that is not finite, so that a spike or gap of a single step stays visible.
    """
    if len(values) <= most:
        return list(range(len(values)))
    num_intervals = max(1, (most - 2) // 3)
    kept = {0, len(values) - 1}
    for index in range(num_intervals):
        start = index * len(values) // num_intervals
        end = (index + 1) * len(values) // num_intervals
        finite = [each for each in range(start, end) if isfinite(values[each])]
        if finite:
            kept.add(min(finite, key=values.__getitem__))
            kept.add(max(finite, key=values.__getitem__))
        if len(finite) < end - start:
            kept.add(next(each for each in range(start, end) if not isfinite(values[each])))
    return sorted(kept)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return a moving average of the finite values; NaN where a window has none.

    The window is cut off at both ends.
    """
    sums, counts = [0.0], [0]
    for value in values:
        sums.append(sums[-1] + (value if isfinite(value) else 0.0))
        counts.append(counts[-1] + isfinite(value))
    found = []
    for index in range(len(values)):
        start = max(0, index - window // 2)
        end = min(len(values), index + window // 2 + 1)
        count = counts[end] - counts[start]
        found.append((sums[end] - sums[start]) / count if count else float("nan"))
    return found
