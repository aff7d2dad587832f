"""Functions that torch.compile must not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(function: _F) -> _F:
    """Keep dynamo out of a function and of all that it calls.

    `torch.compiler.disable` does the same through a wrapper, which takes longer than most of what
    is wrapped here, and imports the compiler. Dynamo reads the mark while it traces a caller; the
    strategy of the code is what the interpreter follows (torch 2.11 to 2.13).
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "fullshard runs between graphs"  # type: ignore[attr-defined]
    function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function
