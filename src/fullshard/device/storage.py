"""Storage that comes and goes under views that stay."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Slab:
    """A storage whose views are made once and outlive its memory (rule 1).

    A unit has one for its full parameters and one for the messages that are shared. `fill`
    allocates on the current stream and `empty` gives the memory back; views may be read or
    written only in between.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._device = device
        self._storage = torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()

    @property
    def is_filled(self) -> bool:
        return self._storage.size() == self.num_bytes

    @property
    def address_range(self) -> tuple[int, int]:
        start = self._storage.data_ptr()
        return start, start + self.num_bytes

    def fill(self) -> None:
        self._storage.resize_(self.num_bytes)

    def empty(self) -> None:
        self._storage.resize_(0)

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor at an offset, with a version counter of its own.

        Only while filled: a view that reaches past the storage would make it grow.
        """
        return _view(self._storage, offset_bytes // dtype.itemsize, shape, dtype, self._device)


def second_view(tensor: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """Part of a contiguous tensor's memory, with a version counter of its own."""
    storage = tensor.untyped_storage()
    return _view(storage, int(tensor.storage_offset()) + offset, shape, tensor.dtype, tensor.device)


def _view(
    storage: torch.UntypedStorage,
    offset: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    base = torch.empty(0, dtype=dtype, device=device)
    return base.set_(storage, offset, torch.Size(shape), _contiguous_stride(shape))


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
