"""How much memory a rank will need, from the shapes of its units alone.

The layouts are those that the engine runs with, so the sizes of shards are exact, with padding. The
peak of a step is at one of two moments: when backward begins, with all activations saved, or when
it ends, with all gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from fullshard.api import ShardingStrategy
from fullshard.errors import ConfigError
from fullshard.layout import (
    Bucket,
    BucketKind,
    CostModel,
    DtypePlan,
    Lane,
    ParamSpec,
    Split,
    UnitLayout,
    plan_unit,
)

# AdamW keeps two numbers beside each parameter.
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
    """The parameters of a unit."""

    name: str
    parameters: tuple[ParameterShape, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How units are sharded: over `num_replicas` groups of `num_shards` ranks each.

    `is_flat` is the layout of `FullyShardedDataParallel`. With NO_SHARD every rank keeps
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
        # `fully_shard` that shards nothing keeps the parameters that it has cast.
        return self.strategy in _KEEPS_FULL or (self.is_whole and not self.is_flat)

    @property
    def is_in_host_memory(self) -> bool:
        """Whether shards are in other memory than the device computes in."""
        return self.is_offloaded and self.device_type != "cpu"

    def layout(self, unit: UnitShapes) -> UnitLayout:
        """The layout that the engine will have for a unit."""
        num_shards = 1 if self.is_whole else self.num_shards
        wire_dtype = None if num_shards == 1 else self.wire_dtype
        params = [
            ParamSpec(
                parameter.name,
                Split(parameter.shape, 0 if parameter.shape else None, num_shards),
                DtypePlan.of(parameter.dtype, self.param_dtype, self.reduce_dtype, wire_dtype),
                parameter.is_trainable,
            )
            for parameter in unit.parameters
        ]
        cost = CostModel.of_device(self.device_type)
        return plan_unit(params, num_shards, cost, is_flat=self.is_flat)


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
    def shards_bytes(self) -> int:
        return self.parameter_shards + self.gradient_shards + self.optimizer_state

    @property
    def host_bytes(self) -> int:
        """Host memory, where that is not what the device computes in."""
        return self.shards_bytes if self.sharding.is_in_host_memory else 0

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
        rows = [("on each rank", "before backward", "after backward")]
        rows += [(name, readable(a), readable(b)) for name, a, b in self._rows()]
        totals = (readable(self.before_backward_bytes), readable(self.after_backward_bytes))
        rows.append(("in all", *totals))
        lines = [
            f"{self.num_parameters:,} parameters, {self.num_trainable:,} trainable, on "
            f"{self.sharding.num_replicas}x{self.sharding.num_shards} ranks",
            *table(rows, numbers=(1, 2)),
        ]
        if self.host_bytes:
            lines.append(f"and {readable(self.host_bytes)} of host memory")
        return "\n".join(lines)


def plan_memory(
    units: Sequence[UnitShapes], sharding: Sharding, work: Work | None = None
) -> MemoryPlan:
    """Return what a rank will hold when it trains these units with AdamW.

    Args:
        units: In the order in which they run, the root last, as `fullshard.wrap` chooses them.
        sharding: How they are sharded.
        work: Activations and logits; without it, parameters alone are planned.
    """
    if not units:
        raise ConfigError("plan_memory: at least the root unit is expected, found no units.")
    layouts = [sharding.layout(unit) for unit in units]
    parameters = [parameter for layout in layouts for parameter in layout.params]
    lanes = [lane for layout in layouts for lane in layout.lanes]
    moving = _moving_full(layouts, sharding)
    kept = sum(_full_bytes(layout, sharding) for layout in layouts)
    return MemoryPlan(
        sharding=sharding,
        num_parameters=sum(param.split.numel for param in parameters),
        num_trainable=sum(param.split.numel for param in parameters if param.is_trainable),
        parameter_shards=sum(_shard_buffer_bytes(lane) for lane in lanes),
        gradient_shards=sum(_shard_buffer_bytes(lane) for lane in lanes if lane.is_trainable),
        optimizer_state=_MOMENTS * sum(_trained_shard_bytes(each, sharding) for each in layouts),
        kept_full=kept if sharding.keeps_full else moving,
        moving_full=moving,
        gradient_messages=_full_gradients(layouts, sharding),
        work=work or Work(),
    )


def _shard_buffer_bytes(lane: Lane) -> int:
    return lane.shard_numel * lane.dtypes.stored.itemsize


def _trained_shard_bytes(layout: UnitLayout, sharding: Sharding) -> int:
    """The first rank's trainable shards, without padding: no rank has more."""
    found = 0
    for lane, bucket in _trained_buckets(layout):
        if sharding.is_flat:
            numel = min(bucket.segment_numel, bucket.used_numel)
        else:
            splits = (layout.params[slot.param_index].split for slot in bucket.slots)
            numel = sum(split.shard_numel(0) for split in splits)
        found += numel * lane.dtypes.stored.itemsize
    return found


