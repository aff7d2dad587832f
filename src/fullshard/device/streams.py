"""Streams and events, or their absence."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


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
