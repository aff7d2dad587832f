"""Triton kernels of the built-in transformer: what would be many passes over memory is one."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _turn(x, out, cos, sin, length, num_pairs, half, sign, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = pair < num_pairs
    within = pair % half
    at = token * num_pairs * 2 + (pair // half) * half * 2 + within
    angle = (token % length) * half + within
    c = tl.load(cos + angle, mask=is_there, other=0.0)
    s = tl.load(sin + angle, mask=is_there, other=0.0) * sign
    first = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(x + at + half, mask=is_there, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + at, (first * c - second * s).to(kind), mask=is_there)
    tl.store(out + at + half, (second * c + first * s).to(kind), mask=is_there)


@triton.jit
def _gate(gate, up, out, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < numel
    g = tl.load(gate + at, mask=is_there, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=is_there, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    silu = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32)
    tl.store(out + at, (silu * u).to(kind), mask=is_there)


@triton.jit
def _gate_grads(grad, gate, up, gate_grad, up_grad, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < numel
    d = tl.load(grad + at, mask=is_there, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=is_there, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=is_there, other=0.0).to(tl.float32)
    kind = gate_grad.dtype.element_ty
    share = 1.0 / (1.0 + tl.exp(-g))
    silu = (g * share).to(kind).to(tl.float32)
    by_silu = (d * u).to(kind).to(tl.float32)
    tl.store(up_grad + at, (d * silu).to(kind), mask=is_there)
    slope = share * (1.0 + g * (1.0 - share))
    tl.store(gate_grad + at, (by_silu * slope).to(kind), mask=is_there)


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """Rotate [batch, heads, length, width] by the angle of each position, or back."""
    tokens = x.transpose(1, 2).contiguous()  # as a projection writes them
    batch, length, heads, width = tokens.shape
    out, half = torch.empty_like(tokens), width // 2
    grid = (batch * length, triton.cdiv(heads * half, _BLOCK))
    sign = -1.0 if back else 1.0
    _turn[grid](tokens, out, cos, sin, length, heads * half, half, sign, _BLOCK)
    return out.transpose(1, 2)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`."""
    out = torch.empty_like(gate)
    _gate[(triton.cdiv(out.numel(), _BLOCK),)](gate, up, out, out.numel(), _BLOCK)
    return out


def gated_grads(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gated` by both."""
    found = torch.empty_like(gate), torch.empty_like(up)
    grid = (triton.cdiv(gate.numel(), _BLOCK),)
    _gate_grads[grid](grad, gate, up, *found, gate.numel(), _BLOCK)
    return found
