"""The summary of a run, and the table of its units."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite

from fullshard.facts import PROCESS_KIND
from fullshard.formatting import counted
from fullshard.trace import Activity, Timeline, Track, UnitFacts
from fullshard_train.report.curves import exposed_share, tokens_per_s
from fullshard_train.report.formatting import (
    DASH,
    finite_median,
    plain,
    shown_bytes,
    shown_count,
    shown_number,
    shown_share,
    shown_time,
)
from fullshard_train.report.palette import NUM_SERIES
from fullshard_train.report.record import HostFacts, RunRecord
from fullshard_train.report.step_timeline import shown_unit


@dataclass(frozen=True, slots=True)
class Fact:
    """A number of the summary, and a note on it."""

    name: str
    value: str
    note: str
    is_alarming: bool = False


def summary(record: RunRecord) -> list[Fact]:
    """Return the facts, with a dash if not measured; validation and MFU are left out then."""
    metrics = record.metrics
    speed = finite_median(tokens_per_s(each) for each in metrics)
    step_s = finite_median(each.step_s for each in metrics)
    slowest_s = max((each.step_s for each in metrics), default=float("nan"))
    memory = max((each.memory_bytes for each in metrics), default=None)
    exposed = finite_median(exposed_share(each) for each in metrics)
    planned_s, planned_bytes = (record.predicted.get(each, 0) for each in ("step_s", "peak_bytes"))
    step_note = f"; predicted {shown_time(planned_s)}" if planned_bytes else ""
    shown_peak = f"{shown_bytes(int(planned_bytes))}{_of_tensors(record)}"
    peak_note = f"; predicted {shown_peak}" if planned_bytes else ""
    return [
        _final_loss(record),
        *_best_validation(record),
        Fact("Tokens per second", shown_count(speed) if isfinite(speed) else DASH, "median"),
        Fact(
            "Step time", shown_time(step_s), f"median; slowest {shown_time(slowest_s)}{step_note}"
        ),
        Fact(
            "Peak memory",
            DASH if memory is None else shown_bytes(memory),
            f"most on any rank{peak_note}",
        ),
        Fact("Exposed communication", shown_share(exposed), "of a step waits for it, median"),
        *_slowest(record),
        *_computed(record),
    ]


def _slowest(record: RunRecord) -> Iterator[Fact]:
    """The ranks that the others wait for in most steps, if there are any."""
    named = Counter(each.slowest for each in record.metrics)
    for name, number in named.most_common(1):
        if name:
            waiting = (each for each in record.metrics if each.slowest == name)
            share = finite_median(each.slowest_s / each.step_s for each in waiting)
            note = f"of the step the others wait for {name}, median of {counted(number, 'step')}"
            yield Fact("Slowest", shown_share(share), note, is_alarming=True)


@dataclass(frozen=True, slots=True)
class HostRow:
    """A host as the page draws it; `waits` has a rank and the percent of the step it waited.

    `inside` is what its ranks gather and reduce from each other; empty if that is not known.
    """

    name: str
    received: str
    sent: str
    inside: str
    waits: Sequence[tuple[int, float]]


def host_rows(record: RunRecord) -> list[HostRow]:
    """The hosts of a traced step, with what each of their ranks waited for communication."""
    by_rank = {each.rank: each for each in record.timelines}
    step_s = max((each.duration_s for each in record.timelines), default=0.0)
    return [
        HostRow(
            name=plain(host.name),
            received=_with_rate(host.received_bytes, step_s),
            sent=_with_rate(host.sent_bytes, step_s),
            inside=_with_rate(inside, step_s) if (inside := _inside_bytes(record, host)) else "",
            waits=[
                (rank, 100 * min(1.0, by_rank[rank].exposed_s() / step_s))
                for rank in host.ranks
                if rank in by_rank and step_s > 0
            ],
        )
        for host in record.hosts
    ]


def _inside_bytes(record: RunRecord, host: HostFacts) -> int:
    """What ranks of a host receive from each other in the traced step; 0 if that is not known."""
    section, model = (record.config.get(each, {}) for each in ("sharding", "model"))
    is_plain = all(section.get(f"{each}_wire", "plain") == "plain" for each in ("gather", "reduce"))
    if not is_plain or section.get("reshard_to") or model.get("lora_rank"):
        return 0
    shards = str(section.get("mesh", "auto")).partition("x")[2]
    size = min(int(shards or len(host.ranks)), len(host.ranks))
    gathered = {each.name: each.gather_bytes for each in record.units}
    reduced = {
        each.name: each.numel * (2 if section.get("precision") == "bf16-reduce" else 4)
        for each in record.units
    }
    moved = {Activity.GATHER: gathered, Activity.REDUCE: reduced}
    num_bytes = sum(
        moved[span.activity].get(span.unit, 0)
        for timeline in record.timelines
        if timeline.rank in host.ranks
        for span in timeline.spans
        if span.activity in moved
    )
    return num_bytes * (size - 1) // size


def _with_rate(num_bytes: int, seconds: float) -> str:
    shown = shown_bytes(num_bytes)
    return f"{shown}, {shown_bytes(int(num_bytes / seconds))}/s" if seconds > 0 else shown


def subtitle(record: RunRecord) -> list[str]:
    """Return the number of steps, ranks, parameters and tokens, as far as they are known."""
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


def _best_validation(record: RunRecord) -> list[Fact]:
    found = [(each.eval_loss, each.step) for each in record.metrics if isfinite(each.eval_loss)]
    if not found:
        return []
    loss, step = min(found)
    perplexity = exp(min(loss, 700))  # beyond this, exp overflows
    note = f"after step {step:,}; perplexity {shown_number(perplexity)}"
    return [Fact("Best validation loss", shown_number(loss), note)]


def _computed(record: RunRecord) -> list[Fact]:
    mfu = finite_median(each.mfu for each in record.metrics)
    tflops = finite_median(each.tflops for each in record.metrics)
    if not isfinite(mfu):
        rate = Fact("TFLOP/s per rank", shown_number(tflops), "median")
        return [rate] if isfinite(tflops) else []
    note = f"median; {shown_number(tflops)} TFLOP/s per rank" if isfinite(tflops) else "median"
    return [Fact("MFU", shown_share(mfu), note)]


def memory_kinds(record: RunRecord) -> dict[str, list[tuple[str, str, float, int]]]:
    """Return the name, size, percentage and color of kinds of memory, measured and planned."""
    predicted = f"Predicted{_of_tensors(record)}, at the peak of a simulated step:"
    return _shares({"": record.memory, predicted: record.predicted.get("memory", {})})


def sent_by_wire(record: RunRecord) -> dict[str, list[tuple[str, str, float, int]]]:
    """Return the same of what a rank sends in a step, by the form in which it travels."""
    headings = {Activity.GATHER: "All-gathers of parameters", Activity.REDUCE: "Sums of gradients"}
    sums: dict[Activity, Counter[str]] = {activity: Counter() for activity in headings}
    for timeline in record.timelines:
        for each in timeline.sent:
            sums[each.activity][each.wire] += each.num_bytes
    means = {
        activity: {wire: size // len(record.timelines) for wire, size in by_wire.most_common()}
        for activity, by_wire in sums.items()
    }
    return _shares(
        {
            f"{headings[activity]}: {shown_bytes(sum(by_wire.values()))}": by_wire
            for activity, by_wire in means.items()
        }
    )


def _shares(
    given: Mapping[str, Mapping[str, int]],
) -> dict[str, list[tuple[str, str, float, int]]]:
    """Return the name, size, percentage and color of each part, by heading, in the same colors."""
    names = list(dict.fromkeys(name for sizes in given.values() for name in sizes))
    return {
        heading: [
            (
                plain(name),
                shown_bytes(size),
                100 * size / sum(kinds.values()),
                names.index(name) % NUM_SERIES,
            )
            for name, size in kinds.items()
            if size > 0
        ]
        for heading, kinds in given.items()
        if kinds
    }


def time_parts(record: RunRecord) -> list[tuple[str, str, float, int]]:
    """Return the name, seconds, percentage and color of what the time of a step went to."""
    total = sum(record.parts.values())
    return [
        (plain(name), shown_time(seconds), 100 * seconds / total, index % NUM_SERIES)
        for index, (name, seconds) in enumerate(record.parts.items())
        if seconds > 0
    ]


def _of_tensors(record: RunRecord) -> str:
    """On a CPU the memory of the process is measured, and that of its tensors predicted."""
    return " for tensors alone" * (PROCESS_KIND in record.memory)


@dataclass(frozen=True, slots=True)
class Column:
    """The heading of a column and its meaning."""

    heading: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Cell:
    """A text, and the number by which rows are sorted; None sorts last."""

    text: str
    value: float | None


@dataclass(frozen=True, slots=True)
class UnitRow:
    """One unit, or the sum of all units."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class UnitTable:
    columns: tuple[Column, ...]
    rows: tuple[UnitRow, ...]
    total: UnitRow


