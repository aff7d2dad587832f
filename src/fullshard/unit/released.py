"""The stand-in for a full parameter that is freed while its module still computes (rule 15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard._torch import tree_map_only
from fullshard.unit.param import ShardedParam

_Tensor = torch.Tensor
_PROPERTIES = (
    "device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_sparse itemsize layout nbytes "
    "ndim requires_grad shape"
)
_METHODS = (
    "__len__ dim element_size get_device is_complex is_contiguous is_floating_point nelement numel "
    "size stride"
)
# These need no values: the full parameter answers them as it is.
_NEEDS_NO_VALUES: frozenset[Callable[..., Any]] = frozenset(
    [getattr(_Tensor, name).__get__ for name in _PROPERTIES.split()]
    + [getattr(_Tensor, name) for name in _METHODS.split()]
    + [torch.is_complex, torch.is_floating_point, torch.numel]
)


class ReleasedParam(torch.Tensor):
    """Is registered in place of a full parameter that was released; its memory may be free.

    It is like the full parameter in all but its values. Code that reads these has them gathered
    again, on all ranks, and goes on with the full parameter itself.
    """

    _is_param = True  # for isinstance
    _param: ShardedParam
    _gather: Callable[[], None]

    @classmethod
    def of(cls, param: ShardedParam, gather: Callable[[], None]) -> ReleasedParam:
        assert param.full is not None
        element = torch.empty((), dtype=param.full.dtype, device="meta")
        made = element.expand(param.full.shape).as_subclass(cls)
        made._param, made._gather = param, gather
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def full_of(value: ReleasedParam) -> nn.Parameter:
            if func not in _NEEDS_NO_VALUES:
                value._gather()
            assert value._param.full is not None
            return value._param.full

        args, kwargs = tree_map_only(cls, full_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReleasedParam({tuple(self.shape)}, {self.dtype}, gathered when it is read)"
