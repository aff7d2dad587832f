"""Options of a group of parameters that Muon trains."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch

from fullshard.errors import ConfigError

State = dict[str, Any]

_MOST_STEPS = 99
_OPTIONS = ("ns_coefficients", "eps", "ns_steps")


def names_of(group: State) -> list[str]:
    names = group.get("param_names")
    return names or [f"parameter {number}" for number in range(len(group["params"]))]


def require_options(options: State) -> None:
    steps, adjust = options["ns_steps"], options["adjust_lr_fn"]
    problem = None
    if not isinstance(steps, int) or not 1 <= steps <= _MOST_STEPS:
        problem = f"ns_steps must be from 1 to {_MOST_STEPS}, not {steps!r}"
    elif len(options["ns_coefficients"]) != 3:
        problem = f"ns_coefficients must be three numbers, not {options['ns_coefficients']!r}"
    elif adjust not in (None, "original", "match_rms_adamw"):
        problem = f"adjust_lr_fn must be 'original' or 'match_rms_adamw', not {adjust!r}"
    else:
        # A learning rate on the device is not read: a step may be captured.
        names = ("lr", "weight_decay", "momentum")
        known = {name: options[name] for name in names if not _is_on_device(options[name])}
        wrong = [name for name, value in known.items() if not float(value) >= 0]
        if wrong:
            problem = f"{wrong[0]} must not be negative, but is {options[wrong[0]]!r}"
    if problem is not None:
        raise ConfigError(f"Muon: {problem}.")


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_cpu


def adjustment(rows: int, cols: int, adjust_lr_fn: str | None) -> float:
    """What the learning rate is multiplied by for a matrix."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, cols))
    return sqrt(max(1.0, rows / cols))


def ns_options(groups: list[State]) -> list[tuple[Any, ...]]:
    return [tuple(_frozen(group[name]) for name in _OPTIONS) for group in groups]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
