"""One unit: parameters that are gathered and reduced together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from fullshard.api import MixedPrecisionPolicy, OffloadPolicy
from fullshard.comm.collectives import Brought, Collectives, collectives_for
from fullshard.comm.topology import Axis, Topology
from fullshard.errors import LifecycleError, UnsupportedError
from fullshard.layout import CostModel, Entry, Split, UnitLayout, plan_flat_layout, plan_layout
from fullshard.trace import seam
from fullshard.trace.activities import Activity
from fullshard.unit.extending import ExtensionGatherer
from fullshard.unit.flat_lanes import FlatLanes
from fullshard.unit.flow import Flow
from fullshard.unit.gathering import Gatherer, Gathering
from fullshard.unit.gradients import Gradients
from fullshard.unit.homes import Homes, home_device
from fullshard.unit.member import Member
from fullshard.unit.reducing import AllReduceHook, CommHook, Route
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
    """The parameters of one wrapper, or of one `fully_shard` call that share a mesh.

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
        flat: FlatLanes | None = None,
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
        self.all_reduce_hook: AllReduceHook | None = None
        self.comm_hook: CommHook | None = None
        self.on_gradients: Callable[[Unit], None] = _ignore
        self.gradients = Gradients(topology, policy, offload)
        self.is_held = False
        self.is_summoned = False
        self.flat = flat
        self._num_trainable = 0
        self._versions: list[int] = []
        self._gatherer: Gatherer | None = None
        self.rehome()

    # Plan and homes

    @property
    def is_unsharded(self) -> bool:
        return self.state is UNSHARDED

    @property
    def homes(self) -> Homes:
        """This rank's shards; `require_ready` says what is wrong where there are none."""
        if self._homes is None:
            self.require_ready()
        assert self._homes is not None
        return self._homes

    @property
    def has_frozen(self) -> bool:
        """Whether some of the full parameters, as registered, take no gradient."""
        return self._num_trainable < len(self.members)

    def rehome(self) -> None:
        """Plan anew from the shards as they are now, and move them into new homes."""
        self.reshard_now()
        self._gatherer = None
        plain = [m for m in self.members if m.extension is None]
        extended = [m for m in self.members if m.extension is not None]
        self._plain, self._extended = plain, extended
        if self.flat is not None:
            self.flat.part()
        self.layout = self._planned(plain)
        if self.flat is not None:
            self.flat.recut(self.layout, plain)
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
                if self.flat is not None:
                    self.flat.settle(self.layout, plain, self._homes)
        self._is_trained_as_planned = [m.is_trainable for m in self.members]

    def collect(self) -> None:
        """Before members come or go: make whole what is cut by a plan (a collective if flat)."""
        self.reshard_now()
        if self.flat is not None:
            self.flat.part()
            self.flat.collect()

    def _planned(self, members: Sequence[Member]) -> UnitLayout:
        policy = self.policy
        entries = [
            Entry(
                m.name,
                m.split if isinstance(m.split, Split) else Split(m.split.shape, None, 1),
                m.stages(policy.param_dtype, policy.reduce_dtype),
                m.is_trainable,
            )
            for m in members
        ]
        if self.flat is not None:
            return plan_flat_layout(entries, self.topology.shard.size)
        cost = CostModel.of_device(self.flow.device.torch_device.type)
        return plan_layout(entries, self.topology.shard.size, cost)

    def refresh(self, *, plan_training: bool = False) -> None:
        """Notice shards that changed since they were gathered, or that a user replaced.

        With `plan_training`, also those that were frozen or thawed since the plan was made: not
        while a state dict may be held, since its tensors would be left behind.
        """
        self._require_not_summoned()
        versions = self._shard_versions()
        if self.state is not SHARDED:
            if self._versions == versions:
                return
            self.reshard_now()
        self._versions = versions
        is_current = True
        for member in self.members:
            if not member.is_current():
                member.follow_registered()
                is_current = member.came_back() and is_current
        if self.flat is not None and self._homes is not None:
            is_current = is_current and self.flat.are_current(self._homes)
        if plan_training and not self.is_held:
            trained = [m.is_trainable for m in self.members]
            is_current = is_current and trained == self._is_trained_as_planned
        if not is_current:
            self.rehome()
            self._versions = self._shard_versions()

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

    def _require_not_summoned(self) -> None:
        if self.is_summoned:
            raise LifecycleError(
                f"{self.name}: forward and backward must run outside of summon_full_params, found "
                "its parameters summoned; leave the context first."
            )

    # Unshard and reshard

    def unshard(self) -> None:
        """Issue the gather, unless the unit is unsharded or about to be."""
        self._require_not_summoned()
        state = self.state
        if isinstance(state, (Unsharding, Unsharded)):
            return
        flow = self.flow
        is_late = flow.is_late(self)
        if is_late or isinstance(state, Thinned):
            is_unchanged = self._versions == self._shard_versions()
            if is_late and is_unchanged:
                flow.revive(self)
                self._register_full()
                return
            flow.release_now(self)
            if not is_unchanged:
                state = SHARDED  # what was thinned is not what the shards say any more
        if self._homes is None:
            self.require_ready()
        with _outside_inference():
            if self._gatherer is None:
                self._build()
            assert self._gatherer is not None
            with flow.device.on(flow.streams.gather):
                if seam.observers:
                    seam.begin(Activity.GATHER, self.name)
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
                if seam.observers:
                    self._tell_of_gather(gathering)
        self.state = Unsharding(gathering, extension)
        flow.gather_issued(self)

    def _tell_of_gather(self, gathering: Gathering) -> None:
        assert self._gatherer is not None
        seam.hold(self.name, self._gatherer.slab_bytes)
        futures = [future for transfer in gathering.transfers for future in transfer.futures]
        seam.end_after(futures, Activity.GATHER, self.name)

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
        self.flow.gather_used(self)
        if seam.observers:
            seam.begin(Activity.AWAIT_GATHER, self.name)
        with _outside_inference():
            self._gatherer.finish(state.gathering, self.flow)
            if state.extension is not None:
                self._extender.finish(state.extension, self.flow)
        if seam.observers:
            seam.end(Activity.AWAIT_GATHER, self.name)
        self._register_full()

    def _register_full(self) -> None:
        num_trainable = 0
        for member in self.members:
            full = member.full
            assert full is not None
            member.was_trainable = is_trainable = member.is_trainable
            if full.requires_grad != is_trainable:
                full.requires_grad_(is_trainable)
            if is_trainable:
                num_trainable += 1
                if not member.is_hooked:
                    full.register_post_accumulate_grad_hook(_arrival_hook(self, member))
                    member.is_hooked = True
            member.show(full)
        self._num_trainable = num_trainable
        self.state = UNSHARDED

    def reshard(self, thin: Axis | None = None) -> None:
        """Register the shards; memory is given back once the next gather is issued (rule 3)."""
        if self.state is SHARDED or isinstance(self.state, Thinned):
            return
        self._settle_gather()
        for member in self.members:
            full = member.full
            if full is not None and full.requires_grad != member.was_trainable:
                member.freeze_or_thaw(full.requires_grad)  # while unsharded
            member.show(member.shard)
        self.state = SHARDED
        if thin is not None:
            self.require_thinnable()
            assert self._gatherer is not None
            with _outside_inference():
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
        if seam.observers:
            seam.hold(self.name, 0)
        return [*self._gatherer.release(), *self._extender.release()]

    def require_thinnable(self) -> None:
        """Raise unless the full parameters can be spread over fewer ranks."""
        if self._extended:
            raise UnsupportedError(
                f"{self.name}: resharding to fewer ranks needs plain parameters, found "
                f"'{self._extended[0].name}' with its own gather; pass reshard_after_forward=True."
            )

    def _shard_versions(self) -> list[int]:
        """Changes whenever an optimizer, or anyone else, has written to a shard.

        Taken at the start of a pass: what is gathered in it is as new as that, or newer.
        """
        return [member.version for member in self.members]

    # Gradients

    def gradient_arrived(self, member: Member) -> None:
        arrived = self.gradients.arrived
        arrived.add(member)
        if len(arrived) == self._num_trainable:
            self.on_gradients(self)

    @property
    def owes_reduction(self) -> bool:
        return self.gradients.are_owed(self.members, self.settings)

    def reduce(self) -> None:
        """Take the full gradients and start reducing them, or keep them if no sync is wanted."""
        with torch.no_grad():
            if not self.settings.requires_gradient_sync:
                self.gradients.keep(self.members, is_flat=self.flat is not None)
                return
            plans = [(self.layout, self._plain), (self.extension_layout, self._extended)]
            route = Route(
                self.name,
                self.topology,
                self.reduce_axis,
                self.collectives,
                self.all_reduce_hook,
                self.comm_hook,
            )
            holders = None if self.flat is None else self.flat.holders
            self.gradients.reduce(plans, route, self.settings, self.flow, holders)

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
            f"{m.name} {tuple(m.shape)} {str(m.dtype).removeprefix('torch.')}"
            f"{'' if m.is_trainable else ' frozen'}"
            for m in self.members
        )
        precision = "" if self.policy == MixedPrecisionPolicy() else f" in {self.policy}"
        return f"[{held}] over {self.topology!r}{precision}"

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self.members)} parameters, {type(self.state).__name__})"


def _arrival_hook(unit: Unit, member: Member) -> Callable[[torch.Tensor], None]:
    """Tells a unit of a gradient, without keeping it alive.

    The garbage collector does not see through the hooks of a tensor.
    """
    unit_ref, member_ref = weakref.ref(unit), weakref.ref(member)

    def arrived(_: torch.Tensor) -> None:
        unit, member = unit_ref(), member_ref()
        if unit is not None and member is not None:
            unit.gradient_arrived(member)

    return arrived


def _outside_inference() -> AbstractContextManager[object]:
    """Tensors made in inference mode could not be trained with later."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _ignore(unit: Unit) -> None:
    """Nobody listens."""
