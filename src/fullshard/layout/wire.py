"""How a bucket travels: what is sent of each rank's segment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
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
    `alignment_numel` elements. The ranks of a unit compare their wires as text.
    """

    dtype: torch.dtype
    is_plain = False
    suits_params = True

    @property
    def holds_sums(self) -> bool:
        """Whether sums of some ranks can travel so on their way to the others."""
        return True

    @property
    def alignment_numel(self) -> int:
        return 1

    @property
    def inside(self) -> Wire:
        """The wire between ranks of one host, and of sums that have travelled in this one."""
        return self

    def suits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape should travel so; otherwise it travels as it is."""
        return True

    def allocates(self, segments: torch.Tensor) -> bool:
        """Whether encoding takes memory of its own on the current stream."""
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
        """Sum messages in the order of ranks, in the dtype of `out`; all may have several rows."""
        out = _in_rows(out)
        values = torch.empty_like(out)
        out.zero_()
        for message in messages:
            self.decode(_in_rows(message), values)
            out.add_(values)


# The wire of all parameters of a policy, or one for each by its name and shape.
Wires: TypeAlias = Wire | Callable[[str, torch.Size], Wire | None] | None


def require_for_params(what: str, wire: Wire) -> None:
    """Raise if parameters cannot travel in a wire."""
    if not wire.suits_params:
        raise ConfigError(
            f"{what}: parameters cannot be gathered as {wire}: models do not train with weights of "
            "four bits; gather them as Int8(), and send gradients in four."
        )


@dataclass(frozen=True, slots=True)
class Plain(Wire):
    """Values in one dtype."""

    dtype: torch.dtype

    is_plain = True

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def holds_sums(self) -> bool:
        return self.dtype is not torch.float16  # whose range is small

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
    """Values of eight or four bits, with one float32 scale for each block of elements.

    A message has the values of its segment, and then the scales. The scale of a block of
    consecutive elements is its largest magnitude over the largest value, so that a block of zeros
    arrives as zeros. All of a block that has a value which is not finite arrives as NaN. Values
    round to the nearest one, or `stochastic`ally: up with a chance that makes them right on
    average.
    """

    dtype = torch.uint8
    block: int
    stochastic = False
    bits = 8
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

    def allocates(self, segments: torch.Tensor) -> bool:
        return self._kernels(segments) is None

    def message_numel(self, numel: int) -> int:
        return numel * self.bits // 8 + numel // self.block * 4

    def _spread(self, wide: torch.Tensor) -> torch.Tensor:
        """What is rounded of blocks: their elements."""
        return wide

    def _collected(self, values: torch.Tensor) -> torch.Tensor:
        """Blocks of which `_spread` would make these values."""
        return values

    def _packed(self, rounded: torch.Tensor) -> torch.Tensor:
        return rounded

    def _unpacked(self, values: torch.Tensor) -> torch.Tensor:
        return values.float()

    def encode(self, segments: torch.Tensor, messages: torch.Tensor) -> None:
        if not segments.numel():
            return
        kernels = self._kernels(segments)
        if kernels is not None:
            kernels.encode(
                *(segments, messages, self._form, self.largest, _SMALLEST_SCALE),
                is_stochastic=self.stochastic,
            )
            return
        start = 0
        for blocks, values, scales in self._chunks(segments, messages):
            wide = self._spread(blocks.float())
            torch.div(wide.abs().amax(-1, keepdim=True), self.largest, out=scales)
            # What is not finite is in the scale: with it, any value is decoded as NaN.
            is_used = scales.isfinite() & (scales >= _SMALLEST_SCALE)
            scaled = (wide / scales).masked_fill_(~is_used, 0.0)
            if self.stochastic:
                scaled.add_(_chances(wide, scales, start)).floor_().clamp_(max=self.largest)
            elif self._is_int:
                scaled.round_()
            scales.masked_fill_(~scales.isfinite(), torch.nan)
            values.copy_(self._packed(scaled))
            start += wide[0].numel()

    def decode(self, messages: torch.Tensor, segments: torch.Tensor) -> None:
        if not segments.numel():
            return
        kernels = self._kernels(segments)
        if kernels is not None:
            kernels.decode(messages, segments, self._form)
            return
        for blocks, values, scales in self._chunks(segments, messages):
            blocks.copy_(self._collected(self._unpacked(values) * scales))

    def add_up(self, messages: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Sum messages in the order of ranks, in float32."""
        kernels = self._kernels(out) if out.numel() else None
        if kernels is not None and _are_rows(messages):
            kernels.add_up([*map(_in_rows, messages)], _in_rows(out), self._form)
        elif out.dtype is torch.float32:
            Wire.add_up(self, messages, out)
        else:
            total = torch.empty_like(out, dtype=torch.float32)
            Wire.add_up(self, messages, total)
            out.copy_(total)

    @property
    def _is_int(self) -> bool:
        return not self.value_dtype.is_floating_point

    @property
    def _form(self) -> tuple[int, int, bool]:
        """The elements of a block, the bits of a value, and whether values are integers."""
        return self.block, self.bits, self._is_int

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
        num_bytes, block_bytes = numel * self.bits // 8, self.block * self.bits // 8
        values = messages[:, :num_bytes].view(self.value_dtype).unflatten(1, (-1, block_bytes))
        scales = messages[:, num_bytes:].view(torch.float32).unsqueeze(-1)
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


