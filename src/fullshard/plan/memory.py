"""How much memory a rank will need, from the shapes of its units alone.

The layouts are those that the engine runs with, so shards are exact, padding included. Two
moments can be the highest of a step: when backward begins, with all activations saved, and when it
ends, with all gradients there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """A full parameter, as its unit is given it."""

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
    """How units are spread over ranks: `num_replicas` groups of `num_shards` ranks each.

    `is_flat` is how the second door lays parameters out. With NO_SHARD every rank keeps
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
        # The first door, asked to shard nothing, keeps what it has cast.
        return self.strategy in _KEEPS_FULL or (self.is_whole and not self.is_flat)

    @property
    def is_in_host_memory(self) -> bool:
        """Whether shards lie in other memory than what is computed with."""
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
    """What a step takes besides parameters. `accumulates`: gradients outlive a backward."""

    activation_bytes: int = 0
    logits_bytes: int = 0
    accumulates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What the rank that has most will hold, in bytes; `repr` is a table.

    Shards, gradients and optimizer state are in host memory if `sharding` says so. `kept_full` is
    what stays unsharded between forward and backward, `moving_full` what is unsharded at most while
    units come and go, both with the buffers that they are gathered through; `gradient_messages` are
    full gradients and what they are reduced in.
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
        """Of host memory, where that is not what is computed in."""
        return self.shards_bytes if self.sharding.is_in_host_memory else 0

    @property
    def device_bytes(self) -> int:
        """The most that is held at any moment."""
        return max(self.before_backward_bytes, self.after_backward_bytes)

    @property
    def before_backward_bytes(self) -> int:
        return sum(before for _, before, _ in self._rows())

    @property
    def after_backward_bytes(self) -> int:
        return sum(after for _, _, after in self._rows())

    def _rows(self) -> Iterator[tuple[str, int, int]]:
        """What is held on the device when backward begins and when it ends."""
        work = self.work
        if not self.sharding.is_in_host_memory:
            yield "parameter shards", self.parameter_shards, self.parameter_shards
            waiting = self.gradient_shards if work.accumulates else 0
            yield "gradient shards", waiting, self.gradient_shards
            yield "optimizer state", self.optimizer_state, self.optimizer_state
        yield "full parameters", self.kept_full, self.moving_full
        yield "gradient messages", self.gradient_messages, self.gradient_messages
        yield "activations", work.activation_bytes, 0
        yield "logits", work.logits_bytes, 0

    def __repr__(self) -> str:
        sharding = self.sharding
        rows = [("on each rank", "before backward", "after backward")]
        rows += [(name, readable(a), readable(b)) for name, a, b in self._rows()]
        totals = (readable(self.before_backward_bytes), readable(self.after_backward_bytes))
        rows.append(("in all", *totals))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.rjust(widths[2])}" for a, b, c in rows
        ]
        rule = "  ".join("-" * width for width in widths)
        lines = [
            f"{self.num_parameters:,} parameters, {self.num_trainable:,} trainable, on "
            f"{sharding.num_replicas}x{sharding.num_shards} ranks",
            *(lines[0], rule, *lines[1:-1], rule, lines[-1]),
        ]
        if self.host_bytes:
            lines.append(f"and {readable(self.host_bytes)} of host memory")
        return "\n".join(lines)


def plan_memory(
    units: Sequence[UnitShapes], sharding: Sharding, work: Work | None = None
) -> MemoryPlan:
    """What a rank will hold when it trains these units with AdamW.

    Args:
        units: In the order in which they run, the root last: as `choosing.Choice` lists them.
        sharding: How they are spread.
        work: Activations and the like; without it, parameters alone are planned.
    """
    if not units:
        raise ConfigError("plan_memory: at least the root unit is expected, found no units.")
    layouts = [sharding.layout(unit) for unit in units]
    parameters = [parameter for layout in layouts for parameter in layout.params]
    lanes = [lane for layout in layouts for lane in layout.lanes]
    trained = [lane for lane in lanes if lane.is_trainable]
    moving = _moving_full(layouts, sharding)
    return MemoryPlan(
        sharding=sharding,
        num_parameters=sum(param.split.numel for param in parameters),
        num_trainable=sum(param.split.numel for param in parameters if param.is_trainable),
        parameter_shards=sum(_home_bytes(lane) for lane in lanes),
        gradient_shards=sum(_home_bytes(lane) for lane in trained),
        optimizer_state=_MOMENTS * sum(_used_bytes(layout, sharding) for layout in layouts),
        kept_full=sum(_slab_bytes(layout, sharding) for layout in layouts)
        if sharding.keeps_full
        else moving,
        moving_full=moving,
        gradient_messages=_gradient_messages(layouts, sharding),
        work=work or Work(),
    )


