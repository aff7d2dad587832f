"""A tensor that is stored, or about to be: its shape, its dtype, and how boxes of it are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fullshard.layout.split import Box
from fullshard.state.shards import LocalPart


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a stored tensor; `boxes` are the parts that it was written in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


class TensorReader(Protocol):
    """Reads stored tensors by their keys, in whichever format: the index of
    `torch.distributed.checkpoint`, or safetensors.
    """

    @property
    def keys(self) -> Sequence[str]: ...

    def info(self, key: str) -> TensorInfo:
        """What is known of a tensor. Raises if there is none, or torch has no such dtype."""

    def read_into(self, wanted: Mapping[str, Sequence[LocalPart]]) -> None:
        """Fill parts of tensors, with bounded memory besides them."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorSource:
    """A tensor to be written. `read` returns one box of it at a time, on any device.

    `boxes` are those that this process writes; by default, its files share the rows evenly.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box], torch.Tensor]
    boxes: tuple[Box, ...] | None = None

    @classmethod
    def of_parts(
        cls, shape: Sequence[int], dtype: torch.dtype, parts: Iterable[LocalPart]
    ) -> TensorSource:
        values = {part.box: part.values for part in parts}
        return cls(tuple(shape), dtype, values.__getitem__, tuple(values))

    @classmethod
    def of_stored(cls, stored: TensorReader, key: str) -> TensorSource:
        info = stored.info(key)

        def read(box: Box) -> torch.Tensor:
            values = torch.empty(box.sizes, dtype=info.dtype)
            stored.read_into({key: [LocalPart(box, values)]})
            return values

        return cls(info.shape, info.dtype, read)
