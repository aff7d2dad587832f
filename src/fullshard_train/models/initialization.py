"""How initial values of parameters are drawn."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Draw = Callable[[Tensor, torch.Generator], object]
"""Initializes a tensor in place."""


def normal(deviation: float) -> Draw:
    """Draw from a normal distribution with mean 0."""
    return lambda values, generator: values.normal_(0.0, deviation, generator=generator)


def uniform(bound: float) -> Draw:
    """Draw from a uniform distribution over [-bound, bound]."""
    return lambda values, generator: values.uniform_(-bound, bound, generator=generator)


def constant(value: float) -> Draw:
    return lambda values, generator: values.fill_(value)
