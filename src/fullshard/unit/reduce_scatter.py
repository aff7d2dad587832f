"""From full gradients to the gradients of shards.

`UnitGrads` belongs to a unit: it takes the full gradients that autograd left on the full
parameters, and starts an `InFlightReduceScatter`. The first half of that runs on the stream that
computes (copy the gradients into buckets), the second on the reduce-scatter stream: reduce-scatter,
all-reduce over the replicas, scale, cast, assign as `.grad`.

What does not change from step to step is made once (rule 7): how gradients lie in buckets
(`GradBucket`, `GradLane`), and the gradients themselves (`GradBuffer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fullshard._torch import (
    backward_hooks,
    chunk_cat,
    disable_torch_function,
    foreach_copy_,
    local_tensor,
    post_accumulate_grad_hooks,
    to_local,
    version_of,
)
from fullshard.api import MixedPrecisionPolicy, OffloadPolicy
from fullshard.comm.collectives import Collectives, CollectiveWork, all_reduce
from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.comm.placement import local_gradient
from fullshard.device import ResizableBuffer, reference_counts
from fullshard.errors import ConfigError, LifecycleError
from fullshard.layout import Bucket, BucketKind, DtypePlan, FlatSplit, Lane, Split, UnitLayout
from fullshard.trace import seam
from fullshard.trace.seam import Activity
from fullshard.unit.all_gather import permuted_pairs
from fullshard.unit.context import CommContext, HeldResults, wait_all
from fullshard.unit.param import GradTarget, ShardedParam, shard_device
from fullshard.unit.settings import UnitSettings

Grad = torch.Tensor | None
GradSlot = tuple[GradTarget, int]
"""What receives a gradient, and where in the lane's reduced gradients it begins."""

# A bucket as large as those of embeddings is worth a collective of its own before the rest of its
# unit, if each rank's part is large enough for latency not to count (rule 9).
LARGE_BYTES = 128 << 20
LARGE_PART_BYTES = 2 << 20
PIECE_BYTES = 64 << 20


# How a unit's gradients are reduced


@dataclass(frozen=True, slots=True)
class AllReduceHook:
    """A user's function on reduced gradients, and the stream that it wants to run on."""

    function: Callable[[torch.Tensor], None]
    stream: Any


@dataclass(frozen=True, slots=True)
class CommHook:
    """A user's function that reduces gradients in place of ours, scaling included.

    Called as `function(state, gradients, shard)`, or without the shard if nothing is sharded.
    """

    function: Callable[..., None]
    state: object


@dataclass(frozen=True, slots=True)
class ReduceConfig:
    """Over what the gradients of a unit are reduced, and how.

    `axis` is the shard axis, perhaps on a process group of its own.
    """

    unit: str
    mesh_info: MeshInfo
    axis: Axis
    collectives: Collectives
    settings: UnitSettings
    all_reduce_hook: AllReduceHook | None = None
    comm_hook: CommHook | None = None

    @property
    def is_partial(self) -> bool:
        """Whether sums over the shard axis wait for a step that reduces over the replicas, too."""
        return not (self.mesh_info.replicate.is_single or self.settings.requires_all_reduce)

    def grad_dtype(self, dtypes: DtypePlan) -> torch.dtype:
        """The dtype of the gradients that optimizers see; low precision is kept as torch does."""
        if not self.settings.keep_low_precision_grads:
            return dtypes.stored
        return dtypes.reduced if self.mesh_info.shard.is_single else dtypes.computed


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a sum over ranks becomes a mean: divide before, let the backend average, divide after."""

    before: float
    average: bool
    after: float

    @classmethod
    def of(cls, config: ReduceConfig, dtype: torch.dtype) -> Scaling:
        if config.comm_hook is not None:
            return cls(1.0, False, 1.0)
        num_ranks = config.mesh_info.num_ranks
        factor = config.settings.gradient_divide_factor
        if dtype == torch.float16:
            # Its range is small: divide by about a square root on either side of the sum.
            factor = float(num_ranks) if factor is None else factor
            before = 1.0
            while factor % before == 0 and factor / before > before:
                before *= 2
            return cls(before, False, factor / before)
        only_sums = config.settings.force_sum_reduction_for_comms
        if factor is None and config.collectives.averages and not only_sums:
            return cls(1.0, num_ranks > 1, 1.0)
        return cls(1.0, False, float(num_ranks) if factor is None else factor)


def require_no_wire_dtype(
    what: str, unit: str, mesh_info: MeshInfo, policy: MixedPrecisionPolicy
) -> None:
    """Raise where gradients may travel in a dtype that a user's own reduction does not know of."""
    wire, reduced = policy.wire_dtype, policy.reduce_dtype or policy.param_dtype
    if wire is not None and wire != reduced and not mesh_info.shard.is_single:
        raise ConfigError(
            f"{unit}: {what} needs gradients that travel in the dtype that they are reduced in, "
            f"found wire_dtype={wire}; leave wire_dtype out, and choose the dtype of the buckets "
            "in your own function."
        )


# Where reduced gradients live


