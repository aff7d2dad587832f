"""What a unit may be; each state carries what exists only in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from fullshard.api import MixedPrecisionPolicy, OffloadPolicy
from fullshard.comm.collectives import Collectives, CustomCollectives, collectives_for
from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.device import fast_attributes
from fullshard.errors import LifecycleError, UnsupportedError
from fullshard.layout import CostModel, ParamSpec, Split, UnitLayout, plan_unit
from fullshard.trace import seam
from fullshard.trace.seam import Activity
from fullshard.unit.all_gather import ExtensionAllGather, InFlightAllGather, UnitAllGather
from fullshard.unit.context import CommContext
from fullshard.unit.flat_param import FlatParams
from fullshard.unit.param import ShardBuffers, ShardedParam, shard_device
from fullshard.unit.reduce_scatter import (
    AllReduceHook,
    CommHook,
    GradBucket,
    Gradients,
    GradLane,
    Route,
    grad_lanes,
)
from fullshard.unit.settings import Settings


@dataclass(frozen=True, slots=True)
class Sharded:
    """Shards are registered; the slab is empty, or about to be."""


@dataclass(frozen=True, slots=True)
class ReshardedToSubgroup:
    """Shards are registered; the full parameters are spread over a smaller group of ranks."""

    kept: torch.Tensor
    axis: Axis
    event: Any


@dataclass(frozen=True, slots=True)
class Unsharding:
    """Shards are registered; the gather is under way."""

    gathering: InFlightAllGather
    extension: InFlightAllGather | None


@dataclass(frozen=True, slots=True)
class Unsharded:
    """Full parameters are registered and may be read on the current stream."""


State = Sharded | ReshardedToSubgroup | Unsharding | Unsharded

SHARDED = Sharded()
UNSHARDED = Unsharded()


class Register:
    """Shows modules the shards of a unit, or its full parameters.

    Everything that does not change from step to step is looked up once (rule 7): whoever changes
    where members are registered, or as what, makes a new one.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self.params = [sharded_param.param for sharded_param in params]
        self.fulls = [_made(sharded_param) for sharded_param in params]
        self._params = list(params)
        self._written = [(sharded_param.param, sharded_param.local) for sharded_param in params]
        self._trained: list[bool] = []
        self._places = [
            (location.registry, location.name, sharded_param.shard, full)
            for sharded_param, full in zip(params, self.fulls, strict=True)
            for location in sharded_param.locations
        ]

    def follow_training(self) -> int:
        """Let full parameters be trained as the shards are; how many are."""
        with fast_attributes():
            self._trained = trained = [param.requires_grad for param in self.params]
        if trained != [full.requires_grad for full in self.fulls]:
            for full, is_trained in zip(self.fulls, trained, strict=True):
                full.requires_grad_(is_trained)
        return sum(trained)

    def versions(self) -> list[int]:
        """Change whenever an optimizer, or anyone else, has written to a shard."""
        with fast_attributes():
            return [param._version + local._version for param, local in self._written]

    def shows_shards(self) -> bool:
        """Whether every module sees the shard that was put there."""
        return all(registry.get(name) is shard for registry, name, shard, _ in self._places)

    def show_fulls(self) -> None:
        for registry, name, _, full in self._places:
            registry[name] = full

    def show_shards(self) -> None:
        """Also let the shards be trained as the full parameters are, which users may change."""
        trained = [full.requires_grad for full in self.fulls]
        if trained != self._trained:
            for sharded_param, before, after in zip(
                self._params, self._trained, trained, strict=True
            ):
                if before != after:
                    sharded_param.freeze_or_thaw(after)
            self._trained = trained
        for registry, name, shard, _ in self._places:
            registry[name] = shard

    @property
    def has_gradients(self) -> bool:
        """Whether some of the full parameters have a gradient that was not taken yet."""
        return any(full.grad is not None for full in self.fulls)


def _made(sharded_param: ShardedParam) -> Any:
    assert sharded_param.full is not None  # made at the first unshard, before anything is shown
    return sharded_param.full


