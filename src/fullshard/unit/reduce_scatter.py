"""Over what gradients are reduced, and how a sum becomes a mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fullshard.api import MixedPrecisionPolicy, OffloadPolicy
from fullshard.comm.collectives import Collectives, CollectiveWork, all_reduce
from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.comm.placement import local_gradient
from fullshard.device import Device, ResizableBuffer, fast_attributes, num_references
from fullshard.errors import ConfigError
from fullshard.layout import Bucket, BucketKind, DtypePlan, FlatSplit, Lane, Split, UnitLayout
from fullshard.trace import seam
from fullshard.trace.seam import Activity
from fullshard.unit.all_gather import permuted_pairs
from fullshard.unit.context import CommContext, Tail
from fullshard.unit.param import Holder, ShardedParam, shard_device
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
    mesh_info: MeshInfo
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
        mesh_info = route.mesh_info
        factor = settings.gradient_divide_factor
        if dtype == torch.float16:
            # Its range is small: divide by about a square root on either side of the sum.
            factor = float(mesh_info.num_ranks) if factor is None else factor
            before = 1.0
            while factor % before == 0 and factor / before > before:
                before *= 2
            return cls(before, False, factor / before)
        if (
            factor is None
            and route.collectives.averages
            and not settings.force_sum_reduction_for_comms
        ):
            return cls(1.0, mesh_info.num_ranks > 1, 1.0)
        return cls(1.0, False, float(mesh_info.num_ranks) if factor is None else factor)


def require_own_reduce(
    what: str, unit: str, mesh_info: MeshInfo, policy: MixedPrecisionPolicy
) -> None:
    """Raise where gradients may travel in a dtype that a reduce of the user's knows nothing of."""
    wire, reduced = policy.wire_dtype, policy.reduce_dtype or policy.param_dtype
    if wire is not None and wire != reduced and not mesh_info.shard.is_single:
        raise ConfigError(
            f"{unit}: {what} needs gradients that travel in the dtype that they are reduced in, "
            f"found wire_dtype={wire}; leave wire_dtype out, and let what you bring choose the "
            "dtype of its messages."
        )


class GradBuffer:
    """The gradients of a lane, arranged like its home, and the tensors that become `.grad`.

    They are made once: a step fills `result` and gives `gifts` to their holders (rule 7). That is
    safe only while nobody else has kept anything of the step before, which `is_free` tells;
    otherwise what is kept is left to whoever keeps it, and another one is made. Memory is given
    back between steps (`rest`), as it is for gradients that are dropped.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        places: Sequence[tuple[Holder, int]],
    ) -> None:
        self._full_buffer = ResizableBuffer(numel * dtype.itemsize, device)
        self.result = self._full_buffer.view(0, (numel,), dtype)
        self.gifts = {holder: holder.gradient(self.result, offset) for holder, offset in places}
        self.params = [(holder, holder.param, gift) for holder, gift in self.gifts.items()]
        self._watched = list(self.gifts.values())
        self._watched += [gift._local_tensor for gift in self._watched if isinstance(gift, DTensor)]
        self._counts = self._references()
        self._num_reserved = 0

    @property
    def is_free(self) -> bool:
        """Whether nobody holds a gift, a part of one, or the memory, beside this object."""
        if self._num_reserved:
            return False
        # What has no memory is not given to anyone.
        return not self._full_buffer.is_filled or self._counts == self._references()

    def _references(self) -> list[int]:
        return [self._full_buffer.num_holders, *num_references(self._watched)]

    def reserve(self) -> torch.Tensor:
        """The result, with memory of the current stream, for one reduction until it is given."""
        self._num_reserved += 1
        self._full_buffer.fill()
        return self.result

    def given(self) -> None:
        self._num_reserved -= 1

    def rest(self) -> None:
        """Give the memory back if the gradients were dropped."""
        if self._full_buffer.is_filled and self.is_free:
            self._full_buffer.empty()


Gift = tuple[Holder, int]
"""Who is given a gradient, and where in the lane's result it begins."""


