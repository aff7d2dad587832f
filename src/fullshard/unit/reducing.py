"""From full gradients to the gradients of shards.

`Reduction` is one unit's gradients under way. Its first half runs on the stream that computes
(gather the gradients into messages), its second on the reduce stream: exchange, all-reduce over
the replicas, scale, cast, hand over as `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fullshard.comm.collectives import Brought, Collectives, Transfer, all_reduce
from fullshard.comm.topology import Axis, Topology
from fullshard.layout import Landing, Lane, Message, Split, Stages
from fullshard.trace import seam
from fullshard.trace.activities import Activity
from fullshard.unit.flow import Flow, Tail
from fullshard.unit.gathering import permuted_pairs
from fullshard.unit.handover import HandOver
from fullshard.unit.member import Holder, Member
from fullshard.unit.settings import Settings


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a sum over ranks becomes a mean: divide before, let the backend average, divide after."""

    before: float
    average: bool
    after: float

    @classmethod
    def of(
        cls, settings: Settings, topology: Topology, dtype: torch.dtype, averages: bool
    ) -> Scaling:
        factor = settings.gradient_divide_factor
        if dtype == torch.float16:
            # Its range is small: divide by about a square root on either side of the sum.
            factor = float(topology.num_ranks) if factor is None else factor
            before = 1.0
            while factor % before == 0 and factor / before > before:
                before *= 2
            return cls(before, False, factor / before)
        if factor is None and averages and not settings.force_sum_reduction_for_comms:
            return cls(1.0, topology.num_ranks > 1, 1.0)
        return cls(1.0, False, float(topology.num_ranks) if factor is None else factor)


@dataclass(frozen=True, slots=True)
class Partial:
    """Sums over the shard axis that wait for the replicas, and the slots that they stand for."""

    total: torch.Tensor
    has_slot: tuple[bool, ...]

    def joined(self, other: Partial) -> Partial:
        both = zip(self.has_slot, other.has_slot, strict=True)
        return Partial(self.total.add_(other.total), tuple(a or b for a, b in both))


@dataclass(slots=True)
class MessageGradients:
    """The gradients that go into one message, by slot, and what earlier steps left to add."""

    message: Message
    grads: list[torch.Tensor | None]
    partial: Partial | None


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


@dataclass(slots=True)
class LaneReduction:
    """One lane's part of a reduction. `holder` is who gets all of it, if one does."""

    lane: Lane
    members: Sequence[Member]
    parts: list[MessageGradients]
    holder: Holder | None = None
    ins: list[torch.Tensor] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)
    result: torch.Tensor | None = None
    transfer: Transfer = field(default_factory=Transfer)

    @property
    def numel(self) -> int:
        return sum(part.message.segment_numel for part in self.parts)