@dataclass(frozen=True, slots=True)
class Int4(Blockwise):
    """Integers from -7 to 7, two in a byte, for gradients that go to another host.

    What is rounded is the Hadamard transform of a block, in which no element is much larger than
    the others: one that was, is spread over all. The error of a transformed value is at most 1/14
    of the largest of its block, with `stochastic` twice that, and zero on average. Ranks of one
    host send eight bits to each other, and only their sum travels in four.
    """

    block: int = 128
    stochastic: bool = False

    bits = 4
    suits_params = False
    value_dtype = torch.int8
    largest = 7.0

    def __post_init__(self) -> None:
        if self.block < 16 or self.block & (self.block - 1):
            raise ConfigError(
                "Int4: the elements of a block, which are transformed together, must be a power of "
                f"two from 16 on, not {self.block}."
            )

    @property
    def inside(self) -> Wire:
        return Int8(self.block, self.stochastic)

    def _spread(self, wide: torch.Tensor) -> torch.Tensor:
        # Divided first: no sum of finite values is infinite, and dividing by 2**n loses nothing.
        return _hadamard(wide / self.block)

    def _collected(self, values: torch.Tensor) -> torch.Tensor:
        return _hadamard(values)

    def _packed(self, rounded: torch.Tensor) -> torch.Tensor:
        """The first half of a block in the low bits of its bytes, the second in the high bits."""
        low, high = rounded.to(torch.int8).chunk(2, -1)
        return (low & 15) | (high << 4)

    def _unpacked(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat(((values << 4) >> 4, values >> 4), -1).float()

    def _kernels(self, segments: torch.Tensor) -> ModuleType | None:
        kernels = Blockwise._kernels(self, segments)
        return kernels if kernels and _are_alike(self, kernels, segments.device) else None


@cache
def _are_alike(wire: Blockwise, kernels: ModuleType, device: torch.device) -> bool:
    """Whether kernels that not every compiler may know compute what a CPU does; tried once."""
    segments = torch.randn(2, 5 * wire.alignment_numel, generator=torch.Generator().manual_seed(0))
    shape = len(segments), wire.message_numel(segments.size(1))
    expected, values = torch.empty(shape, dtype=wire.dtype), torch.empty_like(segments)
    wire.encode(segments, expected)
    wire.decode(expected, values)
    form, given = wire._form, segments.to(device)
    with suppress(Exception):  # views do the same, only slower
        messages, found = expected.to(device).zero_(), torch.empty_like(given)
        limits = wire.largest, _SMALLEST_SCALE
        kernels.encode(given, messages, form, *limits, is_stochastic=wire.stochastic)
        kernels.decode(messages, found, form)
        return torch.equal(messages.cpu(), expected) and torch.equal(found.cpu(), values)
    return False


def _hadamard(blocks: torch.Tensor) -> torch.Tensor:
    """The Hadamard transform of the last dim, which is its own inverse but for its size.

    Sums and differences of halves, then of halves of these, to the last pairs.
    """
    # Blocks side by side, so that all halves are consecutive.
    given = blocks.mT.contiguous()
    made, half = torch.empty_like(given), blocks.size(-1) // 2
    while half:
        one, other = given.unflatten(-2, (-1, 2, half)).unbind(-3)
        sums, differences = made.unflatten(-2, (-1, 2, half)).unbind(-3)
        torch.add(one, other, out=sums)
        torch.sub(one, other, out=differences)
        given, made, half = made, given, half // 2
    return given.mT


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.ndim == 2 else tensor.view(1, -1)


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