class HandOver:
    """Hands the results of one reduction over as `.grad`.

    With offload, gradients go to host memory. `events` then holds what the host has to wait for
    before anyone may read them. Holders that had no gradient before are added to `created`.
    """

    def __init__(
        self,
        device: Device,
        to_host: bool,
        pin_memory: bool,
        created: list[Holder],
        events: list[Any],
    ) -> None:
        self._device = device
        self.to_host = to_host
        self._pin_memory = pin_memory
        self._created = created
        self._events = events

    def give_home(self, home: GradBuffer, holders: Sequence[Holder]) -> bool:
        """Hand over what lies in a gradient home that had room for it; whether some was added."""
        if len(holders) == len(home.params):
            places = home.params
        else:
            places = [(holder, holder.param, home.gifts[holder]) for holder in holders]
        others, created = [], self._created
        with fast_attributes():
            for place in places:
                holder, param, gift = place
                if param.grad is None:
                    param.grad = gift
                    created.append(holder)
                else:  # another reduction was concluded in the meantime
                    others.append(place)
        for holder, _, gift in others:
            self._give(holder, gift)
        return bool(others)

    def give_parts(self, result: torch.Tensor, gifts: Iterable[Gift]) -> None:
        """Hand over parts of a result that nobody else will write to."""
        gifts = list(gifts)
        if self.to_host:
            result = self._on_host(result, gifts)
        for holder, offset in gifts:
            self._give(holder, holder.gradient(result, offset))

    def _on_host(self, result: torch.Tensor, gifts: Iterable[Gift]) -> torch.Tensor:
        host = torch.empty(
            result.size(), dtype=result.dtype, device="cpu", pin_memory=self._pin_memory
        )
        host.copy_(result, non_blocking=self._pin_memory)
        event = self._device.record()
        # Adding to a gradient that is there, and users' hooks, read on the host right away.
        if any(h.param.grad is not None or _is_watched(h.param) for h, _ in gifts):
            self._device.synchronize(event)
        else:
            self._events.append(event)
        return host

    def _give(self, holder: Holder, grad: torch.Tensor) -> None:
        param = holder.param
        has_hooks = _is_watched(param)
        if has_hooks:
            for hook in (param._backward_hooks or {}).values():
                changed = hook(grad)
                grad = grad if changed is None else changed
        before = param.grad
        if before is not None:
            _local(before).add_(_local(grad))
        else:
            set_grad(param, grad)
            self._created.append(holder)
        if has_hooks:
            for hook in (param._post_accumulate_grad_hooks or {}).values():
                hook(param)


