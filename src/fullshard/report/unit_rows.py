"""The table of units: what each is, and what the traced step spent on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.report.record import RunRecord
from fullshard.report.stepping import shown_unit
from fullshard.report.wording import DASH, shown_bytes, shown_share
from fullshard.trace.seam import Activity, Track
from fullshard.trace.timeline import Timeline, UnitFacts


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading and what it means."""

    heading: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Cell:
    """What is read, and the number by which rows are sorted; none sorts last."""

    text: str
    value: float | None


@dataclass(frozen=True, slots=True)
class UnitRow:
    """A unit, or all of them."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class UnitTable:
    columns: tuple[Column, ...]
    rows: tuple[UnitRow, ...]
    total: UnitRow


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds that a step spent on a unit, as a mean over ranks."""

    gather_s: float = 0.0
    reduce_s: float = 0.0
    exposed_s: float = 0.0


_COLUMNS = (
    Column("Parameters", "Parameter tensors of the unit"),
    Column("Elements", "Elements of these parameters"),
    Column("Size", "Bytes of the full parameters, in the dtype they are kept in"),
    Column("Padding", "Bytes added for alignment and equal shards"),
    Column("Padding %", "Padding as a part of the size"),
    Column("Messages", "Collectives that carry the unit"),
    Column("Gathered", "Bytes of a gather"),
    Column("Gather ms", "Time in gathers during the traced step, mean over ranks"),
    Column("Reduce ms", "Time in reduces during the traced step, mean over ranks"),
    Column("Exposed ms", "Time that compute waited for them, mean over ranks"),
)


def unit_table(record: RunRecord) -> UnitTable | None:
    """A row for each unit, and for each that only the time line knows of; nothing without any."""
    times = _times_by_unit(record.timelines)
    known = {unit.name: unit for unit in record.units}
    names = dict.fromkeys([*known, *times])
    if not names:
        return None
    rows = tuple(
        UnitRow(shown_unit(name), _cells(known.get(name), _time_of(name, times, record)))
        for name in names
    )
    total = UnitFacts("", *(_sum(record.units, field) for field in _SUMMED))
    summed = _Times(
        sum(each.gather_s for each in times.values()),
        sum(each.reduce_s for each in times.values()),
        sum(each.exposed_s for each in times.values()),
    )
    return UnitTable(
        _COLUMNS,
        rows,
        UnitRow("All units", _cells(total, summed if record.timelines else None)),
    )


_SUMMED = ("num_parameters", "numel", "num_bytes", "padding_bytes", "num_buckets", "gather_bytes")


def _sum(units: Sequence[UnitFacts], field: str) -> int:
    return sum(getattr(unit, field) for unit in units)


def _time_of(name: str, times: dict[str, _Times], record: RunRecord) -> _Times | None:
    return times.get(name, _Times()) if record.timelines else None


def _times_by_unit(timelines: Sequence[Timeline]) -> dict[str, _Times]:
    """Of each unit that communicates."""
    gather: dict[str, float] = defaultdict(float)
    reduce: dict[str, float] = defaultdict(float)
    exposed: dict[str, float] = defaultdict(float)
    for timeline in timelines:
        for span in timeline.spans:
            if span.activity is Activity.GATHER:
                gather[span.unit] += span.duration_s / len(timelines)
            elif span.activity is Activity.REDUCE:
                reduce[span.unit] += span.duration_s / len(timelines)
        for span in timeline.on(Track.COMPUTE):
            if span.activity.is_exposed:
                exposed[span.unit] += span.duration_s / len(timelines)
    names = dict.fromkeys([*gather, *reduce, *exposed])
    return {
        name: _Times(gather.get(name, 0.0), reduce.get(name, 0.0), exposed.get(name, 0.0))
        for name in names
    }


def _cells(facts: UnitFacts | None, times: _Times | None) -> tuple[Cell, ...]:
    unknown = Cell(DASH, None)
    found = [unknown] * len(_COLUMNS)
    if facts is not None:
        padding = facts.padding_bytes / facts.num_bytes if facts.num_bytes else 0.0
        found[:7] = [
            Cell(f"{facts.num_parameters:,}", facts.num_parameters),
            Cell(f"{facts.numel:,}", facts.numel),
            Cell(shown_bytes(facts.num_bytes), facts.num_bytes),
            Cell(shown_bytes(facts.padding_bytes), facts.padding_bytes),
            Cell(shown_share(padding), padding),
            Cell(f"{facts.num_buckets:,}", facts.num_buckets),
            Cell(shown_bytes(facts.gather_bytes), facts.gather_bytes),
        ]
    if times is not None:
        found[7:] = [
            Cell(f"{seconds * 1e3:,.2f}", seconds)
            for seconds in (times.gather_s, times.reduce_s, times.exposed_s)
        ]
    return tuple(found)