class GradBuffer:
    """The gradients of a lane, arranged like its shard buffer, and the tensors that become `.grad`.

    They are made once: a step fills `result` and assigns `grads` to their targets (rule 8). That
    is safe only while nobody else has kept anything of the step before, which `is_unused` tells;
    otherwise the kept memory is left to whoever keeps it, and another buffer is made. Memory is
    freed between steps (`release_if_unused`), as it is for gradients that are dropped.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, slots: Sequence[GradSlot]
    ) -> None:
        self._buffer = ResizableBuffer(numel * dtype.itemsize, device)
        self.result = self._buffer.view(0, (numel,), dtype)
        self.grads = {target: target.grad_view(self.result, offset) for target, offset in slots}
        self.places = [(target, target.param, grad) for target, grad in self.grads.items()]
        self._watched = list(self.grads.values())
        self._watched += [local_tensor(grad) for grad in self._watched if isinstance(grad, DTensor)]
        self._counts = self._references()
        self._num_reserved = 0

    @property
    def is_unused(self) -> bool:
        """Whether nobody holds a gradient, a part of one, or the memory, beside this object."""
        if self._num_reserved:
            return False
        # Gradients without memory were not assigned to anything.
        return not self._buffer.is_allocated or self._counts == self._references()

    def _references(self) -> list[int]:
        return [self._buffer.use_count, *reference_counts(self._watched)]

    def reserve(self) -> torch.Tensor:
        """The result, with memory of the current stream, until its gradients are assigned."""
        self._num_reserved += 1
        self._buffer.allocate()
        return self.result

    def assigned(self) -> None:
        self._num_reserved -= 1

    def holds_all_grads(self) -> bool:
        """Whether the gradients of all targets are this buffer's, and no user's hooks read them."""
        with disable_torch_function():
            return all(p.grad is grad and not _has_hooks(p) for _, p, grad in self.places)

    def release_if_unused(self) -> None:
        """Free the memory if the gradients were dropped."""
        if self._buffer.is_allocated and self.is_unused:
            self._buffer.free()


def set_grad(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Make a tensor the gradient of a parameter, also one of another dtype."""
    if grad.dtype == param.dtype:
        param.grad = grad
        return
    # torch wants a gradient in its parameter's dtype, but checks that only here.
    param.grad = torch.empty_like(param, requires_grad=False)
    param.grad.data = grad


def _has_hooks(param: torch.Tensor) -> bool:
    """Whether a user's hook reads the gradient as soon as it is there."""
    return bool(backward_hooks(param) or post_accumulate_grad_hooks(param))


# How gradients lie in buckets


class Piece(NamedTuple):
    """Part of every rank's segment of a bucket, and where in a segment it starts."""

    segments: torch.Tensor
    start: int


