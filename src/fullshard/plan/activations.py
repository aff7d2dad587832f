"""How much a forward saves for its backward, found without memory on the meta device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fullshard._torch import FakeTensorMode, storage_key, view_base


def saved_activation_bytes(run: Callable[[], torch.Tensor]) -> int:
    """Return the bytes that autograd saves in a forward: each storage once, without parameters.

    Attention counts as the fused kernels of CPUs and GPUs run it. They save no matrix of scores,
    unlike the meta device.

    Args:
        run: Computes with tensors on the meta device and returns what backward would start from.
    """
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        base = view_base(tensor)
        if not isinstance(tensor if base is None else base, nn.Parameter):
            storage = tensor.untyped_storage()
            saved[storage_key(storage)] = storage  # held, so that no other gets its key
        return tensor

    with warnings.catch_warnings(), _fake_mode(), saved_tensors_hooks(note, lambda t: t):
        # torch warns of the inputs of a part of a model when it makes them fake.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        with _FusedAttention():
            output = run()
    del output
    return sum(storage.nbytes() for storage in saved.values())


@functools.cache
def _fake_mode() -> FakeTensorMode:
    """Fake tensors also suit models that read values, which would fail on meta.

    There is one mode for all, since a mode refuses the fake tensors of another.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


class _FusedAttention(TorchFunctionMode):
    """Makes attention save what fused kernels save."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            func = _attention
        return func(*args, **(kwargs or {}))


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **__: Any) -> Any:
    return _Saving.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]


class _Saving(torch.autograd.Function):
    """Attention without arithmetic: saves its inputs, its output and a row of sums."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        made = query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, *(() if mask is None else (mask,)), made, sums)
        return made
