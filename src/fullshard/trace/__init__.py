"""What the engine does, told to whoever listens: `record` one step, or write an observer."""

from fullshard.trace.activities import Activity, Track
from fullshard.trace.recording import Recording, record
from fullshard.trace.seam import Observer, observed
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
