"""What Muon does to each element of a matrix, in two passes instead of eight.

One Triton kernel updates the momentum and writes what is to be orthogonalized; the other one lets
the parameter decay and adds the result. Both compute as torch's operations do one after another.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

_BLOCK = 4096


@triton.jit
def _lerp(start, end, weight):
    """As torch computes it, which is exact at both ends."""
    near = start + weight * (end - start)
    return tl.where(tl.abs(weight) < 0.5, near, end - (end - start) * (1.0 - weight))


@triton.jit
def _update(
    grad, momentum, out, numel, share, kept, factor,
    NESTEROV: tl.constexpr, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < numel
    value = tl.load(grad + at, mask=is_there).to(tl.float32)
    before = tl.load(momentum + at, mask=is_there).to(tl.float32)
    if HAS_FACTOR:
        by = tl.load(factor).to(tl.float32)
        value = tl.where(by == 0.0, 0.0, value)  # it may not be finite
        share = share * by
    after = _lerp(before, value, share).to(momentum.dtype.element_ty)
    tl.store(momentum + at, after, mask=is_there)
    result = after.to(tl.float32)
    if NESTEROV:
        result = _lerp(value, result, kept)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _add(param, result, numel, rest, scale, ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < numel
    if ON_DEVICE:
        rest = tl.load(rest).to(tl.float32)
        scale = tl.load(scale).to(tl.float32)
    value = tl.load(param + at, mask=is_there)
    value = (value.to(tl.float32) * rest).to(param.dtype.element_ty).to(tl.float32)
    value += scale * tl.load(result + at, mask=is_there).to(tl.float32)
    tl.store(param + at, value.to(param.dtype.element_ty), mask=is_there)


def update(
    grad: torch.Tensor,
    momentum: torch.Tensor,
    out: torch.Tensor,
    kept: float,
    factor: torch.Tensor | None,
    *,
    nesterov: bool,
) -> None:
    """Update `momentum`, of which `kept` stays, and write the update to `out`.

    If `factor` is 0, the gradient is as good as zero, and the momentum stays as it is.
    """
    numel = grad.numel()
    grid = (triton.cdiv(numel, _BLOCK),)
    given = grad, momentum, out, numel, 1 - kept, float(kept), factor
    _update[grid](*given, nesterov, factor is not None, _BLOCK, num_warps=8)


def add(
    param: torch.Tensor,
    result: torch.Tensor,
    rest: float | torch.Tensor,
    scale: float | torch.Tensor,
) -> None:
    """`param = param * rest + result * scale`, where both factors are numbers, or on the device."""
    numel = param.numel()
    grid = (triton.cdiv(numel, _BLOCK),)
    on_device = isinstance(rest, torch.Tensor)
    _add[grid](param, result, numel, rest, scale, on_device, _BLOCK, num_warps=8)
