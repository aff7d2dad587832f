"""One unit: parameters that are all-gathered and reduce-scattered together."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from fullshard._torch import (
    current_transform,
    disable_torch_function,
    outside_transforms,
    python_references_of_graph,
    shard_versions,
    storage_key,
    storage_references,
    tensor_references,
    to_local,
)
from fullshard.api import MixedPrecisionPolicy
from fullshard.comm.collectives import collectives_for
from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.device import has_no_memory, type_of
from fullshard.errors import LifecycleError, MisuseError, UnsupportedError
from fullshard.layout import CostModel, DtypePlan, ParamSpec, UnitLayout, plan_unit
from fullshard.trace import seam
from fullshard.trace.seam import Activity
from fullshard.unit.all_gather import ExtensionAllGather, InFlightAllGather, UnitAllGather
from fullshard.unit.context import AddressRanges, CommContext
from fullshard.unit.extensions import Extension
from fullshard.unit.flat_param import FlatParams, OrigParamSlice
from fullshard.unit.param import ShardBuffers, ShardedParam
from fullshard.unit.reduction import GradLane, Reduction, UnitGrads
from fullshard.unit.released import ReleasedParam
from fullshard.unit.settings import UnitComm, UnitSettings
from fullshard.unit.store import Store

# The states of a unit; each carries what exists only in it.


@dataclass(frozen=True, slots=True)
class Sharded:
    """Shards are registered; the full buffer is free, or about to be."""


@dataclass(frozen=True, slots=True)
class ReshardedToSubgroup:
    """Shards are registered; the full buffer is split over a subgroup of the ranks."""

    kept: torch.Tensor
    axis: Axis
    event: Any


@dataclass(frozen=True, slots=True)
class Unsharding:
    """Shards are registered; the all-gather is under way."""

    all_gather: InFlightAllGather


@dataclass(frozen=True, slots=True)
class Unsharded:
    """Full parameters are registered and may be read on the current stream."""


@dataclass(frozen=True, slots=True)
class Released:
    """Stand-ins for the full parameters are registered; the full buffer is free, unless it is held.

    Whether a large unit is released does not depend on this rank alone; whether it is free does.
    """

    is_free: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """Shards are registered; the full parameters are kept for a backward."""


State = Sharded | ReshardedToSubgroup | Unsharding | Unsharded | Released | Kept

SHARDED = Sharded()
UNSHARDED = Unsharded()
KEPT = Kept()


class Registration:
    """Registers the shards of a unit at their modules, or its full parameters.

    Everything that does not change from step to step is looked up once (rule 7): code that changes
    where parameters are registered, or as what, makes a new `Registration`.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self.fulls: list[nn.Parameter] = [param.full for param in params if param.full is not None]
        self._held = [param.param for param in params]
        self._trainable: list[bool] = []
        self._originals = [
            (param, param.full, storage_key(to_local(param.full).untyped_storage()))
            for param in params
            if isinstance(param, OrigParamSlice) and param.full is not None
        ]
        self._places = [
            (location.registry, location.name, param.shard, full)
            for param, full in zip(params, self.fulls, strict=True)
            for location in param.locations
        ]

    def follow_requires_grad(self) -> int:
        """Set `requires_grad` of full parameters as on the shards; return how many require it."""
        with disable_torch_function():
            self._trainable = trainable = [param.requires_grad for param in self._held]
        if trainable != [full.requires_grad for full in self.fulls]:
            for full, is_trainable in zip(self.fulls, trainable, strict=True):
                full.requires_grad_(is_trainable)
        return sum(trainable)

    def has_shards(self) -> bool:
        """Whether every module sees the shard that was registered there."""
        return all(registry.get(name) is shard for registry, name, shard, _ in self._places)

    def find_replaced(self, *, is_unsharded: bool) -> ShardedParam | None:
        """A wrapper's original parameter that a user replaced since it was registered."""
        for param, full, memory in self._originals:
            expected = full if is_unsharded else param.shard
            is_same = all(location.get() is expected for location in param.locations)
            if is_unsharded:
                # Its storage is resized, and stays the same.
                is_same &= storage_key(to_local(full).untyped_storage()) == memory
            else:
                is_same &= expected.numel() == param.local.numel()
            if not is_same:
                return param
        return None

    def register_fulls(self) -> None:
        for registry, name, _, full in self._places:
            registry[name] = full

    def register(self, released: ReleasedParam) -> None:
        """Register the stand-in for the only full parameter."""
        for registry, name, *_ in self._places:
            registry[name] = released

    def register_shards(self) -> None:
        """Register the shards; take over the `requires_grad` that users set on full parameters."""
        trainable = [full.requires_grad for full in self.fulls]
        if trainable != self._trainable:
            for param, before, after in zip(self._held, self._trainable, trainable, strict=True):
                if before != after:
                    param.requires_grad_(after)
            self._trainable = trainable
        for registry, name, shard, _ in self._places:
            registry[name] = shard


