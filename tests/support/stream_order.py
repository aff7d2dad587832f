"""Finds work on streams that nothing orders, on a CPU.

Theory of operation
===================

`emulated_streams` gives the engine a device with streams (`has_streams`) whose work the CPU does at
once. A stream keeps no work, only what it has seen: a vector clock. So a race is found whether or
not it would have happened this time.

**Order.** Every stream counts what is done on it, and so does the host. A stream's clock gives, for
every other stream, the count up to which it comes after it. `record` takes a copy of the current
stream's clock, `wait` joins it to another's, `synchronize` to the host's; whatever is enqueued
comes after what the host has seen by then. An event has passed (`query`) only if the host is known
to have seen it: the engine is told nothing that a fast host would not be told. Reading a value on
the host (`item`) synchronizes with the current stream.

**Accesses.** Every operation that reaches torch's dispatcher is an access on the current stream: to
the bytes that its tensors span, as a write or a read by its schema. Views are not accesses. A
collective runs on the calling stream if it is asked to be synchronous, as with NCCL, and otherwise
on its own stream, for which the stream that calls `Work.wait` waits (for all that were issued by
then). Two overlapping accesses race if one of them writes and neither comes before the other.

**Memory.** A block belongs to the pool of the stream that was current when it was allocated, and
goes back there when its storage dies or is resized to nothing, whichever streams used it: the host
does not wait for streams to free memory. The pool may give out the same memory next. So it
remembers the accesses of a freed block, and an access to a block that is given out later must come
after them, else that is a race, too. Which block comes back depends on sizes that a model chooses:
it may be any, except on the gather stream. There the engine goes by addresses (rule 2), and so does
the pool: it has its own address space, gives out the free range that fits best, and joins
neighbors. `ResizableBuffer.address_range` tells these addresses. Resizing a storage that has
memory moves it: new memory, a copy on the current stream, a free. Storages that share memory
(through dlpack) share a block.

**Host memory.** With `is_offloading`, tensors made for `cpu` are the host's and those for `cpu:0`
the device's: torch takes both for the same, the engine does not. Operations on host tensors alone
are accesses by the host.

Not modeled: kernels that allocate for themselves, more than one host thread, autograd's own
switching of streams (all of forward runs on one here), what other ranks do.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.device import Device, ResizableBuffer, Streams
from fullshard.testing import fake_world

_ENGINE = "/src/fullshard/"
_SELF = __file__
_ALIGNMENT = 512
_POOL_BYTES = 1 << 40
_NUM_SITES = 3

Clock = dict[int, int]
"""How much of each stream has been seen, by the number of the stream."""


class Access(NamedTuple):
    """Something done to memory: where, when, by what."""

    stream: int
    time: int
    writes: bool
    operation: str
    site: tuple[tuple[CodeType, int], ...]


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses that nothing orders."""

    first: str
    second: str
    memory: str
    streams: tuple[str, str]
    is_reuse: bool

    def __str__(self) -> str:
        how = "given out again after" if self.is_reuse else "not ordered with"
        return f"{self.second}\n    {how} {self.first}\n    in {self.memory}"


class Pooling(Enum):
    """Which freed memory a pool gives out."""

    ANY = "any of it may be in what is given out"
    BY_ADDRESS = "what has the same addresses"
    NONE = "none: memory is always fresh"


class Stream:
    """A queue of work, as what it has seen."""

    def __init__(self, name: str, number: int, pooling: Pooling) -> None:
        self.name = name
        self.number = number
        self.clock: Clock = {number: 0}
        self.pool = Pool(number * _POOL_BYTES, pooling)

    def see(self, clock: Clock) -> None:
        own = self.clock
        for number, time in clock.items():
            if own.get(number, 0) < time:
                own[number] = time

    def has_seen(self, access: Access) -> bool:
        return self.clock.get(access.stream, 0) >= access.time

    def __repr__(self) -> str:
        return f"Stream({self.name!r})"


class Event:
    """What a stream had seen when it was recorded."""

    def __init__(self, clock: Clock, host: Stream) -> None:
        self.clock = clock
        self._host = host

    def query(self) -> bool:
        seen = self._host.clock
        return all(seen.get(number, 0) >= time for number, time in self.clock.items())

    def synchronize(self) -> None:
        self._host.see(self.clock)