def set_grad(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Make a tensor the gradient of a parameter, also one of another dtype."""
    if grad.dtype == param.dtype:
        param.grad = grad
        return
    # torch wants a gradient in its parameter's dtype, but does not look at it twice.
    param.grad = torch.empty_like(param, requires_grad=False)
    param.grad.data = grad


def can_add_to(home: GradBuffer) -> bool:
    """Whether what all holders have as gradients is this home, and nobody listens."""
    with fast_attributes():
        return all(param.grad is gift and not _is_watched(param) for _, param, gift in home.params)


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def _is_watched(param: torch.Tensor) -> bool:
    """Whether someone reads the gradient as soon as it is there."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)


Gradient = torch.Tensor | None


# A message that is as large as embeddings are is worth collectives of its own, before the rest of
# its unit, if each rank's part is large enough for latency not to count.
LARGE_BYTES = 128 << 20
LARGE_PART_BYTES = 2 << 20
PIECE_BYTES = 64 << 20


class Piece(NamedTuple):
    """Part of every rank's segment of a message, and where in a segment it starts."""

    segments: torch.Tensor
    start: int


class GradBucket:
    """A message on its way to be reduced: whose gradients it carries, and how they lie in it."""

    def __init__(
        self, lane: Lane, bucket: Bucket, params: Sequence[ShardedParam], num_ranks: int, rank: int
    ) -> None:
        self.bucket = bucket
        self.params = [params[slot.param_index] for slot in bucket.slots]
        self.numel = num_ranks * bucket.segment_numel
        self.num_bytes = self.numel * lane.dtypes.wire.itemsize
        self.home_range = range(bucket.buffer_offset, bucket.buffer_offset + bucket.segment_numel)
        self.places = [
            (sharded_param, bucket.buffer_offset + bucket.shard_offset(slot, rank))
            for sharded_param, slot in zip(self.params, bucket.slots, strict=True)
        ]
        # What is cut as one is reduced as one, used or not: other ranks may use all of it, and a
        # rank cannot know whether they have used a parameter of which it has a part.
        is_cut_as_one = any(
            isinstance(sharded_param.split, FlatSplit) for sharded_param in self.params
        )
        self.is_always_due = is_cut_as_one and lane.is_trainable
        self.sums_on_arrival = lane.dtypes.sums_on_arrival
        self._dtype = lane.dtypes.wire
        self._num_ranks = num_ranks
        is_flat = bucket.kind is BucketKind.FLAT
        # Whether it is one parameter's, and worth being reduced before the others arrive.
        self.is_large = (
            bucket.kind is BucketKind.IN_PLACE
            and self.num_bytes >= LARGE_BYTES
            and self.num_bytes // num_ranks >= LARGE_PART_BYTES
        )
        self._padding_numel = (self.numel if is_flat else bucket.segment_numel) - bucket.used_numel
        self._splits = [sharded_param.split for sharded_param in self.params]
        self._is_plain_split = all(
            isinstance(split, Split) and split.dim == 0 and slot.numel
            for split, slot in zip(self._splits, bucket.slots, strict=True)
        )

    def pieces(self, grads: Sequence[Gradient]) -> list[Piece]:
        """A large message in parts that can be copied and reduced one by one; none if it cannot."""
        grad, num_ranks = grads[0], self._num_ranks
        if not self.is_large or grad is None or grad.numel() != self.numel:
            return []
        if not grad.is_contiguous():
            return []
        segments = grad.view(num_ranks, -1)
        step = max(PIECE_BYTES // num_ranks, LARGE_PART_BYTES) // self._dtype.itemsize
        starts = range(0, segments.size(1), step)
        return [Piece(segments[:, start : start + step], start) for start in starts]

    def is_in_place(self, grads: Sequence[Gradient]) -> bool:
        """Whether the tensor that autograd produced is the message (rule 4)."""
        first = grads[0]
        return (
            len(grads) == 1
            and not self.bucket.kind.is_copied
            and first is not None
            and first.dtype == self._dtype
            and first.numel() == self.numel
            and first.is_contiguous()
        )

    def lay(self, grads: Sequence[Gradient], buffer: torch.Tensor) -> None:
        """Copy gradients to where they belong in a buffer of all ranks' segments, cast."""
        kind = self.bucket.kind
        if kind is BucketKind.SPLIT:
            self._lay_shared(grads, buffer.view(self._num_ranks, -1))
        elif kind is BucketKind.FLAT:
            self._lay_flat(grads, buffer)
        elif grads[0] is None:
            buffer.zero_()
        elif kind is BucketKind.IN_PLACE:
            buffer[: grads[0].numel()].copy_(grads[0].reshape(-1))
        else:
            split = self._splits[0]
            assert isinstance(split, Split)
            segments = buffer.view(self._num_ranks, -1)
            for in_full, in_message in permuted_pairs(split, grads[0], segments):
                in_message.copy_(in_full)

    def _lay_flat(self, grads: Sequence[Gradient], buffer: torch.Tensor) -> None:
        """One after another."""
        parts = [
            _flat_part(grad, slot.numel, buffer)
            for slot, grad in zip(self.bucket.slots, grads, strict=True)
            if slot.numel
        ]
        if self._padding_numel:
            parts.append(buffer.new_zeros(self._padding_numel))
        if len({part.dtype for part in parts}) > 1:
            parts = [part.to(buffer.dtype) for part in parts]
        if parts:
            torch._chunk_cat(parts, dim=0, num_chunks=1, out=buffer.view(1, -1))

    def _lay_shared(self, grads: Sequence[Gradient], segments: torch.Tensor) -> None:
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
                _part(grad, split, slot.numel, self._num_ranks, like)
                for slot, grad, split in zip(self.bucket.slots, grads, self._splits, strict=True)
                if slot.numel
            ]
        if self._padding_numel:
            parts.append(like.new_zeros(self._num_ranks, self._padding_numel))
        if parts:  # none if all parameters are empty
            torch._chunk_cat(parts, dim=0, num_chunks=self._num_ranks, out=segments)


class GradLane:
    """A lane on its way to be reduced. Owns the home of its results.

    `holder` is who gets all of it, if one does.
    """

    def __init__(
        self,
        layout: UnitLayout,
        lane: Lane,
        params: Sequence[ShardedParam],
        rank: int,
        holder: Holder | None,
    ) -> None:
        self.lane = lane
        self.holder = holder
        self.buckets = [
            GradBucket(lane, bucket, params, layout.num_ranks, rank) for bucket in lane.buckets
        ]
        self.gifts: list[Gift] = [
            (sharded_param, offset)
            for bucket in self.buckets
            for sharded_param, offset in bucket.places
            if sharded_param.takes_gradient
        ]
        if holder is not None:
            self.gifts = [(holder, 0)]
        self.holders = [receiver for receiver, _ in self.gifts]
        self.home: GradBuffer | None = None
        self._in_home: set[GradBucket] = set()

    def room_for(self, buckets: Sequence[GradBucket], device: torch.device) -> GradBuffer | None:
        """A home that the results of these messages can be put into and given from.

        None if they have to be given one by one: to holders that have a gradient already, or that
        someone watches. The stream that reduces is current: memory is allocated there.
        """
        is_open = bool(self._in_home)  # by an earlier reduction of the same backward
        if any(bucket in self._in_home for bucket in buckets):
            return None
        if self.home is None or not (is_open or self.home.is_free):
            dtype = self.lane.dtypes.stored
            self.home = GradBuffer(self.lane.shard_numel, dtype, device, self.gifts)
        params = self.home.params
        if len(buckets) < len(self.buckets):
            reduced = {sharded_param for bucket in buckets for sharded_param in bucket.params}
            params = [place for place in params if place[0] in reduced]
        with fast_attributes():
            for _, param, _ in params:
                if (
                    param.grad is not None
                    or param._backward_hooks
                    or param._post_accumulate_grad_hooks
                ):
                    return None
        self._in_home.update(buckets)
        return self.home

    def end_backward(self) -> None:
        self._in_home.clear()


def grad_lanes(
    layout: UnitLayout,
    params: Sequence[ShardedParam],
    rank: int,
    holder_of: Callable[[int], Holder | None],
) -> list[GradLane]:
    """All lanes of a layout."""
    return [
        GradLane(layout, lane, params, rank, holder_of(index))
        for index, lane in enumerate(layout.lanes)
    ]


def _flat_part(grad: Gradient, numel: int, like: torch.Tensor) -> torch.Tensor:
    if grad is None:
        return like.new_zeros(numel)
    return grad if grad.ndim else grad.reshape(1)


def _part(
    grad: Gradient, split: Split | FlatSplit, numel: int, num_ranks: int, like: torch.Tensor
) -> torch.Tensor:
    """A gradient as rows that `_chunk_cat` cuts into one chunk per rank."""
    assert isinstance(split, Split)
    if grad is None:
        return like.new_zeros(num_ranks, numel)
    if split.dim == 0:
        return grad
    if split.dim is None:
        return grad.reshape(1, -1).expand(num_ranks, -1).contiguous()
    return grad.reshape(split.num_rows, split.inner)


@dataclass(frozen=True, slots=True)
class Partial:
    """Sums over the shard axis that wait for the replicas, and the slots that they stand for."""

    total: torch.Tensor
    has_slot: tuple[bool, ...]

    def joined(self, other: Partial) -> Partial:
        both = zip(self.has_slot, other.has_slot, strict=True)
        return Partial(self.total.add_(other.total), tuple(a or b for a, b in both))


@dataclass(slots=True)
class BucketGrads:
    """The gradients that go into one message, by slot, and what earlier steps left to add.

    `grads` is emptied when they are in the message; `has_slot` says which there were.
    """

    plan: GradBucket
    grads: list[Gradient]
    has_slot: tuple[bool, ...]
    partial: Partial | None

    def gifts(self) -> Iterator[Gift]:
        """The members that are given a part of the result."""
        kept_slots = self.partial.has_slot if self.partial is not None else ()
        for index, (sharded_param, offset) in enumerate(self.plan.places):
            has_gradient = self.has_slot[index] or (kept_slots and kept_slots[index])
            has_gradient = has_gradient or (self.plan.is_always_due and sharded_param.is_trainable)
            if has_gradient and sharded_param.takes_gradient:
                yield sharded_param, offset


@dataclass(slots=True)
class LaneReduceScatter:
    """One lane's part of a reduction.

    `result` has the parts one after another: the arrangement of the lane's home, if no message is
    without gradients. `home` is what the results lie in instead, if they do; `sums` are what they
    were cast from on their way there.
    """

    plan: GradLane
    parts: list[BucketGrads]
    scaling: Scaling
    ins: list[torch.Tensor] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)
    result: torch.Tensor | None = None
    home: GradBuffer | None = None
    sums: Sequence[torch.Tensor] = ()
    transfer: CollectiveWork = field(default_factory=CollectiveWork)

    @property
    def num_bytes(self) -> int:
        return sum([part.plan.num_bytes for part in self.parts])

    @property
    def is_complete(self) -> bool:
        """Whether every parameter of the lane has a gradient."""
        return len(self.parts) == len(self.plan.buckets) and all(
            all(part.has_slot) for part in self.parts
        )

    @property
    def is_in_place(self) -> bool:
        """Whether the one message of the lane is what autograd produced."""
        return len(self.plan.buckets) == 1 and self.parts[0].plan.is_in_place(self.parts[0].grads)

    def gifts(self) -> list[Gift]:
        """Who is given a part of the result, and where in it that begins."""
        if self.plan.holder is not None or self.is_complete:
            return self.plan.gifts
        found: list[Gift] = []
        start = 0
        for part in self.parts:
            shift = start - part.plan.home_range.start
            found += [(sharded_param, offset + shift) for sharded_param, offset in part.gifts()]
            start += len(part.plan.home_range)
        return found

    def results(self) -> Sequence[torch.Tensor]:
        """The sums, in as few tensors as there are; of a home, only what is in this reduction."""
        is_all = self.home is None or len(self.parts) == len(self.plan.buckets)
        assert self.result is not None
        return [self.result] if is_all else self.outs

    def move_in(self, home: GradBuffer) -> None:
        """Let the sums go where they belong in a home."""
        self.home = home
        self.result = result = home.reserve()
        if len(self.parts) < len(self.plan.buckets):
            ranges = [part.plan.home_range for part in self.parts]
            self.outs = [result[places.start : places.stop] for places in ranges]
        elif len(self.parts) == 1:
            self.outs = [result]
        else:
            self.outs = list(result.split([len(part.plan.home_range) for part in self.parts]))

    def stay_apart(self, device: torch.device) -> None:
        """Let the sums go into memory of their own."""
        sizes = [len(part.plan.home_range) for part in self.parts]
        dtype = self.plan.lane.dtypes.reduced
        self.result = torch.empty(sum(sizes), dtype=dtype, device=device)
        self.outs = list(self.result.split(sizes))


