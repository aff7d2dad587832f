"""The door to steps by spans: `by_unit`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import optim
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from fullshard.errors import ConfigError
from fullshard.optim.span_steps import SpanSteps

_ATTRIBUTE = "_fullshard_span_steps"
_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.ASGD,
    optim.Rprop,
)
_NOT_ELEMENTWISE = (optim.LBFGS, optim.SparseAdam, optim.Adafactor, optim.Muon)

O = TypeVar("O", bound=Optimizer)  # noqa: E741


def by_unit(optimizer: O, *, elementwise: bool = False) -> O:
    """Let an optimizer step each unit's contiguous shards as a few tensors, not one by one.

        optimizer = by_unit(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))

    The same object is returned, and parameters and state become what they would have become
    without this. `param_groups` and `state` are still about parameters, so schedulers, scalers,
    hooks, state dicts and checkpoints work as before; only `step` is another one, for which the
    optimizer's class becomes a subclass of the same name. Copies and pickles are of its old class.

    Parameters that no unit of this package holds are stepped as they are.

    Args:
        optimizer: One of torch's elementwise optimizers, over parameters that are sharded by
            either door, or will be; call this before a scheduler is built.
        elementwise: Promises that an optimizer of another class updates each element by itself: by
            its gradient, its state, and the settings of its group.

    Raises:
        ConfigError: If the optimizer is not elementwise, or its `step` was replaced.
    """
    _require_elementwise(optimizer, elementwise)
    if _ATTRIBUTE in optimizer.__dict__:
        return optimizer
    cls: type[Any] = type(optimizer)
    if "step" in optimizer.__dict__:
        raise ConfigError(
            f"by_unit: the step of {cls.__name__} must be that of its class, found it replaced, as "
            "learning rate schedulers do; call by_unit right after the optimizer is built."
        )
    optimizer.__dict__[_ATTRIBUTE] = SpanSteps(_unhooked_step(cls))
    optimizer.__class__ = _stepping_by_unit(cls)
    return optimizer


def _require_elementwise(optimizer: Any, is_promised: bool) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "by_unit: an optimizer is expected, found "
            f"{type(optimizer).__name__}; pass one that was built over model.parameters()."
        )
    name = type(optimizer).__name__
    if isinstance(optimizer, _NOT_ELEMENTWISE):
        raise ConfigError(
            f"by_unit: an optimizer that updates each element by itself is expected, found {name}, "
            "which looks at whole tensors; use it without by_unit."
        )
    is_known = _ATTRIBUTE in optimizer.__dict__ or type(optimizer) in _ELEMENTWISE
    if not is_known and not is_promised:
        known = ", ".join(each.__name__ for each in _ELEMENTWISE)
        raise ConfigError(
            f"by_unit: one of torch's elementwise optimizers ({known}) is expected, found {name}; "
            "pass elementwise=True if it updates each element by itself."
        )
    settings = [optimizer.defaults, *optimizer.param_groups]
    if any(each.get("differentiable", False) for each in settings):
        raise ConfigError(
            f"by_unit: {name} must not be differentiable, found differentiable=True; shards have "
            "no graph to the full parameters: leave it out."
        )


def _unhooked_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """The step of a class, without the calls of hooks that torch lays around it."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


_subclasses: dict[type[Any], type[Any]] = {}


def _stepping_by_unit(cls: type[Any]) -> type[Any]:
    """The subclass of a class whose `step` goes by spans."""
    if cls not in _subclasses:
        _subclasses[cls] = _subclass(cls)
    return _subclasses[cls]


def _subclass(cls: type[Any]) -> type[Any]:
    """Made for one class.

    Not an attribute of the instance: that would be a circle, and the memory of an optimizer that
    is dropped would wait for the garbage collector.
    """

    @functools.wraps(_unhooked_step(cls))
    @_disable_dynamo
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        is_given, loss = False, None
        # A closure reads and writes the optimizer's parameters: before they are replaced.
        closure, args, kwargs = _split_closure(args, kwargs)
        if closure is not None:
            with torch.enable_grad():
                is_given, loss = True, closure()
        result = self.__dict__[_ATTRIBUTE].step(self, args, kwargs)
        return loss if is_given else result

    def reduce_ex(self: Any, protocol: Any) -> Any:
        # As protocol 1 does it, in the place of which later ones insist on the object's own class.
        in_full: Callable[..., Any] = cls.__reduce_ex__
        function, args, *rest = in_full(self, 1)
        return (function, tuple(cls if each is made else each for each in args), *rest)

    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True  # torch lays its calls of hooks around every step that does not say so
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    made: type[Any] = type(
        cls.__name__, (cls,), {**names, "step": hooked, "__reduce_ex__": reduce_ex}
    )
    return made


def _split_closure(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any] | None, tuple[Any, ...], dict[str, Any]]:
    if args and callable(args[0]):
        return args[0], (None, *args[1:]), kwargs
    if callable(kwargs.get("closure")):
        return kwargs["closure"], tuple(args), {**kwargs, "closure": None}
    return None, tuple(args), kwargs
