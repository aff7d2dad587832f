"""Where ranks are in the program, and what the places of all of them tell."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from types import FrameType

import torch

from fullshard.comm.guard import Place, Watched

# How long ranks wait before they give up one that has left or is stopped.
SHORT_PATIENCE_S = 3.0
LEFT = "it has left"

_ASKED_WITHIN_S = 1.5
_SHOWN_RANKS = 8
_TORCH = Path(torch.__file__).parent
_PACKAGES = str(_TORCH), f"{Path(__file__).parent.parent}{os.sep}", str(threading.__file__), "<"
# The files in which a program waits in its own collectives, at most `_MAX_DEPTH` calls deep. Not
# all of torch.distributed: a rank that writes a checkpoint there does not wait for others.
_COLLECTIVES = tuple(
    str(_TORCH / "distributed" / name) for name in ("distributed_c10d.py", "_functional_coll")
)
_MAX_DEPTH = 6


class OwnPlace:
    """Follows where this rank is, from another thread than the program's.

    `watched` are the schedulers of this process. `waiting_since` and `doing` are set by code that
    waits for others on the host, which notes in `asked_at` when it last asked whether there is
    hope; a wait of the device, or in a collective of the program's own, is recognized from
    outside: the rank stays where it is.
    """

    def __init__(self) -> None:
        self.watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self.doing = ""
        self.ended = ""
        self.waiting_since: float | None = None
        self.asked_at: float | None = None
        self._program = threading.main_thread().ident or 0
        self._num_left = 0
        self._seen = Place()
        self._seen_since = time.monotonic()

    def look(self) -> Place:
        places = [watched.place() for watched in list(self.watched)]
        active = [place for place in places if place.phase != "idle"]
        found = (active or places or [Place()])[-1]
        line, called = self._line()
        is_behind, ended = found.waited_s > 0 or bool(called), self.ended
        is_left = found.phase == "backward" and not _is_in_autograd()
        self._num_left = self._num_left + 1 if is_left else 0
        if self._num_left > 1 and not ended:
            ended = "it left a backward before its end"
        limit_s = inf if called else found.limit_s  # not the limit of the program's own groups
        doing = self.doing or called
        found = replace(found, waited_s=0.0, line=line, ended=ended, limit_s=limit_s, doing=doing)
        now = time.monotonic()
        if found != self._seen or not is_behind:
            self._seen, self._seen_since = found, now
        return replace(found, waited_s=round(now - (self.waiting_since or self._seen_since), 1))

    def is_beyond_reach(self) -> bool:
        """Whether the program waits for others, and does not ask whether there is hope."""
        if self.asked_at is not None:
            return time.monotonic() - self.asked_at > _ASKED_WITHIN_S
        return bool(self._line()[1])

    def _line(self) -> tuple[str, str]:
        """The line that the program is at, and the collective that it waits in there, if any."""
        called: list[str] = []
        for depth, frame in enumerate(_frames(sys._current_frames().get(self._program))):
            path, name = frame.f_code.co_filename, frame.f_code.co_name
            if not path.startswith(_PACKAGES):
                return f"{Path(path).name}:{frame.f_lineno} in {name}", (called or [""])[-1]
            if depth < _MAX_DEPTH and path.startswith(_COLLECTIVES) and name != "wrapper":
                called.append(name)
        return "", ""


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in_autograd() -> bool:
    """Whether any thread runs a backward."""
    stacks = map(_frames, sys._current_frames().values())
    in_autograd = str(_TORCH / "autograd")
    return any(f.f_code.co_filename.startswith(in_autograd) for stack in stacks for f in stack)


def table(places: Sequence[Place]) -> str:
    """One line for all ranks that are at the same place, the largest group first."""
    at: dict[Place, list[int]] = {}
    for rank, place in enumerate(places):
        at.setdefault(replace(place, waited_s=float(place.waited_s > 0)), []).append(rank)
    lines = []
    for ranks in sorted(at.values(), key=len, reverse=True):
        longest = max((places[rank] for rank in ranks), key=lambda place: place.waited_s)
        shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
        more = ", ..." if len(ranks) > _SHOWN_RANKS else ""
        lines.append(f"  {len(ranks)} of {len(places)} (rank {shown}{more}): {longest}")
    return "\n".join(lines)


def write_places(path: Path, places: Sequence[Place]) -> None:
    """Write where all ranks are, for observers outside of the run."""
    known = {"time": time.time(), "places": [asdict(place) for place in places]}
    with suppress(OSError):
        beside = path.with_name(f".{path.name}")
        beside.write_text(json.dumps(known), encoding="utf-8")
        beside.replace(path)


def read_places(path: Path) -> tuple[list[Place], float]:
    """Where all ranks were, and how many seconds ago."""
    known = json.loads(path.read_text(encoding="utf-8"))
    return [Place(**place) for place in known["places"]], time.time() - known["time"]


def rank_to_give_up(places: Sequence[Place]) -> int | None:
    """The rank that has ended while others have been waiting, if there is one."""
    if max((place.waited_s for place in places), default=0.0) < SHORT_PATIENCE_S:
        return None
    return next((rank for rank, place in enumerate(places) if place.ended), None)


def late_rank(places: Sequence[Place]) -> tuple[int, Place] | None:
    """The rank with the fewest collectives that does not wait, if another is beyond its limit."""
    limit_s = min((each.limit_s for each in places if each.waited_s > each.limit_s), default=None)
    busy = [rank for rank, place in enumerate(places) if not place.waited_s]
    if limit_s is None or not busy:
        return None
    late = min(busy, key=lambda rank: (places[rank].num_collectives, places[rank].forward))
    ended = f"{places[late].line}, while others wait for longer than the timeout of {limit_s:g} s"
    return late, replace(places[late], ended=ended)


def are_deadlocked(places: Sequence[Place], patience_s: float) -> bool:
    """Whether every rank waits, and not all for the same collective."""
    do_wait = all(place.waited_s >= patience_s for place in places)
    return do_wait and len({place.spot for place in places}) > 1
