"""How a bucket travels: what is sent of each rank's segment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from fullshard.errors import ConfigError

# Work on a CPU goes by so many elements, which stay in its cache.
_CHUNK_NUMEL = 256 << 10
# Messages are multiples of 16 bytes, and so are the scales of four blocks.
_BLOCKS_TOGETHER = 4
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class Wire(ABC):
    """An encoding of segments as messages, which have the same size on every rank.

    A message consists of elements of `dtype`. With `is_plain` these are the segment's values: the
    backend can sum them, and what was gathered in the dtype that computes is read as it is.
    Otherwise messages are decoded where they arrive. Segments consist of whole groups of
    `alignment_numel` elements. The ranks of a unit compare the `repr` of their wires.
    """

    dtype: torch.dtype
    is_plain = False

    @property
    def alignment_numel(self) -> int:
        return 1

    def suits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape should travel so; otherwise it travels as it is."""
        return True

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


class Blockwise(Wire):
    """Values of eight bits, with one float32 scale for each block of consecutive elements.

    A message has the values of its segment, and then the scales. The scale of a block is its
    largest magnitude over the largest value, so that a block of zeros arrives as zeros. All of a
    block that has a value which is not finite arrives as NaN. Values round to the nearest one.
    """

    dtype = torch.uint8
    block: int
    value_dtype: torch.dtype
    largest: float

    def __post_init__(self) -> None:
        if self.block < 16 or self.block % 16:
            raise ConfigError(
                f"{type(self).__name__}: a block must have a multiple of 16 elements, not "
                f"{self.block}."
            )

    @property
    def alignment_numel(self) -> int:
        return _BLOCKS_TOGETHER * self.block

    def suits(self, shape: Sequence[int]) -> bool:
        """Gains, biases and what is smaller than a block are few bytes, and matter more."""
        return len(shape) > 1 and prod(shape) >= self.block

    def message_numel(self, numel: int) -> int:
        return numel + numel // self.block * 4

    def encode(self, segments: torch.Tensor, messages: torch.Tensor) -> None:
        for blocks, values, scales in self._chunks(segments, messages):
            wide = blocks.float()
            torch.div(wide.abs().amax(-1, keepdim=True), self.largest, out=scales)
            # What is not finite is in the scale: with it, any value is decoded as NaN.
            is_used = scales.isfinite() & (scales >= _SMALLEST_SCALE)
            wide = (wide / scales).masked_fill_(~is_used, 0.0)
            scales.masked_fill_(scales.isinf(), torch.nan)
            values.copy_(self._rounded(wide))

    def decode(self, messages: torch.Tensor, segments: torch.Tensor) -> None:
        for blocks, values, scales in self._chunks(segments, messages):
            blocks.copy_(values.float() * scales)

    @abstractmethod
    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Values within the largest magnitude, ready to be cast."""

    def _chunks(
        self, segments: torch.Tensor, messages: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Parts of all segments: elements and values, by block, and scales."""
        numel = segments.size(1)
        if not segments.numel():
            return
        blocks = segments.unflatten(1, (-1, self.block))
        values = messages[:, :numel].view(self.value_dtype).unflatten(1, (-1, self.block))
        scales = messages[:, numel:].view(torch.float32).unsqueeze(-1)
        num_blocks = numel // self.block
        if segments.device.type == "cpu":
            num_blocks = max(1, _CHUNK_NUMEL // self.block // max(1, segments.size(0)))
        parts = (each.split(num_blocks, dim=1) for each in (blocks, values, scales))
        yield from zip(*parts, strict=True)


@dataclass(frozen=True, slots=True)
class Int8(Blockwise):
    """Integers from -127 to 127: the error is at most 1/254 of the largest of a block."""

    block: int = 256

    value_dtype = torch.int8
    largest = 127.0

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        return values.round_()


@dataclass(frozen=True, slots=True)
class Fp8(Blockwise):
    """Floating-point numbers e4m3: the error is at most 1/16 of each value.

    Values below 2e-5 of the largest of a block have an error of up to 2e-6 of that.
    """

    block: int = 128

    value_dtype = torch.float8_e4m3fn
    largest = 448.0

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        return values