class Reduction:
    """One unit's gradients under way; holds everything that the streams still read (rule 5)."""

    def __init__(
        self,
        lanes: list[LaneReduction],
        route: Route,
        settings: Settings,
        flow: Flow,
        hand_over: HandOver,
        keep_partial: Callable[[Message, Partial], None],
    ) -> None:
        self._lanes = lanes
        self._route = route
        self._settings = settings
        self._flow = flow
        self._hand_over = hand_over
        self._keep_partial = keep_partial
        self._exchanged: Any = None
        self._event: Any = None

    def start(self) -> None:
        """Issue the reduction; on a device with streams, all of it."""
        device, streams = self._flow.device, self._flow.streams
        for lane in self._lanes:
            scaling = self._scaling(lane)
            for part in lane.parts:
                lane.ins.append(self._message_input(lane, part, scaling))
                part.grads = [None if grad is None else _TAKEN for grad in part.grads]
        device.wait(device.record(), streams.reduce)
        with device.on(streams.reduce):
            if seam.observers:
                seam.begin(Activity.REDUCE, self._route.unit)
            for lane in self._lanes:
                self._exchange(lane)
            if seam.observers and not device.is_ordered:
                futures = [future for lane in self._lanes for future in lane.transfer.futures]
                seam.end_after(futures, Activity.REDUCE, self._route.unit)
            if device.is_ordered:
                self._complete()

    def conclude(self) -> Tail:
        """Let go of the inputs; what is left is the results and the event that ends them."""
        if seam.observers:
            seam.begin(Activity.AWAIT_REDUCE, self._route.unit)
        if not self._flow.device.is_ordered:
            self._complete()
        # The inputs were allocated by compute, which may reuse their memory from here on.
        self._flow.device.wait(self._exchanged)
        if seam.observers:
            seam.end(Activity.AWAIT_REDUCE, self._route.unit)
        results = [lane.result for lane in self._lanes]
        self._lanes.clear()
        return Tail(self._route.unit, self._event, results)

    def abandon(self) -> None:
        """Wait for what is under way and forget it."""
        for lane in self._lanes:
            lane.transfer.wait()
        self._flow.device.wait(self._event)
        self._lanes.clear()

    def _scaling(self, lane: LaneReduction) -> Scaling:
        if self._route.comm_hook is not None:
            return Scaling(1.0, False, 1.0)
        averages = self._route.collectives.averages
        return Scaling.of(self._settings, self._route.topology, lane.lane.stages.reduced, averages)

    def _message_input(
        self, lane: LaneReduction, part: MessageGradients, scaling: Scaling
    ) -> torch.Tensor:
        """The gradients of a message, as all ranks' segments."""
        message = part.message
        num_ranks = self._route.topology.shard.size
        numel = num_ranks * message.segment_numel
        dtype, device = lane.lane.stages.reduced, self._flow.device.torch_device
        grads = part.grads
        splits = [lane.members[slot.entry].split for slot in message.slots]
        first = grads[0]
        custom = (
            isinstance(self._route.collectives, Brought) and self._route.collectives.reduce_comm
        )
        if (
            not message.landing.is_copied
            and len(grads) == 1
            and first is not None
            and not custom
            and first.dtype == dtype
            and first.numel() == numel
            and first.is_contiguous()
        ):
            flat = first.view(-1)  # rule 4
            return flat if scaling.before == 1.0 else flat.div_(scaling.before)
        if custom:
            buffer = custom.allocate((numel,), dtype=dtype, device=device)
        else:
            buffer = torch.empty(numel, dtype=dtype, device=device)
        if message.landing is Landing.SPLIT:
            _fill_shared(buffer.view(num_ranks, -1), message, grads, splits)
        elif message.landing is Landing.FLAT:
            _fill_flat(buffer, message, grads)
        elif first is None:
            buffer.zero_()
        elif message.landing is Landing.IN_PLACE:
            buffer[: first.numel()].copy_(first.reshape(-1))
        else:
            split = splits[0]
            assert isinstance(split, Split)
            for in_full, in_message in permuted_pairs(split, first, buffer.view(num_ranks, -1)):
                in_message.copy_(in_full)
        return buffer if scaling.before == 1.0 else buffer.div_(scaling.before)

    def _exchange(self, lane: LaneReduction) -> None:
        axis = self._route.axis
        stages, device = lane.lane.stages, self._flow.device.torch_device
        if axis.is_single and len(lane.ins) == 1:
            lane.result, lane.outs = lane.ins[0], lane.ins  # the sum over one rank
            return
        lane.result = torch.empty(lane.numel, dtype=stages.reduced, device=device)
        lane.outs = list(lane.result.split([part.message.segment_numel for part in lane.parts]))
        hook = self._route.comm_hook
        if hook is not None:
            # A hook may give the tensor other memory, in another dtype: it must be this one.
            (message_grads,), lane.outs = lane.ins, [lane.result]
            hook.function(hook.state, message_grads, lane.result)
            return
        if axis.group is None or axis.is_single:
            torch._foreach_copy_(lane.outs, lane.ins)
            return
        sent = [(out, inp) for out, inp in zip(lane.outs, lane.ins, strict=True) if inp.numel()]
        if sent:
            outs, ins = zip(*sent, strict=True)
            average = self._scaling(lane).average
            lane.transfer = self._route.collectives.reduce(outs, ins, axis.group, average=average)

    def _complete(self) -> None:
        device, streams = self._flow.device, self._flow.streams
        for lane in self._lanes:
            lane.transfer.wait()
        self._exchanged = device.record()
        replicas = self._route.topology.replicate
        if not replicas.is_single and not self._settings.requires_all_reduce:
            self._put_aside()
            self._end()
            return
        for lane in self._lanes:
            for part, out in zip(lane.parts, lane.outs, strict=True):
                if part.partial is not None:
                    out.add_(part.partial.total)
        hook = self._route.hook
        if replicas.is_single and hook is None:
            self._finish_lanes()
            return
        stream = streams.replicate
        if hook is not None and hook.stream is not None:
            stream = hook.stream
        device.wait(device.record(), stream)
        with device.on(stream):
            for lane in self._lanes:
                assert lane.result is not None
                comm_hook = self._route.comm_hook
                if comm_hook is not None:
                    comm_hook.function(comm_hook.state, lane.result)
                elif replicas.group is not None and not replicas.is_single:
                    average = self._scaling(lane).average
                    all_reduce(lane.result, replicas.group, average=average)
                if hook is not None:
                    hook.function(lane.result)
            self._finish_lanes()

    def _put_aside(self) -> None:
        """Keep sums over the shard axis until a step that also reduces over the replicas."""
        for lane in self._lanes:
            for part, out in zip(lane.parts, lane.outs, strict=True):
                partial = Partial(out, tuple(grad is not None for grad in part.grads))
                if part.partial is not None:
                    partial = part.partial.joined(partial)
                self._keep_partial(part.message, partial)

    def _finish_lanes(self) -> None:
        """Scale, cast and hand over, on the current stream."""
        for lane in self._lanes:
            assert lane.result is not None
            scaling = self._scaling(lane)
            if scaling.after != 1.0:
                lane.result.div_(scaling.after)
            self._hand_over.add_result(lane.result.to(self._given_dtype(lane.lane.stages)))
            if lane.holder is not None:
                self._hand_over.add(lane.holder, 0)
            else:
                self._give_members(lane)
        self._hand_over.finish()
        self._end()

    def _end(self) -> None:
        """All is enqueued, on the current stream."""
        device = self._flow.device
        self._event = device.record()
        if seam.observers and device.is_ordered:
            seam.end(Activity.REDUCE, self._route.unit)

    def _given_dtype(self, stages: Stages) -> torch.dtype:
        """Of the gradients that optimizers see; where low precision is kept, as torch keeps it."""
        if not self._settings.keep_low_precision_grads:
            return stages.kept
        return stages.reduced if self._route.topology.shard.is_single else stages.computed

    def _give_members(self, lane: LaneReduction) -> None:
        rank = self._route.topology.shard.rank
        offset = 0
        for part in lane.parts:
            kept_slots = part.partial.has_slot if part.partial is not None else ()
            # A rank cannot know whether another one has used a parameter of which it has a part.
            is_flat = part.message.landing is Landing.FLAT
            for index, slot in enumerate(part.message.slots):
                member = lane.members[slot.entry]
                has_gradient = part.grads[index] is not None or (kept_slots and kept_slots[index])
                has_gradient = has_gradient or (is_flat and member.is_trainable)
                if has_gradient and member.takes_gradient:
                    self._hand_over.add(member, offset + part.message.shard_offset(slot, rank))
            offset += part.message.segment_numel