_COLUMNS = (
    Column("Parameters", "Parameter tensors of the unit"),
    Column("Elements", "Elements of these parameters"),
    Column("Size", "Bytes of the unsharded parameters, in their original dtype"),
    Column("Padding", "Bytes added for alignment and equal shards"),
    Column("Padding %", "Padding as a percentage of the size"),
    Column("Buckets", "Buckets of the unit: one collective each"),
    Column("Gathered", "Bytes of an all-gather"),
    Column("Gather ms", "Time of all-gathers in the traced step, mean over ranks"),
    Column("Reduce ms", "Time of reduce-scatters in the traced step, mean over ranks"),
    Column("Exposed ms", "Time that compute waited for them, mean over ranks"),
)
_NO_TIME = (0.0, 0.0, 0.0)


def unit_table(record: RunRecord) -> UnitTable | None:
    """Return a row for each unit, including those only in the timeline; None without units."""
    times = _times_by_unit(record.timelines)
    known = {unit.name: unit for unit in record.units}
    names = dict.fromkeys([*known, *times])
    if not names:
        return None

    def row(name: str, facts: UnitFacts | None, seconds: Sequence[float]) -> UnitRow:
        return UnitRow(name, _cells(facts, seconds if record.timelines else None))

    rows = [row(shown_unit(name), known.get(name), times.get(name, _NO_TIME)) for name in names]
    total = UnitFacts("", *(_sum(record.units, field) for field in _SUMMED))
    totals_s = [sum(each) for each in zip(_NO_TIME, *times.values(), strict=True)]
    return UnitTable(_COLUMNS, tuple(rows), row("All units", total, totals_s))


_SUMMED = ("num_parameters", "numel", "num_bytes", "padding_bytes", "num_buckets", "gather_bytes")


def _sum(units: Sequence[UnitFacts], field: str) -> int:
    return sum(getattr(unit, field) for unit in units)


def _times_by_unit(timelines: Sequence[Timeline]) -> Mapping[str, Sequence[float]]:
    """Return the seconds of each unit in [all-gathers, reduce-scatters, waits], mean over ranks."""
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for timeline in timelines:
        for span in timeline.spans:
            if span.activity is Activity.GATHER:
                times[span.unit][0] += span.duration_s / len(timelines)
            elif span.activity is Activity.REDUCE:
                times[span.unit][1] += span.duration_s / len(timelines)
        for span in timeline.on(Track.COMPUTE):
            if span.activity.is_exposed:
                times[span.unit][2] += span.duration_s / len(timelines)
    return times


def _cells(facts: UnitFacts | None, times_s: Sequence[float] | None) -> tuple[Cell, ...]:
    found = [Cell(DASH, None)] * len(_COLUMNS)
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
    if times_s is not None:
        found[7:] = [Cell(f"{seconds * 1e3:,.2f}", seconds) for seconds in times_s]
    return tuple(found)