class Listener:
    """Hears of every gradient of a unit's members, once it was told to.

    Most units need none: when the gradients of their inputs are there, so are those of their
    parameters. One whose inputs take no gradient has nothing else to go by. `tell` is called with
    the member, and whether it is the last that was missing.
    """

    def __init__(self, tell: Callable[[ShardedParam, bool], None]) -> None:
        self._tell = tell
        self._is_on = False
        self._num_expected = 0
        self._arrived: set[ShardedParam] = set()

    def listen(self, params: Sequence[ShardedParam]) -> None:
        if not self._is_on:
            self._is_on = True
            self.follow(params)

    def follow(self, params: Sequence[ShardedParam]) -> None:
        """Full parameters may be new, or trained unlike before."""
        if not self._is_on:
            return
        trained = [m for m in params if m.full is not None and m.full.requires_grad]
        self._num_expected = len(trained)
        for sharded_param in trained:
            if not sharded_param.is_hooked:
                assert sharded_param.full is not None
                sharded_param.full.register_post_accumulate_grad_hook(_hook(self, sharded_param))
                sharded_param.is_hooked = True

    def begin_anew(self) -> None:
        self._arrived.clear()

    def hear(self, sharded_param: ShardedParam) -> None:
        self._arrived.add(sharded_param)
        self._tell(sharded_param, len(self._arrived) == self._num_expected)


def _hook(listener: Listener, sharded_param: ShardedParam) -> Callable[[torch.Tensor], None]:
    """Weakly: the garbage collector does not see through the hooks of a tensor."""
    listener_ref, param_ref = weakref.ref(listener), weakref.ref(sharded_param)

    def arrived(_: torch.Tensor) -> None:
        listener, sharded_param = listener_ref(), param_ref()
        if listener is not None and sharded_param is not None:
            listener.hear(sharded_param)

    return arrived