# In the place of a message that goes by pieces.
_NOTHING = torch.empty(0)


class InFlightReduceScatter:
    """One unit's gradients under way; holds everything that the streams still read (rule 5)."""

    def __init__(
        self,
        lanes: list[LaneReduceScatter],
        route: Route,
        settings: Settings,
        comm_ctx: CommContext,
        hand_over: HandOver,
        keep_partial: Callable[[Bucket, Partial], None],
    ) -> None:
        self._lanes = lanes
        self._route = route
        self._settings = settings
        self._flow = comm_ctx
        self._hand_over = hand_over
        self._keep_partial = keep_partial
        self.num_bytes = sum([lane.num_bytes for lane in lanes])
        self._exchanged: Any = None
        self._event: Any = None
        self._is_worked_on = False

    def start(self) -> None:
        """Issue the reduction; on a device with streams, all of it."""
        device, streams = self._flow.device, self._flow.streams
        for lane in self._lanes:
            if self._is_local and not lane.is_in_place:
                self._move_in(lane)  # gradients are laid where their sums, which they are, belong
            for part in lane.parts:
                if self._goes_by_pieces(part):
                    lane.ins.append(_NOTHING)
                else:
                    lane.ins.append(self._message_input(lane, part))
                    part.grads = []
        device.wait(device.record(), streams.reduce)
        try:
            self._start_on_reduce_stream()
        except BaseException:
            self._outlast()
            raise

    def _start_on_reduce_stream(self) -> None:
        device = self._flow.device
        with device.on(self._flow.streams.reduce):
            if seam.observers:
                seam.begin(Activity.REDUCE, self._route.unit)
            for lane in self._lanes:
                self._exchange(lane)
            if seam.observers and not device.is_ordered:
                futures = [future for lane in self._lanes for future in lane.transfer.futures]
                seam.end_after(futures, Activity.REDUCE, self._route.unit)
            if device.is_ordered:
                self._complete()

    def _outlast(self) -> None:
        """Make compute, which gets the inputs' memory back, wait for all that was enqueued."""
        device = self._flow.device
        for stream in dict.fromkeys((self._flow.streams.reduce, self._last_stream)):
            with device.on(stream):
                event = device.record()
            device.wait(event)

    @property
    def _last_stream(self) -> Any:
        """Where sums are all-reduced, and hooks on them run."""
        hook = self._route.hook
        if hook is not None and hook.stream is not None:
            return hook.stream
        return self._flow.streams.replicate

    def conclude(self) -> Tail:
        """Let go of the inputs; what is left is the results and the event that ends them."""
        if seam.observers:
            seam.begin(Activity.AWAIT_REDUCE, self._route.unit)
        if not self._flow.device.is_ordered:
            self._complete()
        # The inputs were allocated by compute, which may reuse their memory from here on. The sums
        # over one rank are its inputs, and are read until the end.
        is_read_on = self._route.axis.is_single
        self._flow.device.wait(self._event if is_read_on else self._exchanged)
        if seam.observers:
            seam.end(Activity.AWAIT_REDUCE, self._route.unit)
        held = [tensor for lane in self._lanes for tensor in (lane.result, *lane.sums)]
        self._lanes.clear()
        return Tail(self._route.unit, self._event, held)

    def abandon(self) -> None:
        """Wait for what is under way and forget it."""
        for lane in self._lanes:
            lane.transfer.wait()
        self._flow.device.wait(self._event)
        self._lanes.clear()

    @property
    def _is_local(self) -> bool:
        """Whether there is nobody to exchange with, and no memory of a user's to do it in."""
        return self._route.axis.is_single and self._route.collectives.custom_reduce_scatter is None

    def _goes_by_pieces(self, part: BucketGrads) -> bool:
        """Whether a large message is copied on the stream that reduces it, piece by piece.

        Then what is in flight is the gradient that autograd made and one piece, instead of the
        whole message in the dtype that it travels in, or what arrives in the place of it.
        """
        if not part.plan.is_large or not self._flow.device.is_ordered:
            return False
        if (
            self._route.axis.is_single
            or self._route.collectives.custom_reduce_scatter
            or self._route.comm_hook
        ):
            return False
        plan = part.plan
        is_copied = plan.sums_on_arrival or not plan.is_in_place(part.grads)
        return is_copied and bool(plan.pieces(part.grads))

    def _reduce_pieces(self, lane: LaneReduceScatter, part: BucketGrads, out: torch.Tensor) -> None:
        """On the stream that reduces, which runs them one after another in the same memory."""
        group, scaling = self._route.axis.group, lane.scaling
        assert group is not None
        for piece in part.plan.pieces(part.grads):
            buffer = torch.empty_like(
                piece.segments,
                dtype=lane.plan.lane.dtypes.wire,
                memory_format=torch.contiguous_format,
            )
            buffer.copy_(piece.segments)
            if scaling.before != 1.0:
                buffer.div_(scaling.before)
            sums = out[piece.start : piece.start + buffer.size(1)]
            self._route.collectives.reduce_scatter(
                [sums], [buffer.view(-1)], group, average=scaling.average
            ).wait()

    def _message_input(self, lane: LaneReduceScatter, part: BucketGrads) -> torch.Tensor:
        """The gradients of a message, as all ranks' segments."""
        plan, collectives = part.plan, self._route.collectives
        brought = collectives.custom_reduce_scatter
        dtype, device = lane.plan.lane.dtypes.wire, self._flow.device.torch_device
        first = part.grads[0] if part.grads else None
        if brought is None and first is not None and plan.is_in_place(part.grads):
            buffer = first.view(-1)
        else:
            if brought is not None:
                buffer = brought.allocate((plan.numel,), dtype=dtype, device=device)
            elif lane.home is not None:
                buffer = lane.outs[len(lane.ins)]
            else:
                buffer = collectives.allocate_bucket(plan.numel, dtype, device)
            plan.lay(part.grads, buffer)
        before = lane.scaling.before
        return buffer if before == 1.0 else buffer.div_(before)

    def _move_in(self, lane: LaneReduceScatter) -> None:
        """Let a lane's sums go straight to where they are handed over from, if they can."""
        dtypes = lane.plan.lane.dtypes
        if dtypes.reduced != dtypes.stored or self._route.comm_hook is not None:
            return
        if self._ends_in_home(dtypes):
            device = self._flow.device.torch_device
            home = lane.plan.room_for([part.plan for part in lane.parts], device)
            if home is not None:
                lane.move_in(home)

    def _exchange(self, lane: LaneReduceScatter) -> None:
        axis = self._route.axis
        device = self._flow.device.torch_device
        hook = self._route.comm_hook
        if axis.is_single and len(lane.parts) == len(lane.plan.buckets) == 1:
            if lane.home is None:
                lane.result, lane.outs = lane.ins[0], lane.ins  # the sum over one rank
            return
        if lane.home is None:
            self._move_in(lane)
        if lane.home is None:
            lane.stay_apart(device)
        if hook is not None:
            # A hook may give the tensor other memory, in another dtype: it must be this one.
            assert lane.result is not None
            (message_grads,), lane.outs = lane.ins, [lane.result]
            hook.function(hook.state, message_grads, lane.result)
            return
        if axis.group is None or axis.is_single:
            torch._foreach_copy_(lane.outs, lane.ins)
            return
        for part, out in zip(lane.parts, lane.outs, strict=True):
            if part.grads:
                self._reduce_pieces(lane, part, out)
        sent = [(out, inp) for out, inp in zip(lane.outs, lane.ins, strict=True) if inp.numel()]
        if sent:
            outs, ins = zip(*sent, strict=True)
            average = lane.scaling.average
            lane.transfer = self._route.collectives.reduce_scatter(
                outs, ins, axis.group, average=average
            )

    @property
    def _is_put_aside(self) -> bool:
        """Whether sums over the shard axis wait for a step that reduces over the replicas, too."""
        return not (self._route.mesh_info.replicate.is_single or self._settings.requires_all_reduce)

    def _ends_in_home(self, dtypes: DtypePlan) -> bool:
        """Whether the result can be handed over from a gradient home."""
        is_kept = self._given_dtype(dtypes) == dtypes.stored
        return is_kept and not self._hand_over.to_host and not self._is_put_aside

    def _complete(self) -> None:
        device = self._flow.device
        for lane in self._lanes:
            lane.transfer.wait()
        self._exchanged = device.record()
        if self._is_put_aside:
            self._is_worked_on = True
            self._put_aside()
            self._end()
            return
        for lane in self._lanes:
            for part, out in zip(lane.parts, lane.outs, strict=True):
                if part.partial is not None:
                    self._is_worked_on = True
                    out.add_(part.partial.total)
        replicas, hook = self._route.mesh_info.replicate, self._route.hook
        if replicas.is_single and hook is None:
            self._finish_lanes()
            return
        self._is_worked_on = True
        stream = self._last_stream
        device.wait(device.record(), stream)
        with device.on(stream):
            for lane in self._lanes:
                comm_hook = self._route.comm_hook
                for result in lane.results():
                    if comm_hook is not None:
                        comm_hook.function(comm_hook.state, result)
                    elif replicas.group is not None and not replicas.is_single:
                        all_reduce(result, replicas.group, average=lane.scaling.average)
                    if hook is not None:
                        hook.function(result)
            self._finish_lanes()

    def _put_aside(self) -> None:
        """Keep sums over the shard axis until a step that also reduces over the replicas."""
        for lane in self._lanes:
            for part, out in zip(lane.parts, lane.outs, strict=True):
                partial = Partial(out, part.has_slot)
                if part.partial is not None:
                    partial = part.partial.joined(partial)
                self._keep_partial(part.plan.bucket, partial)

    def _finish_lanes(self) -> None:
        """Scale, cast and hand over, on the current stream."""
        for lane in self._lanes:
            if lane.scaling.after != 1.0:
                self._is_worked_on = True
                for result in lane.results():
                    result.div_(lane.scaling.after)
            self._give(lane)
        self._end()

    def _give(self, lane: LaneReduceScatter) -> None:
        plan, dtypes, result = lane.plan, lane.plan.lane.dtypes, lane.result
        assert result is not None
        if lane.home is None:
            self._is_worked_on = True
        if lane.home is None and dtypes.reduced != dtypes.stored and self._ends_in_home(dtypes):
            home = plan.room_for([part.plan for part in lane.parts], result.device)
            if home is not None:
                lane.sums = lane.outs
                lane.move_in(home)
                torch._foreach_copy_(lane.outs, lane.sums)
        if lane.home is not None:
            gifts = lane.gifts()
            holders = plan.holders if gifts is plan.gifts else [holder for holder, _ in gifts]
            lane.home.given()
            if self._hand_over.give_home(lane.home, holders):
                self._is_worked_on = True
        elif plan.home is not None and lane.is_complete and can_add_to(plan.home):
            plan.home.result.add_(result)
        else:
            self._hand_over.give_parts(result.to(self._given_dtype(dtypes)), lane.gifts())

    def _end(self) -> None:
        """All is enqueued, on the current stream."""
        device = self._flow.device
        # Most often nothing was enqueued since the exchange: sums are means already, as they are.
        self._event = device.record() if self._is_worked_on else self._exchanged
        if seam.observers and device.is_ordered:
            seam.end(Activity.REDUCE, self._route.unit)

    def _given_dtype(self, dtypes: DtypePlan) -> torch.dtype:
        """Of the gradients that optimizers see; where low precision is kept, as torch keeps it."""
        if not self._settings.keep_low_precision_grads:
            return dtypes.stored
        return dtypes.reduced if self._route.mesh_info.shard.is_single else dtypes.computed


