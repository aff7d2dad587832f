"""Which memory may still be in use by whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Release:
    start: int
    end: int
    event: Any


class Releases:
    """The address ranges given back to the gather stream, and when compute is done with them.

    The allocator may hand such a range to the next gather at once; that gather has to wait for
    the compute that used the range last, and for no other (rule 2).
    """

    def __init__(self) -> None:
        self._open: list[_Release] = []

    def add(self, address_range: tuple[int, int], event: Any) -> None:
        start, end = address_range
        if event is not None and end > start:
            self._open.append(_Release(start, end, event))

    def take(self, address_range: tuple[int, int]) -> list[Any]:
        """The events to wait for before the range is written; passed ones are forgotten."""
        if not self._open:
            return []
        start, end = address_range
        self._open = [r for r in self._open if not r.event.query()]
        return [r.event for r in self._open if r.start < end and start < r.end]
