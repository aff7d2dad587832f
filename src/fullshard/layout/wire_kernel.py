"""Blockwise wires on CUDA: one Triton kernel encodes, one decodes, and one decodes and adds.

They compute what `wire.py` does on a CPU, to the last bit.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

# Elements of one program of a kernel.
_NUM_ELEMENTS = 4096
_NUM_WARPS = 4
# No fused multiplication and addition, which rounds once where a CPU rounds twice.
_OPTIONS = {"num_warps": _NUM_WARPS, "enable_fp_fusion": False}

# The elements of a block, the bits of a value, and whether values are integers.
Form: TypeAlias = tuple[int, int, bool]


def suits(block: int, value_dtype: torch.dtype) -> bool:
    """Whether the kernels know blocks of so many elements, and this GPU the dtype of values."""
    is_known = value_dtype is torch.int8 or torch.cuda.get_device_capability() >= (8, 9)
    return is_known and block & (block - 1) == 0 and block <= _NUM_ELEMENTS


@triton.jit
def _hadamard(values, NUM: tl.constexpr, BLOCK: tl.constexpr, HALVINGS: tl.constexpr):
    for level in tl.static_range(HALVINGS):
        pairs = tl.reshape(values, (NUM, 1 << level, 2, BLOCK >> (level + 1)))
        one, other = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        pairs = tl.permute(tl.join(one + other, one - other), (0, 1, 3, 2))
        values = tl.reshape(pairs, (NUM, BLOCK))
    return values


@triton.jit
def _mixed(bits):
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _encode(
    segments, messages, numel, num_blocks, segment_stride, message_stride, largest, smallest_scale,
    BLOCK: tl.constexpr, BITS: tl.constexpr, IS_INT: tl.constexpr, NUM: tl.constexpr,
    HALVINGS: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0) * NUM + tl.arange(0, NUM)
    is_there = blocks < num_blocks
    places = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    message = messages + row * message_stride
    source = segments + row * segment_stride + places
    wide = tl.load(source, mask=is_there[:, None], other=0.0).to(tl.float32)
    if BITS == 4:
        wide = _hadamard(wide * (1.0 / BLOCK), NUM, BLOCK, HALVINGS)
    magnitudes = tl.abs(wide)
    is_finite = tl.min((magnitudes < float("inf")).to(tl.int32), 1) == 1
    scales = tl.div_rn(tl.max(magnitudes, 1), largest)
    is_used = is_finite & (scales >= smallest_scale)
    values = tl.div_rn(wide, tl.where(is_used, scales, 1.0)[:, None])
    values = tl.where(is_used[:, None], values, 0.0)
    if STOCHASTIC:
        bits = places.to(tl.uint32) * 0x9E3779B1
        bits = _mixed(bits ^ scales.to(tl.uint32, bitcast=True)[:, None])
        bits = _mixed(bits ^ wide.to(tl.uint32, bitcast=True))
        chance = (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2**-24
        values = tl.minimum(tl.floor(values + chance), largest)
    elif IS_INT:
        values = (values + 12582912.0) - 12582912.0  # to the nearest, and to even
    if IS_INT:
        rounded = values.to(tl.int8).to(tl.uint8, bitcast=True)
    else:
        rounded = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    if BITS == 4:
        halves = tl.reshape(rounded.to(tl.int32), (NUM, 2, BLOCK // 2))
        low, high = tl.split(tl.permute(halves, (0, 2, 1)))
        rounded = ((low & 15) | ((high & 15) << 4)).to(tl.uint8)
    size: tl.constexpr = BLOCK * BITS // 8
    places = blocks[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(message + places, rounded, mask=is_there[:, None])
    scales = tl.where(is_finite, scales, float("nan"))
    to = (message + numel * BITS // 8).to(tl.pointer_type(tl.float32))
    tl.store(to + blocks, scales, mask=is_there)


@triton.jit
def _values(
    message, numel, blocks, is_there,
    BLOCK: tl.constexpr, BITS: tl.constexpr, IS_INT: tl.constexpr, NUM: tl.constexpr,
    HALVINGS: tl.constexpr,
):  # fmt: skip
    size: tl.constexpr = BLOCK * BITS // 8
    places = blocks[:, None] * size + tl.arange(0, size)[None, :]
    values = tl.load(message + places, mask=is_there[:, None], other=0)
    scales = (message + numel * BITS // 8).to(tl.pointer_type(tl.float32))
    scales = tl.load(scales + blocks, mask=is_there, other=0.0)
    if BITS == 4:
        pairs = values.to(tl.int32)
        pairs = tl.permute(tl.join(pairs & 15, pairs >> 4), (0, 2, 1))
        found = ((tl.reshape(pairs, (NUM, BLOCK)) ^ 8) - 8).to(tl.float32)
    elif IS_INT:
        found = values.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        found = values.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    found = found * scales[:, None]
    if BITS == 4:
        found = _hadamard(found, NUM, BLOCK, HALVINGS)
    return found


@triton.jit
def _decode(
    messages, segments, numel, num_blocks, message_stride, segment_stride,
    BLOCK: tl.constexpr, BITS: tl.constexpr, IS_INT: tl.constexpr, NUM: tl.constexpr,
    HALVINGS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0) * NUM + tl.arange(0, NUM)
    is_there = blocks < num_blocks
    places = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    message = messages + row * message_stride
    found = _values(message, numel, blocks, is_there, BLOCK, BITS, IS_INT, NUM, HALVINGS)
    to = segments + row * segment_stride + places
    tl.store(to, found.to(segments.dtype.element_ty), mask=is_there[:, None])


@triton.jit
def _add_up(
    messages, out, num_messages, numel, num_blocks, message_stride, row_stride, out_stride,
    BLOCK: tl.constexpr, BITS: tl.constexpr, IS_INT: tl.constexpr, NUM: tl.constexpr,
    HALVINGS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0) * NUM + tl.arange(0, NUM)
    is_there = blocks < num_blocks
    places = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((NUM, BLOCK), tl.float32)
    message = messages + row * row_stride
    for _ in range(num_messages):
        total += _values(message, numel, blocks, is_there, BLOCK, BITS, IS_INT, NUM, HALVINGS)
        message += message_stride
    to = out + row * out_stride + places
    tl.store(to, total.to(out.dtype.element_ty), mask=is_there[:, None])


def encode(
    segments: torch.Tensor,
    messages: torch.Tensor,
    form: Form,
    largest: float,
    smallest_scale: float,
    *,
    is_stochastic: bool,
) -> None:
    numel, num_blocks, grid, shape = _shape(segments, form)
    _encode[grid](
        segments, messages, numel, num_blocks, segments.stride(0), messages.stride(0),
        largest, smallest_scale, *form, *shape, is_stochastic, **_OPTIONS,
    )  # fmt: skip


def decode(messages: torch.Tensor, segments: torch.Tensor, form: Form) -> None:
    numel, num_blocks, grid, shape = _shape(segments, form)
    _decode[grid](
        messages, segments, numel, num_blocks, messages.stride(0), segments.stride(0),
        *form, *shape, **_OPTIONS,
    )  # fmt: skip


def add_up(messages: Sequence[torch.Tensor], out: torch.Tensor, form: Form) -> None:
    """Messages lie equally far apart, as parts of one tensor."""
    first, *others = messages
    stride = others[0].data_ptr() - first.data_ptr() if others else 0
    numel, num_blocks, grid, shape = _shape(out, form)
    _add_up[grid](
        first, out, len(messages), numel, num_blocks, stride, first.stride(0), out.stride(0),
        *form, *shape, **_OPTIONS,
    )  # fmt: skip


def _shape(segments: torch.Tensor, form: Form) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """Elements and blocks of a segment, the grid, and a program's blocks and halvings of one."""
    (rows, numel), (block, *_) = segments.shape, form
    num, num_blocks = _NUM_ELEMENTS // block, numel // block
    return numel, num_blocks, (triton.cdiv(num_blocks, num), rows), (num, block.bit_length() - 1)