History = dict[int, Access]
"""The last access of each stream."""


def _add(history: History, accesses: Iterable[Access]) -> None:
    for access in accesses:
        before = history.get(access.stream)
        if before is None or before.time < access.time:
            history[access.stream] = access


@dataclass(slots=True, eq=False)
class Block:
    """Memory that was given out, and what was done to it since, by stream and bytes.

    It starts at `start` in its pool's address space and at `address` in the CPU's.
    """

    pool: Pool
    start: int
    num_bytes: int
    site: tuple[tuple[CodeType, int], ...]
    stream: str
    is_on_host: bool
    before: History
    accesses: dict[tuple[int, int, int, bool], Access] = field(default_factory=dict)
    address: int = 0

    def history(self) -> History:
        found = dict(self.before)
        _add(found, self.accesses.values())
        return found


class _Known(NamedTuple):
    """A storage that was seen. Several may share a block without knowing of one another."""

    block: Block
    storage: weakref.ref[torch.UntypedStorage]


class Pool:
    """The memory of one stream: free ranges, and what was last done to each."""

    def __init__(self, base: int, kind: Pooling) -> None:
        self._kind = kind
        self._end = base
        self._free: list[tuple[int, int]] = []
        self._freed: list[tuple[int, int, History]] = []

    def allocate(self, num_bytes: int) -> tuple[int, History]:
        """A range, and what may have been done to it before."""
        size = _rounded(num_bytes)
        fitting = [(hi - lo, lo) for lo, hi in self._free if hi - lo >= size]
        if fitting:
            found, start = min(fitting)
            self._free.remove((start, start + found))
            if found > size:
                self._free.append((start + size, start + found))
        else:
            start, self._end = self._end, self._end + size
        return start, self._taken_over(start, start + size)

    def _over(self, start: int, end: int) -> list[tuple[int, int, History]]:
        if self._kind is Pooling.ANY:
            return self._freed
        return [freed for freed in self._freed if freed[0] < end and start < freed[1]]

    def _taken_over(self, start: int, end: int) -> History:
        history: History = {}
        over = self._over(start, end)
        for _, _, freed in over:
            _add(history, freed.values())
        if self._kind is Pooling.ANY:
            self._freed = [(0, 0, dict(history))]
            return history
        self._freed = [freed for freed in self._freed if freed not in over]
        # A range that is given out carries its history; the rest of it stays.
        for lo, hi, freed in over:
            self._freed += [(a, b, freed) for a, b in ((lo, start), (end, hi)) if a < b]
        return history

    def free(self, block: Block) -> None:
        start, end = block.start, block.start + _rounded(block.num_bytes)
        self._freed.append((start, end, block.history()))
        if self._kind is not Pooling.BY_ADDRESS:
            return
        for lo, hi in [free for free in self._free if free[1] == start or free[0] == end]:
            self._free.remove((lo, hi))
            start, end = min(start, lo), max(end, hi)
        self._free.append((start, end))


