"""One unit: parameters that are gathered and reduced together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.api import MixedPrecisionPolicy, OffloadPolicy
from fullshard.comm.collectives import Brought, Collectives, collectives_for
from fullshard.comm.placement import local_gradient
from fullshard.comm.topology import Axis, Topology
from fullshard.errors import LifecycleError, UnsupportedError
from fullshard.layout import CostModel, Entry, Lane, Message, UnitLayout, plan_layout
from fullshard.unit.extending import ExtensionGatherer
from fullshard.unit.flow import Flow
from fullshard.unit.gathering import Gatherer, Gathering
from fullshard.unit.handover import HandOver
from fullshard.unit.homes import Homes, home_device
from fullshard.unit.member import Member
from fullshard.unit.reducing import LaneReduction, MessageGradients, Reduction
from fullshard.unit.settings import Settings


@dataclass(frozen=True, slots=True)
class Sharded:
    """Shards are registered; the slab is empty, or about to be."""


@dataclass(frozen=True, slots=True)
class Thinned:
    """Shards are registered; the full parameters are spread over a smaller group of ranks."""

    kept: torch.Tensor
    axis: Axis
    event: Any


@dataclass(frozen=True, slots=True)
class Unsharding:
    """Shards are registered; the gather is under way."""

    gathering: Gathering
    extension: Gathering | None


@dataclass(frozen=True, slots=True)
class Unsharded:
    """Full parameters are registered and may be read on the current stream."""


SHARDED = Sharded()
UNSHARDED = Unsharded()


class Unit:
    """The parameters of one `fully_shard` call that share a mesh.

    Owns homes, slab and gradients, and changes state when told to; it does not know when.
    `on_gradients` is called when the last trainable parameter has its gradient.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        topology: Topology,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        flow: Flow,
        settings: Settings,
    ) -> None:
        self.name = name
        self.members = list(members)
        self.topology = topology
        self.policy = policy
        self.offload = offload
        self.flow = flow
        self.settings = settings
        self.state: Sharded | Thinned | Unsharding | Unsharded = SHARDED
        self.default_collectives = collectives_for(topology.shard.group, flow.device.torch_device)
        self.collectives: Collectives = self.default_collectives
        self.reduce_axis = topology.shard
        self.all_reduce_hook: tuple[Callable[[torch.Tensor], None], Any] | None = None
        self.on_gradients: Callable[[Unit], None] = _ignore
        self.created_grads: list[Member] = []
        self.was_reduced = False
        self._host_events: list[Any] = []
        self._partial: dict[int, torch.Tensor] = {}
        self._arrived: set[Member] = set()
        self._num_trainable = 0
        self._versions: list[int] = []
        self._gatherer: Gatherer | None = None
        self.rehome()

    # Plan and homes

    @property
    def is_unsharded(self) -> bool:
        return self.state is UNSHARDED

    def rehome(self) -> None:
        """Plan anew from the shards as they are now, and move them into new homes."""
        self.reshard_now()
        self._gatherer = None
        plain = [m for m in self.members if m.extension is None]
        extended = [m for m in self.members if m.extension is not None]
        self._plain, self._extended = plain, extended
        self.layout = self._planned(plain)
        self.extension_layout = self._planned(extended)
        for member in extended:
            member.adopt(member.current_local)
        self._extender = ExtensionGatherer(extended, self.topology, self.policy)
        self._homes: Homes | None = None
        for member in self.members:
            member.full = None
        if not any(m.current_local.is_meta for m in plain):
            device, pin_memory = home_device(self.offload, self.flow.device.torch_device)
            with torch.no_grad(), torch.inference_mode(False):
                rank = self.topology.shard.rank
                self._homes = Homes(self.layout, plain, device, rank, pin_memory)
        self._is_trained_as_planned = [m.shard.requires_grad for m in self.members]

    def _planned(self, members: Sequence[Member]) -> UnitLayout:
        policy = self.policy
        entries = [
            Entry(
                m.name,
                m.split,
                m.stages(policy.param_dtype, policy.reduce_dtype),
                m.shard.requires_grad,
            )
            for m in members
        ]
        cost = CostModel.of_device(self.flow.device.torch_device.type)
        return plan_layout(entries, self.topology.shard.size, cost)

    def refresh(self, *, plan_training: bool = False) -> None:
        """Notice shards that changed since they were gathered, or that a user replaced.

        With `plan_training`, also those that were frozen or thawed since the plan was made.
        """
        if self.state is not SHARDED:
            if self._versions == self._shard_versions():
                return
            self.reshard_now()
        is_current = True
        for member in self.members:
            if not member.is_current():
                member.follow_registered()
                is_current = False
        if plan_training:
            trained = [m.shard.requires_grad for m in self.members]
            is_current = is_current and trained == self._is_trained_as_planned
        if not is_current:
            self.rehome()

    def require_ready(self) -> None:
        """Raise unless every shard has memory on the right device."""
        device, _ = home_device(self.offload, self.flow.device.torch_device)
        for member in self.members:
            local = member.current_local
            if local.is_meta:
                raise LifecycleError(
                    f"{self.name}: parameters must have values before they are used, found "
                    f"'{member.name}' on meta; call module.to_empty(device='{device.type}') and "
                    "initialise it, or load a state dict with assign=True."
                )
            if local.device.type != device.type:
                raise LifecycleError(
                    f"{self.name}: parameters must be on {device.type}, found '{member.name}' on "
                    f"{local.device}; call module.to('{device.type}')."
                )

    # Unshard and reshard

    def unshard(self) -> None:
        """Issue the gather, unless the unit is unsharded or about to be."""
        state = self.state
        if isinstance(state, (Unsharding, Unsharded)):
            return
        flow = self.flow
        is_unchanged = self._versions == self._shard_versions()
        if flow.is_late(self):
            if is_unchanged:
                flow.revive(self)
                self._register_full()
                return
            flow.release_now(self)
        if not is_unchanged:
            state = SHARDED  # what was thinned is not what the shards say any more
        self.require_ready()
        self._versions = self._shard_versions()
        with torch.no_grad(), torch.inference_mode(False):
            if self._gatherer is None:
                self._build()
            assert self._gatherer is not None
            with flow.device.on(flow.streams.gather):
                extension = None
                if isinstance(state, Thinned):
                    flow.device.wait(state.event)
                    gathering = self._gatherer.start_from_thin(
                        state.kept, state.axis, self.default_collectives, flow
                    )
                else:
                    gathering = self._gatherer.start(self.collectives, flow)
                    if self._extended:
                        extension = self._extender.start(self.collectives, flow)
        self.state = Unsharding(gathering, extension)
        flow.release_late()

    def _build(self) -> None:
        assert self._homes is not None  # require_ready
        device = self.flow.device
        with device.on(self.flow.streams.gather):
            axis = self.topology.shard
            self._gatherer = Gatherer(self.layout, self._homes, self._plain, axis, self.flow)

    def wait(self) -> None:
        """Finish the gather that is under way and register the full parameters."""
        state = self.state
        if not isinstance(state, Unsharding):
            return
        assert self._gatherer is not None
        with torch.no_grad(), torch.inference_mode(False):
            self._gatherer.finish(state.gathering, self.flow)
            if state.extension is not None:
                self._extender.finish(state.extension, self.flow)
        self._register_full()

    def _register_full(self) -> None:
        num_trainable = 0
        for member in self.members:
            full = member.full
            assert full is not None
            is_trainable = member.shard.requires_grad
            if full.requires_grad != is_trainable:
                full.requires_grad_(is_trainable)
            if is_trainable:
                num_trainable += 1
                if not member.is_hooked:
                    full.register_post_accumulate_grad_hook(partial(self._gradient_arrived, member))
                    member.is_hooked = True
            member.register(full)
        self._num_trainable = num_trainable
        self.state = UNSHARDED

    def reshard(self, thin: Axis | None = None) -> None:
        """Register the shards; memory is given back once the next gather is issued (rule 3)."""
        if self.state is SHARDED or isinstance(self.state, Thinned):
            return
        self._settle_gather()
        for member in self.members:
            member.register(member.shard)
        self.state = SHARDED
        if thin is not None:
            self._require_thinnable()
            assert self._gatherer is not None
            with torch.no_grad(), torch.inference_mode(False):
                kept = self._gatherer.thin(thin)
            self.state = Thinned(kept, thin, self.flow.device.record())
        self.flow.release_later(self, self._release)

    def reshard_now(self) -> None:
        """Register the shards and give all memory back."""
        self.reshard()
        self.state = SHARDED
        self.flow.release_now(self)

    def _settle_gather(self) -> None:
        if isinstance(self.state, Unsharding):
            self.wait()

    def _release(self) -> list[tuple[int, int]]:
        if self._gatherer is None:
            return []
        return [*self._gatherer.release(), *self._extender.release()]

    def _require_thinnable(self) -> None:
        if self._extended:
            raise UnsupportedError(
                f"{self.name}: resharding to fewer ranks needs plain parameters, found "
                f"'{self._extended[0].name}' with its own gather; pass reshard_after_forward=True."
            )

    def _shard_versions(self) -> list[int]:
        """Changes whenever an optimizer, or anyone else, has written to a shard."""
        return [member.shard._version + member.local._version for member in self.members]

    # Gradients

    def _gradient_arrived(self, member: Member, _: torch.Tensor) -> None:
        self._arrived.add(member)
        if len(self._arrived) == self._num_trainable:
            self.on_gradients(self)

    @property
    def owes_reduction(self) -> bool:
        """Whether gradients wait to be reduced: new ones, or ones that an earlier step kept."""
        settings = self.settings
        if self._arrived:
            return True
        if not settings.requires_gradient_sync:
            return False
        kept = any(member.accumulated is not None for member in self.members)
        return kept or (bool(self._partial) and settings.requires_all_reduce)

    def reduce(self) -> None:
        """Take the full gradients and start reducing them, or keep them if no sync is wanted."""
        self._arrived.clear()
        self.was_reduced = True
        settings = self.settings
        with torch.no_grad():
            if not settings.requires_gradient_sync:
                self._accumulate()
                return
            lanes = [
                *self._collected(self.layout, self._plain),
                *self._collected(self.extension_layout, self._extended),
            ]
            if not lanes:
                return
            flow = self.flow
            flow.make_room(settings.reduce_scatter_max_input_buffers)
            device, pin_memory = home_device(self.offload, flow.device.torch_device)
            to_host = device != flow.device.torch_device
            hand_over = HandOver(flow.device, self.topology.shard.rank, to_host, pin_memory)
            hand_over.created, hand_over.events = self.created_grads, self._host_events
            reduction = Reduction(
                lanes,
                self.topology,
                self.reduce_axis,
                settings,
                self.collectives,
                flow,
                hand_over,
                self._keep_partial,
                self.all_reduce_hook,
            )
            reduction.start()
            flow.add_reduction(reduction)

    def _keep_partial(self, message: Message, result: torch.Tensor) -> None:
        self._partial[id(message)] = result

    def _accumulate(self) -> None:
        reduce_dtype, param_dtype = self.policy.reduce_dtype, self.policy.param_dtype
        for member in self.members:
            grad = self._taken_gradient(member)
            if grad is None:
                continue
            grad = grad.to(member.stages(param_dtype, reduce_dtype).reduced)
            if member.accumulated is None:
                member.accumulated = grad
            else:
                member.accumulated.add_(grad)

    def _taken_gradient(self, member: Member) -> torch.Tensor | None:
        full = member.full
        if full is None or full.grad is None:
            return None
        grad, full.grad = full.grad, None
        return local_gradient(grad, member.full_spec, self.topology)

    def _collected(
        self, layout: UnitLayout, members: Sequence[Member]
    ) -> list[tuple[LaneReduction, Sequence[Member]]]:
        """The messages that have something to reduce, lane by lane."""
        collected = []
        for lane in layout.lanes:
            parts = [part for m in lane.messages if (part := self._collect(lane, m, members))]
            if parts:
                collected.append((LaneReduction(lane, parts), members))
        return collected

    def _collect(
        self, lane: Lane, message: Message, members: Sequence[Member]
    ) -> MessageGradients | None:
        grads: list[torch.Tensor | None] = []
        for slot in message.slots:
            member = members[slot.entry]
            grad, before = self._taken_gradient(member), member.accumulated
            member.accumulated = None
            if before is not None:
                grad = before if grad is None else before.add_(grad)
            if (
                grad is None
                and self.settings.reduce_scatter_unused_params
                and member.shard.requires_grad
            ):
                shape, dtype = member.split.shape, lane.stages.computed
                grad = torch.zeros(shape, dtype=dtype, device=self.flow.device.torch_device)
            grads.append(grad)
        kept = self._partial.pop(id(message), None)
        if kept is None and all(grad is None for grad in grads):
            return None
        return MessageGradients(message, grads, kept)

    def settle_host(self) -> None:
        """Make the host wait for gradients that are still being copied to it."""
        for event in self._host_events:
            self.flow.device.synchronize(event)
        self._host_events.clear()

    def forget_gradients(self) -> None:
        """Drop everything that a failed step left behind, also gradients that it created."""
        self._arrived.clear()
        self._partial.clear()
        self._host_events.clear()
        for member in self.members:
            member.accumulated = None
            if member.full is not None:
                member.full.grad = None
        for member in self.created_grads:
            member.shard.grad = None
        self.created_grads.clear()

    # Settings

    def set(self, **changes: Any) -> None:
        self.settings = replace(self.settings, **changes)

    def bring(self, *, gather: Any = None, reduce: Any = None) -> None:
        """Use a user's collectives in the place of ours."""
        current = self.collectives
        if isinstance(current, Brought):
            gather = gather or current.gather_comm
            reduce = reduce or current.reduce_comm
        self.collectives = Brought(self.default_collectives, gather, reduce)

    def describe(self) -> str:
        """What all ranks must have alike."""
        held = ", ".join(
            f"{m.name} {tuple(m.shard.shape)} {str(m.dtype).removeprefix('torch.')}"
            f"{'' if m.shard.requires_grad else ' frozen'}"
            for m in self.members
        )
        stages = {
            (s.kept, s.computed, s.reduced) for s in (lane.stages for lane in self.layout.lanes)
        }
        precision = (
            "" if len(stages) <= 1 and self.policy == MixedPrecisionPolicy() else f" {self.policy}"
        )
        return f"[{held}] over {self.topology!r}{precision}"

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self.members)} parameters, {type(self.state).__name__})"


def _ignore(unit: Unit) -> None:
    """Nobody listens."""


def all_parameters(units: Sequence[Unit]) -> list[nn.Parameter]:
    return [member.shard for unit in units for member in unit.members]
