"""Streams and events, or their absence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams that a root moves its units on, beside the one that computes."""

    gather: Any
    reduce: Any
    replicate: Any


_AS_IT_IS = nullcontext()


class Device:
    """A device without streams: work is done when the call returns, or when its Work is.

    `is_ordered` says whether what is enqueued on a stream runs after what was enqueued before;
    where it is False, whoever needs a collective's result waits for its Work.
    """

    is_ordered = False

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    def make_streams(self) -> Streams:
        return Streams(None, None, None)

    def current_stream(self) -> Any:
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return _AS_IT_IS

    def record(self) -> Any:
        """An event on the current stream."""
        return None

    def wait(self, event: Any, stream: Any = None) -> None:
        """Make `stream` (by default the current one) wait for an event."""

    def synchronize(self, event: Any) -> None:
        """Make the host wait for an event."""


class StreamDevice(Device):
    """CUDA, and everything whose torch module has the same streams and events."""

    is_ordered = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module: Any = torch.get_device_module(device.type)

    def make_streams(self) -> Streams:
        # Above the compute's priority: a delayed copy-out would hold up compute.
        high = [self._module.Stream(self.torch_device, priority=-1) for _ in range(2)]
        return Streams(high[0], high[1], self._module.Stream(self.torch_device))

    def current_stream(self) -> Any:
        return self._module.current_stream(self.torch_device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def record(self) -> Any:
        event = self._module.Event()
        event.record(self.current_stream())
        return event

    def wait(self, event: Any, stream: Any = None) -> None:
        if event is not None:
            (self.current_stream() if stream is None else stream).wait_event(event)

    def synchronize(self, event: Any) -> None:
        if event is not None:
            event.synchronize()


class CudaDevice(StreamDevice):
    """CUDA, for less host time: torch's own functions look up devices and make objects each time.

    A unit changes streams and records events some thirty times a step (rule 7). What is called
    here below torch's functions is the same in torch 2.11 to 2.13.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._known: dict[Any, Any] = {}

    def current_stream(self) -> Any:
        key = torch._C._cuda_getCurrentStream(self._index)
        stream = self._known.get(key)
        if stream is None:
            number, index, kind = key
            stream = torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)
            self._known[key] = stream
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        if torch._C._cuda_getDevice() != self._index:
            return super().on(stream)
        return _OnCudaStream(self._index, stream)

    def record(self) -> Any:
        event = torch._C._CudaEventBase()
        event.record(self.current_stream())
        return event

    def wait(self, event: Any, stream: Any = None) -> None:
        if event is not None:
            event.wait(self.current_stream() if stream is None else stream)


class _OnCudaStream:
    """Makes a stream of the current device the current one for a while."""

    __slots__ = ("_before", "_index", "_stream")

    def __init__(self, index: int, stream: Any) -> None:
        self._index = index
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch._C._cuda_getCurrentStream(self._index)
        stream = self._stream
        _set_cuda_stream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        _set_cuda_stream(*self._before)


def _set_cuda_stream(number: int, index: int, kind: int) -> None:
    torch._C._cuda_setStream(stream_id=number, device_index=index, device_type=kind)


def device_for(device: torch.device) -> Device:
    if device.type in ("cpu", "meta"):
        return Device(device)
    return CudaDevice(device) if device.type == "cuda" else StreamDevice(device)


class ResizableBuffer:
    """A storage whose views are made once and outlive its memory (rule 1).

    A unit has one for its full parameters and one for the messages that are shared. `fill`
    allocates on the current stream and `empty` gives the memory back; views may be read or
    written only in between.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.device = device
        self._storage = torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()

    @property
    def is_filled(self) -> bool:
        return self._storage.size() == self.num_bytes

    @property
    def address_range(self) -> tuple[int, int]:
        start = self._storage.data_ptr()
        return start, start + self.num_bytes

    def fill(self) -> None:
        # Resizing moves memory even if it is as large already, to where nobody has waited (rule 2).
        if not self.is_filled:
            self._storage.resize_(self.num_bytes)

    def empty(self) -> None:
        self._storage.resize_(0)

    @property
    def num_holders(self) -> int:
        """How many there are who keep the storage object: tensors, and this."""
        count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return count

    def view(
        self,
        offset_bytes: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """A tensor at an offset, contiguous if no stride is given, with its own version counter.

        Only while filled: a view that reaches past the storage would make it grow.
        """
        offset = offset_bytes // dtype.itemsize
        return _view(self._storage, offset, shape, dtype, self.device, stride)


def second_view(tensor: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """Part of a contiguous tensor's memory, with a version counter of its own."""
    storage = tensor.untyped_storage()
    return _view(storage, int(tensor.storage_offset()) + offset, shape, tensor.dtype, tensor.device)


def num_references(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Changes when someone else takes hold of a tensor, in Python or below, or lets it go."""
    count = sys.getrefcount
    return [count(tensor) + (tensor._use_count() << 32) for tensor in tensors]  # type: ignore[attr-defined]


def fast_attributes() -> AbstractContextManager[Any]:
    """Reading attributes of many `DTensor`s takes a third of the time in here."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return context


def _view(
    storage: torch.UntypedStorage,
    offset: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    stride: Sequence[int] | None = None,
) -> torch.Tensor:
    base = torch.empty(0, dtype=dtype, device=device)
    if stride is None:
        stride = _contiguous_stride(shape)
    return base.set_(storage, offset, torch.Size(shape), tuple(stride))


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


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


_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(function: _F) -> _F:
    """Keep dynamo out of a function and of all that it calls.

    `torch.compiler.disable` does the same through a wrapper, which takes longer than most of what
    is wrapped here, and imports the compiler. Dynamo reads the mark while it traces a caller; the
    strategy of the code is what the interpreter follows (torch 2.11 to 2.13).
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "fullshard runs between graphs"  # type: ignore[attr-defined]
    function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function
