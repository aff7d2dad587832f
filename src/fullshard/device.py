"""Streams, events and resizable buffers, on the CPU and on everything shaped like CUDA.

While a step is simulated (`plan/`), tensors on meta belong to a simulated device, and this module
provides its streams, its type, and the addresses of its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from fullshard._torch import (
    CudaEvent,
    cuda_current_stream,
    cuda_get_device,
    cuda_set_stream,
    storage_references,
    tensor_references,
)


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of a scheduler's collectives, beside the compute stream."""

    all_gather: Any
    reduce_scatter: Any
    all_reduce: Any


_NO_STREAM = nullcontext()


class Device:
    """A device without streams: work is done when the call returns, or when its Work is.

    With `has_streams`, work on a stream runs in the order in which it was enqueued. Without, code
    that needs the result of a collective waits for its Work.
    """

    has_streams = False

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    def make_streams(self) -> Streams:
        return Streams(None, None, None)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one in a scope."""
        return _NO_STREAM

    def record(self) -> Any:
        """Record an event on the current stream."""
        return None

    def wait(self, event: Any, stream: Any = None) -> None:
        """Make `stream` (by default the current one) wait for an event."""

    def synchronize(self, event: Any) -> None:
        """Make the host wait for an event."""


class StreamDevice(Device):
    """CUDA, and everything whose torch module has the same streams and events."""

    has_streams = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module: Any = torch.get_device_module(device.type)
        self._new_event: Any = CudaEvent if device.type == "cuda" else self._module.Event

    def make_streams(self) -> Streams:
        # Above the compute stream's priority: a delayed copy-out would hold up compute.
        high = [self._module.Stream(self.torch_device, priority=-1) for _ in range(2)]
        return Streams(high[0], high[1], self._module.Stream(self.torch_device))

    def current_stream(self) -> Any:
        return self._module.current_stream(self.torch_device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def record(self) -> Any:
        event = self._new_event()
        event.record(self.current_stream())
        return event

    def wait(self, event: Any, stream: Any = None) -> None:
        if event is not None:
            event.wait(self.current_stream() if stream is None else stream)

    def synchronize(self, event: Any) -> None:
        if event is not None:
            event.synchronize()


class CudaDevice(StreamDevice):
    """CUDA with less host time (rule 7: host time).

    A unit changes streams and records events 30 times a step, and torch.cuda's own functions look
    up devices and make objects on each call.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._streams: dict[Any, Any] = {}

    def current_stream(self) -> Any:
        key = cuda_current_stream(self._index)
        stream = self._streams.get(key)
        if stream is None:
            names = ("stream_id", "device_index", "device_type")
            stream = self._streams[key] = torch.cuda.Stream(**dict(zip(names, key, strict=True)))
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        if cuda_get_device() != self._index:
            return super().on(stream)
        return _OnCudaStream(self._index, stream)


class _OnCudaStream:
    """Makes a stream of the current device the current one in a scope."""

    __slots__ = ("_before", "_index", "_stream")

    def __init__(self, index: int, stream: Any) -> None:
        self._index = index
        self._stream = stream

    def __enter__(self) -> None:
        self._before = cuda_current_stream(self._index)
        stream = self._stream
        _set_stream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        _set_stream(*self._before)


def _set_stream(stream_id: int, index: int, device_type: int) -> None:
    cuda_set_stream(stream_id=stream_id, device_index=index, device_type=device_type)


class Simulation(Protocol):
    """A device of type `played` that exists in numbers only; its tensors are on meta."""

    played: str
    collectives: Any
    """A `comm.collectives.Collectives`."""

    @property
    def device(self) -> Device: ...

    def address_of(self, storage: torch.UntypedStorage) -> int: ...

    def resized(self, storage: torch.UntypedStorage, kind: str) -> None: ...

    def copied(self, num_bytes: int) -> None: ...

    def host_of(self, rank: int) -> int: ...

    def all_reduce(self, num_bytes: int, group: Any) -> None: ...


_simulation: Simulation | None = None


def simulation() -> Simulation | None:
    """The simulation that this process runs. Autograd's threads see it, too."""
    return _simulation


@contextmanager
def simulated(simulation: Simulation) -> Iterator[None]:
    global _simulation
    _simulation = simulation
    try:
        yield
    finally:
        _simulation = None


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on meta, and not one of a simulated device."""
    return tensor.is_meta and _simulation is None


def type_of(device: torch.device) -> str:
    """The type of a device; for a simulated one, the type that it plays."""
    return device.type if _simulation is None else _simulation.played


def address_of(memory: torch.Tensor | torch.UntypedStorage) -> int:
    """The address of a storage, or of a tensor that begins where its storage does."""
    if _simulation is None:
        return memory.data_ptr()
    return _simulation.address_of(
        memory.untyped_storage() if isinstance(memory, torch.Tensor) else memory
    )


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory with a version counter and a storage object of its own."""
    shared: torch.Tensor = view.data if _simulation else from_dlpack(to_dlpack(view))
    return shared


def device_for(device: torch.device) -> Device:
    if _simulation is not None:
        return _simulation.device
    if device.type in ("cpu", "meta"):
        return Device(device)
    return CudaDevice(device) if device.type == "cuda" else StreamDevice(device)


class ResizableBuffer:
    """A storage whose views are made once and outlive its memory (rule 1: storage outlives memory).

    `allocate` takes memory of the current stream and `free` gives it back. Views may be read or
    written only in between.
    """

    def __init__(self, num_bytes: int, device: torch.device, kind: str = "") -> None:
        self.num_bytes = num_bytes
        self.device = device
        self._kind = kind
        self._storage = torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()

    @property
    def is_allocated(self) -> bool:
        return self._storage.size() == self.num_bytes

    @property
    def address_range(self) -> tuple[int, int]:
        start = address_of(self._storage)
        return start, start + self.num_bytes

    def allocate(self) -> None:
        # Rule 2, memory by stream: all-gathers wait for memory by its address, and resize_ to the
        # same size would move it.
        if not self.is_allocated:
            self._resize(self.num_bytes)

    def free(self) -> None:
        self._resize(0)

    def _resize(self, num_bytes: int) -> None:
        self._storage.resize_(num_bytes)
        if _simulation is not None:
            _simulation.resized(self._storage, self._kind)

    @property
    def use_count(self) -> int:
        """How many tensors share the storage, in Python and in C++, plus this object."""
        return storage_references(self._storage)

    def view(
        self,
        offset_bytes: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: Sequence[int] = (),
    ) -> torch.Tensor:
        """A tensor at an offset, contiguous unless a stride is given, with its own version counter.

        Only while allocated: a view that reaches past the storage would make it grow.
        """
        view = torch.empty(0, dtype=dtype, device=self.device)
        offset = offset_bytes // dtype.itemsize
        return view.set_(self._storage, offset, torch.Size(shape), tuple(stride))


def reference_counts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Numbers that change when anyone else takes or drops a reference, in Python or in C++."""
    count = sys.getrefcount
    return [count(tensor) + (tensor_references(tensor) << 32) for tensor in tensors]
