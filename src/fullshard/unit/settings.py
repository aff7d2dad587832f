"""What may be changed on a unit between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.api import AllGather, ReduceScatter
from fullshard.comm.collectives import Collectives, CustomCollectives
from fullshard.comm.mesh import Axis


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """How a unit behaves; replaced as a whole, so that a scope can restore what it found.

    `reshard_after_forward` None means True, except for the root when a backward may follow. An
    int is the number of ranks that the unit is sharded over between forward and backward. A unit
    that `stands_alone` was made for a single large parameter (rule 15: large ones alone).
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
    keep_unsharded_storage: bool = False
    keep_low_precision_grads: bool = False
    stands_alone: bool = False


@dataclass(slots=True)
class UnitComm:
    """The collectives of a unit, and the user's functions in them.

    `reduce_axis` is the shard axis, perhaps with a process group of its own. `all_reduce_hook` is
    called on reduced gradients, on `all_reduce_stream` if there is one. `comm_hook` replaces our
    reduction of gradients, scaling included: it is called with the gradients and the shard, or
    without the shard if nothing is sharded.
    """

    default: Collectives
    current: Collectives
    reduce_axis: Axis
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_stream: Any = None
    comm_hook: Callable[..., None] | None = None

    def customize(
        self, *, all_gather: AllGather | None = None, reduce_scatter: ReduceScatter | None = None
    ) -> None:
        """Use a user's collectives in place of ours."""
        if isinstance(self.current, CustomCollectives):
            all_gather = all_gather or self.current.custom_all_gather
            reduce_scatter = reduce_scatter or self.current.custom_reduce_scatter
        self.current = CustomCollectives(self.default, all_gather, reduce_scatter)
