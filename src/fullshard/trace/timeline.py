"""One step of one rank as spans of time: pure values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fullshard.trace.seam import Activity, Track


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of a rank for a unit. Times are seconds since the step began."""

    activity: Activity
    unit: str
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory in use at one moment.

    `full_bytes` is the memory of the full parameters that were gathered. `allocated_bytes` is what
    the device had allocated, or on a CPU the memory of the process.
    """

    at_s: float
    full_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class SentBytes:
    """What a rank has sent to others in one form: in gathers of parameters, or in reductions."""

    activity: Activity
    wire: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of one rank."""

    rank: int
    duration_s: float
    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...]
    sent: tuple[SentBytes, ...] = ()

    def on(self, track: Track) -> tuple[Span, ...]:
        """The spans of a track, one after another.

        Units nest, and so do their spans: the one that ends first is what the rank does.
        """
        return tuple(_innermost(span for span in self.spans if span.activity.track is track))

    def exposed_s(self, unit: str | None = None) -> float:
        """How long compute waited for communication, of one unit or of all."""
        return sum(
            span.duration_s
            for span in self.on(Track.COMPUTE)
            if span.activity.is_exposed and unit in (None, span.unit)
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data, from which `from_json` makes the same timeline."""
        return {
            "rank": self.rank,
            "duration_s": self.duration_s,
            "spans": [[s.activity.value, s.unit, s.start_s, s.end_s] for s in self.spans],
            "memory": [[m.at_s, m.full_bytes, m.allocated_bytes] for m in self.memory],
            "sent": [[s.activity.value, s.wire, s.num_bytes] for s in self.sent],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Timeline:
        return cls(
            found["rank"],
            found["duration_s"],
            tuple(Span(Activity(what), *rest) for what, *rest in found["spans"]),
            tuple(MemorySample(*each) for each in found["memory"]),
            # Runs of earlier versions lack it.
            tuple(SentBytes(Activity(what), *rest) for what, *rest in found.get("sent", ())),
        )


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """A row of a table of units. Sizes are those of the full parameters, in the stored dtype."""

    name: str
    num_parameters: int
    numel: int
    num_bytes: int
    padding_bytes: int
    num_buckets: int
    gather_bytes: int


def _innermost(spans: Iterable[Span]) -> Iterable[Span]:
    """Cut spans that overlap, so that at every moment only the one that ends first is left."""
    waiting = sorted(spans, key=lambda span: (-span.start_s, span.end_s))
    edges = sorted({edge for span in waiting for edge in (span.start_s, span.end_s)})
    open_spans: list[Span] = []
    cut: list[Span] = []
    for start_s, end_s in pairwise(edges):
        while waiting and waiting[-1].start_s <= start_s:
            open_spans.append(waiting.pop())
        open_spans = [span for span in open_spans if span.end_s > start_s]
        if not open_spans:
            continue
        top = min(open_spans, key=lambda span: (span.end_s, -span.start_s))
        last = cut[-1] if cut else None
        if last and (last.activity, last.unit, last.end_s) == (top.activity, top.unit, start_s):
            start_s = cut.pop().start_s
        cut.append(replace(top, start_s=start_s, end_s=end_s))
    return cut
