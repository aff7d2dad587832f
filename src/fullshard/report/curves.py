"""Curves of metrics over steps, as plotly figures.

A colour is "$" and its name in the palette; the page replaces it, for the light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from fullshard.report.formatting import shown_number
from fullshard.report.record import StepMetrics

MOST_POINTS = 2000
_FEW_POINTS = 60  # each point has a marker up to this number
_SMOOTHED_FROM = 100  # steps
_SMOOTHED_PART = 25


@dataclass(frozen=True, slots=True)
class Curve:
    """One figure: `figure` is plotly's data and layout, `summary` describes it in words."""

    key: str
    title: str
    summary: str
    note: str
    figure: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A metric, and how its numbers are formatted."""

    key: str
    title: str
    axis: str
    hover: str = ".4~g"
    tick: str = ""


_LOSS = _Kind("loss", "Loss", "loss", hover=".4f")
_LR = _Kind("lr", "Learning rate", "learning rate", hover=".3~e")
_NORM = _Kind("grad-norm", "Gradient norm", "norm")
_SPEED = _Kind("tokens-per-s", "Tokens per second", "tokens/s", hover=",.0f", tick="~s")
_EXPOSED = _Kind("exposed", "Exposed communication", "% of the step", hover=".1f")


def curves_of(metrics: Sequence[StepMetrics]) -> list[Curve]:
    """Return the figures of a run, the loss first; none if there is no step."""
    if not metrics:
        return []
    steps = [each.step for each in metrics]
    return [
        _curve(_LOSS, steps, [each.loss for each in metrics]),
        _curve(_LR, steps, [each.lr for each in metrics]),
        _curve(_NORM, steps, [each.grad_norm for each in metrics]),
        _curve(_SPEED, steps, [tokens_per_s(each) for each in metrics]),
        _curve(_EXPOSED, steps, [100 * exposed_share(each) for each in metrics]),
    ]


def tokens_per_s(step: StepMetrics) -> float:
    """Return the throughput, or NaN if no time was measured."""
    return step.tokens_per_s if step.step_s > 0 else float("nan")


def exposed_share(step: StepMetrics) -> float:
    """Return exposed communication as a fraction of the step, or NaN if no time was measured."""
    return step.exposed_s / step.step_s if step.step_s > 0 else float("nan")


def _curve(kind: _Kind, steps: Sequence[int], values: Sequence[float]) -> Curve:
    is_smoothed = kind is not _LR and len(values) >= _SMOOTHED_FROM
    traces = [_line(kind, steps, values, is_soft=is_smoothed)]
    note = ""
    if is_smoothed:
        window = len(values) // _SMOOTHED_PART // 2 * 2 + 1
        traces.append(_smooth_line(kind, steps, smoothed(values, window)))
        if kind is _LOSS:
            note = f"thin: each step; thick: mean of {window:,} steps"
    not_finite = [index for index, value in enumerate(values) if not isfinite(value)]
    if not_finite:
        traces.append(_crosses(steps, values, not_finite))
        crosses = f"crosses: not finite ({len(not_finite):,} of {len(values):,} steps)"
        note = f"{note}; {crosses}" if note else crosses
    return Curve(
        kind.key,
        kind.title,
        _summary(kind, steps, values),
        note,
        {"data": traces, "layout": _layout(kind, steps)},
    )


def _line(
    kind: _Kind, steps: Sequence[int], values: Sequence[float], *, is_soft: bool
) -> dict[str, Any]:
    kept = downsampled(values)
    few = len(kept) <= _FEW_POINTS
    return {
        "type": "scatter",
        "mode": "lines+markers" if few else "lines",
        "x": [steps[index] for index in kept],
        # JSON has no NaN; null leaves a gap.
        "y": [values[index] if isfinite(values[index]) else None for index in kept],
        "line": {"color": "$accent-soft" if is_soft else "$accent", "width": 1 if is_soft else 2},
        "marker": {"color": "$accent", "size": 5},
        "connectgaps": False,
        "name": kind.axis,
        "hovertemplate": f"step %{{x:,}}: %{{y:{kind.hover}}} {_unit(kind)}<extra></extra>",
    }


def _smooth_line(kind: _Kind, steps: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    line = _line(kind, steps, values, is_soft=False)
    return line | {"mode": "lines", "hoverinfo": "skip", "hovertemplate": None}


def _crosses(steps: Sequence[int], values: Sequence[float], at: Sequence[int]) -> dict[str, Any]:
    """Mark the steps at these indices, whose value is not finite, at the bottom of the figure."""
    bottom = min((value for value in values if isfinite(value)), default=0.0)
    kept = [at[index] for index in downsampled([float(index) for index in at])]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [steps[index] for index in kept],
        "y": [bottom] * len(kept),
        "text": [shown_number(values[index]) for index in kept],
        "marker": {"symbol": "x-thin", "size": 8, "line": {"color": "$alarm", "width": 2}},
        "name": "not finite",
        "hovertemplate": "step %{x:,}: %{text}<extra></extra>",
    }


def _layout(kind: _Kind, steps: Sequence[int]) -> dict[str, Any]:
    is_long = steps[-1] >= 10_000
    steps_axis: dict[str, Any] = {
        "title": {"text": "step"},
        "tickformat": "~s" if is_long else ",d",
    }
    if steps[-1] - steps[0] <= 8:  # otherwise ticks would appear between steps
        steps_axis |= {"dtick": 1, "range": [steps[0] - 0.5, steps[-1] + 0.5]}
    return {
        "xaxis": steps_axis,
        "yaxis": {"title": {"text": kind.axis}, "tickformat": kind.tick},
        "hovermode": "closest" if len(steps) == 1 else "x",
    }


def _summary(kind: _Kind, steps: Sequence[int], values: Sequence[float]) -> str:
    finite = [(value, step) for value, step in zip(values, steps, strict=True) if isfinite(value)]
    if not finite:
        return f"{kind.title} by step: not finite at any step."
    low, high = min(finite), max(finite)
    return (
        f"{kind.title} by step, from {shown_number(finite[0][0])} at step {finite[0][1]:,} to "
        f"{shown_number(finite[-1][0])} at step {finite[-1][1]:,}; lowest {shown_number(low[0])} "
        f"at step {low[1]:,}, highest {shown_number(high[0])} at step {high[1]:,}."
    )


def _unit(kind: _Kind) -> str:
    return {"tokens-per-s": "tokens/s", "exposed": "%"}.get(kind.key, "")


def downsampled(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Return the indices of at most `most` values, in order.

    The first and last value are kept and, of every interval in between, the lowest, the highest
    and one value that is not finite: a spike or gap of a single step stays visible.
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
