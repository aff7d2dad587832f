"""What the engine does, reported to observers: `record` one step, or write an observer."""

from fullshard.trace.recording import Recording, record
from fullshard.trace.seam import Activity, Observer, Track, observed
from fullshard.trace.timeline import MemorySample, Span, Timeline, UnitFacts

__all__ = [
    "Activity",
    "MemorySample",
    "Observer",
    "Recording",
    "Span",
    "Timeline",
    "Track",
    "UnitFacts",
    "observed",
    "record",
]
