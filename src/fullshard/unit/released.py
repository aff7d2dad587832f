"""The stand-in for a full parameter that is freed while its module computes.

Only a large parameter, which is a unit by itself, is freed so early (rule 15: large ones alone).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard._torch import (
    python_references_of_graph,
    storage_references,
    tensor_references,
    tree_map_only,
)
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


class FullReferences:
    """Who refers to a full parameter, counted against those that did before anything read it."""

    def __init__(self, fulls: list[nn.Parameter]) -> None:
        self._fulls = fulls  # not the parameter, which arguments of functions refer to, too
        self._before = self._count()

    def _count(self) -> tuple[int, int, int]:
        """References in C++, to the memory, and in Python."""
        full = self._fulls[0]
        memory = storage_references(full.untyped_storage())
        return tensor_references(full), memory, sys.getrefcount(full)

    def is_saved(self, num_trainable: int) -> bool:
        """Whether autograd, or anyone else, holds the parameter to read it.

        If it is trained, its `AccumulateGrad` holds it once, to write to `grad`.
        """
        (before, before_memory, _), (held, held_memory, _) = self._before, self._count()
        return held > before + num_trainable or held_memory > before_memory

    def is_held(self, num_trainable: int) -> bool:
        """Whether it is saved, or a Python program holds it.

        A graph that looked the parameter up has a reference in Python, for its gradient.
        """
        if self.is_saved(num_trainable):
            return True
        (before, _, before_in_python), (held, _, held_in_python) = self._before, self._count()
        in_graph = python_references_of_graph() if held > before else 0
        return held_in_python > before_in_python + in_graph
