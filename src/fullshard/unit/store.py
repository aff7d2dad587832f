"""Where the shards of a lane, their gradients and their optimizer state are kept between steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from fullshard.api import CPUOffloadPolicy, OffloadPolicy
from fullshard.device import Device


class Store(ABC):
    """A place for the values of a lane. Its optimizer steps there, on `device`."""

    device: torch.device
    is_on_device: bool
    """Whether values are in the memory that computes: then nothing has to be moved."""

    @classmethod
    def of(cls, policy: OffloadPolicy, device: torch.device) -> Store:
        """The store that a user's policy asks for."""
        if isinstance(policy, CPUOffloadPolicy):
            return HostStore(device, policy.pin_memory)
        return DeviceStore(device)

    @abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the values of a lane, filled with zeros."""

    @abstractmethod
    def read(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Copy values to memory that computes, on the current stream."""

    @abstractmethod
    def write(self, values: torch.Tensor, device: Device) -> tuple[torch.Tensor, Any]:
        """Copy values here, on the current stream; return them and the event to wait for."""


class DeviceStore(Store):
    """The memory that computes."""

    is_on_device = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def read(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values)

    def write(self, values: torch.Tensor, device: Device) -> tuple[torch.Tensor, Any]:
        return values, None


class HostStore(Store):
    """Host memory, pinned if the device that computes is another one.

    On a CPU this is the memory that computes.
    """

    def __init__(self, computes_on: torch.device, pin_memory: bool = True) -> None:
        self.device = torch.device("cpu")
        self.is_on_device = computes_on == self.device
        self._pin_memory = pin_memory and computes_on.type != "cpu"

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self._pin_memory)

    def read(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values, non_blocking=True)

    def write(self, values: torch.Tensor, device: Device) -> tuple[torch.Tensor, Any]:
        kept = torch.empty(
            values.size(), dtype=values.dtype, device=self.device, pin_memory=self._pin_memory
        )
        kept.copy_(values, non_blocking=self._pin_memory)
        return kept, device.record()
