"""How a bucket travels: what is sent of each rank's segment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import ModuleType
from typing import TypeAlias

import torch

from fullshard._torch import triton_kernels
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


# The wire of all parameters of a policy, or one for each by its name and shape.
Wires: TypeAlias = Wire | Callable[[str, torch.Size], Wire | None] | None


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
    block that has a value which is not finite arrives as NaN. Values round to the nearest one, or
    `stochastic`ally: up with a chance that makes them right on average.
    """

    dtype = torch.uint8
    block: int
    stochastic = False
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
        if not segments.numel():
            return
        kernels = self._kernels(segments)
        if kernels is not None:
            kernels.encode(
                *(segments, messages, self.block, self.largest, _SMALLEST_SCALE),
                is_int=self._is_int,
                is_stochastic=self.stochastic,
            )
            return
        start = 0
        for blocks, values, scales in self._chunks(segments, messages):
            wide = blocks.float()
            torch.div(wide.abs().amax(-1, keepdim=True), self.largest, out=scales)
            # What is not finite is in the scale: with it, any value is decoded as NaN.
            is_used = scales.isfinite() & (scales >= _SMALLEST_SCALE)
            scaled = (wide / scales).masked_fill_(~is_used, 0.0)
            if self.stochastic:
                scaled.add_(_chances(wide, scales, start)).floor_().clamp_(max=self.largest)
            elif self._is_int:
                scaled.round_()
            scales.masked_fill_(scales.isinf(), torch.nan)
            values.copy_(scaled)
            start += wide[0].numel()

    def decode(self, messages: torch.Tensor, segments: torch.Tensor) -> None:
        if not segments.numel():
            return
        kernels = self._kernels(segments)
        if kernels is not None:
            kernels.decode(messages, segments, self.block, is_int=self._is_int)
            return
        for blocks, values, scales in self._chunks(segments, messages):
            blocks.copy_(values.float() * scales)

    def add_up(self, messages: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Sum messages in the order of ranks, in float32."""
        kernels = self._kernels(out) if out.numel() else None
        if kernels is not None and _are_rows(messages):
            kernels.add_up(messages, out, self.block, is_int=self._is_int)
        elif out.dtype is torch.float32:
            Wire.add_up(self, messages, out)
        else:
            total = torch.empty_like(out, dtype=torch.float32)
            Wire.add_up(self, messages, total)
            out.copy_(total)

    @property
    def _is_int(self) -> bool:
        return not self.value_dtype.is_floating_point

    def _kernels(self, segments: torch.Tensor) -> ModuleType | None:
        if not segments.is_cuda or type(segments) is not torch.Tensor:
            return None
        kernels = triton_kernels("fullshard.layout.wire_kernel")
        return kernels if kernels and kernels.suits(self.block, self.value_dtype) else None

    def _chunks(
        self, segments: torch.Tensor, messages: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Parts of all segments: elements and values, by block, and scales."""
        numel = segments.size(1)
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
    """Integers from -127 to 127: the error is at most 1/254 of the largest of a block.

    With `stochastic`, which suits gradients, it is at most twice that, and zero on average. What a
    value rounds to follows from its bits and those of its block: a run that is repeated, resumed,
    or replayed from a CUDA graph rounds alike.
    """

    block: int = 256
    stochastic: bool = False

    value_dtype = torch.int8
    largest = 127.0


@dataclass(frozen=True, slots=True)
class Fp8(Blockwise):
    """Floating-point numbers e4m3: the error is at most 1/16 of each value.

    Values below 2e-5 of the largest of a block have an error of up to 2e-6 of that.
    """

    block: int = 128

    value_dtype = torch.float8_e4m3fn
    largest = 448.0


def _are_rows(messages: Sequence[torch.Tensor]) -> bool:
    """Whether messages lie equally far apart."""
    starts = [message.data_ptr() for message in messages]
    return len({b - a for a, b in pairwise(starts)}) <= 1


def _chances(wide: torch.Tensor, scales: torch.Tensor, start: int) -> torch.Tensor:
    """Numbers from 0 to 1, one for each value of blocks that begin at `start` of their segment.

    They are a hash of a value's bits, of its scale's, and of its place.
    """
    places = torch.arange(start, start + wide[0].numel(), dtype=torch.int32, device=wide.device)
    bits = places.mul_(-0x61C8864F).view(wide.shape[1:]) ^ scales.view(torch.int32)
    bits = _mixed(_mixed(bits).bitwise_xor_(wide.view(torch.int32)))
    return (bits >> 8).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """The integer hash of Chris Wellons with the least bias, in place."""
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
