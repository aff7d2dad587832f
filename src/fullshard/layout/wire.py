"""How a bucket travels: what is sent of each rank's segment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Sums over ranks on a CPU go by so many elements, which stay in its cache.
_CHUNK_NUMEL = 256 << 10
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class Wire(ABC):
    """An encoding of segments as messages, which have the same size on every rank.

    A message consists of elements of `dtype`. With `is_plain` these are the segment's values: the
    backend can sum them, and what was gathered in the dtype that computes is read as it is.
    Otherwise messages are decoded where they arrive. Segments consist of whole groups of
    `alignment_numel` elements.
    """

    dtype: torch.dtype
    is_plain = False

    @property
    def alignment_numel(self) -> int:
        return 1

    @abstractmethod
    def message_numel(self, numel: int) -> int:
        """How many elements of `dtype` the message of a segment of `numel` elements has."""

    @abstractmethod
    def encode(self, segments: torch.Tensor, messages: torch.Tensor) -> None:
        """Write segments, one in each row, as messages."""

    @abstractmethod
    def decode(self, messages: torch.Tensor, segments: torch.Tensor) -> None:
        """Write the values of messages, one in each row, in the dtype of `segments`."""

    def add_up(self, messages: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Sum messages in the order of ranks, in the dtype of `out`."""
        values = torch.empty_like(out)
        out.zero_()
        for message in messages:
            self.decode(message.view(1, -1), values.view(1, -1))
            out.add_(values)


@dataclass(frozen=True, slots=True)
class Plain(Wire):
    """Values in one dtype."""

    dtype: torch.dtype

    is_plain = True

    @property
    def alignment_numel(self) -> int:
        """Messages are multiples of 16 bytes; NCCL copies by elements otherwise."""
        return max(1, 16 // self.dtype.itemsize)

    def message_numel(self, numel: int) -> int:
        return numel

    def encode(self, segments: torch.Tensor, messages: torch.Tensor) -> None:
        messages.copy_(segments)

    def decode(self, messages: torch.Tensor, segments: torch.Tensor) -> None:
        segments.copy_(messages)

    def add_up(self, messages: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """On a CPU: `out` may be one of the messages."""
        if len(messages) == 2 and out.dtype == messages[0].dtype:
            # The addition of two is done in float32 anyway, and rounded once.
            torch.add(*messages, out=out)
            return
        if out.numel() > _CHUNK_NUMEL:
            chunks = (each.split(_CHUNK_NUMEL) for each in (out, *messages))
            for chunk, *parts in zip(*chunks, strict=True):
                self.add_up(parts, chunk)
            return
        wide = torch.float32 if out.dtype in _LOW_PRECISION else out.dtype
        if messages[0].dtype != wide:
            # A cast and an addition are faster than one addition of two dtypes.
            messages = [message.to(wide) for message in messages]
        total, *others = messages
        for other in others[:-1]:
            total = torch.add(total, other)
        if others:
            torch.add(total, others[-1], out=out)
        else:
            out.copy_(total)