@dataclass(frozen=True, slots=True)
class Shown:
    """What a parameter shows as its gradient while more than that is kept unreduced."""

    grad: torch.Tensor
    version: int
    is_stand_in: bool

    def was_zeroed(self, param: torch.Tensor) -> bool:
        """Whether someone has called `zero_grad` since, in either of its ways."""
        if param.grad is not self.grad:
            return param.grad is None
        return self.grad._version != self.version and not self.grad.any()


class Gradients:
    """The full gradients of a unit's members, and what became of them.

    `was_reduced` says whether the backward under way took some gradients already; `created` are
    those that it gave a `.grad` to.
    """

    def __init__(
        self, mesh_info: MeshInfo, policy: MixedPrecisionPolicy, offload: OffloadPolicy
    ) -> None:
        self._topology = mesh_info
        self._policy = policy
        self._offload = offload
        self._partial: dict[int, Partial] = {}
        self._host_events: list[Any] = []
        self._created: list[Holder] = []
        self._shown: dict[torch.Tensor, Shown] = {}
        self.was_reduced = False
        self._make_lanes: Callable[[], list[GradLane]] = list
        self._lanes: list[GradLane] | None = None
        self._large: dict[ShardedParam, GradBucket] = {}

    def plan_anew(self, make_lanes: Callable[[], list[GradLane]]) -> None:
        """Follow a new plan of the unit, from the next reduction on."""
        self._make_lanes = make_lanes
        self._lanes = None

    @property
    def lanes(self) -> list[GradLane]:
        """How gradients are reduced, planned when it is first asked for."""
        if self._lanes is None:
            self._lanes = self._make_lanes()
            buckets = [bucket for lane in self._lanes for bucket in lane.buckets]
            self._large = {m.params[0]: m for m in buckets if m.is_large}
        return self._lanes

    @property
    def large(self) -> dict[ShardedParam, GradBucket]:
        """The members whose gradient is a large message by itself."""
        return self._large if self.lanes else {}

    def were_kept(self, params: Sequence[ShardedParam], settings: Settings) -> bool:
        """Whether an earlier step kept gradients that are to be reduced now."""
        if self._shown:
            self._drop_zeroed(params)
        if not settings.requires_gradient_sync:
            return False
        kept = any(sharded_param.accumulated is not None for sharded_param in params)
        return kept or (bool(self._partial) and settings.requires_all_reduce)

    def keep(self, params: Sequence[ShardedParam], *, is_flat: bool) -> None:
        """Take the full gradients and keep them unreduced, in the dtype of the reduction.

        Wrapped parameters show that there is something: `zero_grad` is to drop it.
        """
        self._drop_zeroed(params)
        self.was_reduced = True
        for sharded_param in params:
            grad = self._taken(sharded_param)
            if grad is None:
                continue
            grad = grad.to(sharded_param.dtype_plan(self._policy).reduced)
            if sharded_param.accumulated is None:
                sharded_param.accumulated = grad
            else:
                sharded_param.accumulated.add_(grad)
            if is_flat:
                self._show(sharded_param.param)

    def _show(self, param: torch.Tensor) -> None:
        if param in self._shown:
            return
        is_stand_in = param.grad is None
        if param.grad is None:
            param.grad = torch.zeros_like(param, requires_grad=False)
        self._shown[param] = Shown(param.grad, param.grad._version, is_stand_in)

    def _drop_zeroed(self, params: Sequence[ShardedParam]) -> None:
        """Forget what was kept for parameters whose gradients were zeroed since."""
        zeroed = {param for param, shown in self._shown.items() if shown.was_zeroed(param)}
        for param in zeroed:
            del self._shown[param]
        for sharded_param in params if zeroed else ():
            if sharded_param.param in zeroed:
                sharded_param.accumulated = None

    def _hide(self) -> None:
        """Take back what only stood for gradients."""
        for param, shown in self._shown.items():
            if shown.is_stand_in and param.grad is shown.grad:
                param.grad = None
        self._shown.clear()

    def reduce(
        self,
        route: Route,
        settings: Settings,
        comm_ctx: CommContext,
        only: GradBucket | None = None,
    ) -> None:
        """Take the full gradients and start reducing them; with `only`, those of one message."""
        plans = self.lanes
        if self._shown:
            self._drop_zeroed([m for p in plans for bucket in p.buckets for m in bucket.params])
            self._hide()
        self.was_reduced = True
        lanes = []
        for plan in plans:
            buckets = plan.buckets if only is None else [m for m in plan.buckets if m is only]
            taken = [self._collect(plan.lane, m, settings, comm_ctx) for m in buckets]
            parts = [part for part in taken if part is not None]
            if parts:
                scaling = Scaling.of(settings, route, plan.lane.dtypes.reduced)
                lanes.append(LaneReduceScatter(plan, parts, scaling))
        if not lanes:
            return
        if only is None:
            comm_ctx.make_room(settings.reduce_scatter_max_input_buffers)
        else:
            comm_ctx.make_room_for(sum(lane.num_bytes for lane in lanes))
        home, pin_memory = shard_device(self._offload, comm_ctx.device.torch_device)
        to_host = home != comm_ctx.device.torch_device
        hand_over = HandOver(comm_ctx.device, to_host, pin_memory, self._created, self._host_events)
        reduction = InFlightReduceScatter(
            lanes, route, settings, comm_ctx, hand_over, self._keep_partial
        )
        reduction.start()
        comm_ctx.add_reduction(reduction)
        is_partial = not (route.mesh_info.replicate.is_single or settings.requires_all_reduce)
        if is_partial and not comm_ctx.device.is_ordered:
            comm_ctx.make_room(1)  # the next backward has to find these sums

    def _keep_partial(self, bucket: Bucket, partial: Partial) -> None:
        # Another reduction of the same backward may have been under way and kept some, too.
        before = self._partial.get(id(bucket))
        self._partial[id(bucket)] = partial if before is None else before.joined(partial)

    def _taken(self, sharded_param: ShardedParam) -> torch.Tensor | None:
        full = sharded_param.full
        if full is None or full.grad is None:
            return None
        grad, full.grad = full.grad, None
        if sharded_param.full_spec is None:
            return grad
        return local_gradient(grad, sharded_param.full_spec, self._topology)

    def _collect(
        self, lane: Lane, plan: GradBucket, settings: Settings, comm_ctx: CommContext
    ) -> BucketGrads | None:
        """What goes into a message; None if nothing does."""
        grads: list[torch.Tensor | None] = []
        for sharded_param in plan.params:
            grad, before = self._taken(sharded_param), sharded_param.accumulated
            if before is not None:
                sharded_param.accumulated = None
                grad = before if grad is None else before.add_(grad)
            if (
                grad is None
                and settings.reduce_scatter_unused_params
                and sharded_param.is_trainable
            ):
                shape, dtype = sharded_param.split.shape, lane.dtypes.computed
                grad = torch.zeros(shape, dtype=dtype, device=comm_ctx.device.torch_device)
            grads.append(grad)
        kept = self._partial.pop(id(plan.bucket), None) if self._partial else None
        has_slot = tuple([grad is not None for grad in grads])
        if kept is None and not plan.is_always_due and not any(has_slot):
            return None
        return BucketGrads(plan, grads, has_slot, kept)

    def end_backward(self) -> None:
        self.was_reduced = False
        for lane in self._lanes or ():
            lane.end_backward()

    def rest(self) -> None:
        """Give back the memory of gradients that were dropped."""
        for lane in self._lanes or ():
            if lane.home is not None:
                lane.home.rest()

    def settle(self, comm_ctx: CommContext) -> None:
        """Make the host wait for gradients that are still being copied to it."""
        for event in self._host_events:
            comm_ctx.device.synchronize(event)
        self._host_events.clear()
        self._created.clear()

    def forget(self, params: Sequence[ShardedParam]) -> None:
        """Drop everything that a failed step left behind, also gradients that it created."""
        self.was_reduced = False
        self._lanes = None  # results may lie in their homes that nobody was given
        self._hide()
        self._partial.clear()
        self._host_events.clear()
        for sharded_param in params:
            sharded_param.accumulated = None
            if sharded_param.full is not None:
                sharded_param.full.grad = None
        for holder in self._created:
            holder.param.grad = None
        self._created.clear()
