"""From full gradients to the gradients of shards.

`Reduction` is one unit's gradients under way. Its first half runs on the stream that computes
(gather the gradients into messages), its second on the reduce stream: exchange, all-reduce over
the replicas, scale, cast, hand over as `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fullshard.comm.collectives import Transfer, all_reduce
from fullshard.layout import Message, Stages
from fullshard.trace import seam
from fullshard.trace.activities import Activity
from fullshard.unit.flow import Flow, Tail
from fullshard.unit.gradient_home import GradientHome
from fullshard.unit.gradient_lane import Gradient, GradientLane, GradientMessage
from fullshard.unit.handover import Gift, HandOver, can_add_to
from fullshard.unit.route import Route, Scaling
from fullshard.unit.settings import Settings


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
    """The gradients that go into one message, by slot, and what earlier steps left to add.

    `grads` is emptied when they are in the message; `has_slot` says which there were.
    """

    plan: GradientMessage
    grads: list[Gradient]
    has_slot: tuple[bool, ...]
    partial: Partial | None

    def gifts(self) -> Iterator[Gift]:
        """The members that are given a part of the result."""
        kept_slots = self.partial.has_slot if self.partial is not None else ()
        for index, (member, offset) in enumerate(self.plan.places):
            has_gradient = self.has_slot[index] or (kept_slots and kept_slots[index])
            has_gradient = has_gradient or (self.plan.is_always_due and member.is_trainable)
            if has_gradient and member.takes_gradient:
                yield member, offset


@dataclass(slots=True)
class LaneReduction:
    """One lane's part of a reduction.

    `result` has the parts one after another: the arrangement of the lane's home, if no message is
    without gradients. `home` is what the results lie in instead, if they do; `sums` are what they
    were cast from on their way there.
    """

    plan: GradientLane
    parts: list[MessageGradients]
    scaling: Scaling
    ins: list[torch.Tensor] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)
    result: torch.Tensor | None = None
    home: GradientHome | None = None
    sums: Sequence[torch.Tensor] = ()
    transfer: Transfer = field(default_factory=Transfer)

    @property
    def num_bytes(self) -> int:
        return sum([part.plan.num_bytes for part in self.parts])

    @property
    def is_complete(self) -> bool:
        """Whether every parameter of the lane has a gradient."""
        return len(self.parts) == len(self.plan.messages) and all(
            all(part.has_slot) for part in self.parts
        )

    @property
    def is_in_place(self) -> bool:
        """Whether the one message of the lane is what autograd produced."""
        return len(self.plan.messages) == 1 and self.parts[0].plan.is_in_place(self.parts[0].grads)

    def gifts(self) -> list[Gift]:
        """Who is given a part of the result, and where in it that begins."""
        if self.plan.holder is not None or self.is_complete:
            return self.plan.gifts
        found: list[Gift] = []
        start = 0
        for part in self.parts:
            shift = start - part.plan.home_range.start
            found += [(member, offset + shift) for member, offset in part.gifts()]
            start += len(part.plan.home_range)
        return found

    def results(self) -> Sequence[torch.Tensor]:
        """The sums, in as few tensors as there are; of a home, only what is in this reduction."""
        is_all = self.home is None or len(self.parts) == len(self.plan.messages)
        assert self.result is not None
        return [self.result] if is_all else self.outs

    def move_in(self, home: GradientHome) -> None:
        """Let the sums go where they belong in a home."""
        self.home = home
        self.result = result = home.reserve()
        if len(self.parts) < len(self.plan.messages):
            ranges = [part.plan.home_range for part in self.parts]
            self.outs = [result[places.start : places.stop] for places in ranges]
        elif len(self.parts) == 1:
            self.outs = [result]
        else:
            self.outs = list(result.split([len(part.plan.home_range) for part in self.parts]))

    def stay_apart(self, device: torch.device) -> None:
        """Let the sums go into memory of their own."""
        sizes = [len(part.plan.home_range) for part in self.parts]
        dtype = self.plan.lane.stages.reduced
        self.result = torch.empty(sum(sizes), dtype=dtype, device=device)
        self.outs = list(self.result.split(sizes))


# In the place of a message that goes by pieces.
_NOTHING = torch.empty(0)


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
        return self._route.axis.is_single and self._route.collectives.reduce_comm is None

    def _goes_by_pieces(self, part: MessageGradients) -> bool:
        """Whether a large message is copied on the stream that reduces it, piece by piece.

        Then what is in flight is the gradient that autograd made and one piece, instead of the
        whole message in the dtype that it travels in, or what arrives in the place of it.
        """
        if not part.plan.is_large or not self._flow.device.is_ordered:
            return False
        if (
            self._route.axis.is_single
            or self._route.collectives.reduce_comm
            or self._route.comm_hook
        ):
            return False
        plan = part.plan
        is_copied = plan.sums_on_arrival or not plan.is_in_place(part.grads)
        return is_copied and bool(plan.pieces(part.grads))

    def _reduce_pieces(
        self, lane: LaneReduction, part: MessageGradients, out: torch.Tensor
    ) -> None:
        """On the stream that reduces, which runs them one after another in the same memory."""
        group, scaling = self._route.axis.group, lane.scaling
        assert group is not None
        for piece in part.plan.pieces(part.grads):
            buffer = torch.empty_like(
                piece.segments,
                dtype=lane.plan.lane.stages.wire,
                memory_format=torch.contiguous_format,
            )
            buffer.copy_(piece.segments)
            if scaling.before != 1.0:
                buffer.div_(scaling.before)
            sums = out[piece.start : piece.start + buffer.size(1)]
            self._route.collectives.reduce(
                [sums], [buffer.view(-1)], group, average=scaling.average
            ).wait()

    def _message_input(self, lane: LaneReduction, part: MessageGradients) -> torch.Tensor:
        """The gradients of a message, as all ranks' segments."""
        plan, collectives = part.plan, self._route.collectives
        brought = collectives.reduce_comm
        dtype, device = lane.plan.lane.stages.wire, self._flow.device.torch_device
        first = part.grads[0] if part.grads else None
        if brought is None and first is not None and plan.is_in_place(part.grads):
            buffer = first.view(-1)
        else:
            if brought is not None:
                buffer = brought.allocate((plan.numel,), dtype=dtype, device=device)
            elif lane.home is not None:
                buffer = lane.outs[len(lane.ins)]
            else:
                buffer = collectives.message_buffer(plan.numel, dtype, device)
            plan.lay(part.grads, buffer)
        before = lane.scaling.before
        return buffer if before == 1.0 else buffer.div_(before)

    def _move_in(self, lane: LaneReduction) -> None:
        """Let a lane's sums go straight to where they are handed over from, if they can."""
        stages = lane.plan.lane.stages
        if stages.reduced != stages.kept or self._route.comm_hook is not None:
            return
        if self._ends_in_home(stages):
            device = self._flow.device.torch_device
            home = lane.plan.room_for([part.plan for part in lane.parts], device)
            if home is not None:
                lane.move_in(home)

    def _exchange(self, lane: LaneReduction) -> None:
        axis = self._route.axis
        device = self._flow.device.torch_device
        hook = self._route.comm_hook
        if axis.is_single and len(lane.parts) == len(lane.plan.messages) == 1:
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
            lane.transfer = self._route.collectives.reduce(outs, ins, axis.group, average=average)

    @property
    def _is_put_aside(self) -> bool:
        """Whether sums over the shard axis wait for a step that reduces over the replicas, too."""
        return not (self._route.topology.replicate.is_single or self._settings.requires_all_reduce)

    def _ends_in_home(self, stages: Stages) -> bool:
        """Whether the result can be handed over from a gradient home."""
        is_kept = self._given_dtype(stages) == stages.kept
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
        replicas, hook = self._route.topology.replicate, self._route.hook
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
                self._keep_partial(part.plan.message, partial)

    def _finish_lanes(self) -> None:
        """Scale, cast and hand over, on the current stream."""
        for lane in self._lanes:
            if lane.scaling.after != 1.0:
                self._is_worked_on = True
                for result in lane.results():
                    result.div_(lane.scaling.after)
            self._give(lane)
        self._end()

    def _give(self, lane: LaneReduction) -> None:
        plan, stages, result = lane.plan, lane.plan.lane.stages, lane.result
        assert result is not None
        if lane.home is None:
            self._is_worked_on = True
        if lane.home is None and stages.reduced != stages.kept and self._ends_in_home(stages):
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
            self._hand_over.give_parts(result.to(self._given_dtype(stages)), lane.gifts())

    def _end(self) -> None:
        """All is enqueued, on the current stream."""
        device = self._flow.device
        # Most often nothing was enqueued since the exchange: sums are means already, as they are.
        self._event = device.record() if self._is_worked_on else self._exchanged
        if seam.observers and device.is_ordered:
            seam.end(Activity.REDUCE, self._route.unit)

    def _given_dtype(self, stages: Stages) -> torch.dtype:
        """Of the gradients that optimizers see; where low precision is kept, as torch keeps it."""
        if not self._settings.keep_low_precision_grads:
            return stages.kept
        return stages.reduced if self._route.topology.shard.is_single else stages.computed