def _full_bytes(layout: UnitLayout, sharding: Sharding) -> int:
    """The full buffer; there is none where the shard buffers are the full parameters."""
    return 0 if layout.is_whole and not sharding.is_in_host_memory else layout.full_bytes


def _gather_bytes(layout: UnitLayout) -> int:
    """What the buckets that are copied out are gathered into."""
    return sum(
        layout.num_ranks * bucket.segment_numel * lane.dtypes.computed.itemsize
        for lane in layout.lanes
        for bucket in lane.buckets
        if bucket.kind.is_copied
    )


def _moving_full(layouts: Sequence[UnitLayout], sharding: Sharding) -> int:
    """The root and the two neighbours that are largest together (rule 3), one being gathered."""
    *inner, root = layouts
    full = [_full_bytes(layout, sharding) for layout in inner]
    gathered = [_gather_bytes(layout) for layout in inner]
    pairs = [
        full[index] + full[index + 1] + max(gathered[index], gathered[index + 1])
        for index in range(len(inner) - 1)
    ]
    alone = [a + b for a, b in zip(full, gathered, strict=True)]
    return _full_bytes(root, sharding) + max([_gather_bytes(root), *alone, *pairs])


def _full_gradients(layouts: Sequence[UnitLayout], sharding: Sharding) -> int:
    """The root's full gradients, and those of one unit while another's are reduced.

    The gradient of the head comes first and that of the embedding last, so the root's wait until
    the end.
    """
    *inner, root = layouts
    made = [_gradient_bytes(layout) for layout in inner]
    sent = [_reduced_bytes(layout) + _received_bytes(layout, sharding) for layout in inner]
    pairs = [sent[index + 1] + made[index] for index in range(len(inner) - 1)]
    alone = [max(a, b) for a, b in zip(made, sent, strict=True)]
    copied = _reduced_bytes(root, only_copied=True) + _received_bytes(root, sharding)
    return _gradient_bytes(root) + max([copied, *alone, *pairs])


def _trained_buckets(layout: UnitLayout) -> Iterator[tuple[Lane, Bucket]]:
    for lane in layout.lanes:
        if lane.is_trainable:
            yield from ((lane, bucket) for bucket in lane.buckets)


def _gradient_bytes(layout: UnitLayout) -> int:
    """The full gradients, as autograd makes them."""
    return sum(
        layout.params[slot.param_index].split.numel * lane.dtypes.computed.itemsize
        for lane, bucket in _trained_buckets(layout)
        for slot in bucket.slots
    )


def _wire_bytes(layout: UnitLayout, lane: Lane, bucket: Bucket) -> int:
    return layout.num_ranks * bucket.segment_numel * lane.dtypes.wire.itemsize


def _reduced_bytes(layout: UnitLayout, *, only_copied: bool = False) -> int:
    """The buckets that are reduced, or those among them that are not the gradients themselves.

    A gradient that lies as its bucket does, in the dtype it travels in, is reduced in place
    (rule 4).
    """
    return sum(
        _wire_bytes(layout, lane, bucket)
        for lane, bucket in _trained_buckets(layout)
        if not only_copied
        or bucket.kind is not BucketKind.IN_PLACE
        or lane.dtypes.computed != lane.dtypes.wire
    )


def _received_bytes(layout: UnitLayout, sharding: Sharding) -> int:
    """What arrives of the largest bucket that is summed in a wider dtype; they come one by one.

    CPU ranks of one host read each other's memory instead.
    """
    if sharding.device_type == "cpu":
        return 0
    arriving = [
        _wire_bytes(layout, lane, bucket)
        for lane, bucket in _trained_buckets(layout)
        if lane.dtypes.sums_on_arrival
    ]
    return max(arriving, default=0)


def readable(num_bytes: int, word: str = "bytes") -> str:
    """A size as in "1.5 GiB"; `word` is for sizes of less than 1 KiB."""
    size, units = float(num_bytes), [word, "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.0f} {word}" if units[0] == word else f"{size:.1f} {units[0]}"


def table(rows: Sequence[tuple[str, ...]], numbers: Collection[int]) -> list[str]:
    """The lines of a table whose first row is a header and whose last row is a total.

    The columns of `numbers` are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    rule = "  ".join("-" * width for width in widths)
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]
