"""The floating-point operations of a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress

from torch.utils.flop_counter import FlopCounterMode

from fullshard._torch import FakeTensorMode


def count_flops(step: Callable[[], object]) -> float | None:
    """The operations of the matrix products of a step; None if they cannot be counted.

    `step` runs forward and backward of a model on the meta device, so that nothing is computed.
    Attention counts as if nothing were masked.
    """
    # Fake tensors are slower, but work for models that read values.
    for mode in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with suppress(Exception), mode, FlopCounterMode(display=False) as counter:
            step()
            return float(counter.get_total_flops())
    return None
