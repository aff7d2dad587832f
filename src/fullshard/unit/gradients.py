"""What a unit knows of its gradients, from the first that arrives to the last handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.api import MixedPrecisionPolicy, OffloadPolicy
from fullshard.comm.placement import local_gradient
from fullshard.comm.topology import Topology
from fullshard.layout import Lane, Message
from fullshard.unit.flow import Flow
from fullshard.unit.gradient_lane import GradientLane, GradientMessage
from fullshard.unit.handover import HandOver
from fullshard.unit.homes import home_device
from fullshard.unit.member import Holder, Member
from fullshard.unit.reducing import LaneReduction, MessageGradients, Partial, Reduction
from fullshard.unit.route import Route, Scaling
from fullshard.unit.settings import Settings


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
        self, topology: Topology, policy: MixedPrecisionPolicy, offload: OffloadPolicy
    ) -> None:
        self._topology = topology
        self._policy = policy
        self._offload = offload
        self._partial: dict[int, Partial] = {}
        self._host_events: list[Any] = []
        self._created: list[Holder] = []
        self._shown: dict[torch.Tensor, Shown] = {}
        self.was_reduced = False
        self._make_lanes: Callable[[], list[GradientLane]] = list
        self._lanes: list[GradientLane] | None = None
        self._large: dict[Member, GradientMessage] = {}

    def plan_anew(self, make_lanes: Callable[[], list[GradientLane]]) -> None:
        """Follow a new plan of the unit, from the next reduction on."""
        self._make_lanes = make_lanes
        self._lanes = None

    @property
    def lanes(self) -> list[GradientLane]:
        """How gradients are reduced, planned when it is first asked for."""
        if self._lanes is None:
            self._lanes = self._make_lanes()
            messages = [message for lane in self._lanes for message in lane.messages]
            self._large = {m.members[0]: m for m in messages if m.is_large}
        return self._lanes

    @property
    def large(self) -> dict[Member, GradientMessage]:
        """The members whose gradient is a large message by itself."""
        return self._large if self.lanes else {}

    def were_kept(self, members: Sequence[Member], settings: Settings) -> bool:
        """Whether an earlier step kept gradients that are to be reduced now."""
        if self._shown:
            self._drop_zeroed(members)
        if not settings.requires_gradient_sync:
            return False
        kept = any(member.accumulated is not None for member in members)
        return kept or (bool(self._partial) and settings.requires_all_reduce)

    def keep(self, members: Sequence[Member], *, is_flat: bool) -> None:
        """Take the full gradients and keep them unreduced, in the dtype of the reduction.

        Wrapped parameters show that there is something: `zero_grad` is to drop it.
        """
        self._drop_zeroed(members)
        self.was_reduced = True
        for member in members:
            grad = self._taken(member)
            if grad is None:
                continue
            grad = grad.to(member.stages(self._policy).reduced)
            if member.accumulated is None:
                member.accumulated = grad
            else:
                member.accumulated.add_(grad)
            if is_flat:
                self._show(member.param)

    def _show(self, param: torch.Tensor) -> None:
        if param in self._shown:
            return
        is_stand_in = param.grad is None
        if param.grad is None:
            param.grad = torch.zeros_like(param, requires_grad=False)
        self._shown[param] = Shown(param.grad, param.grad._version, is_stand_in)

    def _drop_zeroed(self, members: Sequence[Member]) -> None:
        """Forget what was kept for parameters whose gradients were zeroed since."""
        zeroed = {param for param, shown in self._shown.items() if shown.was_zeroed(param)}
        for param in zeroed:
            del self._shown[param]
        for member in members if zeroed else ():
            if member.param in zeroed:
                member.accumulated = None

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
        flow: Flow,
        only: GradientMessage | None = None,
    ) -> None:
        """Take the full gradients and start reducing them; with `only`, those of one message."""
        plans = self.lanes
        if self._shown:
            self._drop_zeroed([m for p in plans for message in p.messages for m in message.members])
            self._hide()
        self.was_reduced = True
        lanes = []
        for plan in plans:
            messages = plan.messages if only is None else [m for m in plan.messages if m is only]
            taken = [self._collect(plan.lane, m, settings, flow) for m in messages]
            parts = [part for part in taken if part is not None]
            if parts:
                scaling = Scaling.of(settings, route, plan.lane.stages.reduced)
                lanes.append(LaneReduction(plan, parts, scaling))
        if not lanes:
            return
        if only is None:
            flow.make_room(settings.reduce_scatter_max_input_buffers)
        else:
            flow.make_room_for(sum(lane.num_bytes for lane in lanes))
        home, pin_memory = home_device(self._offload, flow.device.torch_device)
        to_host = home != flow.device.torch_device
        hand_over = HandOver(flow.device, to_host, pin_memory, self._created, self._host_events)
        reduction = Reduction(lanes, route, settings, flow, hand_over, self._keep_partial)
        reduction.start()
        flow.add_reduction(reduction)
        is_partial = not (route.topology.replicate.is_single or settings.requires_all_reduce)
        if is_partial and not flow.device.is_ordered:
            flow.make_room(1)  # the next backward has to find these sums

    def _keep_partial(self, message: Message, partial: Partial) -> None:
        # Another reduction of the same backward may have been under way and kept some, too.
        before = self._partial.get(id(message))
        self._partial[id(message)] = partial if before is None else before.joined(partial)

    def _taken(self, member: Member) -> torch.Tensor | None:
        full = member.full
        if full is None or full.grad is None:
            return None
        grad, full.grad = full.grad, None
        if member.full_spec is None:
            return grad
        return local_gradient(grad, member.full_spec, self._topology)

    def _collect(
        self, lane: Lane, plan: GradientMessage, settings: Settings, flow: Flow
    ) -> MessageGradients | None:
        """What goes into a message; None if nothing does."""
        grads: list[torch.Tensor | None] = []
        for member in plan.members:
            grad, before = self._taken(member), member.accumulated
            if before is not None:
                member.accumulated = None
                grad = before if grad is None else before.add_(grad)
            if grad is None and settings.reduce_scatter_unused_params and member.is_trainable:
                shape, dtype = member.split.shape, lane.stages.computed
                grad = torch.zeros(shape, dtype=dtype, device=flow.device.torch_device)
            grads.append(grad)
        kept = self._partial.pop(id(plan.message), None) if self._partial else None
        has_slot = tuple([grad is not None for grad in grads])
        if kept is None and not plan.is_always_due and not any(has_slot):
            return None
        return MessageGradients(plan, grads, has_slot, kept)

    def end_backward(self) -> None:
        self.was_reduced = False
        for lane in self._lanes or ():
            lane.end_backward()

    def rest(self) -> None:
        """Give back the memory of gradients that were dropped."""
        for lane in self._lanes or ():
            if lane.home is not None:
                lane.home.rest()

    def settle(self, flow: Flow) -> None:
        """Make the host wait for gradients that are still being copied to it."""
        for event in self._host_events:
            flow.device.synchronize(event)
        self._host_events.clear()
        self._created.clear()

    def forget(self, members: Sequence[Member]) -> None:
        """Drop everything that a failed step left behind, also gradients that it created."""
        self.was_reduced = False
        self._lanes = None  # results may lie in their homes that nobody was given
        self._hide()
        self._partial.clear()
        self._host_events.clear()
        for member in members:
            member.accumulated = None
            if member.full is not None:
                member.full.grad = None
        for holder in self._created:
            holder.param.grad = None
        self._created.clear()
