"""What may be changed on a unit between steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """How a unit behaves; replaced as a whole, so that a scope can restore what it found.

    `reshard_after_forward` None means True, except for the root when a backward may follow. An
    int is the number of ranks that the unit is sharded over between forward and backward.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    gradient_divide_factor: float | None = None
    force_sum_reduction_for_comms: bool = False
    reduce_scatter_unused_params: bool = False
    reduce_scatter_max_input_buffers: int = 1
    unshard_in_backward: bool = True
    keep_low_precision_grads: bool = False
