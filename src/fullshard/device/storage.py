"""Storage that comes and goes under views that stay."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch


class Slab:
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


def swift_attributes() -> AbstractContextManager[Any]:
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