def _rounded(num_bytes: int) -> int:
    return max(-(-num_bytes // _ALIGNMENT), 1) * _ALIGNMENT


class StreamOrder(TorchDispatchMode):
    """Keeps the clocks of all streams and the accesses to all memory while it is entered."""

    def __init__(self, *, is_offloading: bool, is_fresh: bool) -> None:
        super().__init__()
        self.races: dict[tuple[Any, ...], Race] = {}
        self.num_accesses: Counter[str] = Counter()
        self.waiting_places: Counter[str] = Counter()
        self.recording_places: Counter[str] = Counter()
        self.without_wait: set[str] = set()
        self.without_event: set[str] = set()
        self._is_offloading = is_offloading
        self._gather_pooling = Pooling.NONE if is_fresh else Pooling.BY_ADDRESS
        self._streams: list[Stream] = []
        self.host = self.make_stream("host")
        self.compute = self.make_stream("compute")
        self._collectives = self.make_stream("collectives")
        self.current = self.compute
        self._known: dict[int, _Known] = {}
        self._blocks: dict[int, Block] = {}
        self.device = EmulatedDevice(torch.device("cpu:0" if is_offloading else "cpu"), self)

    # Streams

    def make_stream(self, name: str, pooling: Pooling = Pooling.ANY) -> Stream:
        stream = Stream(name, len(self._streams), pooling)
        self._streams.append(stream)
        return stream

    def make_streams(self) -> Streams:
        gather = self.make_stream("gather", self._gather_pooling)
        return Streams(gather, self.make_stream("reduce"), self.make_stream("replicate"))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def record(self) -> Event:
        self.current.see(self.host.clock)
        return Event(dict(self.current.clock), self.host)

    # Memory

    def block_of(self, storage: torch.UntypedStorage) -> Block:
        """The block of a storage; one that was made unseen belongs to the current stream."""
        known = self._known.get(storage._cdata)
        if known is not None:
            return known.block
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if num_bytes:
            for block in self._blocks.values():
                if 0 <= address - block.address < block.num_bytes:
                    return self._remember(storage, block)
        return self._adopt(storage, is_on_host=False)

    def _adopt(self, storage: torch.UntypedStorage, *, is_on_host: bool) -> Block:
        """Follow memory that was allocated just now."""
        block = self._allocated(storage.nbytes(), is_on_host)
        block.address = storage.data_ptr()
        self._blocks[storage._cdata] = block
        return self._remember(storage, block)

    def _remember(self, storage: torch.UntypedStorage, block: Block) -> Block:
        key = storage._cdata

        def died(_: object) -> None:
            del self._known[key]
            owned = self._blocks.pop(key, None)
            if owned is not None and owned.num_bytes:
                owned.pool.free(owned)

        self._known[key] = _Known(block, weakref.ref(storage, died))
        return block

    def _allocated(self, num_bytes: int, is_on_host: bool) -> Block:
        stream = self.host if is_on_host else self.current
        start, before = stream.pool.allocate(num_bytes) if num_bytes else (0, {})
        site = _site(sys._getframe(1))
        return Block(stream.pool, start, num_bytes, site, stream.name, is_on_host, before)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Follow a storage that is about to get other memory, or none."""
        block = self.block_of(storage)
        if num_bytes and block.num_bytes:
            self.access([(block, 0, block.num_bytes, False)], "resize_")
        moved = self._allocated(num_bytes, block.is_on_host)
        if block.num_bytes:
            block.pool.free(block)
        had_memory = bool(block.num_bytes)
        block.pool, block.start, block.num_bytes = moved.pool, moved.start, num_bytes
        block.stream, block.site, block.before = moved.stream, moved.site, moved.before
        block.accesses = {}
        block.address = 0  # until it is known
        if num_bytes and had_memory:
            self.access([(block, 0, num_bytes, True)], "resize_")

    # Accesses

    def access(
        self,
        spans: Iterable[tuple[Block, int, int, bool]],
        operation: str,
        stream: Stream | None = None,
    ) -> None:
        """Record an access to memory, by default on the current stream."""
        stream = self.current if stream is None else stream
        stream.see(self.host.clock)
        number = stream.number
        time = stream.clock[number] = stream.clock[number] + 1
        site = _site(sys._getframe(1))
        for block, lo, hi, writes in spans:
            self.num_accesses[stream.name] += 1
            access = Access(number, time, writes, operation, site)
            for earlier in block.before.values():
                if not stream.has_seen(earlier):
                    self._report(earlier, access, block, is_reuse=True)
            for (other, start, end, wrote), earlier in block.accesses.items():
                is_conflict = other != number and (writes or wrote) and lo < end and start < hi
                if is_conflict and not stream.has_seen(earlier):
                    self._report(earlier, access, block, is_reuse=False)
            block.accesses[number, lo, hi, writes] = access

    def _report(self, first: Access, second: Access, block: Block, *, is_reuse: bool) -> None:
        key = (first.operation, first.site, second.operation, second.site, block.site, is_reuse)
        if key in self.races:
            return
        streams = (self._streams[first.stream].name, self._streams[second.stream].name)
        self.races[key] = Race(
            self._told(first),
            self._told(second),
            f"memory of '{block.stream}' from {_told_site(block.site)}",
            streams,
            is_reuse,
        )

    def report(self) -> str:
        """The races that were found, in words."""
        return "\n".join(["", *map(str, self.races.values())])

    def _told(self, access: Access) -> str:
        kind = "write" if access.writes else "read"
        stream = self._streams[access.stream].name
        return f"{kind} by {access.operation} on '{stream}' ({_told_site(access.site)})"

    # What torch does

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it, and answering for every operation takes time

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)
        if not all(map(_is_plain, types)):
            return NotImplemented  # its inner tensors arrive here themselves
        found = func(*args, **kwargs)
        self._note(_traits(func), args, kwargs, found)
        return found

    def _note(
        self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any
    ) -> None:
        if traits.is_view:
            return
        spans: dict[tuple[int, int, int, bool], tuple[Block, int, int, bool]] = {}
        is_on_host = self._is_offloading
        num_tensors = 0
        for place, writes in traits.places:
            value = args[place] if isinstance(place, int) and place < len(args) else None
            if isinstance(place, str):
                value = kwargs.get(place)
            for tensor in _tensors(value):
                block = self._span(tensor, writes, spans)
                num_tensors += 1
                is_on_host = is_on_host and (block is None or block.is_on_host)
        device = kwargs.get("device")
        is_made_on_host = is_on_host and (device is None or device.index is None)
        is_made_on_host = is_made_on_host and (num_tensors > 0 or device is not None)
        for tensor in _tensors(found):
            if not _has_memory(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._adopt(storage, is_on_host=is_made_on_host)
                if not traits.only_allocates:
                    self._span(tensor, True, spans)
        if not spans:
            return
        stream = self.current
        if all(block.is_on_host for block, *_ in spans.values()):
            stream = self.host
        elif traits.is_collective and traits.is_asynchronous(args, kwargs):
            stream = self._collectives
            stream.see(self.current.clock)
        self.access(spans.values(), traits.name, stream)
        if traits.is_read_by_host:
            self.host.see(stream.clock)

    def _span(
        self,
        tensor: torch.Tensor,
        writes: bool,
        spans: dict[tuple[int, int, int, bool], tuple[Block, int, int, bool]],
    ) -> Block | None:
        if not _has_memory(tensor) or not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        block = self.block_of(storage)
        size = tensor.element_size()
        lo = int(tensor.storage_offset()) * size + storage.data_ptr() - block.address
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        hi = lo + (reach + 1) * size
        spans[id(block), lo, hi, writes] = (block, lo, hi, writes)
        return block

    def work_waited(self) -> None:
        """The current stream comes after the collectives that were issued beside it."""
        self.current.see(self._collectives.clock)


class EmulatedDevice(Device):
    """What the engine asks for streams."""

    has_streams = True

    def __init__(self, device: torch.device, order: StreamOrder) -> None:
        super().__init__(device)
        self._order = order

    def make_streams(self) -> Streams:
        return self._order.make_streams()

    def current_stream(self) -> Stream:
        return self._order.current

    def on(self, stream: Stream) -> Any:
        return self._order.on(stream)

    def record(self) -> Event:
        order = self._order
        place = _caller()
        order.recording_places[place] += 1
        if place in order.without_event:
            return Event({}, order.host)
        return order.record()

    def wait(self, event: Event | None, stream: Stream | None = None) -> None:
        if event is None or not self._heeds(_caller()):
            return
        (self._order.current if stream is None else stream).see(event.clock)

    def synchronize(self, event: Event | None) -> None:
        if event is not None and self._heeds(_caller()):
            event.synchronize()

    def _heeds(self, place: str) -> bool:
        self._order.waiting_places[place] += 1
        return place not in self._order.without_wait


class Traits:
    """What an operation does to memory, by its schema."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name: str = schema.name.removeprefix("aten::")
        self.is_collective = schema.name.startswith("c10d::")
        self.is_read_by_host = self.name in _READ_BY_HOST
        self.only_allocates = self.name in _ONLY_ALLOCATE
        returned = [each.alias_info for each in schema.returns]
        is_alias = any(info is not None and not info.is_write for info in returned)
        self.is_view = is_alias or self.name in _NO_ACCESS
        self.places: list[tuple[int | str, bool]] = []
        self._asynchronous: tuple[int, str] | None = None
        for index, argument in enumerate(schema.arguments):
            if argument.name in ("async_op", "asyncOp"):
                self._asynchronous = (index, argument.name)
            if "Tensor" not in str(argument.type):
                continue
            place: int | str = argument.name if argument.kwarg_only else index
            if self.is_collective:
                is_in = not argument.name.startswith("output")
                is_out = not argument.name.startswith("input")
                self.places += [(place, False)] * is_in + [(place, True)] * is_out
            elif not self.only_allocates:
                info = argument.alias_info
                self.places.append((place, info is not None and info.is_write))

    def is_asynchronous(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._asynchronous is None:
            return False
        index, name = self._asynchronous
        return bool(args[index] if index < len(args) else kwargs.get(name, True))


_READ_BY_HOST = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero"}
_ONLY_ALLOCATE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
_NO_ACCESS = {"set_", "lift_fresh", "resize_", "c10d::barrier", "c10d::monitored_barrier_"}
_known_traits: dict[Any, Traits] = {}


def _traits(func: Any) -> Traits:
    found = _known_traits.get(func)
    if found is None:
        found = _known_traits[func] = Traits(func)
    return found


def _is_plain(kind: type) -> bool:
    """Whether a class of tensors leaves operations to torch."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def _has_memory(tensor: torch.Tensor) -> bool:
    return _is_plain(type(tensor)) and tensor.device.type != "meta"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


# Where in the code


def _caller() -> str:
    """The name of the function that called the caller."""
    return sys._getframe(2).f_code.co_qualname


def _site(frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
    """The innermost lines of the engine, or else of the code that called torch."""
    found: list[tuple[CodeType, int]] = []
    outside: tuple[tuple[CodeType, int], ...] = ()
    while frame is not None and len(found) < _NUM_SITES:
        code = frame.f_code
        name = code.co_filename
        if _ENGINE in name:
            found.append((code, frame.f_lineno))
        elif not outside and name != _SELF and "/torch/" not in name:
            outside = ((code, frame.f_lineno),)
        frame = frame.f_back
    return tuple(found) or outside


def _told_site(site: tuple[tuple[CodeType, int], ...]) -> str:
    return " < ".join(
        f"{code.co_filename.rpartition(_ENGINE)[2]}:{line} {code.co_qualname}"
        for code, line in site
    )


@contextmanager
def emulated_streams(
    num_ranks: int, *, is_offloading: bool = False, is_fresh: bool = False
) -> Iterator[StreamOrder]:
    """Play a rank whose device has streams, and follow everything that is done on it.

    With `is_fresh`, gathers never get memory a second time, and so never wait for releases.
    """
    order = StreamOrder(is_offloading=is_offloading, is_fresh=is_fresh)
    resize, data_ptr = torch.UntypedStorage.resize_, torch.Tensor.data_ptr

    def resized(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        order.resize(storage, num_bytes)
        resize(storage, num_bytes)
        order.block_of(storage).address = storage.data_ptr()
        return storage

    def address_range(buffer: ResizableBuffer) -> tuple[int, int]:
        start = order.block_of(buffer._storage).start
        return start, start + buffer.num_bytes

    def address(tensor: torch.Tensor) -> int:
        if not is_offloading or type(tensor) is not torch.Tensor:
            return data_ptr(tensor)
        start = order.block_of(tensor.untyped_storage()).start
        return start + int(tensor.storage_offset()) * tensor.element_size()

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_without_collector())
        enter(fake_world(num_ranks))
        enter(patch("fullshard.runtime.build.device_for", lambda _: order.device))
        enter(patch.object(torch.UntypedStorage, "resize_", resized))
        enter(patch.object(torch.Tensor, "data_ptr", address))
        enter(patch.object(ResizableBuffer, "address_range", property(address_range)))
        for kind in (dist.Work, FakeWork):
            enter(patch.object(kind, "wait", _waiting(order, kind.wait)))
        enter(order)
        yield order


def _waiting(order: StreamOrder, wait: Callable[..., Any]) -> Callable[..., Any]:
    def waited(work: dist.Work, *args: Any) -> Any:
        order.work_waited()
        return wait(work, *args)

    return waited


@contextmanager
def _without_collector() -> Iterator[None]:
    """Memory in cycles would be freed at any time; here it is not freed at all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