# Stands for a gradient that went into its message and is not needed any more.
_TAKEN = torch.empty(0)


def _fill_flat(
    buffer: torch.Tensor, message: Message, grads: Sequence[torch.Tensor | None]
) -> None:
    """Lay gradients one after another."""
    sizes = [slot.numel for slot in message.slots]
    padding = buffer.numel() - sum(sizes)
    *places, rest = buffer.split([*sizes, padding])
    rest.zero_()
    to, taken = [], []
    for place, grad in zip(places, grads, strict=True):
        if grad is None:
            place.zero_()
        else:
            to.append(place.view(grad.shape))
            taken.append(grad)
    if to:
        torch._foreach_copy_(to, taken)


def _fill_shared(
    segments: torch.Tensor,
    message: Message,
    grads: Sequence[torch.Tensor | None],
    splits: Sequence[Any],
) -> None:
    """Lay several gradients side by side in every rank's segment."""
    num_ranks = segments.size(0)
    parts: list[torch.Tensor] = []
    if len({grad.dtype for grad in grads if grad is not None}) > 1:
        # Some are fresh and some were accumulated, in the dtype of the reduction.
        grads = [None if grad is None else grad.to(segments.dtype) for grad in grads]
    like = next((grad for grad in grads if grad is not None), segments)
    for slot, grad, split in zip(message.slots, grads, splits, strict=True):
        if slot.numel == 0:
            continue
        if grad is None:
            parts.append(like.new_zeros(num_ranks, slot.numel))
        elif split.dim == 0:
            parts.append(grad)
        elif split.dim is None:
            parts.append(grad.reshape(1, -1).expand(num_ranks, -1).contiguous())
        else:
            parts.append(grad.reshape(split.num_rows, split.inner))
    if message.padding_numel:
        parts.append(like.new_zeros(num_ranks, message.padding_numel))
    if parts:  # none if all parameters are empty
        torch._chunk_cat(parts, dim=0, num_chunks=num_ranks, out=segments)
