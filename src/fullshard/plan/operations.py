"""Operations of torch on meta tensors: what they return, write, read and cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import flop_registry

from fullshard._torch import (
    FakeTensor,
    cpu_attention_backend,
)

_MATH, _FLASH, _EFFICIENT = 0, 1, 2  # numbers of torch.nn.attention.SDPBackend


@dataclass(frozen=True, slots=True)
class Cost:
    """The result of an operation, as `described` returns it, and its cost."""

    found: Any
    seconds: float
    flops: int = 0
    copied_bytes: int = 0
    is_by_host: bool = False


class Traits:
    """What an operation does, by its schema and name."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        name = schema.name.removeprefix("aten::")
        returned = [each.alias_info for each in schema.returns]
        is_alias = any(info is not None and not info.is_write for info in returned)
        self.is_view = is_alias or name in _VIEWS or name.startswith(("profiler::", "prim::"))
        self.is_read = name == "_local_scalar_dense"
        self.is_aten = schema.name.startswith("aten::")
        self.only_allocates = name in _ALLOCATE
        self.is_fused_step = name.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad"))
        self.flops: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        self.is_attention = "attention" in name
        if self.is_attention and self.flops is not None:
            self.flops = partial(_attention_flops, "backward" in name)
        names = [argument.name for argument in schema.arguments]
        self._causal_at = names.index("is_causal") if "is_causal" in names else None
        # Where the tensors that are returned were passed, if all of them were.
        written = {
            str(argument.alias_info.before_set): (index, argument.name)
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        self._returned = [
            None if info is None else written.get(str(info.before_set)) for info in returned
        ]
        self.is_in_place = bool(written) and None not in self._returned

    def written(self, args: Any, kwargs: Any) -> Any:
        """The arguments that an in-place operation returns."""
        places = [place for place in self._returned if place is not None]
        found = [kwargs[name] if name in kwargs else args[index] for index, name in places]
        return None if not found else found[0] if len(found) == 1 else tuple(found)

    def is_causal(self, args: Any, kwargs: Any) -> bool:
        index = self._causal_at
        if index is None:
            return False
        return bool(args[index] if index < len(args) else kwargs.get("is_causal"))


def _attention_flops(is_backward: bool, *args: Any, **_: Any) -> int:
    """The FLOPs of attention's matmuls; torch before 2.13 cannot count those of grouped heads."""
    query, key, value = args[is_backward : is_backward + 3]
    scores = query.shape[:-1].numel() * key.shape[-2]
    width, value_width = query.shape[-1], value.shape[-1]
    number = 3 * width + 2 * value_width if is_backward else width + value_width
    return int(2 * scores * number)


_ALLOCATE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
# Some have no alias in their schemas.
_VIEWS = (
    *("set_", "resize_", "lift_fresh"),
    *("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes"),
)
traits_of = cache(Traits)


class TensorShape(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def described(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A value with shapes in place of tensors, for comparison; 1, 1.0 and True differ.

    The tensors are added to `tensors`.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return TensorShape(value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple([described(each, tensors) for each in value])
    return (type(value), value)


def tensors_in(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_in(each)]
    return ()


def is_simulated(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def bytes_of(tensor: torch.Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


@contextmanager
def fused_kernels(played: str) -> Iterator[None]:
    """Replace attention and norms on meta by the operations that the device runs.

    Models find them in `torch.nn.functional`. A mode would not see what backward recomputes.
    """
    attention, norm, functional = F.scaled_dot_product_attention, F.rms_norm, vars(F)
    functional["scaled_dot_product_attention"] = partial(_attention, played, attention)
    if played != "cpu":
        # RMS norm saves what layer norm saves, and on meta it would be many operations.
        functional["rms_norm"] = lambda input, normalized_shape, weight=None, eps=None: (
            F.layer_norm(input, normalized_shape, weight, None, eps or 1e-5)
        )
    try:
        yield
    finally:
        functional.update(scaled_dot_product_attention=attention, rms_norm=norm)


def _attention(
    played: str,
    plain: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    is_grouped = query.shape[-3] != key.shape[-3]
    ops, backend = torch.ops.aten, _MATH
    if played == "cpu":
        backend = cpu_attention_backend(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    elif query.dtype.itemsize == 2 and attn_mask is None:
        backend = _FLASH
    elif not is_grouped:
        backend = _EFFICIENT
    if attn_mask is not None and attn_mask.dtype == torch.bool and backend != _MATH:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -1e9)
    if backend == _MATH:
        return plain(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if played == "cpu":
        return ops._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    if backend == _FLASH:
        return ops._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return ops._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
