"""What the units of a root share while they move."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from fullshard.device import Device, Releases, Streams
from fullshard.trace import seam
from fullshard.trace.seam import Activity


@dataclass(frozen=True, slots=True)
class Tail:
    """What is left of a reduction: memory of the reduce stream that is used until `event`."""

    unit: str
    event: Any
    held: list[Any]


# Of messages with large gradients that are reduced before the rest of their unit.
_MOST_BYTES = 256 << 20


class Concludable(Protocol):
    """A reduction under way. `num_bytes` is the size of its messages."""

    num_bytes: int

    def conclude(self) -> Tail: ...
    def abandon(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Late:
    """Memory to give back once the next gather has been issued (rule 3)."""

    owner: object
    event: Any
    release: Callable[[], list[tuple[int, int]]]


class CommContext:
    """Streams, releases, and the reductions under way, in the order of issue."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._releases = Releases()
        self._late: list[_Late] = []
        self._ahead: set[object] = set()
        self._reductions: deque[Concludable] = deque()
        self._tail: Tail | None = None

    @cached_property
    def streams(self) -> Streams:
        return self.device.make_streams()

    def start_gathers_after_compute(self, event: Any = None) -> None:
        """Make gathers from now on see what compute has written: the optimizer's new shards."""
        if self.device.is_ordered:
            event = event or self.device.record()
            self.device.wait(event, self.streams.gather)

    def await_releases(self, address_range: tuple[int, int]) -> None:
        """Make the current (gather) stream wait for compute that may still use this memory."""
        if not self.device.is_ordered:
            return
        for event in self._releases.take(address_range):
            self.device.wait(event)

    def await_all_releases(self) -> None:
        """The same for memory that is still to be allocated, by code that is not ours."""
        self.await_releases((0, sys.maxsize))

    def gather_issued(self, owner: object) -> None:
        """A gather is under way for which nobody has waited yet."""
        self._ahead.add(owner)
        self.release_late()

    def gather_used(self, owner: object) -> None:
        self._ahead.discard(owner)

    def release_later(self, owner: object, release: Callable[[], list[tuple[int, int]]]) -> None:
        """Give memory back once a further gather has been issued, or at once if one has been."""
        self._late.append(_Late(owner, self.device.record(), release))
        if self._ahead:
            self.release_late()

    def is_late(self, owner: object) -> bool:
        return bool(self._late) and any(late.owner is owner for late in self._late)

    def revive(self, owner: object) -> None:
        """Keep memory that was to be given back."""
        self._late = [late for late in self._late if late.owner is not owner]

    def release_now(self, owner: object) -> None:
        """Give back the memory of one owner, if it was to be given back later."""
        kept, self._late = (
            [late for late in self._late if late.owner is not owner],
            [late for late in self._late if late.owner is owner],
        )
        self.release_late()
        self._late = kept

    def release_late(self) -> None:
        if not self._late:
            return
        late, self._late = self._late, []
        for entry in late:
            for address_range in entry.release():
                self._releases.add(address_range, entry.event)

    def add_reduction(self, reduction: Concludable) -> None:
        self._reductions.append(reduction)

    def make_room(self, max_under_way: int) -> None:
        """Conclude the oldest reductions until fewer than `max_under_way` are left."""
        while len(self._reductions) >= max_under_way:
            self._conclude_oldest()

    def make_room_for(self, num_bytes: int) -> None:
        """Conclude the oldest reductions until what is left and `num_bytes` are not too much."""
        held_bytes = sum(reduction.num_bytes for reduction in self._reductions)
        while self._reductions and held_bytes + num_bytes > _MOST_BYTES:
            held_bytes -= self._reductions[0].num_bytes
            self._conclude_oldest()

    def _conclude_oldest(self) -> None:
        previous, self._tail = self._tail, self._reductions.popleft().conclude()
        if previous is not None and self.device.is_ordered:
            # Its memory returns to the reduce stream, which must not write there too early.
            self.device.wait(previous.event, self.streams.reduce)

    def conclude_reductions(self) -> None:
        """Conclude all; the current stream then sees every gradient."""
        self.make_room(1)
        if self._tail is not None:
            if seam.observers:
                seam.begin(Activity.AWAIT_REDUCE, self._tail.unit)
            self.device.wait(self._tail.event)
            # The reduce stream has waited for the tails before this one, on whichever stream.
            with self.device.on(self.streams.reduce):
                reduced = self.device.record()
            self.device.wait(reduced)
            if seam.observers:
                seam.end(Activity.AWAIT_REDUCE, self._tail.unit)
            self._tail = None

    def abandon_reductions(self) -> None:
        while self._reductions:
            self._reductions.popleft().abandon()
        if self._tail is not None:
            self.device.wait(self._tail.event)
            self._tail = None