class UnitOwner(Protocol):
    """Whom a unit tells what happens to it: the hooks of its modules."""

    def grads_ready(self, unit: Unit) -> None:
        """All gradients that a listening unit waits for have arrived."""

    def read_again(self, unit: Unit) -> None:
        """A parameter is read that was released."""

    def before_reduce(self, unit: Unit, num_bytes: int) -> None:
        """Gradients are about to be reduced."""


@dataclass(eq=False)
class Unit:
    """The parameters of one wrapper, or of one `fully_shard` call that share a mesh.

    Owns shard buffers, full buffer and gradients, and changes `state` when told to; `hooks.py`
    says when. `flat` exists for the parameters of a wrapper. `stands_alone` says that it was made
    for a single large parameter (rule 15), and `is_unread` that the next backward does not read
    it. `is_held` says that a state dict may hold the shards, `is_summoned` that
    `summon_full_params` shows the full parameters. A unit that listens tells its `owner` once
    every trainable parameter has its gradient; `_arrived` are those that have.
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
    stands_alone: bool = False
    is_unread: bool = False
    state: State = SHARDED
    is_held: bool = False
    is_summoned: bool = False
    _is_listening: bool = False
    _is_entered: bool = True
    num_trainable: int = 0
    _is_training_followed: bool = False
    _all_gather: UnitAllGather | None = None
    _registration: Registration | None = None

    def __post_init__(self) -> None:
        device, axis = self.comm_ctx.device, self.mesh_info.shard
        default = collectives_for(axis.group, device.torch_device)
        self.comm = UnitComm(default, default, axis)
        self.grads = UnitGrads(self.mesh_info, self.store, device)
        self._arrived: set[ShardedParam] = set()
        self._versions: list[tuple[int, int]] = []
        self._references = (0, 0, 0)
        self.replan()

    # Plan and shard buffers

    @property
    def is_unsharded(self) -> bool:
        return self.state is UNSHARDED

    @property
    def is_kept(self) -> bool:
        return self.state is KEPT

    @property
    def is_released(self) -> bool:
        return isinstance(self.state, Released)

    @property
    def is_large(self) -> bool:
        """Whether it is a single large parameter, also after ties were settled."""
        return self.stands_alone and len(self.params) == 1

    @property
    def shard_buffers(self) -> ShardBuffers:
        """This rank's shards; raises if parameters are on meta."""
        if self._shard_buffers is None:
            self.require_ready()
        assert self._shard_buffers is not None
        return self._shard_buffers

    @property
    def has_frozen(self) -> bool:
        """Whether some of the full parameters, as registered, take no gradient."""
        return self.num_trainable < len(self.params)

    def replan(self) -> None:
        """Plan from the shards as they are now, and move them into new shard buffers."""
        self.reshard_now()
        self._all_gather = self._registration = None
        for param in self.params if self.flat is None else ():
            extension = Extension.of(param.name, param.current_local)
            if (extension is None) != (param.extension is None):
                param.extension = extension
        plain = self._plain = [p for p in self.params if p.extension is None]
        self._extended = [p for p in self.params if p.extension is not None]
        if self.flat is not None:
            self.flat.detach()
        self.layout = self._plan(plain)
        if self.flat is not None:
            self.flat.follow_layout(self.layout, plain)
        self.extension_layout = self._plan(self._extended)
        for param in self._extended:
            param.set_local(param.current_local)
        self._shard_buffers: ShardBuffers | None = None
        for param in self.params:
            param.full = None
        if not any(has_no_memory(param.current_local) for param in plain):
            with torch.no_grad(), _outside_modes():
                rank = self.mesh_info.shard.rank
                shards = ShardBuffers(self.layout, plain, self.store, rank)
                self._shard_buffers = shards
                if self.flat is not None:
                    self.flat.attach(self.layout, plain, shards)
        self._planned = self._planned_by()
        self.grads.follow_lanes([*self._grad_lanes()])

    def make_whole(self) -> None:
        """Make flat parameters whole, before parameters come or go (a collective)."""
        self.reshard_now()
        if self.flat is not None:
            self.flat.detach()
            self.flat.make_whole()

    def _plan(self, params: Sequence[ShardedParam]) -> UnitLayout:
        axis, policy, specs = self.mesh_info.shard, self.policy, []
        is_flat = self.flat is not None
        trained = [
            param.grad_dtype or self._param_dtype(param) or param.dtype
            for param in self.params
            if param.is_trainable
        ]
        reduce_dtype = DtypePlan.unit_reduce_dtype(policy.reduce_dtype, trained, is_flat=is_flat)
        wires = policy.gather_wire, policy.reduce_wire
        if axis.is_single:
            wires = None, None  # one rank sends nothing
        for param in params:
            plan = DtypePlan.of(param.dtype, self._param_dtype(param), reduce_dtype, *wires)
            if param.grad_dtype != param.dtype:
                plan = replace(plan, grad=param.grad_dtype)
            param.dtypes = plan
            specs.append(ParamSpec(param.name, param.split, param.dtypes, param.is_trainable))
        cost = CostModel.of_device(type_of(self.comm_ctx.device.torch_device))
        return plan_unit(specs, axis.size, cost, is_flat=is_flat)

    def _param_dtype(self, param: ShardedParam) -> torch.dtype | None:
        return None if param.keeps_dtype else self.policy.param_dtype

    def _planned_by(self) -> list[tuple[bool, torch.dtype | None, bool]]:
        """What users may change that the plan depends on, beside the shards' memory."""
        return [
            (p.is_trainable, p.grad_dtype, hasattr(p.current_local, "fsdp_pre_all_gather"))
            for p in self.params
        ]

    def begin_forward(self) -> None:
        """Note that a forward begins, which may reach this unit."""
        self._is_entered = self.is_unread = False

    def enter_forward(self) -> None:
        """Get ready, once, for the forward that has begun. By then, compute is under way."""
        if not self._is_entered:
            self._is_entered = True
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
        if self.is_unsharded:
            self.require_not_replaced()
        self._is_training_followed = False
        versions = self._shard_versions()
        if self._versions != versions:
            self.reshard_now()  # also memory that the last forward kept for a backward
        elif self.state not in (SHARDED, KEPT):
            return
        self._versions = versions
        is_current = self._follow_registered()
        if self.flat is not None and self._shard_buffers is not None:
            is_current = is_current and self.flat.are_current(self._shard_buffers)
        if plan_training and not self.is_held:
            is_current = is_current and self._planned_by() == self._planned
        if not is_current:
            self.replan()
            self.comm_ctx.all_gathers_follow_compute()  # compute has just written the new shards
            self._versions = self._shard_versions()

    def _follow_registered(self) -> bool:
        """Take over shards that a user registered; return whether all lie in their buffers."""
        registration = self._registration
        is_registered = registration is not None and registration.has_shards()
        if is_registered and all(param.is_in_buffer() for param in self.params):
            return True
        is_current = True
        for param in self.params:
            before = param.shard
            is_current = param.follow_registered() and is_current
            if param.shard is not before:
                self._registration = None
        return is_current

    def _shard_versions(self) -> list[tuple[int, int]]:
        """Versions, which change whenever an optimizer, or anyone else, writes to a shard.

        They are read when a forward reaches the unit: what it gathers is as new as that, or newer.
        """
        with disable_torch_function():
            return list(map(shard_versions, self.params))

    def require_ready(self) -> None:
        """Raise unless every shard has memory on the right device."""
        device = self.store.device
        for param in self.params:
            local = param.current_local
            if has_no_memory(local):
                raise LifecycleError(
                    f"{self.name}: parameters must have values before they are used, found "
                    f"'{param.name}' on meta; call module.to_empty(device='{device.type}') and "
                    "initialise it, or load a state dict with assign=True."
                )
            if local.device.type != device.type:
                raise LifecycleError(
                    f"{self.name}: parameters must be on {device.type}, found '{param.name}' on "
                    f"{local.device}; call module.to('{device.type}')."
                )

    def require_not_replaced(self) -> None:
        """Raise if a user replaced an original parameter between a forward and its backward."""
        found = self._find_replaced()
        if found is not None:
            self.forget_full()  # it may be what was replaced
            raise MisuseError(
                f"{found.name}: a wrapper's parameter must stay the same tensor between a forward "
                "and its backward, found it or its data replaced; replace it before the forward "
                "or after the backward."
            )

    def _find_replaced(self) -> ShardedParam | None:
        if self._registration is None:
            return None
        return self._registration.find_replaced(is_unsharded=self.is_unsharded)

    # Unshard and reshard

    def unshard(self) -> None:
        """Issue the all-gather, unless the unit is unsharded or about to be, or summoned."""
        if self.is_summoned:
            return
        if self.is_released:
            self.reshard_now()  # held memory would let this rank skip the all-gather
        state, comm_ctx = self.state, self.comm_ctx
        if isinstance(state, (Unsharding, Unsharded)):
            return
        if state is KEPT:
            self._register_fulls()
            return
        if comm_ctx.is_free_pending(self) or isinstance(state, ReshardedToSubgroup):
            if self._versions != self._shard_versions():
                comm_ctx.free_now(self)
                state = SHARDED  # the shards have changed since the subgroup kept its parts
            elif comm_ctx.cancel_free(self):
                self._register_fulls()
                return
        if self._shard_buffers is None:
            self.require_ready()
        with _outside_modes(), comm_ctx.device.on(comm_ctx.streams.all_gather):
            if seam.observers:
                seam.begin(Activity.GATHER, self.name)
            in_flight = self._issue_all_gather(state)
            if seam.observers:
                assert self._all_gather is not None
                seam.hold(self.name, self._all_gather.full_bytes)
                futures = (future for work in in_flight.works for future in work.futures)
                seam.end_after(futures, Activity.GATHER, self.name)
        self.state = Unsharding(in_flight)
        comm_ctx.all_gather_issued(self)

    def _issue_all_gather(self, state: State) -> InFlightAllGather:
        comm_ctx = self.comm_ctx
        gather = self._all_gather
        if gather is None:
            extensions = ExtensionAllGather(self._extended, self.mesh_info, self.policy)
            gather = self._all_gather = UnitAllGather(
                self.layout,
                self.shard_buffers,
                self._plain,
                self.mesh_info.shard,
                self.store,
                comm_ctx,
                extensions,
            )
        if isinstance(state, ReshardedToSubgroup):
            comm_ctx.device.wait(state.event)
            return gather.start_from_subgroup(state.kept, state.axis, self.comm.default, comm_ctx)
        return gather.start(self.comm.current, comm_ctx)

    def wait(self) -> None:
        """Finish the all-gather that is under way and register the full parameters."""
        state = self.state
        if not isinstance(state, Unsharding):
            return
        assert self._all_gather is not None
        self.comm_ctx.all_gather_used(self)
        if seam.observers:
            seam.begin(Activity.AWAIT_GATHER, self.name)
        with _outside_modes():
            self._all_gather.finish(state.all_gather, self.comm_ctx)
        if self._extended:
            self._registration = None  # full parameters may have been made anew
        if seam.observers:
            seam.end(Activity.AWAIT_GATHER, self.name)
        self._register_fulls()

    def _register_fulls(self) -> None:
        registration = self._registration
        if registration is None:
            registration = self._registration = Registration(self.params)
            self._is_training_followed = False
            registration.register_fulls()
            self._references = self._full_references()
        if not self._is_training_followed:
            self.num_trainable = registration.follow_requires_grad()
            self._is_training_followed = True
            self._hook_fulls()
        registration.register_fulls()
        self.state = UNSHARDED

    def join_all_gather(self, *, is_wanted: bool) -> None:
        """Take part in the all-gather, whatever the unit's state is: some rank needs it."""
        self.wait()
        if not self.is_unsharded:
            self.reshard_now()  # kept memory would let this rank skip the all-gather
            self.unshard()
            if not is_wanted:
                self.reshard_now()
            return
        # The same values arrive where they already are.
        self.comm_ctx.all_gathers_follow_compute()
        with _outside_modes():
            with self.comm_ctx.device.on(self.comm_ctx.streams.all_gather):
                in_flight = self._issue_all_gather(SHARDED)
            assert self._all_gather is not None
            self._all_gather.finish(in_flight, self.comm_ctx)
        self.comm_ctx.num_collectives += 1

    def _full_references(self) -> tuple[int, int, int]:
        """References to a large unit's full parameter: in C++, to its memory, and in Python."""
        full = self.params[0].full if self.is_large else None
        if full is None:
            return 0, 0, 0
        memory = storage_references(full.untyped_storage())
        return tensor_references(full), memory, sys.getrefcount(full)

    @property
    def is_saved(self) -> bool:
        """Whether autograd, or anyone else, holds the full parameter of a large unit to read it.

        If it is trained, its `AccumulateGrad` holds it once, to write to `grad`.
        """
        held, held_memory, _ = self._full_references()
        before, before_memory, _ = self._references
        return held > before + self.num_trainable or held_memory > before_memory

    def release(self) -> None:
        """Register a stand-in for the full parameter of a large unit, and free it unless held.

        Autograd's and Python's references tell: a graph that looked it up has one for its gradient.
        """
        owner, registration = self.owner, self._registration
        if not self.is_unsharded or owner is None:
            return
        assert registration is not None
        held, _, held_in_python = self._full_references()
        before, _, before_in_python = self._references
        in_graph = python_references_of_graph() if held > before else 0
        is_free = not self.is_saved and held_in_python <= before_in_python + in_graph
        registration.register(ReleasedParam.of(self.params[0], partial(owner.read_again, self)))
        if is_free:
            self.comm_ctx.free_later(self, self._free)
            self.comm_ctx.free_now(self)
        self.state = Released(is_free)

    @property
    def full_bytes(self) -> int:
        """The memory of the full parameters, while there are any."""
        gather = None if self.state in (SHARDED, Released(is_free=True)) else self._all_gather
        return 0 if gather is None else gather.full_bytes

    def reshard(self, subgroup: Axis | None = None) -> None:
        """Register the shards; memory is freed once another all-gather is issued (rule 3)."""
        if self.state is SHARDED or isinstance(self.state, ReshardedToSubgroup):
            return
        self.wait()
        assert self._registration is not None  # made when the full parameters were registered
        self._registration.register_shards()
        is_free = isinstance(self.state, Released) and self.state.is_free
        self.state = SHARDED
        if is_free:
            return
        if subgroup is not None:
            self.require_plain_params()
            assert self._all_gather is not None
            with _outside_modes():
                kept = self._all_gather.part_for_subgroup(subgroup)
            self.state = ReshardedToSubgroup(kept, subgroup, self.comm_ctx.device.record())
        self.comm_ctx.free_later(self, self._free)

    def keep(self) -> None:
        """Register the shards of an unsharded unit, and keep the full parameters for a backward."""
        if self.is_unsharded and self._registration is not None:
            self._registration.register_shards()
            self.state = KEPT

    def reshard_now(self) -> None:
        """Register the shards and free all memory."""
        self.reshard()
        self.state = SHARDED
        self.comm_ctx.free_now(self)

    def forget_full(self) -> None:
        """Drop the full parameters and the memory of gradients; the next step makes them anew."""
        self.reshard_now()
        self._all_gather = self._registration = None
        for param in self.params:
            param.full = None
        self.grads.forget_buffers()

    def abort(self) -> None:
        """Shard the unit and drop what a failed step left; never raises (rule 11)."""
        state = self.state
        if isinstance(state, Unsharding):
            state.all_gather.abort()
            self.comm_ctx.all_gather_used(self)
            self.state = SHARDED  # shards are still registered
            self.comm_ctx.free_later(self, self._free)
        if self._find_replaced() is not None:
            self.forget_full()
        self.reshard_now()
        self.grads.reset(self.params)
        self._arrived.clear()

    def _free(self) -> AddressRanges:
        if self._all_gather is None:
            return []
        if seam.observers:
            seam.hold(self.name, 0)
        return self._all_gather.free(keep_storage=self.settings.keep_unsharded_storage)

    def require_plain_params(self) -> None:
        """Raise unless the full parameters can be resharded to a subgroup."""
        if self._extended:
            raise UnsupportedError(
                f"{self.name}: resharding to fewer ranks needs plain parameters, found "
                f"'{self._extended[0].name}' with its own gather; pass reshard_after_forward=True."
            )

    # Gradients

    def listen(self) -> None:
        """Count every gradient from now on: nothing else tells when the last one is there."""
        if not self._is_listening:
            self._is_listening = True
            self._hook_fulls()

    def _hook_fulls(self) -> None:
        """Hook full parameters that are new, or newly trainable, once the unit listens.

        Most units need no hooks: when the gradients of their inputs are there, so are those of
        their parameters. A unit whose inputs take no gradient has nothing else to go by.
        """
        for param in self.params if self._is_listening else ():
            full = param.full
            if full is not None and full.requires_grad and not param.is_hooked:
                # Weak references: the garbage collector does not see through a tensor's hooks.
                full.register_post_accumulate_grad_hook(
                    _arrival_hook(weakref.ref(self), weakref.ref(param))
                )
                param.is_hooked = True

    def grad_arrived(self, param: ShardedParam) -> None:
        self._arrived.add(param)
        if len(self._arrived) == self.num_trainable:
            assert self.owner is not None
            self.owner.grads_ready(self)

    @property
    def has_full_grads(self) -> bool:
        """Whether there are full gradients that were not taken yet."""
        registration = self._registration
        return registration is not None and any(f.grad is not None for f in registration.fulls)

    @property
    def owes_kept_grads(self) -> bool:
        """Whether an earlier step kept gradients that are to be reduced now."""
        return self.grads.were_kept(self.params, self.settings)

    def _grad_lanes(self) -> Iterator[GradLane]:
        rank = self.mesh_info.shard.rank
        flat = dict(enumerate(self.flat.holders)) if self.flat is not None else {}
        for index, lane in enumerate(self.layout.lanes):
            yield GradLane(self.layout, lane, self._plain, rank, flat.get(index))
        for lane in self.extension_layout.lanes:
            yield GradLane(self.extension_layout, lane, self._extended, rank)

    def reduce_scatter(self, *, with_zeros: bool = False) -> None:
        """Take the full gradients and start reducing them, or accumulate them without a sync."""
        self._arrived.clear()
        with torch.no_grad() if torch.is_grad_enabled() else _NO_CONTEXT, _outside_modes():
            if not self.settings.requires_gradient_sync:
                self.grads.accumulate(self.params, is_flat=self.flat is not None)
            else:
                comm, settings, comm_ctx = self.comm, self.settings, self.comm_ctx
                if with_zeros:  # other ranks may have gradients that this one lacks
                    settings = replace(settings, reduce_scatter_unused_params=True)
                reduction = self.grads.take(self.name, comm, settings, comm_ctx)
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
        num_buckets = sum(len(lane.buckets) for lane in self.layout.lanes)
        return f"[{held}] over {self.mesh_info!r} in {num_buckets} buckets"

    def describe_settings(self) -> dict[str, str]:
        """The settings that must be the same on all ranks."""
        found: dict[str, Any] = {"store": type(self.store).__name__}
        for each in (self.policy, self.settings):
            found.update((entry.name, getattr(each, entry.name)) for entry in fields(each))
        return {name: getattr(value, "__qualname__", str(value)) for name, value in found.items()}

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self.params)} parameters, {type(self.state).__name__})"


def _arrival_hook(
    unit_ref: weakref.ref[Unit], param_ref: weakref.ref[ShardedParam]
) -> Callable[[torch.Tensor], None]:
    def arrived(_: torch.Tensor) -> None:
        unit, param = unit_ref(), param_ref()
        if unit is not None and param is not None:
            unit.grad_arrived(param)

    return arrived


_NO_CONTEXT = nullcontext()


def _outside_modes() -> AbstractContextManager[object]:
    """Leave inference mode, whose tensors could not be trained with later, and functorch."""
    is_inference = torch.is_inference_mode_enabled()
    if not is_inference and current_transform() is None:
        return _NO_CONTEXT
    stack = ExitStack()
    stack.enter_context(outside_transforms())
    stack.enter_context(torch.inference_mode(False))
    return stack
