"""One unit: parameters that are all-gathered and reduce-scattered together."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Protocol

import torch

from fullshard._torch import (
    current_transform,
    disable_torch_function,
    outside_transforms,
    shard_versions,
)
from fullshard.api import MixedPrecisionPolicy
from fullshard.comm.annotations import is_checked, unchecked
from fullshard.comm.collectives import collectives_for
from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.device import has_no_memory
from fullshard.errors import LifecycleError, MisuseError, UnsupportedError
from fullshard.layout import UnitLayout
from fullshard.trace import seam
from fullshard.trace.seam import Activity
from fullshard.unit.all_gather import InFlightAllGather, UnitAllGather
from fullshard.unit.arrangement import Arrangement
from fullshard.unit.context import AddressRanges, CommContext
from fullshard.unit.flat_param import FlatParams
from fullshard.unit.grads import UnitGrads
from fullshard.unit.param import ShardBuffers, ShardedParam
from fullshard.unit.reduction import Reduction
from fullshard.unit.registration import GradArrivals, Registration, Shown
from fullshard.unit.released import ReleasedParam
from fullshard.unit.settings import UnitComm, UnitSettings
from fullshard.unit.state import ABSENT, Absent, Arriving, Kept, Leaving, Present, State, Version
from fullshard.unit.store import Store


class UnitOwner(Protocol):
    """Whom a unit tells what happens to it: the hooks of its modules."""

    def grads_ready(self, unit: Unit) -> None:
        """All gradients that a listening unit waits for have arrived."""

    def read_again(self, unit: Unit) -> None:
        """A parameter is read that was released."""

    def before_reduce(self, unit: Unit, num_bytes: int) -> None:
        """Gradients are about to be reduced."""


class Summoned(Protocol):
    """What `summon_full_params` shows of a unit, and whether it does just now."""

    is_shown: bool

    def pause(self) -> None:
        """Let modules see what they see outside, if the unit may be trained meanwhile."""

    def resume(self) -> None:
        """Show the full parameters again."""


@dataclass(eq=False)
class Unit:
    """The parameters of one wrapper, or of one `fully_shard` call that share a mesh.

    Does what it is told to, and `hooks.py` says when. `arrangement` has the shards, `state` says
    what is in memory besides, and `registration` what modules see; there is none before the first
    unshard. `version` is that of the shards when they were last looked at, and `forward` the one
    that last did so (`CommContext.forward`). `flat` exists for the parameters of a wrapper.
    """

    name: str
    params: list[ShardedParam]
    mesh_info: MeshInfo
    policy: MixedPrecisionPolicy
    store: Store
    comm_ctx: CommContext
    settings: UnitSettings
    flat: FlatParams | None = None
    owner: UnitOwner | None = None
    state: State = ABSENT
    registration: Registration | None = None
    summoned: Summoned | None = None
    version: Version = field(default_factory=list)
    forward: object = None
    arrangement: Arrangement = field(init=False)
    comm: UnitComm = field(init=False)
    grads: UnitGrads = field(init=False)
    arrivals: GradArrivals = field(init=False)

    def __post_init__(self) -> None:
        device, axis = self.comm_ctx.device, self.mesh_info.shard
        default = collectives_for(axis.group, device.torch_device)
        self.comm = UnitComm(default, default, axis)
        self.grads = UnitGrads(self.mesh_info, self.store, device)
        self.arrivals = GradArrivals(self._grads_arrived)
        self.forward = self.comm_ctx.forward
        self._arrange()

    # What users and other rooms ask

    @property
    def layout(self) -> UnitLayout:
        """Of the parameters that the unit gathers itself."""
        return self.arrangement.layout

    @property
    def shard_buffers(self) -> ShardBuffers:
        """This rank's shards; raises if parameters are on meta."""
        if self.arrangement.shard_buffers is None:
            self.require_ready()
        assert self.arrangement.shard_buffers is not None
        return self.arrangement.shard_buffers

    @property
    def is_unsharded(self) -> bool:
        """Whether modules see the full parameters."""
        return self.registration is not None and self.registration.shown is Shown.FULLS

    @property
    def is_summoned(self) -> bool:
        """Whether `summon_full_params` shows the full parameters just now."""
        return self.summoned is not None and self.summoned.is_shown

    @property
    def is_released(self) -> bool:
        """Whether a stand-in takes the place of the full parameter, whose memory may be free.

        Whether a unit is released does not depend on this rank alone; whether it is free does.
        """
        return self.registration is not None and self.registration.stand_in is not None

    @property
    def is_large(self) -> bool:
        """Whether it is one large parameter (rule 15: large ones alone), also after ties."""
        return self.settings.stands_alone and len(self.params) == 1

    @property
    def num_trainable(self) -> int:
        """How many of the full parameters, as registered, take a gradient."""
        return 0 if self.registration is None else self.registration.num_trainable

    @property
    def has_frozen(self) -> bool:
        """Whether some of the full parameters, as registered, take no gradient."""
        return self.num_trainable < len(self.params)

    @property
    def is_saved(self) -> bool:
        """Whether autograd, or anyone else, holds the full parameter of a large unit to read it."""
        references = None if self.registration is None else self.registration.references
        return references is not None and references.is_saved(self.num_trainable)

    @property
    def full_bytes(self) -> int:
        """The memory of the full parameters, while there are any."""
        gather = None if isinstance(self.state, (Absent, Kept)) else self.arrangement.all_gather
        return 0 if gather is None else gather.full_bytes

    # Plan and shard buffers

    def replan(self) -> None:
        """Plan from the shards as they are now, and move them into new shard buffers."""
        self.reshard_now()
        self._arrange()

    def _arrange(self) -> None:
        self.registration = None
        device = self.comm_ctx.device.torch_device
        with torch.no_grad(), outside_modes():
            self.arrangement = Arrangement(
                self.params, self.flat, self.mesh_info, self.policy, self.store, device
            )
        self.grads.follow_lanes([*self.arrangement.grad_lanes()])

    def make_whole(self) -> None:
        """Make flat parameters whole, before parameters come or go (a collective)."""
        self.reshard_now()
        if self.flat is not None:
            self.flat.detach()
            self.flat.make_whole()

    def enter_forward(self) -> None:
        """Get ready, once, for the forward that has begun. By then, compute is under way."""
        if self.forward is not self.comm_ctx.forward:
            self.forward = self.comm_ctx.forward
            self.refresh()
            self.grads.release_unused_buffers()

    def refresh(self, *, plan_training: bool = False) -> None:
        """Notice shards that changed since they were gathered, or that a user replaced.

        With `plan_training`, also notice those that were frozen or unfrozen since the plan was
        made, or whose `grad_dtype` or own all-gather was set since then. But not while a state dict
        may be held, whose tensors would be left behind.
        """
        if self.is_summoned:
            return
        registration = self.registration
        if registration is not None:
            if registration.shown is Shown.FULLS:
                self.require_not_replaced()
            registration.is_followed = False
        if not self._holds_current():
            self.reshard_now()  # also memory that the last forward kept for a backward
        elif isinstance(self.state, Arriving) or self.is_unsharded or self.is_released:
            return
        is_current = self._follow_registered() and self.arrangement.has_shards()
        if plan_training and not self.arrangement.is_held:
            is_current = is_current and self.arrangement.is_planned_alike()
        if not is_current:
            self.replan()
            self.comm_ctx.all_gathers_follow_compute()  # compute has just written the new shards
            self._look()

    def _holds_current(self) -> bool:
        """Look at the shards; return whether memory does not hold an older version of them."""
        self._look()
        return isinstance(self.state, Absent) or self.state.version is self.version

    def _look(self) -> None:
        """Read the version of the shards. What is gathered after that is as new, or newer."""
        with disable_torch_function():
            found = list(map(shard_versions, self.params))
        if found != self.version:
            self.version = found

    def _follow_registered(self) -> bool:
        """Take over shards that a user registered; return whether all lie in their buffers."""
        registration = self.registration
        is_registered = registration is not None and registration.has_shards()
        if is_registered and all(param.is_in_buffer() for param in self.params):
            return True
        is_current = True
        for param in self.params:
            before = param.shard
            is_current = param.follow_registered() and is_current
            if param.shard is not before:
                self.registration = None
        return is_current

    def require_ready(self) -> None:
        """Raise unless every shard has memory on the right device."""
        device = self.store.device
        for param in self.params:
            local = param.current_local
            if has_no_memory(local):
                names = [each.name for each in self.params if has_no_memory(each.current_local)]
                raise LifecycleError(
                    f"{self.name}: FSDP parameters should be materialized from meta device before "
                    f"training, but the following were still on meta device: {names}; call "
                    f"module.to_empty(device='{device.type}') and initialize them, or load a state "
                    "dict with assign=True."
                )
            if local.device.type != device.type:
                offloading = "on CPU when enabling CPU offloading"
                raise LifecycleError(
                    f"{self.name}: FSDP parameters should be materialized "
                    f"{offloading if not self.store.is_on_device else f'on {device.type}'}, but "
                    f"'{param.name}' is on {local.device}; call module.to('{device.type}')."
                )

    def require_not_replaced(self) -> None:
        """Raise if a user replaced an original parameter between a forward and its backward."""
        found = self._find_replaced()
        if found is not None:
            self.forget_full()  # it may be what was replaced
            raise MisuseError(
                f"{found.name}: FSDP does not support changing the parameters between forward and "
                "backward for wrappers that keep them in between, and this one or its data was "
                "replaced; replace it before the forward or after the backward."
            )

    def _find_replaced(self) -> ShardedParam | None:
        return None if self.registration is None else self.registration.find_replaced()

    # Unshard and reshard

    def unshard(self) -> None:
        """Have the full parameters arrive, unless they are there or about to be, or summoned."""
        if self.is_summoned or self.is_unsharded:
            return
        if self.is_released:
            self.reshard_now()  # held memory would let this rank skip the all-gather
        if isinstance(self.state, Arriving):
            return
        if not isinstance(self.state, Absent) and not self._holds_current():
            self.reshard_now()
        if isinstance(self.state, (Leaving, Present)):
            if isinstance(self.state, Leaving):
                self.comm_ctx.stay(self)
            self.state = Present(self.state.version)
            self._show_fulls()
            return
        if self.arrangement.shard_buffers is None:
            self.require_ready()
        comm_ctx = self.comm_ctx
        with outside_modes(), comm_ctx.device.on(comm_ctx.streams.all_gather):
            if seam.observers:
                seam.begin(Activity.GATHER, self.name)
            in_flight = self._issue_all_gather(self.state)
            if seam.observers:
                seam.hold(self.name, self._all_gather.full_bytes)
                futures = (future for work in in_flight.works for future in work.futures)
                seam.end_after(futures, Activity.GATHER, self.name)
        self.state = Arriving(in_flight, self.version)
        comm_ctx.all_gather_issued(self)

    @property
    def _all_gather(self) -> UnitAllGather:
        made = self.arrangement.all_gather
        return self.arrangement.make_all_gather(self.comm_ctx) if made is None else made

    def _issue_all_gather(self, state: State) -> InFlightAllGather:
        comm, comm_ctx = self.comm, self.comm_ctx
        if isinstance(state, Kept):
            comm_ctx.device.wait(state.event)
            gather = self._all_gather
            return gather.start_from_subgroup(state.part, state.axis, comm.default, comm_ctx)
        return self._all_gather.start(comm.current, comm_ctx)

    def wait(self) -> None:
        """Finish the all-gather that is under way and register the full parameters."""
        state = self.state
        if not isinstance(state, Arriving):
            return
        self.comm_ctx.all_gather_used(self)
        if seam.observers:
            seam.begin(Activity.AWAIT_GATHER, self.name)
        with outside_modes():
            self._all_gather.finish(state.all_gather, self.comm_ctx)
        if self.arrangement.extended:
            self.registration = None  # full parameters may have been made anew
        if seam.observers:
            seam.end(Activity.AWAIT_GATHER, self.name)
        self.state = Present(state.version)
        self._show_fulls()

    def _show_fulls(self) -> None:
        registration = self.registration
        if registration is None:
            registration = self.registration = Registration(self.params, is_large=self.is_large)
        if not registration.is_followed:
            registration.follow_requires_grad()
            self.arrivals.hook(self.params)
        registration.show_fulls()
        for param in self.arrangement.annotated:
            assert param.annotations is not None
            assert param.full is not None
            param.annotations.restore(param.full)

    def join_all_gather(self, *, is_wanted: bool) -> None:
        """Take part in the all-gather, whatever the unit's state is: some rank needs it."""
        self.wait()
        if not self.is_unsharded:
            self.reshard_now()  # kept memory would let this rank skip the all-gather
            self.unshard()
            if not is_wanted:
                self.reshard_now()
            return
        # It writes the values that are already there.
        self.comm_ctx.all_gathers_follow_compute()
        with outside_modes():
            with self.comm_ctx.device.on(self.comm_ctx.streams.all_gather):
                in_flight = self._issue_all_gather(ABSENT)
            self._all_gather.finish(in_flight, self.comm_ctx)
        self.comm_ctx.num_collectives += 1

    def release(self) -> None:
        """Register a stand-in for the full parameter of a large unit, and free it unless held.

        Autograd's and Python's references tell.
        """
        owner, registration, state = self.owner, self.registration, self.state
        if registration is not None and registration.stand_in is not None:
            registration.show_stand_in(registration.stand_in)  # shards may have been shown
            return
        if not isinstance(state, Present) or owner is None:
            return
        assert registration is not None
        assert registration.references is not None
        is_held = registration.references.is_held(registration.num_trainable)
        registration.show_stand_in(
            ReleasedParam.of(self.params[0], partial(owner.read_again, self))
        )
        if not is_held:
            self._leave(state.version)
            self.comm_ctx.free_now(self)

    def reshard(self, subgroup: Axis | None = None) -> None:
        """Register the shards; memory is freed with the next all-gather (rule 3: freed late)."""
        self.wait()
        self.keep()
        if self.registration is not None:
            self.registration.stand_in = None
        if isinstance(self.state, Present):
            self._leave(self.state.version, subgroup)

    def _leave(self, version: Version, subgroup: Axis | None = None) -> None:
        """Let the memory of the full parameters leave, except for a part that a subgroup keeps."""
        then: Absent | Kept = ABSENT
        if subgroup is None:
            event = self.comm_ctx.device.record()
        else:
            self.require_plain_params()
            with outside_modes():
                part = self._all_gather.part_for_subgroup(subgroup)
            event = self.comm_ctx.device.record()
            then = Kept(version, part, subgroup, event)
        self.state = Leaving(version, event, then)
        self.comm_ctx.leave(self)

    def keep(self) -> None:
        """Register the shards, and keep what is in memory for a backward."""
        if self.registration is not None and self.registration.shown is not Shown.SHARDS:
            self.registration.show_shards()

    def reshard_now(self) -> None:
        """Register the shards and free all memory."""
        self.reshard()
        self.comm_ctx.free_now(self)
        self.state = ABSENT

    def let_go(self) -> tuple[AddressRanges, Any]:
        state, gather = self.state, self.arrangement.all_gather
        assert isinstance(state, Leaving)
        self.state = state.then
        if gather is None:
            return [], state.event
        if seam.observers:
            seam.hold(self.name, 0)
        return gather.free(keep_storage=self.settings.keep_unsharded_storage), state.event

    def forget_full(self) -> None:
        """Drop the full parameters and the memory of gradients; the next step makes them anew."""
        self.reshard_now()
        self.registration = None
        self.arrangement.forget_full()
        self.grads.forget_buffers()

    def abort(self) -> None:
        """Drop what a failed step left, and shard; never raises (rule 11: abort cannot raise)."""
        state = self.state
        if isinstance(state, Arriving):
            state.all_gather.abort()
            self.comm_ctx.all_gather_used(self)
            self._leave(state.version)  # shards are still registered
        if self._find_replaced() is not None:
            self.forget_full()
        self.reshard_now()
        self.grads.reset(self.params)
        self.arrivals.forget()

    def require_plain_params(self) -> None:
        """Raise unless the full parameters can be resharded to a subgroup."""
        if self.arrangement.extended:
            raise UnsupportedError(
                f"{self.name}: {self.arrangement.extended[0].name} has a gather of its own, "
                "which cannot be resharded to fewer ranks; pass reshard_after_forward=True."
            )

    # Gradients

    def listen(self) -> None:
        """Count every gradient from now on: nothing else tells when the last one is there."""
        if not self.arrivals.is_listening:
            self.arrivals.is_listening = True
            self.arrivals.hook(self.params)

    def _grads_arrived(self, number: int) -> None:
        if number == self.num_trainable:
            assert self.owner is not None
            self.owner.grads_ready(self)

    @property
    def has_full_grads(self) -> bool:
        """Whether there are full gradients that were not taken yet."""
        registration = self.registration
        return registration is not None and any(f.grad is not None for f in registration.fulls)

    @property
    def owes_kept_grads(self) -> bool:
        """Whether an earlier step kept gradients that are to be reduced now."""
        return self.grads.were_kept(self.params, self.settings)

    def reduce_scatter(self, *, with_zeros: bool = False) -> None:
        """Take the full gradients and start reducing them, or accumulate them without a sync."""
        self.arrivals.forget()
        with torch.no_grad() if torch.is_grad_enabled() else _NO_CONTEXT, outside_modes():
            if not self.settings.requires_gradient_sync:
                self.grads.accumulate(self.params, is_flat=self.flat is not None)
            else:
                comm, settings, comm_ctx = self.comm, self.settings, self.comm_ctx
                if with_zeros:  # other ranks may have gradients that this one lacks
                    settings = replace(settings, reduce_scatter_unused_params=True)
                reduction = Reduction.of(self.grads, self.name, comm, settings, comm_ctx)
                if reduction is not None:
                    self._start(reduction)

    def _start(self, reduction: Reduction) -> None:
        comm_ctx = self.comm_ctx
        if self.owner is not None:
            self.owner.before_reduce(self, reduction.num_bytes)
        if self.is_large:
            comm_ctx.make_room_for(reduction.num_bytes)
        else:
            comm_ctx.limit_reduce_scatters(self.settings.reduce_scatter_max_input_buffers)
        reduction.start()
        comm_ctx.add_reduce_scatter(reduction)
        if reduction.is_partial and not comm_ctx.device.has_streams:
            comm_ctx.limit_reduce_scatters(1)  # the next backward has to find these sums

    def set(self, **changes: Any) -> None:
        self.settings = replace(self.settings, **changes)

    def describe(self) -> str:
        """What must be the same on all ranks.

        The names of a wrapper's parameters are left out: modules that it ignores may shift them.
        """
        held = ", ".join(
            f"{'' if self.flat else f'{p.name} '}{tuple(p.shape)} "
            f"{str(p.dtype).removeprefix('torch.')}"
            f"{'' if p.is_trainable else ' frozen'}"
            for p in self.params
        )
        return f"[{held}] over {self.mesh_info!r}"

    def describe_settings(self) -> dict[str, str]:
        """The settings that must be the same on all ranks."""
        found: dict[str, Any] = {"store": type(self.store).__name__}
        for each in (self.policy, self.settings):
            found.update((entry.name, getattr(each, entry.name)) for entry in fields(each))
        for key in ("gather_wire", "reduce_wire", "replica_wire"):
            if callable(found[key]):  # functions with one name may choose differently
                found[key] = ", ".join(f"{p.name} {getattr(p.dtypes, key)}" for p in self.params)
        found["number of buckets"] = sum(len(lane.buckets) for lane in self.layout.lanes)
        return {name: getattr(value, "__qualname__", str(value)) for name, value in found.items()}

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self.params)} parameters, {type(self.state).__name__})"


_NO_CONTEXT = nullcontext()


def outside_modes() -> AbstractContextManager[object]:
    """Leave inference mode, whose tensors could not be trained with later, and functorch.

    And let `spmd_types` check the types of nothing that is done here.
    """
    is_inference, checks_types = torch.is_inference_mode_enabled(), is_checked()
    if not is_inference and not checks_types and current_transform() is None:
        return _NO_CONTEXT
    stack = ExitStack()
    if checks_types:
        stack.enter_context(unchecked())
    stack.enter_context(outside_transforms())
    stack.enter_context(torch.inference_mode(False))
    return stack
