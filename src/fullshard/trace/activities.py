"""What the engine says that it does."""

from __future__ import annotations

from enum import Enum


class Track(Enum):
    """Where an activity runs: three things that a rank does at the same time."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"


class Activity(Enum):
    """What a rank does for a unit from a beginning to an end."""

    FORWARD = "forward"
    BACKWARD = "backward"
    GATHER = "gather"
    REDUCE = "reduce"
    AWAIT_GATHER = "waits for its gather"
    AWAIT_REDUCE = "waits for its reduce"
    OPTIMIZER = "optimizer"

    @property
    def track(self) -> Track:
        return _TRACKS.get(self, Track.COMPUTE)

    @property
    def is_exposed(self) -> bool:
        """Whether compute stands still meanwhile: communication that nothing hides."""
        return self in (Activity.AWAIT_GATHER, Activity.AWAIT_REDUCE)


_TRACKS = {Activity.GATHER: Track.GATHER, Activity.REDUCE: Track.REDUCE}
