"""When things happen, and what is in use then: on the host, or on a device with streams."""

from __future__ import annotations

import os
import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes stamps while a step runs; says afterwards when they were."""

    def start(self) -> None:
        """The moment that seconds count from."""

    def stamp(self) -> Any:
        """Now: on the current stream, where there are streams."""

    def settle(self) -> None:
        """Wait until every stamp has passed."""

    def seconds(self, stamp: Any) -> float:
        """When a stamp was, once it has passed."""

    def between(self, first: Any, second: Any) -> float:
        """Seconds from one stamp to another, once both have passed."""

    def allocated_bytes(self) -> int:
        """What is in use now, as the host sees it."""


class HostClock:
    """A CPU: work is done when the call returns."""

    def __init__(self) -> None:
        self._zero_s = 0.0

    def start(self) -> None:
        self._zero_s = time.perf_counter()

    def stamp(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing is under way."""

    def seconds(self, stamp: float) -> float:
        return stamp - self._zero_s

    def between(self, first: float, second: float) -> float:
        return second - first

    def allocated_bytes(self) -> int:
        return resident_bytes()


class StreamClock:
    """CUDA, and everything whose torch module has the same events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._zero: Any = None

    def start(self) -> None:
        self.settle()
        self._zero = self.stamp()

    def stamp(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def settle(self) -> None:
        self._module.synchronize(self._device)

    def seconds(self, stamp: Any) -> float:
        return self.between(self._zero, stamp)

    def between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1000

    def allocated_bytes(self) -> int:
        return int(self._module.memory_allocated(self._device))


def clock_for(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else StreamClock(device)


def resident_bytes() -> int:
    """What this process has in memory, where the system tells."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
