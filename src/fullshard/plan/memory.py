"""How much memory a rank will need, from the shapes of its units alone.

The layouts are those that the engine runs with, so the sizes of shards are exact, with padding. The
peak of a step is at one of two moments: when backward begins, with all activations saved, or when
it ends, with all gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from fullshard.api import ShardingStrategy
from fullshard.errors import ConfigError
from fullshard.formatting import readable, table
from fullshard.layout import (
    BucketKind,
    CostModel,
    DtypePlan,
    ParamSpec,
    Split,
    UnitLayout,
    plan_unit,
)

# AdamW keeps two numbers for each element of a parameter.
_MOMENTS = 2
_KEEPS_FULL = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """A full parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    is_trainable: bool = True


@dataclass(frozen=True, slots=True)
class UnitShapes:
    """The parameters of a unit, for when there are no tensors to take shapes from."""

    name: str
    parameters: tuple[ParameterShape, ...]

    def on_meta(self) -> list[torch.Tensor]:
        return [
            torch.empty(p.shape, dtype=p.dtype, device="meta", requires_grad=p.is_trainable)
            for p in self.parameters
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How units are sharded: over `num_replicas` groups of `num_shards` ranks each.

    `is_flat` selects the layout of `FullyShardedDataParallel`. With NO_SHARD, every rank keeps
    everything, whatever the numbers are.
    """

    num_shards: int
    num_replicas: int = 1
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    is_flat: bool = False
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    is_offloaded: bool = False
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.num_replicas < 1:
            raise ConfigError(
                "Sharding: at least one shard and one replica are expected, found "
                f"{self.num_replicas}x{self.num_shards}; pass the sizes of the mesh."
            )

    @property
    def num_ranks(self) -> int:
        return self.num_shards * self.num_replicas

    @property
    def is_whole(self) -> bool:
        return self.strategy is ShardingStrategy.NO_SHARD

    @property
    def keeps_full(self) -> bool:
        """Whether full parameters stay from forward to backward."""
        # If it shards nothing, `fully_shard` keeps the parameters that it has cast.
        return self.strategy in _KEEPS_FULL or (self.is_whole and not self.is_flat)

    @property
    def is_in_host_memory(self) -> bool:
        """Whether shards are in host memory while the device computes in its own."""
        return self.is_offloaded and self.device_type != "cpu"

    def layout(self, params: Sequence[torch.Tensor]) -> UnitLayout:
        """The layout that the engine will have for a unit of full parameters."""
        num_shards = 1 if self.is_whole else self.num_shards
        wire_dtype = None if num_shards == 1 else self.wire_dtype
        trained = [param.dtype for param in params if param.requires_grad]
        reduce_dtype = DtypePlan.unit_reduce_dtype(self.reduce_dtype, trained, is_flat=self.is_flat)
        specs = [
            ParamSpec(
                "",
                Split(tuple(param.shape), 0 if param.shape else None, num_shards),
                DtypePlan.of(param.dtype, self.param_dtype, reduce_dtype, wire_dtype),
                param.requires_grad,
            )
            for param in params
        ]
        cost = CostModel.of_device(self.device_type)
        return plan_unit(specs, num_shards, cost, is_flat=self.is_flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a step needs besides parameters. With `accumulates`, gradients outlive a backward."""

    activation_bytes: int = 0
    logits_bytes: int = 0
    accumulates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What the rank with the largest shards will hold, in bytes; `repr` is a table.

    Shards, gradients and optimizer state are in host memory if `sharding` says so. `kept_full` is
    what stays unsharded between forward and backward, and `moving_full` the most that is unsharded
    while units are gathered and freed, both with the buffers of the all-gathers.
    `gradient_messages` are the full gradients and the buckets that they are reduced in.
    """

    sharding: Sharding
    num_parameters: int
    num_trainable: int
    parameter_shards: int
    gradient_shards: int
    optimizer_state: int
    kept_full: int
    moving_full: int
    gradient_messages: int
    work: Work

    @property
    def host_bytes(self) -> int:
        """The host memory needed, if the device does not compute in host memory itself."""
        shards_bytes = self.parameter_shards + self.gradient_shards + self.optimizer_state
        return shards_bytes if self.sharding.is_in_host_memory else 0

    @property
    def device_bytes(self) -> int:
        """The peak."""
        return max(self.before_backward_bytes, self.after_backward_bytes)

    @property
    def before_backward_bytes(self) -> int:
        return sum(before for _, before, _ in self._rows())

    @property
    def after_backward_bytes(self) -> int:
        return sum(after for _, _, after in self._rows())

    def _rows(self) -> Iterator[tuple[str, int, int]]:
        """What the device holds when backward begins and when it ends."""
        work = self.work
        if not self.sharding.is_in_host_memory:
            yield "parameter shards", self.parameter_shards, self.parameter_shards
            waiting = self.gradient_shards if work.accumulates else 0
            yield "gradient shards", waiting, self.gradient_shards
            yield "optimizer state", self.optimizer_state, self.optimizer_state
        yield "full parameters", self.kept_full, self.moving_full
        yield "full gradients", self.gradient_messages, self.gradient_messages
        yield "activations", work.activation_bytes, 0
        yield "logits", work.logits_bytes, 0

    def __repr__(self) -> str:
        totals = ("in all", self.before_backward_bytes, self.after_backward_bytes)
        rows = [("on each rank", "before backward", "after backward")]
        rows += [(name, readable(a), readable(b)) for name, a, b in (*self._rows(), totals)]
        lines = [
            f"{self.num_parameters:,} parameters, {self.num_trainable:,} trainable, on "
            f"{self.sharding.num_replicas}x{self.sharding.num_shards} ranks",
            *table(rows, numbers=(1, 2)),
        ]
        if self.host_bytes:
            lines.append(f"and {readable(self.host_bytes)} of host memory")
        return "\n".join(lines)


def plan_memory(
    units: Sequence[Sequence[torch.Tensor] | UnitShapes],
    sharding: Sharding,
    work: Work | None = None,
) -> MemoryPlan:
    """Return what a rank will hold when it trains these units with AdamW.

    Args:
        units: The full parameters of each unit, on any device, or their shapes. Units are in the
            order in which they run, the root last, as `fullshard.wrap` chooses them.
        sharding: How they are sharded.
        work: Activations and logits; without it, parameters alone are planned.
    """
    if not units:
        raise ConfigError("plan_memory: at least the root unit is expected, found none.")
    tensors = [unit.on_meta() if isinstance(unit, UnitShapes) else unit for unit in units]
    *inner, root = every = [_UnitBytes.of(sharding.layout(unit), sharding) for unit in tensors]
    # The root and the two neighbours that are largest together (rule 3), one being gathered.
    alone = [unit.full + unit.gathered for unit in inner]
    pairs = [max(a.full + b.arriving, b.full + a.arriving) for a, b in pairwise(inner)]
    moving = root.full + max([root.gathered, *alone, *pairs])
    # The root's full gradients, and those of one unit while another's are reduced. The gradient of
    # the head comes first and that of the embedding last, so the root's wait until the end.
    alone = [max(unit.gradients, unit.sent + unit.received) for unit in inner]
    pairs = [a.gradients + b.sent + b.received for a, b in pairwise(inner)]
    messages = root.gradients + max([root.copied + root.received, *alone, *pairs])
    params = [param for unit in tensors for param in unit]
    return MemoryPlan(
        sharding=sharding,
        num_parameters=sum(param.numel() for param in params),
        num_trainable=sum(param.numel() for param in params if param.requires_grad),
        parameter_shards=sum(unit.shards for unit in every),
        gradient_shards=sum(unit.trained_shards for unit in every),
        optimizer_state=sum(unit.optimizer_state for unit in every),
        kept_full=sum(unit.full for unit in every) if sharding.keeps_full else moving,
        moving_full=moving,
        gradient_messages=messages,
        work=work or Work(),
    )


@dataclass(slots=True)
class _UnitBytes:
    """What a unit takes.

    `full` is its full buffer; there is none where the shard buffers are the full parameters.
    `gathered` holds the buckets that are copied out after the all-gather, and `arriving` is all
    that an all-gather needs before compute waits for it. `gradients` are the full gradients as
    autograd makes them, `sent` are the buckets that are reduced, and `copied` those of them that
    are not the gradients themselves (rule 4). `received` is what arrives of the largest bucket that
    is summed in a wider dtype; these buckets come one by one.
    """

    full: int
    shards: int = 0
    trained_shards: int = 0
    optimizer_state: int = 0
    gathered: int = 0
    arriving: int = 0
    gradients: int = 0
    sent: int = 0
    copied: int = 0
    received: int = 0

    @classmethod
    def of(cls, layout: UnitLayout, sharding: Sharding) -> _UnitBytes:
        is_in_shards = layout.is_whole and not sharding.is_in_host_memory
        unit = cls(0 if is_in_shards else layout.full_bytes)
        for lane in layout.lanes:
            dtypes = lane.dtypes
            stored, computed = dtypes.stored.itemsize, dtypes.computed.itemsize
            for bucket in lane.buckets:
                splits = [layout.params[slot.param_index].split for slot in bucket.slots]
                bucket_numel = layout.num_ranks * bucket.segment_numel
                unit.shards += bucket.segment_numel * stored
                if bucket.kind.is_copied:
                    unit.gathered += bucket_numel * computed
                if not lane.is_trainable:
                    continue
                # The shards of the first rank, without padding: no rank has more.
                own_numel = sum(split.shard_numel(0) for split in splits)
                if sharding.is_flat:
                    own_numel = min(bucket.segment_numel, bucket.used_numel)
                wire_bytes = bucket_numel * dtypes.wire.itemsize
                is_in_place = bucket.kind is BucketKind.IN_PLACE and dtypes.computed == dtypes.wire
                unit.trained_shards += bucket.segment_numel * stored
                unit.optimizer_state += _MOMENTS * own_numel * stored
                unit.gradients += sum(split.numel for split in splits) * computed
                unit.sent += wire_bytes
                unit.copied += 0 if is_in_place else wire_bytes
                # CPU ranks of one host read each other's memory instead.
                if dtypes.sums_on_arrival and sharding.device_type != "cpu":
                    unit.received = max(unit.received, wire_bytes)
        # If all buckets are copied out, the full buffer is allocated only for the copy.
        buckets = [bucket for lane in layout.lanes for bucket in lane.buckets]
        is_all_copied = all(bucket.kind.is_copied for bucket in buckets)
        unit.arriving = unit.gathered if is_all_copied else unit.full + unit.gathered
        return unit
