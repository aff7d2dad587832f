"""How much a forward saves for its backward, found out without memory: on the meta device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode


def saved_activation_bytes(run: Callable[[], torch.Tensor]) -> int:
    """Bytes that autograd keeps of a forward, until backward: each storage once, no parameters.

    Attention is counted as the fused kernels of CPUs and GPUs do it, which save no matrix of
    scores; the meta device would.

    Args:
        run: Computes with tensors on the meta device and returns what backward would begin at.
    """
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        origin = tensor if tensor._base is None else tensor._base
        if not isinstance(origin, nn.Parameter):
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage  # held, so that its address stays its own
        return tensor

    with _fake(), saved_tensors_hooks(note, _as_it_is), _FusedAttention():
        output = run()
    del output
    return sum(storage.nbytes() for storage in saved.values())


@contextmanager
def _fake() -> Iterator[None]:
    """Models that look at values do not where tensors are fake, and fail where they are on meta."""
    with warnings.catch_warnings(), _fake_mode():
        # torch, of inputs of a part of a model, which it makes fake.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


@functools.cache
def _fake_mode() -> FakeTensorMode:
    """One for all: what one made fake is not for another."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _FusedAttention(TorchFunctionMode):
    """Lets attention save what fused kernels save."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attention(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    made = _Saving.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
    assert isinstance(made, torch.Tensor)
    return made


class _Saving(torch.autograd.Function):
    """Takes and gives what attention does, and saves its inputs, its output and a row of sums."""

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