class GradBucket:
    """A bucket to be reduced: the parameters whose gradients it carries, and how they lie in it."""

    def __init__(
        self, lane: Lane, bucket: Bucket, params: Sequence[ShardedParam], num_ranks: int, rank: int
    ) -> None:
        self.bucket = bucket
        self.params = [params[slot.param_index] for slot in bucket.slots]
        self.numel = num_ranks * bucket.segment_numel
        self.num_bytes = self.numel * lane.dtypes.wire.itemsize
        self.shard_range = range(bucket.buffer_offset, bucket.buffer_offset + bucket.segment_numel)
        self.places = [
            (param, bucket.shard_offset(slot, rank))
            for param, slot in zip(self.params, bucket.slots, strict=True)
        ]
        # A flat bucket is always reduced: other ranks may have used parameters that this rank has
        # a part of, without its knowing.
        is_flat_param = any(isinstance(param.split, FlatSplit) for param in self.params)
        self.is_always_reduced = is_flat_param and lane.is_trainable
        self.sums_on_arrival = lane.dtypes.sums_on_arrival
        self._dtype = lane.dtypes.wire
        self._num_ranks = num_ranks
        # One parameter's, and worth reducing before the others arrive.
        self.is_large = (
            bucket.kind is BucketKind.IN_PLACE
            and self.num_bytes >= LARGE_BYTES
            and self.num_bytes // num_ranks >= LARGE_PART_BYTES
        )
        is_flat = bucket.kind is BucketKind.FLAT
        self._padding_numel = (self.numel if is_flat else bucket.segment_numel) - bucket.used_numel
        self._splits = [param.split for param in self.params]
        self._is_plain_split = all(
            isinstance(split, Split) and split.dim == 0 and slot.numel
            for split, slot in zip(self._splits, bucket.slots, strict=True)
        )

    def pieces(self, grads: Sequence[Grad]) -> list[Piece]:
        """A large bucket in parts that can be reduced one by one; none if that is impossible."""
        grad, num_ranks = grads[0], self._num_ranks
        if not self.is_large or grad is None or grad.numel() != self.numel:
            return []
        if not grad.is_contiguous():
            return []
        segments = grad.view(num_ranks, -1)
        step = max(PIECE_BYTES // num_ranks, LARGE_PART_BYTES) // self._dtype.itemsize
        starts = range(0, segments.size(1), step)
        return [Piece(segments[:, start : start + step], start) for start in starts]

    def is_in_place(self, grads: Sequence[Grad]) -> bool:
        """Whether the tensor that autograd produced is the bucket (rule 4)."""
        first = grads[0]
        return (
            len(grads) == 1
            and not self.bucket.kind.is_copied
            and first is not None
            and first.dtype == self._dtype
            and first.numel() == self.numel
            and first.is_contiguous()
        )

    def copy_in(self, grads: Sequence[Grad], buffer: torch.Tensor) -> None:
        """Copy gradients to where they belong in a buffer of all ranks' segments, cast."""
        kind = self.bucket.kind
        if kind is BucketKind.SPLIT:
            self._copy_in_split(grads, buffer.view(self._num_ranks, -1))
        elif kind is BucketKind.FLAT:
            self._copy_in_flat(grads, buffer)
        elif grads[0] is None:
            buffer.zero_()
        elif kind is BucketKind.IN_PLACE:
            buffer[: grads[0].numel()].copy_(grads[0].reshape(-1))
        else:
            split = self._splits[0]
            assert isinstance(split, Split)
            segments = buffer.view(self._num_ranks, -1)
            for in_full, in_bucket in permuted_pairs(split, grads[0], segments):
                in_bucket.copy_(in_full)

    def _copy_in_flat(self, grads: Sequence[Grad], buffer: torch.Tensor) -> None:
        """One after another."""
        parts: list[torch.Tensor] = []
        for slot, grad in zip(self.bucket.slots, grads, strict=True):
            if slot.numel:
                part = buffer.new_zeros(slot.numel) if grad is None else grad
                parts.append(part if part.ndim else part.reshape(1))
        if self._padding_numel:
            parts.append(buffer.new_zeros(self._padding_numel))
        if len({part.dtype for part in parts}) > 1:
            parts = [part.to(buffer.dtype) for part in parts]
        if parts:
            chunk_cat(parts, dim=0, num_chunks=1, out=buffer.view(1, -1))

    def _copy_in_split(self, grads: Sequence[Grad], segments: torch.Tensor) -> None:
        """Side by side in every rank's segment."""
        if len({grad.dtype for grad in grads if grad is not None}) > 1:
            # Some are fresh and some were accumulated, in the dtype of the reduction.
            grads = [None if grad is None else grad.to(segments.dtype) for grad in grads]
        present = [grad for grad in grads if grad is not None]
        like = present[0] if present else segments
        if self._is_plain_split and len(present) == len(grads):
            parts = present
        else:
            parts = [
                _chunked(grad, split, slot.numel, self._num_ranks, like)
                for slot, grad, split in zip(self.bucket.slots, grads, self._splits, strict=True)
                if slot.numel
            ]
        if self._padding_numel:
            parts.append(like.new_zeros(self._num_ranks, self._padding_numel))
        if parts:  # none if all parameters are empty
            chunk_cat(parts, dim=0, num_chunks=self._num_ranks, out=segments)


def _chunked(
    grad: Grad, split: Split | FlatSplit, numel: int, num_ranks: int, like: torch.Tensor
) -> torch.Tensor:
    """A gradient as rows that `chunk_cat` cuts into one chunk per rank."""
    assert isinstance(split, Split)
    if grad is None:
        return like.new_zeros(num_ranks, numel)
    if split.dim == 0:
        return grad
    if split.dim is None:
        return grad.reshape(1, -1).expand(num_ranks, -1).contiguous()
    return grad.reshape(split.num_rows, split.inner)


class GradLane:
    """A lane to be reduced. Owns the buffer of its gradients.

    `target` is the flat parameter that receives all of it, if there is one.
    """

    def __init__(
        self,
        layout: UnitLayout,
        lane: Lane,
        params: Sequence[ShardedParam],
        rank: int,
        target: GradTarget | None,
    ) -> None:
        self.lane = lane
        self.target = target
        self.buckets = [
            GradBucket(lane, bucket, params, layout.num_ranks, rank) for bucket in lane.buckets
        ]
        self.slots: list[GradSlot] = [
            (param, bucket.shard_range.start + offset)
            for bucket in self.buckets
            for param, offset in bucket.places
            if param.takes_gradient
        ]
        if target is not None:
            self.slots = [(target, 0)]
        self.buffer: GradBuffer | None = None
        self._in_buffer: set[GradBucket] = set()

    def acquire_grad_buffer(
        self, buckets: Sequence[GradBucket], device: torch.device
    ) -> GradBuffer | None:
        """A buffer that the results of these buckets can be written to and assigned from.

        None if gradients have to be assigned one by one: to parameters that have a gradient
        already, or that have a user's hook. The reduce-scatter stream is current: memory is
        allocated there.
        """
        if any(bucket in self._in_buffer for bucket in buckets):
            return None
        slots = self.slots
        if len(buckets) < len(self.buckets):
            reduced = {param for bucket in buckets for param in bucket.params}
            slots = [slot for slot in slots if slot[0] in reduced]
        with disable_torch_function():
            for target, _ in slots:
                if target.param.grad is not None or _has_hooks(target.param):
                    return None
        is_open = bool(self._in_buffer)  # by an earlier reduce-scatter of the same backward
        if self.buffer is None or not (is_open or self.buffer.is_unused):
            dtype = self.lane.dtypes.stored
            self.buffer = GradBuffer(self.lane.shard_numel, dtype, device, self.slots)
        self._in_buffer.update(buckets)
        return self.buffer

    def end_backward(self) -> None:
        self._in_buffer.clear()


def make_grad_lanes(
    layout: UnitLayout,
    params: Sequence[ShardedParam],
    rank: int,
    target_of: Callable[[int], GradTarget | None],
) -> list[GradLane]:
    return [
        GradLane(layout, lane, params, rank, target_of(index))
        for index, lane in enumerate(layout.lanes)
    ]


# One reduce-scatter


@dataclass(slots=True)
class BucketReduce:
    """One bucket's part of a reduce-scatter.

    `grads` are by slot, and emptied when they are in the bucket; `has_grad` says which there were.
    `partials` are what earlier steps summed over the shard axis, and where in `out` to add it.
    """

    plan: GradBucket
    grads: list[Grad]
    has_grad: list[bool]
    partials: list[tuple[int, torch.Tensor]]
    inp: torch.Tensor | None = None
    out: torch.Tensor | None = None

    def slots(self) -> Iterator[tuple[ShardedParam, int]]:
        """The parameters that receive a part of `out`, and where in it that begins."""
        for (param, offset), has_grad in zip(self.plan.places, self.has_grad, strict=True):
            is_due = has_grad or (self.plan.is_always_reduced and param.is_trainable)
            if is_due and param.takes_gradient:
                yield param, offset


@dataclass(slots=True)
class LaneReduce:
    """One lane's part of a reduce-scatter.

    `whole` is the memory of all results, if they lie side by side. `buffer` is what they lie in, if
    they do, and `sums` what they were cast from.
    """

    plan: GradLane
    buckets: list[BucketReduce]
    scaling: Scaling
    whole: torch.Tensor | None = None
    buffer: GradBuffer | None = None
    sums: list[torch.Tensor] = field(default_factory=list)
    work: CollectiveWork = field(default_factory=CollectiveWork)

    @property
    def is_complete(self) -> bool:
        """Whether every parameter of the lane has a gradient."""
        has_all_buckets = len(self.buckets) == len(self.plan.buckets)
        return has_all_buckets and all(all(bucket.has_grad) for bucket in self.buckets)

    @property
    def outs(self) -> list[torch.Tensor]:
        return [bucket.out for bucket in self.buckets if bucket.out is not None]

    @property
    def results(self) -> list[torch.Tensor]:
        """The results in as few tensors as possible: for collectives, hooks and scaling."""
        return self.outs if self.whole is None else [self.whole]

    def slots(self, bucket: BucketReduce) -> list[GradSlot]:
        """What receives a part of a bucket's result."""
        return [(self.plan.target, 0)] if self.plan.target is not None else list(bucket.slots())

    def acquire_buffer(self, device: torch.device) -> bool:
        """Let the results go where they are assigned from, if they can; whether they do."""
        self.buffer = self.plan.acquire_grad_buffer([b.plan for b in self.buckets], device)
        if self.buffer is None:
            return False
        result = self.buffer.reserve()
        for bucket in self.buckets:
            places = bucket.plan.shard_range
            bucket.out = result[places.start : places.stop]
        self.whole = result if len(self.buckets) == len(self.plan.buckets) else None
        return True

    def allocate_results(self, device: torch.device) -> None:
        sizes = [len(bucket.plan.shard_range) for bucket in self.buckets]
        dtype = self.plan.lane.dtypes.reduced
        self.whole = torch.empty(sum(sizes), dtype=dtype, device=device)
        for bucket, out in zip(self.buckets, self.whole.split(sizes), strict=True):
            bucket.out = out


class InFlightReduceScatter:
    """One unit's gradients under way. Holds all that the streams still read (rules 5, 10)."""

    def __init__(
        self,
        lanes: list[LaneReduce],
        config: ReduceConfig,
        comm_ctx: CommContext,
        unit_grads: UnitGrads,
    ) -> None:
        self.num_bytes = sum([bucket.plan.num_bytes for lane in lanes for bucket in lane.buckets])
        self._lanes = lanes
        self._config = config
        self._comm_ctx = comm_ctx
        self._device = comm_ctx.device
        self._unit_grads = unit_grads
        self._scattered: Any = None  # event: the inputs are read
        self._event: Any = None  # event: the results are complete
        self._has_followed = False  # whether anything was enqueued since `_scattered`

    def start(self) -> None:
        """Issue the reduce-scatter; on a device with streams, all that follows it as well."""
        device = self._device
        for lane in self._lanes:
            if self._is_local and not self._is_in_place(lane):
                self._write_to_buffer(lane)  # the sum over one rank is the gradient itself
            for bucket in lane.buckets:
                if not self._goes_by_pieces(bucket):
                    bucket.inp = self._bucket_input(lane, bucket)
                    bucket.grads = []
        device.wait(device.record(), self._comm_ctx.streams.reduce_scatter)
        try:
            with device.on(self._comm_ctx.streams.reduce_scatter):
                if seam.observers:
                    seam.begin(Activity.REDUCE, self._config.unit)
                for lane in self._lanes:
                    self._reduce_scatter(lane)
                if seam.observers and not device.has_streams:
                    futures = (future for lane in self._lanes for future in lane.work.futures)
                    seam.end_after(futures, Activity.REDUCE, self._config.unit)
                if device.has_streams:
                    self._complete()
        except BaseException:
            self._wait_for_enqueued()
            raise

    def _wait_for_enqueued(self) -> None:
        """After a failure: make compute, which gets the inputs' memory back, wait for the rest."""
        device = self._device
        self._wait_works()
        for stream in dict.fromkeys((self._comm_ctx.streams.reduce_scatter, self._last_stream)):
            with device.on(stream):
                event = device.record()
            device.wait(event)

    def _wait_works(self) -> None:
        """Wait for the collectives; never raises (rule 11)."""
        try:
            wait_all(lane.work for lane in self._lanes)
        except Exception:
            pass  # whoever aborts already knows of a failure

    @property
    def _last_stream(self) -> Any:
        """Where sums are all-reduced, and hooks on them run."""
        hook = self._config.all_reduce_hook
        if hook is not None and hook.stream is not None:
            return hook.stream
        return self._comm_ctx.streams.all_reduce

    def finish(self) -> HeldResults:
        """Make compute wait for the reduce-scatter, and let go of the inputs."""
        if seam.observers:
            seam.begin(Activity.AWAIT_REDUCE, self._config.unit)
        if not self._device.has_streams:
            self._complete()
        # The inputs were allocated by compute, which may reuse their memory from here on. The sums
        # over one rank are its inputs, and are read until the end.
        is_read_on = self._config.axis.is_single
        self._device.wait(self._event if is_read_on else self._scattered)
        if seam.observers:
            seam.end(Activity.AWAIT_REDUCE, self._config.unit)
        held = [tensor for lane in self._lanes for tensor in (*lane.outs, *lane.sums)]
        self._lanes.clear()
        return HeldResults(self._config.unit, self._event, held)

    def abort(self) -> None:
        """Wait for what is under way and drop it; never raises (rule 11)."""
        self._wait_works()
        self._device.wait(self._event)
        self._lanes.clear()

    # Inputs, on the stream that computes

    @property
    def _is_local(self) -> bool:
        """Whether there is no other rank, and no user's memory to reduce in."""
        return (
            self._config.axis.is_single and self._config.collectives.custom_reduce_scatter is None
        )

    def _is_in_place(self, lane: LaneReduce) -> bool:
        """Whether the one bucket of a lane is what autograd produced."""
        bucket = lane.buckets[0]
        return len(lane.plan.buckets) == 1 and bucket.plan.is_in_place(bucket.grads)

    def _goes_by_pieces(self, bucket: BucketReduce) -> bool:
        """Whether a large bucket is copied on the stream that reduces it, piece by piece (rule 9).

        Then what is in flight is the gradient that autograd made and one piece, instead of the
        whole bucket in the dtype that it travels in, or what arrives in its place.
        """
        plan, config = bucket.plan, self._config
        if not plan.is_large or not self._device.has_streams or config.axis.is_single:
            return False
        if config.collectives.custom_reduce_scatter or config.comm_hook:
            return False
        is_copied = plan.sums_on_arrival or not plan.is_in_place(bucket.grads)
        return is_copied and bool(plan.pieces(bucket.grads))

    def _bucket_input(self, lane: LaneReduce, bucket: BucketReduce) -> torch.Tensor:
        """The gradients of a bucket, as all ranks' segments."""
        plan, collectives = bucket.plan, self._config.collectives
        custom = collectives.custom_reduce_scatter
        dtype, device = lane.plan.lane.dtypes.wire, self._device.torch_device
        first = bucket.grads[0] if bucket.grads else None
        if custom is None and first is not None and plan.is_in_place(bucket.grads):
            buffer = first.view(-1)
        else:
            if custom is not None:
                buffer = custom.allocate((plan.numel,), dtype=dtype, device=device)
            elif bucket.out is not None:
                buffer = bucket.out
            else:
                group = self._config.axis.group
                buffer = collectives.allocate_bucket(plan.numel, dtype, device, group)
            plan.copy_in(bucket.grads, buffer)
        before = lane.scaling.before
        return buffer if before == 1.0 else buffer.div_(before)

    # Sums, on the reduce-scatter stream

    def _ends_in_buffer(self, dtypes: DtypePlan) -> bool:
        """Whether the result can be assigned from a gradient buffer."""
        is_stored = self._config.grad_dtype(dtypes) == dtypes.stored
        return is_stored and not self._unit_grads.to_host and not self._config.is_partial

    def _write_to_buffer(self, lane: LaneReduce) -> bool:
        """Let a lane's sums go straight to where they are assigned from, if they can."""
        dtypes = lane.plan.lane.dtypes
        if dtypes.reduced != dtypes.stored or self._config.comm_hook is not None:
            return False
        return self._ends_in_buffer(dtypes) and lane.acquire_buffer(self._device.torch_device)

    def _reduce_scatter(self, lane: LaneReduce) -> None:
        axis, hook = self._config.axis, self._config.comm_hook
        if axis.is_single and len(lane.buckets) == len(lane.plan.buckets) == 1:
            if lane.buffer is None:
                # The sum over one rank.
                lane.whole = lane.buckets[0].out = lane.buckets[0].inp
            return
        if lane.buffer is None and not self._write_to_buffer(lane):
            lane.allocate_results(self._device.torch_device)
        if hook is not None:
            # A hook may give the tensor other memory, in another dtype: it must be one tensor.
            (bucket,) = lane.buckets
            bucket.out = lane.whole
        for bucket, out in zip(lane.buckets, lane.outs, strict=True):
            if hook is not None:
                hook.function(hook.state, bucket.inp, out)
            elif bucket.inp is None:
                self._reduce_pieces(lane, bucket, out)
        sent = [b for b in lane.buckets if b.inp is not None and b.inp.numel()]
        outs = [bucket.out for bucket in sent if bucket.out is not None]
        ins = [bucket.inp for bucket in sent if bucket.inp is not None]
        if hook is not None or not sent:
            return
        if axis.group is None or axis.is_single:
            foreach_copy_(outs, ins)
        else:
            lane.work = self._config.collectives.reduce_scatter(
                outs, ins, axis.group, average=lane.scaling.average
            )

    def _reduce_pieces(self, lane: LaneReduce, bucket: BucketReduce, out: torch.Tensor) -> None:
        """One after another in the same memory, which the stream orders."""
        group, scaling = self._config.axis.group, lane.scaling
        assert group is not None
        for piece in bucket.plan.pieces(bucket.grads):
            buffer = torch.empty_like(
                piece.segments,
                dtype=lane.plan.lane.dtypes.wire,
                memory_format=torch.contiguous_format,
            )
            buffer.copy_(piece.segments)
            if scaling.before != 1.0:
                buffer.div_(scaling.before)
            sums = out[piece.start : piece.start + buffer.size(1)]
            self._config.collectives.reduce_scatter(
                [sums], [buffer.view(-1)], group, average=scaling.average
            ).wait()

    # After the reduce-scatter

    def _complete(self) -> None:
        device, config = self._device, self._config
        wait_all(lane.work for lane in self._lanes)
        self._scattered = device.record()
        for lane in self._lanes:
            for bucket, out in zip(lane.buckets, lane.outs, strict=True):
                for start, partial in bucket.partials:
                    self._has_followed = True
                    out[start : start + partial.numel()].add_(partial)
        replicas, hook = config.mesh_info.replicate, config.all_reduce_hook
        if config.is_partial:
            self._has_followed = True
            self._keep_partial_sums()
        elif replicas.is_single and hook is None:
            self._assign_lanes()
        else:
            self._has_followed = True
            stream = self._last_stream
            device.wait(device.record(), stream)
            with device.on(stream):
                for lane in self._lanes:
                    for result in lane.results:
                        if config.comm_hook is not None:
                            config.comm_hook.function(config.comm_hook.state, result)
                        elif replicas.group is not None and not replicas.is_single:
                            all_reduce(result, replicas.group, average=lane.scaling.average)
                        if hook is not None:
                            hook.function(result)
                self._assign_lanes()
                self._end()
            return
        self._end()

    def _keep_partial_sums(self) -> None:
        """Keep sums over the shard axis until a step that also reduces over the replicas."""
        for lane in self._lanes:
            for bucket, out in zip(lane.buckets, lane.outs, strict=True):
                for param, offset in bucket.slots():
                    part = out[offset : offset + param.local.numel()]
                    before = param.partial_grad
                    # Another reduce-scatter of the same backward may have kept some, too.
                    param.partial_grad = part if before is None else before.add_(part)

    def _assign_lanes(self) -> None:
        """Scale, cast and assign, on the current stream."""
        for lane in self._lanes:
            if lane.scaling.after != 1.0:
                self._has_followed = True
                for result in lane.results:
                    result.div_(lane.scaling.after)
            self._assign(lane)

    def _assign(self, lane: LaneReduce) -> None:
        plan, dtypes, unit_grads = lane.plan, lane.plan.lane.dtypes, self._unit_grads
        if lane.buffer is None:
            self._has_followed = True
            if dtypes.reduced != dtypes.stored and self._ends_in_buffer(dtypes):
                sums = lane.outs
                if lane.acquire_buffer(self._device.torch_device):
                    lane.sums = sums
                    foreach_copy_(lane.outs, lane.sums)
        if lane.buffer is not None:
            lane.buffer.assigned()
            places = lane.buffer.places
            if not lane.is_complete and plan.target is None:
                grads = lane.buffer.grads
                targets = [target for bucket in lane.buckets for target, _ in bucket.slots()]
                places = [(target, target.param, grads[target]) for target in targets]
            if unit_grads.assign_places(places):
                self._has_followed = True
        elif (
            plan.buffer is not None
            and lane.whole is not None
            and lane.is_complete
            and plan.buffer.holds_all_grads()
        ):
            plan.buffer.result.add_(lane.whole)
        else:
            dtype = self._config.grad_dtype(dtypes)
            for bucket, out in zip(lane.buckets, lane.outs, strict=True):
                unit_grads.assign_parts(out.to(dtype), lane.slots(bucket))

    def _end(self) -> None:
        """All is enqueued, on the current stream."""
        # Most often nothing follows the reduce-scatter: its sums are the gradients as they are.
        self._event = self._device.record() if self._has_followed else self._scattered
        if seam.observers and self._device.has_streams:
            seam.end(Activity.REDUCE, self._config.unit)


# What a unit knows of its gradients


@dataclass(frozen=True, slots=True)
class ShownGrad:
    """What a parameter shows as its gradient while more than that is kept unreduced."""

    grad: torch.Tensor
    version: int
    is_placeholder: bool

    def was_zeroed(self, param: torch.Tensor) -> bool:
        """Whether someone has called `zero_grad` since, in either of its ways."""
        if param.grad is not self.grad:
            return param.grad is None
        return version_of(self.grad) != self.version and not self.grad.any()


class UnitGrads:
    """The full gradients of a unit's parameters, and what became of them.

    `was_reduced` says whether the backward under way has taken some gradients already. `_created`
    are the targets that it gave a `.grad`; `_host_events` are copies of gradients to the host that
    nobody has waited for; `_shown` stands for gradients that a wrapper keeps unreduced.
    """

    def __init__(
        self, mesh_info: MeshInfo, policy: MixedPrecisionPolicy, offload: OffloadPolicy, device: Any
    ) -> None:
        self.was_reduced = False
        shards_device, self._pin_memory = shard_device(offload, device.torch_device)
        self.to_host = shards_device != device.torch_device
        self._device = device
        self._mesh_info = mesh_info
        self._policy = policy
        self._host_events: list[Any] = []
        self._created: list[GradTarget] = []
        self._shown: dict[torch.Tensor, ShownGrad] = {}
        self._make_lanes: Callable[[], list[GradLane]] = list
        self._lanes: list[GradLane] | None = None
        self._large: dict[ShardedParam, GradBucket] = {}

    def follow_layout(self, make_lanes: Callable[[], list[GradLane]]) -> None:
        """Follow a new plan of the unit from the next reduce-scatter on."""
        self._make_lanes = make_lanes
        self._lanes = None

    @property
    def lanes(self) -> list[GradLane]:
        """How gradients are reduced, planned when it is first asked for."""
        if self._lanes is None:
            self._lanes = self._make_lanes()
            buckets = [bucket for lane in self._lanes for bucket in lane.buckets]
            self._large = {b.params[0]: b for b in buckets if b.is_large}
        return self._lanes

    @property
    def large(self) -> dict[ShardedParam, GradBucket]:
        """The parameters whose gradient is a large bucket by itself."""
        return self._large if self.lanes else {}

    # Accumulation without communication

    def were_kept(self, params: Sequence[ShardedParam], settings: UnitSettings) -> bool:
        """Whether an earlier step kept gradients that are to be reduced now."""
        if self._shown:
            self._drop_zeroed(params)
        if not settings.requires_gradient_sync:
            return False
        if any(param.accumulated is not None for param in params):
            return True
        return settings.requires_all_reduce and any(p.partial_grad is not None for p in params)

    def accumulate(self, params: Sequence[ShardedParam], *, is_flat: bool) -> None:
        """Take the full gradients and keep them unreduced, in the dtype of the reduction.

        Wrapped parameters show a gradient, so that `zero_grad` drops what is kept.
        """
        self._drop_zeroed(params)
        self.was_reduced = True
        for param in params:
            grad = self._take(param)
            if grad is None:
                continue
            grad = grad.to(param.dtype_plan(self._policy).reduced)
            if param.accumulated is None:
                param.accumulated = grad
            else:
                param.accumulated.add_(grad)
            if is_flat:
                self._show(param.param)

    def _show(self, param: torch.Tensor) -> None:
        if param in self._shown:
            return
        is_placeholder = param.grad is None
        if param.grad is None:
            param.grad = torch.zeros_like(param, requires_grad=False)
        self._shown[param] = ShownGrad(param.grad, version_of(param.grad), is_placeholder)

    def _drop_zeroed(self, params: Sequence[ShardedParam]) -> None:
        """Forget what was kept for parameters whose gradients were zeroed since."""
        zeroed = {param for param, shown in self._shown.items() if shown.was_zeroed(param)}
        for zeroed_param in zeroed:
            del self._shown[zeroed_param]
        for param in params if zeroed else ():
            if param.param in zeroed:
                param.accumulated = None

    def _hide(self) -> None:
        """Remove the gradients that were only placeholders."""
        for param, shown in self._shown.items():
            if shown.is_placeholder and param.grad is shown.grad:
                param.grad = None
        self._shown.clear()

    # Reduction

    def reduce_scatter(
        self, config: ReduceConfig, comm_ctx: CommContext, only: GradBucket | None = None
    ) -> None:
        """Take the full gradients and start reducing them; with `only`, those of one bucket."""
        plans = self.lanes
        if self._shown:
            self._drop_zeroed([p for plan in plans for b in plan.buckets for p in b.params])
            self._hide()
        self.was_reduced = True
        lanes = []
        for plan in plans:
            buckets = plan.buckets if only is None else [b for b in plan.buckets if b is only]
            taken = [self._collect(plan.lane, bucket, config.settings) for bucket in buckets]
            present = [bucket for bucket in taken if bucket is not None]
            if present:
                scaling = Scaling.of(config, plan.lane.dtypes.reduced)
                lanes.append(LaneReduce(plan, present, scaling))
        if not lanes:
            return
        in_flight = InFlightReduceScatter(lanes, config, comm_ctx, self)
        if only is None:
            comm_ctx.limit_reduce_scatters(config.settings.reduce_scatter_max_input_buffers)
        else:
            comm_ctx.make_room_for(in_flight.num_bytes)
        in_flight.start()
        comm_ctx.add_reduce_scatter(in_flight)
        if config.is_partial and not comm_ctx.device.has_streams:
            comm_ctx.limit_reduce_scatters(1)  # the next backward has to find these sums

    def _take(self, param: ShardedParam) -> Grad:
        full = param.full
        if full is None or full.grad is None:
            return None
        grad, full.grad = full.grad, None
        if param.full_spec is None:
            return grad
        return local_gradient(grad, param.full_spec, self._mesh_info)

    def _collect(self, lane: Lane, plan: GradBucket, settings: UnitSettings) -> BucketReduce | None:
        """What goes into a bucket; None if nothing does."""
        grads: list[Grad] = []
        has_grad: list[bool] = []
        partials: list[tuple[int, torch.Tensor]] = []
        for param, offset in plan.places:
            grad, before = self._take(param), param.accumulated
            if before is not None:
                param.accumulated = None
                grad = before if grad is None else before.add_(grad)
            if grad is None and settings.reduce_scatter_unused_params and param.is_trainable:
                shape, dtype = param.split.shape, lane.dtypes.computed
                grad = torch.zeros(shape, dtype=dtype, device=self._device.torch_device)
            grads.append(grad)
            partial, param.partial_grad = param.partial_grad, None
            if partial is not None:
                if partial.numel() != param.local.numel():
                    raise LifecycleError(
                        f"{param.name}: a parameter must keep its place between steps that "
                        f"accumulate gradients, found {partial.numel()} accumulated elements for a "
                        f"shard of {param.local.numel()}; finish the accumulation first."
                    )
                partials.append((offset, partial))
            has_grad.append(grad is not None or partial is not None)
        if not plan.is_always_reduced and not any(has_grad):
            return None
        return BucketReduce(plan, grads, has_grad, partials)

    def assign_places(
        self, places: Sequence[tuple[GradTarget, torch.Tensor, torch.Tensor]]
    ) -> bool:
        """Assign gradients of a gradient buffer; whether some had to be added to others."""
        others, created = [], self._created
        with disable_torch_function():
            for place in places:
                target, param, grad = place
                if param.grad is None:
                    param.grad = grad
                    created.append(target)
                else:  # another reduce-scatter was finished in the meantime
                    others.append(place)
        for target, _, grad in others:
            self._assign_one(target, grad)
        return bool(others)

    def assign_parts(self, result: torch.Tensor, slots: Sequence[GradSlot]) -> None:
        """Assign parts of a result that nobody else will write to."""
        if self.to_host:
            result = self._on_host(result, slots)
        for target, offset in slots:
            self._assign_one(target, target.grad_view(result, offset))

    def _on_host(self, result: torch.Tensor, slots: Sequence[GradSlot]) -> torch.Tensor:
        host = torch.empty(
            result.size(), dtype=result.dtype, device="cpu", pin_memory=self._pin_memory
        )
        host.copy_(result, non_blocking=self._pin_memory)
        event = self._device.record()
        # Adding to a gradient that is there, and users' hooks, read on the host right away.
        if any(t.param.grad is not None or _has_hooks(t.param) for t, _ in slots):
            self._device.synchronize(event)
        else:
            self._host_events.append(event)
        return host

    def _assign_one(self, target: GradTarget, grad: torch.Tensor) -> None:
        param = target.param
        for hook in (backward_hooks(param) or {}).values():
            changed = hook(grad)
            grad = grad if changed is None else changed
        if param.grad is not None:
            to_local(param.grad).add_(to_local(grad))
        else:
            set_grad(param, grad)
            self._created.append(target)
        for hook in (post_accumulate_grad_hooks(param) or {}).values():
            hook(param)

    # The end of a step

    def end_backward(self) -> None:
        self.was_reduced = False
        for lane in self._lanes or ():
            lane.end_backward()

    def release_unused_buffers(self) -> None:
        """Free the memory of gradients that were dropped."""
        for lane in self._lanes or ():
            if lane.buffer is not None:
                lane.buffer.release_if_unused()

    def synchronize_host(self) -> None:
        """Make the host wait for gradients that are still being copied to it."""
        for event in self._host_events:
            self._device.synchronize(event)
        self._host_events.clear()
        self._created.clear()

    def reset(self, params: Sequence[ShardedParam]) -> None:
        """Drop everything that a failed step left behind, also gradients that it created."""
        self.was_reduced = False
        self._lanes = None  # results may lie in their buffers that were assigned to nothing
        self._hide()
        self._host_events.clear()
        for param in params:
            param.accumulated = param.partial_grad = None
            if param.full is not None:
                param.full.grad = None
        for target in self._created:
            target.param.grad = None
        self._created.clear()