class Unit:
    """The parameters of one wrapper, or of one `fully_shard` call that share a mesh.

    Owns homes, slab and gradients, and changes state when told to; it does not know when.
    Of a unit that listens, `on_gradients` is called when the last trainable parameter has its
    gradient, and before that when one has that fills a message.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[ShardedParam],
        mesh_info: MeshInfo,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        comm_ctx: CommContext,
        settings: Settings,
        flat: FlatParams | None = None,
    ) -> None:
        self.name = name
        self.params = list(params)
        self.mesh_info = mesh_info
        self.policy = policy
        self.offload = offload
        self.comm_ctx = comm_ctx
        self.settings = settings
        self.state: State = SHARDED
        self.default_collectives = collectives_for(
            mesh_info.shard.group, comm_ctx.device.torch_device
        )
        self.collectives: Collectives = self.default_collectives
        self.reduce_axis = mesh_info.shard
        self.all_reduce_hook: AllReduceHook | None = None
        self.comm_hook: CommHook | None = None
        self.on_gradients: Callable[[Unit, GradBucket | None], None] = _ignore
        self.gradients = Gradients(mesh_info, policy, offload)
        self.is_held = False
        self.is_summoned = False
        self.flat = flat
        self._num_trainable = 0
        self._listener = Listener(self._heard)
        self._versions: list[int] = []
        self._gatherer: UnitAllGather | None = None
        self._register: Register | None = None
        self._listens_for_last = False
        self._is_training_followed = False
        self.replan()

    # Plan and homes

    @property
    def is_unsharded(self) -> bool:
        return self.state is UNSHARDED

    @property
    def shard_buffers(self) -> ShardBuffers:
        """This rank's shards; `require_ready` says what is wrong where there are none."""
        if self._shard_buffers is None:
            self.require_ready()
        assert self._shard_buffers is not None
        return self._shard_buffers

    @property
    def has_frozen(self) -> bool:
        """Whether some of the full parameters, as registered, take no gradient."""
        return self._num_trainable < len(self.params)

    def replan(self) -> None:
        """Plan anew from the shards as they are now, and move them into new homes."""
        self.reshard_now()
        self._gatherer = None
        self._register = None
        self.gradients.plan_anew(self._grad_lanes)
        plain = [m for m in self.params if m.extension is None]
        extended = [m for m in self.params if m.extension is not None]
        self._plain, self._extended = plain, extended
        if self.flat is not None:
            self.flat.part()
        self.layout = self._planned(plain)
        if self.flat is not None:
            self.flat.recut(self.layout, plain)
        self.extension_layout = self._planned(extended)
        for sharded_param in extended:
            sharded_param.adopt(sharded_param.current_local)
        self._extender = ExtensionAllGather(extended, self.mesh_info, self.policy)
        self._shard_buffers: ShardBuffers | None = None
        for sharded_param in self.params:
            sharded_param.full = None
        if not any(m.current_local.is_meta for m in plain):
            device, pin_memory = shard_device(self.offload, self.comm_ctx.device.torch_device)
            with torch.no_grad(), torch.inference_mode(False):
                rank = self.mesh_info.shard.rank
                self._shard_buffers = ShardBuffers(self.layout, plain, device, rank, pin_memory)
                if self.flat is not None:
                    self.flat.settle(self.layout, plain, self._shard_buffers)
        self._is_trained_as_planned = [m.is_trainable for m in self.params]

    def collect(self) -> None:
        """Before members come or go: make whole what is cut by a plan (a collective if flat)."""
        self.reshard_now()
        if self.flat is not None:
            self.flat.part()
            self.flat.collect()

    def _planned(self, params: Sequence[ShardedParam]) -> UnitLayout:
        axis = self.mesh_info.shard
        entries = [
            ParamSpec(
                m.name,
                m.split if isinstance(m.split, Split) else Split(m.split.shape, None, 1),
                m.dtype_plan(self.policy, is_alone=axis.is_single),
                m.is_trainable,
            )
            for m in params
        ]
        cost = CostModel.of_device(self.comm_ctx.device.torch_device.type)
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
        if self.flat is not None and self._shard_buffers is not None:
            is_current = is_current and self.flat.are_current(self._shard_buffers)
        if plan_training and not self.is_held:
            trained = [m.is_trainable for m in self.params]
            is_current = is_current and trained == self._is_trained_as_planned
        if not is_current:
            self.replan()
            self._versions = self._shard_versions()

    def _follow_registered(self) -> bool:
        """Take over shards that a user registered; whether all of them look at their homes."""
        register = self._register
        is_shown = register is not None and register.shows_shards()
        if is_shown and all(sharded_param.is_at_home() for sharded_param in self.params):
            return True
        is_current = True
        for sharded_param in self.params:
            if not sharded_param.is_current():
                self._register = None
                self.gradients.plan_anew(self._grad_lanes)
                sharded_param.follow_registered()
                is_current = sharded_param.came_back() and is_current
        return is_current

    def require_ready(self) -> None:
        """Raise unless every shard has memory on the right device."""
        device, _ = shard_device(self.offload, self.comm_ctx.device.torch_device)
        for sharded_param in self.params:
            local = sharded_param.current_local
            if local.is_meta:
                raise LifecycleError(
                    f"{self.name}: parameters must have values before they are used, found "
                    f"'{sharded_param.name}' on meta; call module.to_empty(device='{device.type}') and "
                    "initialise it, or load a state dict with assign=True."
                )
            if local.device.type != device.type:
                raise LifecycleError(
                    f"{self.name}: parameters must be on {device.type}, found '{sharded_param.name}' on "
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
        comm_ctx = self.comm_ctx
        is_late = comm_ctx.is_late(self)
        if is_late or isinstance(state, ReshardedToSubgroup):
            is_unchanged = self._versions == self._shard_versions()
            if is_late and is_unchanged:
                comm_ctx.revive(self)
                self._register_full()
                return
            comm_ctx.release_now(self)
            if not is_unchanged:
                state = SHARDED  # what was thinned is not what the shards say any more
        if self._shard_buffers is None:
            self.require_ready()
        with _outside_inference():
            if self._gatherer is None:
                self._build()
            assert self._gatherer is not None
            with comm_ctx.device.on(comm_ctx.streams.gather):
                if seam.observers:
                    seam.begin(Activity.GATHER, self.name)
                extension = None
                if isinstance(state, ReshardedToSubgroup):
                    comm_ctx.device.wait(state.event)
                    gathering = self._gatherer.start_from_thin(
                        state.kept, state.axis, self.default_collectives, comm_ctx
                    )
                else:
                    gathering = self._gatherer.start(self.collectives, comm_ctx)
                    if self._extended:
                        extension = self._extender.start(self.collectives, comm_ctx)
                if seam.observers:
                    self._tell_of_gather(gathering)
        self.state = Unsharding(gathering, extension)
        comm_ctx.gather_issued(self)

    def _tell_of_gather(self, gathering: InFlightAllGather) -> None:
        assert self._gatherer is not None
        seam.hold(self.name, self._gatherer.full_bytes)
        futures = [future for transfer in gathering.transfers for future in transfer.futures]
        seam.end_after(futures, Activity.GATHER, self.name)

    def _build(self) -> None:
        assert self._shard_buffers is not None  # require_ready
        device = self.comm_ctx.device
        with device.on(self.comm_ctx.streams.gather):
            axis = self.mesh_info.shard
            self._gatherer = UnitAllGather(
                self.layout, self._shard_buffers, self._plain, axis, self.comm_ctx
            )

    def wait(self) -> None:
        """Finish the gather that is under way and register the full parameters."""
        state = self.state
        if not isinstance(state, Unsharding):
            return
        assert self._gatherer is not None
        self.comm_ctx.gather_used(self)
        if seam.observers:
            seam.begin(Activity.AWAIT_GATHER, self.name)
        with _outside_inference():
            self._gatherer.finish(state.gathering, self.comm_ctx)
            if state.extension is not None:
                self._extender.finish(state.extension, self.comm_ctx)
                self._register = None  # it may have made full parameters anew
        if seam.observers:
            seam.end(Activity.AWAIT_GATHER, self.name)
        self._register_full()

    def _register_full(self) -> None:
        register = self._register
        if register is None:
            register = self._register = Register(self.params)
            self._is_training_followed = False
        if not self._is_training_followed:
            self._num_trainable = register.follow_training()
            self._is_training_followed = True
            self._listener.follow(self.params)
        register.show_fulls()
        self.state = UNSHARDED

    def reshard(self, thin: Axis | None = None) -> None:
        """Register the shards; memory is given back once the next gather is issued (rule 3)."""
        if self.state is SHARDED or isinstance(self.state, ReshardedToSubgroup):
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
            self.state = ReshardedToSubgroup(kept, thin, self.comm_ctx.device.record())
        self.comm_ctx.release_later(self, self._release)

    def reshard_now(self) -> None:
        """Register the shards and give all memory back."""
        self.reshard()
        self.state = SHARDED
        self.comm_ctx.release_now(self)

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
        return [sharded_param.version for sharded_param in self.params]

    # Gradients

    def listen(self) -> None:
        """Be told of every gradient from now on: nothing else says when the last one is here."""
        self._listens_for_last = True
        self._listener.listen(self.params)

    def listen_for_large(self) -> None:
        """Be told of gradients if some are large enough not to wait for the others."""
        if self.comm_ctx.device.is_ordered and self.gradients.large:
            self._listener.listen(self.params)

    def _heard(self, sharded_param: ShardedParam, is_last: bool) -> None:
        if is_last and self._listens_for_last:
            self.on_gradients(self, None)
        elif self.settings.requires_gradient_sync and self.comm_ctx.device.is_ordered:
            bucket = self.gradients.large.get(sharded_param)
            if bucket is not None:
                self.on_gradients(self, bucket)

    @property
    def has_gradients(self) -> bool:
        """Whether full gradients are there that were not taken yet."""
        return self._register is not None and self._register.has_gradients

    @property
    def owes_kept_gradients(self) -> bool:
        """Whether an earlier step kept gradients that are to be reduced now."""
        return self.gradients.were_kept(self.params, self.settings)

    def _grad_lanes(self) -> list[GradLane]:
        rank = self.mesh_info.shard.rank
        holders = dict(enumerate(self.flat.holders)) if self.flat is not None else {}
        return [
            *grad_lanes(self.layout, self._plain, rank, holders.get),
            *grad_lanes(self.extension_layout, self._extended, rank, lambda _: None),
        ]

    def reduce(self, only: GradBucket | None = None) -> None:
        """Take the full gradients and start reducing them, or keep them if no sync is wanted."""
        if only is None:
            self._listener.begin_anew()
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
            if not self.settings.requires_gradient_sync:
                self.gradients.keep(self.params, is_flat=self.flat is not None)
                return
            route = Route(
                self.name,
                self.mesh_info,
                self.reduce_axis,
                self.collectives,
                self.all_reduce_hook,
                self.comm_hook,
            )
            self.gradients.reduce(route, self.settings, self.comm_ctx, only)

    def forget_gradients(self) -> None:
        """Drop everything that a failed step left behind, also gradients that it created."""
        self.gradients.forget(self.params)
        self._listener.begin_anew()

    # Settings

    def set(self, **changes: Any) -> None:
        self.settings = replace(self.settings, **changes)

    def bring(self, *, gather: Any = None, reduce: Any = None) -> None:
        """Use a user's collectives in the place of ours."""
        current = self.collectives
        if isinstance(current, CustomCollectives):
            gather = gather or current.custom_all_gather
            reduce = reduce or current.custom_reduce_scatter
        self.collectives = CustomCollectives(self.default_collectives, gather, reduce)

    def describe(self) -> str:
        """What all ranks must have alike."""
        held = ", ".join(
            f"{m.name} {tuple(m.shape)} {str(m.dtype).removeprefix('torch.')}"
            f"{'' if m.is_trainable else ' frozen'}"
            for m in self.params
        )
        precision = "" if self.policy == MixedPrecisionPolicy() else f" in {self.policy}"
        return f"[{held}] over {self.mesh_info!r}{precision}"

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self.params)} parameters, {type(self.state).__name__})"


_AS_IT_IS = nullcontext()


def _outside_inference() -> AbstractContextManager[object]:
    """Tensors made in inference mode could not be trained with later."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


def _ignore(unit: Unit, bucket: GradBucket | None) -> None:
    """Nobody listens."""
