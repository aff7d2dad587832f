"""The comm context: streams, collectives in flight, and memory to free.

The units of one scheduler share a `CommContext`. It alone frees the memory of collectives (rule
12: one owner of memory): full buffers when a further all-gather has been issued, the inputs of a
reduce-scatter when compute waits for it, and its results when the reduce-scatter stream does.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from fullshard.comm.work import CollectiveWork
from fullshard.device import Device, ResizableBuffer, Streams
from fullshard.trace import seam
from fullshard.trace.seam import Activity

# How many bytes of gradients may be in flight when a large unit adds its own (rule 15: alone).
MAX_EARLY_BYTES = 256 << 20

AddressRanges = list[tuple[int, int]]


def wait_all(works: Iterable[CollectiveWork]) -> None:
    """Wait for every collective, then raise the first error (rule 10: wait before raising)."""
    error: BaseException | None = None
    for work in works:
        try:
            work.wait()
        except Exception as raised:
            error = error or raised
    if error is not None:
        raise error


@dataclass(frozen=True, slots=True)
class HeldResults:
    """Results of a reduce-scatter: memory of the reduce-scatter stream, in use until `event`."""

    unit: str
    event: Any
    tensors: list[Any]


class ReductionInFlight(Protocol):
    """`Reduction` as the comm context sees it."""

    num_bytes: int

    def finish(self) -> HeldResults: ...

    def abort(self) -> None: ...


class LeavingMemory(Protocol):
    """A unit whose memory is to be freed (`Leaving`), as the comm context sees it."""

    def let_go(self) -> tuple[AddressRanges, Any]:
        """Free it; return what was freed, and the event of the compute that used it."""


class CommContext:
    """What is in flight on the streams of one scheduler, in the order of issue.

    `_leaving` are the units whose full buffers are freed once another all-gather is issued (rule 3:
    freed one step late). `_freed` has the address ranges that were freed, and the events of the
    compute that used them: the allocator may give such a range to the next all-gather at once,
    which must wait for the compute that used it last, and for no other (rule 2: memory by stream).
    `_unused_all_gathers` are the owners of all-gathers that nothing has waited for yet.
    `_is_capturing` says that what is issued now becomes part of a CUDA graph. `num_collectives`
    counts issued collectives: it says where a rank is. `forward` stands for the forward under way,
    or the last one. `_made` has what units share in device memory.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._freed: deque[tuple[int, int, Any]] = deque()
        self._leaving: dict[LeavingMemory, None] = {}
        self._unused_all_gathers: set[object] = set()
        self._reduce_scatters: deque[ReductionInFlight] = deque()
        self._held: HeldResults | None = None
        self._is_capturing = False
        self._made: dict[Hashable, Any] = {}
        self.num_collectives = 0
        self.forward = object()

    @property
    def is_behind(self) -> bool:
        """Whether the device still has collectives to do; may be called from another thread."""
        if not self.device.has_streams or self._is_capturing:
            return False
        return not (self.streams.all_gather.query() and self.streams.reduce_scatter.query())

    @cached_property
    def streams(self) -> Streams:
        return self.device.make_streams()

    # All-gathers

    def all_gathers_follow_compute(self, event: Any = None) -> None:
        """Make later all-gathers see what compute has written: the optimizer's new shards."""
        if self.device.has_streams:
            event = event or self.device.record()
            self.device.wait(event, self.streams.all_gather)

    def wait_until_unused(self, address_range: tuple[int, int] = (0, sys.maxsize)) -> None:
        """Make the current stream wait for compute that may still use this memory.

        The default is all memory, for what a user's code is about to allocate.
        """
        first, last = address_range
        if not self._is_capturing:  # a capture cannot query events
            # The oldest pass first; querying all of them would take long when there are many.
            while self._freed and self._freed[0][2].query():
                self._freed.popleft()
        for start, end, event in self._freed:
            if start < last and first < end:
                self.device.wait(event)

    def all_gather_issued(self, owner: object) -> None:
        self._unused_all_gathers.add(owner)
        self.num_collectives += 1
        self.free_leaving()

    def all_gather_used(self, owner: object) -> None:
        self._unused_all_gathers.discard(owner)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` makes in device memory, made once; None if a capture is the first to ask."""
        if key not in self._made:
            if self._is_capturing:
                return None
            self.wait_until_unused()  # of the gather stream (rule 2: memory by stream)
            self._made[key] = make()
        return self._made[key]

    # Captures

    def begin_capture(self) -> None:
        """Forget past events: the device has passed them all, and a capture cannot wait for them.

        Everything must be sharded, and nothing in flight.
        """
        self._freed.clear()
        self._is_capturing = True

    def end_capture(self) -> None:
        """Forget the events of the capture: nothing else can wait for those."""
        self._freed.clear()
        self._unused_all_gathers.clear()
        self._reduce_scatters.clear()
        self._held = None
        self._is_capturing = False

    # Full buffers to free (rule 3: freed one step late)

    def leave(self, unit: LeavingMemory) -> None:
        """Free memory once another all-gather is issued, or at once if one is under way."""
        self._leaving[unit] = None
        if self._unused_all_gathers:
            self.free_leaving()

    def stay(self, unit: LeavingMemory) -> None:
        """Do not free the memory of a unit that was leaving."""
        del self._leaving[unit]

    def free_now(self, unit: LeavingMemory) -> None:
        """Free the memory of a unit, if it is leaving."""
        if unit in self._leaving:
            del self._leaving[unit]
            self._note_freed(*unit.let_go())

    def free_leaving(self) -> None:
        for unit in list(self._leaving):
            self.free_now(unit)

    def free_after_compute(self, buffer: ResizableBuffer) -> None:
        """Free memory of the all-gather stream that compute has just been told to read."""
        address_range = buffer.address_range
        buffer.free()
        self._note_freed([address_range], self.device.record())

    def _note_freed(self, address_ranges: AddressRanges, event: Any) -> None:
        if event is not None:
            self._freed += [(start, end, event) for start, end in address_ranges if end > start]

    # Reduce-scatters

    def add_reduce_scatter(self, reduce_scatter: ReductionInFlight) -> None:
        self._reduce_scatters.append(reduce_scatter)
        self.num_collectives += 1

    def limit_reduce_scatters(self, max_in_flight: int) -> None:
        """Finish the oldest until fewer than `max_in_flight` are in flight."""
        while len(self._reduce_scatters) >= max_in_flight:
            self._finish_oldest()

    def make_room_for(self, num_bytes: int) -> None:
        """Finish the oldest until `num_bytes` more fit below the limit for large gradients."""
        held_bytes = sum(each.num_bytes for each in self._reduce_scatters)
        while self._reduce_scatters and held_bytes + num_bytes > MAX_EARLY_BYTES:
            held_bytes -= self._reduce_scatters[0].num_bytes
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        previous, self._held = self._held, self._reduce_scatters.popleft().finish()
        if previous is not None:
            # Its memory returns to the reduce-scatter stream, which must not write there too early.
            self.device.wait(previous.event, self.streams.reduce_scatter)

    def finish_reduce_scatters(self) -> None:
        """Finish all of them; the current stream then sees every gradient."""
        self.limit_reduce_scatters(1)
        held = self._held
        if held is None:
            return
        if seam.observers:
            seam.begin(Activity.AWAIT_REDUCE, held.unit)
        self._drop_held()
        if seam.observers:
            seam.end(Activity.AWAIT_REDUCE, held.unit)

    def _drop_held(self) -> None:
        """Wait for the last results, and for all before these, which the stream has waited for."""
        if self._held is None:
            return
        self.device.wait(self._held.event)
        with self.device.on(self.streams.reduce_scatter):
            reduced = self.device.record()
        self.device.wait(reduced)
        self._held = None

    def abort_reduce_scatters(self) -> None:
        """Wait for what is in flight and drop it; never raises (rule 11: abort cannot raise)."""
        while self._reduce_scatters:
            self._reduce_scatters.popleft().abort()
        self._drop_held()
