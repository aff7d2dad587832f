"""What the built-in transformer computes between matrix products, saving little for backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_played = ""


@contextmanager
def played_on(device_type: str) -> Iterator[None]:
    """Compute with tensors on meta as on such a device, for a plan."""
    global _played
    before, _played = _played, device_type
    try:
        yield
    finally:
        _played = before


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, of which backward computes the first factor again."""
    if torch.compiler.is_compiling():  # which decides by itself
        return F.silu(gate) * up
    found: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return found


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of elements (one of each half of a head) by the angle of its position."""
    if _kernels_for(x) is not None and x.dim() == 4:
        found: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
        return found
    return _turned(x, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        kernels = _kernels_for(gate)
        if kernels is None:
            return F.silu(gate) * up
        found: Tensor = kernels.gated(gate.contiguous(), up.contiguous())
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        kernels = _kernels_for(gate)
        if kernels is not None:
            found: tuple[Tensor, Tensor]
            found = kernels.gated_grads(*(each.contiguous() for each in (grad, gate, up)))
            return found
        gate_grad: Tensor = torch.ops.aten.silu_backward(grad * up, gate)
        return gate_grad, grad * F.silu(gate)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        found: Tensor = _kernels_for(x).turned(x, cos, sin, back=False)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _kernels_for(grad).turned(grad, *ctx.saved_tensors, back=True), None, None


def _kernels_for(x: Tensor) -> Any:
    """The kernels for a tensor's device, or None; on meta, what takes their memory and time."""
    if torch.compiler.is_compiling() or x.dtype is torch.float64:
        return None
    if x.is_meta:
        return _OnMeta if _played == "cuda" else None
    if not x.is_cuda or not kernels_agree(x.device):
        return None
    from fullshard_train.models import kernels

    return kernels


class _OnMeta:
    """One operation for each kernel, which reads and writes as much."""

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
        return x.neg()

    @staticmethod
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return gate * up

    @staticmethod
    def gated_grads(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return grad * gate, grad * up


@cache
def kernels_agree(device: torch.device) -> bool:
    """Whether there is Triton, and its kernels compute on this device what they should."""
    if find_spec("triton") is None:
        return False
    try:
        pairs = _compared(device)
    except Exception:  # a Triton that does not compile them
        return False
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)


def _compared(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return what the kernels compute, beside what they should."""
    from fullshard_train.models import kernels

    with torch.random.fork_rng([device]), torch.no_grad():
        grad, gate, up = torch.randn(3, 2, 6, 40, 24, device=device)
        angles = torch.randn(40, 12, device=device)
    cos, sin = angles.cos(), angles.sin()
    silu_grad = torch.ops.aten.silu_backward(grad * up, gate)
    return [
        (kernels.turned(gate, cos, sin, back=False), _turned(gate, cos, sin)),
        (kernels.turned(gate, cos, sin, back=True), _turned(gate, cos, -sin)),
        (kernels.gated(gate, up), F.silu(gate) * up),
        *zip(kernels.gated_grads(grad, gate, up), (silu_grad, grad * F.silu(gate)), strict=True),
    ]
