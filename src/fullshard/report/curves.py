"""Metrics over steps, as figures that plotly draws.

A colour is written as "$" and its name in the palette: the page fills it in, for light or dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from fullshard.report.record import StepMetrics
from fullshard.report.thinning import smoothed, thinned
from fullshard.report.wording import shown_number

_FEW_POINTS = 60  # so few that each has a mark of its own
_SMOOTHED_FROM = 100  # steps; of fewer, each one counts
_SMOOTHED_PART = 25


@dataclass(frozen=True, slots=True)
class Curve:
    """One figure. `summary` says in words what it shows, `figure` is plotly's data and layout."""

    key: str
    title: str
    summary: str
    note: str
    figure: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is drawn, and how its numbers are written."""

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
    """The figures of a run: the loss first; none without a step."""
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
    """Not a number where no time was measured."""
    return step.tokens_per_s if step.step_s > 0 else float("nan")


def exposed_share(step: StepMetrics) -> float:
    """Of the step's time; not a number where no time was measured."""
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
    lost = [index for index, value in enumerate(values) if not isfinite(value)]
    if lost:
        traces.append(_marks_of_lost(steps, values, lost))
        crosses = f"crosses: not finite ({len(lost):,} of {len(values):,} steps)"
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
    kept = thinned(values)
    few = len(kept) <= _FEW_POINTS
    return {
        "type": "scatter",
        "mode": "lines+markers" if few else "lines",
        "x": [steps[index] for index in kept],
        "y": [_drawn(values[index]) for index in kept],
        "line": {"color": "$accent-soft" if is_soft else "$accent", "width": 1 if is_soft else 2},
        "marker": {"color": "$accent", "size": 5},
        "connectgaps": False,
        "name": kind.axis,
        "hovertemplate": f"step %{{x:,}}: %{{y:{kind.hover}}} {_unit(kind)}<extra></extra>",
    }


def _smooth_line(kind: _Kind, steps: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    line = _line(kind, steps, values, is_soft=False)
    return line | {"mode": "lines", "hoverinfo": "skip", "hovertemplate": None}


def _marks_of_lost(
    steps: Sequence[int], values: Sequence[float], lost: Sequence[int]
) -> dict[str, Any]:
    """A cross at the foot of the figure for each step whose value is no number."""
    foot = min((value for value in values if isfinite(value)), default=0.0)
    kept = [lost[index] for index in thinned([float(index) for index in lost])]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [steps[index] for index in kept],
        "y": [foot] * len(kept),
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
    if steps[-1] - steps[0] <= 8:  # or ticks would stand between steps
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


def _drawn(value: float) -> float | None:
    """JSON has no word for what is not finite: a gap."""
    return value if isfinite(value) else None
