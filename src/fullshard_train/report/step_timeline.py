"""The timeline and memory of one traced step, as compact JSON that the page draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.formatting import counted
from fullshard.trace import Activity, Timeline, Track
from fullshard_train.report.curves import downsampled
from fullshard_train.report.formatting import ByteScale, plain, shown_bytes, shown_share, shown_time
from fullshard_train.report.palette import KEYS
from fullshard_train.report.record import RunRecord

MOST_RANKS = 64
_SHOWN_AT_ONCE = 4
_ENDS = 8  # with many ranks, this many of the first and of the slowest are always kept
_MEMORY_POINTS = 600

# All-gathers are drawn above the compute that they overlap with, reduce-scatters below.
_ROWS = (Track.GATHER, Track.COMPUTE, Track.REDUCE)


@dataclass(frozen=True, slots=True)
class Choice:
    """Ranks that are shown together; `places` are indices into the ranks of the page."""

    label: str
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepFigure:
    """The timeline and memory of a step.

    `content` is plain JSON; `summary` and `memory_summary` describe the figures in words.
    """

    content: dict[str, Any]
    summary: str
    memory_summary: str
    groups: tuple[Choice, ...]
    singles: tuple[Choice, ...]
    unit_names: tuple[str, ...]
    left_out: str


def step_figure(record: RunRecord) -> StepFigure | None:
    """Return the figure of the traced step, or None if no step was traced."""
    if not record.timelines:
        return None
    timelines = kept_ranks(sorted(record.timelines, key=lambda each: each.rank))
    names = _unit_names(record)
    number = {name: index for index, name in enumerate(names)}
    samples = [sample for each in timelines for sample in each.memory]
    full = ByteScale.fitting(max((each.full_bytes for each in samples), default=0))
    allocated = ByteScale.fitting(max((each.allocated_bytes for each in samples), default=0))
    content = {
        "units": [shown_unit(name) for name in names],
        "labels": short_labels(names),
        "activities": [
            {"key": KEYS[each], "name": each.value, "row": _ROWS.index(each.track)} for each in KEYS
        ],
        "rows": [track.value for track in _ROWS],
        "ranks": [_rank(each, number, full, allocated) for each in timelines],
        "memory_units": [full.name, allocated.name],
        "held": _held(record, allocated),
    }
    return StepFigure(
        content,
        _summary(record, timelines),
        _memory_summary(timelines),
        choices(timelines),
        tuple(Choice(f"Rank {each.rank}", (place,)) for place, each in enumerate(timelines)),
        tuple(shown_unit(name) for name in names),
        _left_out(len(record.timelines), len(timelines)),
    )


def kept_ranks(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Return all ranks or, if there are very many, the first, the slowest and some in between."""
    if len(timelines) <= MOST_RANKS:
        return list(timelines)
    slowest = sorted(range(len(timelines)), key=lambda index: -timelines[index].duration_s)
    places = {*range(_ENDS), *slowest[:_ENDS]}
    num_others = MOST_RANKS - 2 * _ENDS
    places |= {index * len(timelines) // num_others for index in range(num_others)}
    return [timelines[place] for place in sorted(places)]


def choices(timelines: Sequence[Timeline]) -> tuple[Choice, ...]:
    """Return which ranks can be shown together; the page opens with the first choice."""
    places = tuple(range(len(timelines)))
    if len(timelines) <= _SHOWN_AT_ONCE + 1:
        return (Choice(counted(len(timelines), "rank"), places),)
    by_time = sorted(places, key=lambda place: -timelines[place].duration_s)
    first = places[:_SHOWN_AT_ONCE]
    slowest = by_time[0]
    opening = first if slowest in first else (*first, slowest)
    found = [
        Choice(f"The first {_SHOWN_AT_ONCE} and the slowest", opening),
        Choice(f"The slowest {_SHOWN_AT_ONCE}", tuple(by_time[:_SHOWN_AT_ONCE])),
    ]
    for start in range(0, len(places), _SHOWN_AT_ONCE):
        group = places[start : start + _SHOWN_AT_ONCE]
        ranks = [timelines[place].rank for place in group]
        label = f"Ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"Rank {ranks[0]}"
        found.append(Choice(label, group))
    return tuple(found)


def shown_unit(name: str) -> str:
    """Return the name of a unit for display; the name of the root is empty."""
    return plain(name) or "(root)"


def short_labels(names: Sequence[str]) -> list[str]:
    """Return for each name its shortest suffix that no other name ends with."""
    tails = {}
    for name in names:
        parts = name.split(".")
        tails[name] = [".".join(parts[start:]) for start in reversed(range(len(parts)))]
    ends = Counter(tail for each in tails.values() for tail in each)
    found = []
    for name in names:
        label = next((tail for tail in tails[name] if tail and ends[tail] == 1), name)
        found.append(plain(label) if name else "root")
    return found


def _unit_names(record: RunRecord) -> list[str]:
    """Return the units in the order of the table, then those that only the timeline has."""
    names = dict.fromkeys(unit.name for unit in record.units)
    for timeline in record.timelines:
        names |= dict.fromkeys(span.unit for span in timeline.spans)
    return list(names)


def _rank(
    timeline: Timeline, number: dict[str, int], full: ByteScale, allocated: ByteScale
) -> dict[str, Any]:
    """Return one rank; spans are [activity, unit, start, duration] in microseconds."""
    order = {activity: index for index, activity in enumerate(KEYS)}
    return {
        "rank": timeline.rank,
        "duration_ms": round(timeline.duration_s * 1e3, 3),
        "spans": [
            [
                order[span.activity],
                number[span.unit],
                round(span.start_s * 1e6),
                round(span.duration_s * 1e6),
            ]
            for track in _ROWS
            for span in timeline.on(track)
        ],
        "memory": _memory(timeline, full, allocated),
    }


def _memory(timeline: Timeline, full: ByteScale, allocated: ByteScale) -> dict[str, list[float]]:
    samples = sorted(timeline.memory, key=lambda sample: sample.at_s)
    kept = sorted(
        {
            *downsampled([float(each.full_bytes) for each in samples], _MEMORY_POINTS // 2),
            *downsampled([float(each.allocated_bytes) for each in samples], _MEMORY_POINTS // 2),
        }
    )
    return {
        "at_ms": [round(samples[index].at_s * 1e3, 3) for index in kept],
        "full": [round(samples[index].full_bytes / full.num_bytes, 3) for index in kept],
        "allocated": [
            round(samples[index].allocated_bytes / allocated.num_bytes, 3) for index in kept
        ],
    }


def _held(record: RunRecord, scale: ByteScale) -> dict[str, Any] | None:
    """Return the memory of a planned step by kind, stacked, all kinds at the same times."""
    if not record.held:
        return None
    totals = [float(sum(held.values())) for _, held in record.held]
    samples = [record.held[index] for index in downsampled(totals, _MEMORY_POINTS)]
    kinds = list(samples[0][1])
    return {
        "at_ms": [round(at_s * 1e3, 3) for at_s, _ in samples],
        "kinds": kinds,
        "tops": [
            [
                round(sum(held[name] for name in kinds[: n + 1]) / scale.num_bytes, 3)
                for _, held in samples
            ]
            for n in range(len(kinds))
        ],
    }


def _summary(record: RunRecord, timelines: Sequence[Timeline]) -> str:
    slowest = max(timelines, key=lambda each: each.duration_s)
    step = "A step" if record.traced_step is None else f"Step {record.traced_step:,}"
    share = slowest.exposed_s() / slowest.duration_s if slowest.duration_s > 0 else float("nan")
    gathers = sum(span.activity is Activity.GATHER for span in slowest.spans)
    reduces = sum(span.activity is Activity.REDUCE for span in slowest.spans)
    return (
        f"{step} on {counted(len(record.timelines), 'rank')}. The slowest, rank {slowest.rank}, "
        f"took {shown_time(slowest.duration_s)}, with {counted(gathers, 'all-gather')} and "
        f"{counted(reduces, 'reduce-scatter')}; its compute waited for communication for "
        f"{shown_time(slowest.exposed_s())}, {shown_share(share)} of the step."
    )


def _memory_summary(timelines: Sequence[Timeline]) -> str:
    samples = [(sample, each.rank) for each in timelines for sample in each.memory]
    if not samples:
        return ""
    most_full, full_rank = max(samples, key=lambda each: each[0].full_bytes)
    most, rank = max(samples, key=lambda each: each[0].allocated_bytes)
    return (
        f"Peak of unsharded parameters: {shown_bytes(most_full.full_bytes)}, on rank {full_rank} "
        f"after {shown_time(most_full.at_s)}. Peak memory: {shown_bytes(most.allocated_bytes)}, on "
        f"rank {rank} after {shown_time(most.at_s)}."
    )


def _left_out(num_ranks: int, num_kept: int) -> str:
    if num_kept == num_ranks:
        return ""
    return (
        f"This page shows {num_kept} of {num_ranks:,} ranks: the first, the slowest and some in "
        "between."
    )