def _home_bytes(lane: Lane) -> int:
    return lane.shard_numel * lane.dtypes.stored.itemsize


def _used_bytes(layout: UnitLayout, sharding: Sharding) -> int:
    """The first rank's trainable shards, without padding: no rank has more."""
    found = 0
    for lane in layout.lanes:
        for bucket in lane.buckets if lane.is_trainable else ():
            if sharding.is_flat:
                numel = min(bucket.segment_numel, bucket.used_numel)
            else:
                numel = sum(
                    layout.params[slot.param_index].split.shard_numel(0) for slot in bucket.slots
                )
            found += numel * lane.dtypes.stored.itemsize
    return found


def _slab_bytes(layout: UnitLayout, sharding: Sharding) -> int:
    """Of the slab; none where the homes are the full parameters."""
    return 0 if layout.is_whole and not sharding.is_in_host_memory else layout.full_bytes


def _buffer_bytes(layout: UnitLayout) -> int:
    """What messages that are copied out arrive in."""
    return sum(
        layout.num_ranks * bucket.segment_numel * lane.dtypes.computed.itemsize
        for lane in layout.lanes
        for bucket in lane.buckets
        if bucket.kind.is_copied
    )


def _moving_full(layouts: Sequence[UnitLayout], sharding: Sharding) -> int:
    """The root, and the two neighbours that are largest together (rule 3); one still arrives."""
    *inner, root = layouts
    slabs = [_slab_bytes(layout, sharding) for layout in inner]
    buffers = [_buffer_bytes(layout) for layout in inner]
    pairs = [
        slabs[index] + slabs[index + 1] + max(buffers[index], buffers[index + 1])
        for index in range(len(inner) - 1)
    ]
    alone = [full + buffer for full, buffer in zip(slabs, buffers, strict=True)]
    root_slab = _slab_bytes(root, sharding)
    return root_slab + max([_buffer_bytes(root), *alone, *pairs])


def _gradient_messages(layouts: Sequence[UnitLayout], sharding: Sharding) -> int:
    """The root's full gradients, and one unit's being made while another's are reduced.

    The head's gradient comes first and the embedding's last, so the root's wait until the end.
    """
    *inner, root = layouts
    made = [_gradient_bytes(layout) for layout in inner]
    sent = [_message_bytes(layout) + _received_bytes(layout, sharding) for layout in inner]
    pairs = [sent[index + 1] + made[index] for index in range(len(inner) - 1)]
    alone = [max(a, b) for a, b in zip(made, sent, strict=True)]
    copied = _copied_bytes(root) + _received_bytes(root, sharding)
    return _gradient_bytes(root) + max([copied, *alone, *pairs])


def _trained_messages(layout: UnitLayout) -> Iterator[tuple[Lane, Bucket]]:
    for lane in layout.lanes:
        if lane.is_trainable:
            yield from ((lane, bucket) for bucket in lane.buckets)


def _gradient_bytes(layout: UnitLayout) -> int:
    """Of the full gradients, as autograd makes them."""
    return sum(
        layout.params[slot.param_index].split.numel * lane.dtypes.computed.itemsize
        for lane, bucket in _trained_messages(layout)
        for slot in bucket.slots
    )


def _message_bytes(layout: UnitLayout) -> int:
    return sum(
        layout.num_ranks * bucket.segment_numel * lane.dtypes.wire.itemsize
        for lane, bucket in _trained_messages(layout)
    )


def _received_bytes(layout: UnitLayout, sharding: Sharding) -> int:
    """What arrives of the largest message that is added up in a wider dtype; one at a time is.

    CPU ranks of one host read it where the others have laid it.
    """
    if sharding.device_type == "cpu":
        return 0
    arriving = [
        layout.num_ranks * bucket.segment_numel * lane.dtypes.wire.itemsize
        for lane, bucket in _trained_messages(layout)
        if lane.dtypes.sums_on_arrival
    ]
    return max(arriving, default=0)


def _copied_bytes(layout: UnitLayout) -> int:
    """Of the messages that gradients are copied into; the others are the gradients (rule 4)."""
    return sum(
        layout.num_ranks * bucket.segment_numel * lane.dtypes.wire.itemsize
        for lane, bucket in _trained_messages(layout)
        if bucket.kind is not BucketKind.IN_PLACE or lane.dtypes.computed != lane.dtypes.wire
    )


def readable(num_bytes: int) -> str:
    """As in "1.5 GiB"."""
    size = float(num_bytes)
    for word in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {word}" if word == "bytes" else f"{size:.1f} {word}"
        size /= 1024
    return f"{size:.1f} TiB"
