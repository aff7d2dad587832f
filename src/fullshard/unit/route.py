"""Over what gradients are reduced, and how a sum becomes a mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.api import MixedPrecisionPolicy
from fullshard.comm.collectives import Collectives
from fullshard.comm.topology import Axis, Topology
from fullshard.errors import ConfigError
from fullshard.unit.settings import Settings


@dataclass(frozen=True, slots=True)
class AllReduceHook:
    """A user's function on reduced gradients, and the stream that it wants to run on."""

    function: Callable[[torch.Tensor], None]
    stream: Any


@dataclass(frozen=True, slots=True)
class CommHook:
    """A user's function that reduces gradients in the place of ours, scaling included.

    Called as `function(state, gradients, shard)`, or without the shard if nothing is sharded.
    """

    function: Callable[..., None]
    state: object


@dataclass(frozen=True, slots=True)
class Route:
    """Whose gradients are reduced, and over what.

    `axis` is the shard axis, perhaps on a group of its own.
    """

    unit: str
    topology: Topology
    axis: Axis
    collectives: Collectives
    hook: AllReduceHook | None
    comm_hook: CommHook | None = None


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a sum over ranks becomes a mean: divide before, let the backend average, divide after."""

    before: float
    average: bool
    after: float

    @classmethod
    def of(cls, settings: Settings, route: Route, dtype: torch.dtype) -> Scaling:
        if route.comm_hook is not None:
            return cls(1.0, False, 1.0)
        topology = route.topology
        factor = settings.gradient_divide_factor
        if dtype == torch.float16:
            # Its range is small: divide by about a square root on either side of the sum.
            factor = float(topology.num_ranks) if factor is None else factor
            before = 1.0
            while factor % before == 0 and factor / before > before:
                before *= 2
            return cls(before, False, factor / before)
        if (
            factor is None
            and route.collectives.averages
            and not settings.force_sum_reduction_for_comms
        ):
            return cls(1.0, topology.num_ranks > 1, 1.0)
        return cls(1.0, False, float(topology.num_ranks) if factor is None else factor)


def require_own_reduce(
    what: str, unit: str, topology: Topology, policy: MixedPrecisionPolicy
) -> None:
    """Raise where gradients may travel in a dtype that a reduce of the user's knows nothing of."""
    wire, reduced = policy.wire_dtype, policy.reduce_dtype or policy.param_dtype
    if wire is not None and wire != reduced and not topology.shard.is_single:
        raise ConfigError(
            f"{unit}: {what} needs gradients that travel in the dtype that they are reduced in, "
            f"found wire_dtype={wire}; leave wire_dtype out, and let what you bring choose the "
            "dtype of its messages."
        )
