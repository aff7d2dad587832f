"""Explains errors of a module that was called while its parameters are sharded."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any

from torch import nn

from fullshard.errors import FullshardError

# Returns the hooks that manage a module's own parameters.
Finder = Callable[[nn.Module], Any]
_IS_EXPLAINED = "_fullshard_is_explained"


def explain_error(error: BaseException, hooks_of: Finder) -> None:
    """Add a note to an error if the module that raised it has sharded parameters."""
    is_torchs = isinstance(error, RuntimeError) and not isinstance(error, FullshardError)
    if not is_torchs or hasattr(error, _IS_EXPLAINED):
        return
    setattr(error, _IS_EXPLAINED, True)  # what is gathered now may be sharded when it is seen again
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    firsts = [frame.f_locals.get(next(iter(frame.f_code.co_varnames), "")) for frame in frames]
    called = [
        (module, frame.f_code.co_name)
        for module, frame in zip(firsts, frames, strict=True)
        # A method of a module, and not a function that takes one.
        if isinstance(module, nn.Module) and hasattr(type(module), frame.f_code.co_name)
    ]
    module = called[-1][0] if called else None
    hooks = None if module is None else hooks_of(module)
    if hooks is None or not _is_sharded(module, hooks):
        return
    method = next((name for each, name in called if each in hooks.modules), "forward")
    remedy = "call state_dict(), reshard() and the like after forward"
    if method != "forward" and not method.startswith("_"):
        remedy = f"pass its method to register_fsdp_forward_method(module, {method!r})"
    error.add_note(
        f"fullshard: {type(module).__name__} was called with shards. Its parameters belong to "
        f"{hooks.name} and are gathered in its forward: call that module, or {remedy}."
    )


def _is_sharded(module: nn.Module | None, hooks: Any) -> bool:
    units = (unit for unit in hooks.units if not unit.is_unsharded)
    params = (param for unit in units for param in unit.params)
    return any(location.module is module for param in params for location in param.locations)


@cache
def explain_uncaught(hooks_of: Finder) -> None:
    """Explain errors that end the program, through `sys.excepthook`."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        explain_error(error, hooks_of)
        before(kind, error, frames)

    sys.excepthook = hook
