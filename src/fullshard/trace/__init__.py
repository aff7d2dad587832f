"""What the engine does, reported to observers: `record` one step, or write an observer."""

from fullshard.trace.profiling import profiled
from fullshard.trace.recording import Recording, StepTime, StepTimes, record
from fullshard.trace.seam import Activity, Observer, Track, doing, observed
from fullshard.trace.timeline import MemorySample, SentBytes, Span, Timeline, UnitFacts

__all__ = [
    "Activity",
    "MemorySample",
    "Observer",
    "Recording",
    "SentBytes",
    "Span",
    "StepTime",
    "StepTimes",
    "Timeline",
    "Track",
    "UnitFacts",
    "doing",
    "observed",
    "profiled",
    "record",
]
