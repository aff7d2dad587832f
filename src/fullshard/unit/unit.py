"""One unit: parameters that are gathered and reduced together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from fullshard.api import MixedPrecisionPolicy, OffloadPolicy
from fullshard.comm.collectives import Brought, Collectives, collectives_for
from fullshard.comm.topology import Axis, Topology
from fullshard.errors import LifecycleError, UnsupportedError
from fullshard.layout import CostModel, Entry, Split, UnitLayout, plan_unit
from fullshard.trace import seam
from fullshard.trace.activities import Activity
from fullshard.unit.extending import ExtensionGatherer
from fullshard.unit.flat_lanes import FlatLanes
from fullshard.unit.flow import Flow
from fullshard.unit.gathering import Gatherer, Gathering
from fullshard.unit.gradient_lane import GradientLane, GradientMessage, gradient_lanes
from fullshard.unit.gradients import Gradients
from fullshard.unit.homes import Homes, home_device
from fullshard.unit.listening import Listener
from fullshard.unit.member import Member
from fullshard.unit.register import Register
from fullshard.unit.route import AllReduceHook, CommHook, Route
from fullshard.unit.settings import Settings
from fullshard.unit.states import SHARDED, UNSHARDED, State, Thinned, Unsharded, Unsharding


class Unit:
    """The parameters of one wrapper, or of one `fully_shard` call that share a mesh.

    Owns homes, slab and gradients, and changes state when told to; it does not know when.
    Of a unit that listens, `on_gradients` is called when the last trainable parameter has its
    gradient, and before that when one has that fills a message.
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
        self.state: State = SHARDED
        self.default_collectives = collectives_for(topology.shard.group, flow.device.torch_device)
        self.collectives: Collectives = self.default_collectives
        self.reduce_axis = topology.shard
        self.all_reduce_hook: AllReduceHook | None = None
        self.comm_hook: CommHook | None = None
        self.on_gradients: Callable[[Unit, GradientMessage | None], None] = _ignore
        self.gradients = Gradients(topology, policy, offload)
        self.is_held = False
        self.is_summoned = False
        self.flat = flat
        self._num_trainable = 0
        self._listener = Listener(self._heard)
        self._versions: list[int] = []
        self._gatherer: Gatherer | None = None
        self._register: Register | None = None
        self._listens_for_last = False
        self._is_training_followed = False
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
        self._register = None
        self.gradients.plan_anew(self._gradient_lanes)
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
        axis = self.topology.shard
        entries = [
            Entry(
                m.name,
                m.split if isinstance(m.split, Split) else Split(m.split.shape, None, 1),
                m.stages(self.policy, is_alone=axis.is_single),
                m.is_trainable,
            )
            for m in members
        ]
        cost = CostModel.of_device(self.flow.device.torch_device.type)
        return plan_unit(entries, axis.size, cost, is_flat=self.flat is not None)

    def refresh(self, *, plan_training: bool = False) -> None:
        """Notice shards that changed since they were gathered, or that a user replaced.

        With `plan_training`, also those that were frozen or thawed since the plan was made: not
        while a state dict may be held, since its tensors would be left behind.
        """
        self._require_not_summoned()
        self._is_training_followed = False
        versions = self._shard_versions()
        if self.state is not SHARDED:
            if self._versions == versions:
                return
            self.reshard_now()
        self._versions = versions
        is_current = self._follow_registered()
        if self.flat is not None and self._homes is not None:
            is_current = is_current and self.flat.are_current(self._homes)
        if plan_training and not self.is_held:
            trained = [m.is_trainable for m in self.members]
            is_current = is_current and trained == self._is_trained_as_planned
        if not is_current:
            self.rehome()
            self._versions = self._shard_versions()

    def _follow_registered(self) -> bool:
        """Take over shards that a user registered; whether all of them look at their homes."""
        register = self._register
        is_shown = register is not None and register.shows_shards()
        if is_shown and all(member.is_at_home() for member in self.members):
            return True
        is_current = True
        for member in self.members:
            if not member.is_current():
                self._register = None
                self.gradients.plan_anew(self._gradient_lanes)
                member.follow_registered()
                is_current = member.came_back() and is_current
        return is_current

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
                self._register = None  # it may have made full parameters anew
        if seam.observers:
            seam.end(Activity.AWAIT_GATHER, self.name)
        self._register_full()

    def _register_full(self) -> None:
        register = self._register
        if register is None:
            register = self._register = Register(self.members)
            self._is_training_followed = False
        if not self._is_training_followed:
            self._num_trainable = register.follow_training()
            self._is_training_followed = True
            self._listener.follow(self.members)
        register.show_fulls()
        self.state = UNSHARDED

    def reshard(self, thin: Axis | None = None) -> None:
        """Register the shards; memory is given back once the next gather is issued (rule 3)."""
        if self.state is SHARDED or isinstance(self.state, Thinned):
            return
        self.wait()
        assert self._register is not None  # made when the full parameters were shown
        self._register.show_shards()
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
        if self._register is not None:
            return self._register.versions()
        return [member.version for member in self.members]

    # Gradients

    def listen(self) -> None:
        """Be told of every gradient from now on: nothing else says when the last one is here."""
        self._listens_for_last = True
        self._listener.listen(self.members)

    def listen_for_large(self) -> None:
        """Be told of gradients if some are large enough not to wait for the others."""
        if self.flow.device.is_ordered and self.gradients.large:
            self._listener.listen(self.members)

    def _heard(self, member: Member, is_last: bool) -> None:
        if is_last and self._listens_for_last:
            self.on_gradients(self, None)
        elif self.settings.requires_gradient_sync and self.flow.device.is_ordered:
            message = self.gradients.large.get(member)
            if message is not None:
                self.on_gradients(self, message)

    @property
    def has_gradients(self) -> bool:
        """Whether full gradients are there that were not taken yet."""
        return self._register is not None and self._register.has_gradients

    @property
    def owes_kept_gradients(self) -> bool:
        """Whether an earlier step kept gradients that are to be reduced now."""
        return self.gradients.were_kept(self.members, self.settings)

    def _gradient_lanes(self) -> list[GradientLane]:
        rank = self.topology.shard.rank
        holders = dict(enumerate(self.flat.holders)) if self.flat is not None else {}
        return [
            *gradient_lanes(self.layout, self._plain, rank, holders.get),
            *gradient_lanes(self.extension_layout, self._extended, rank, lambda _: None),
        ]

    def reduce(self, only: GradientMessage | None = None) -> None:
        """Take the full gradients and start reducing them, or keep them if no sync is wanted."""
        if only is None:
            self._listener.begin_anew()
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
            if not self.settings.requires_gradient_sync:
                self.gradients.keep(self.members, is_flat=self.flat is not None)
                return
            route = Route(
                self.name,
                self.topology,
                self.reduce_axis,
                self.collectives,
                self.all_reduce_hook,
                self.comm_hook,
            )
            self.gradients.reduce(route, self.settings, self.flow, only)

    def forget_gradients(self) -> None:
        """Drop everything that a failed step left behind, also gradients that it created."""
        self.gradients.forget(self.members)
        self._listener.begin_anew()

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


_AS_IT_IS = nullcontext()


def _outside_inference() -> AbstractContextManager[object]:
    """Tensors made in inference mode could not be trained with later."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


def _ignore(unit: Unit, message: GradientMessage | None) -> None:
    """Nobody listens."""
