"""What a module's forward and backward trigger: gather, compute, reshard, reduce.

`calls.py` says how a module knows that its gradients are complete. `step.py` has what concerns all
modules of a tree.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullshard._torch import in_backward, untraced
from fullshard.api import BackwardPrefetch, MixedPrecisionPolicy, OffloadPolicy
from fullshard.comm.mesh import MeshInfo
from fullshard.errors import LifecycleError
from fullshard.runtime.calls import ModuleCall
from fullshard.runtime.explained import explain_error, explain_uncaught
from fullshard.runtime.readers import Readers, nodes_reading, readers_of
from fullshard.runtime.step import FAILED_UNIT, Scheduler
from fullshard.runtime.trees import map_tensors
from fullshard.runtime.turnstile import Turnstile
from fullshard.trace import seam
from fullshard.trace.seam import Activity
from fullshard.unit.flat_param import ParamForm
from fullshard.unit.settings import UnitSettings
from fullshard.unit.state import Arriving
from fullshard.unit.unit import Unit

_ATTRIBUTE = "_fullshard_hooks"
# A weak dictionary, because a module that is not sharded itself, but whose parameters are, must not
# get an attribute that keeps the hooks alive or that a copy of the module would share.
_managers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ModuleHooks]]
_managers = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """The checked arguments of one `fully_shard` call or one wrapper.

    `owner` is the module that a wrapper's flat parameters are registered on.
    """

    modules: tuple[nn.Module, ...]
    mesh_info: MeshInfo
    device: torch.device
    policy: MixedPrecisionPolicy
    offload: OffloadPolicy | Mapping[str, OffloadPolicy]
    settings: UnitSettings
    placement_fn: Callable[[nn.Parameter], Any] | None = None
    ignored: Collection[nn.Parameter] = ()
    ignored_modules: Collection[nn.Module] = ()
    form: ParamForm = ParamForm.DTENSOR
    owner: nn.Module | None = None
    prefetches_forward: bool = True
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    casts_root_inputs: bool = False


class ModuleHooks:
    """The hooks of the modules of one `fully_shard` call or wrapper.

    `units` were made of their parameters. `lenders` are units of other calls that own parameters
    which these modules use too. The prefetch lists are those that the user set. `active` are the
    calls in backward, `_open` those in forward, `_awaited` those of a list of modules that backward
    has not reached yet (weakly: a graph that is dropped takes its calls with it), `_ran` the
    modules that ran in the current forward. `handles` are those of the forward hooks, in pairs.
    `readers` says what reads each large unit (rule 15: large ones alone). `_num_lookups` is how
    many nodes had read it when the first module inside began, in the forward that determines
    `readers`. `turnstile` says how ranks come to the collectives of these units, and `is_uneven`
    that the user allowed ranks to run different units inside.
    """

    def __init__(
        self,
        request: ShardRequest,
        units: Sequence[Unit],
        managed: Iterable[nn.Module],
        make_scheduler: Callable[[ModuleHooks], Scheduler],
    ) -> None:
        self.name = units[0].name
        self.modules = request.modules
        self.request = request
        self.units = list(units)
        self.lenders: list[Unit] = []
        self.forward_prefetch: Sequence[ModuleHooks] = ()
        self.backward_prefetch: Sequence[ModuleHooks] = ()
        self.scheduler: Scheduler | None = None
        self.active: set[ModuleCall] = set()
        self.is_uneven = False
        self.turnstile = Turnstile()
        self.prefetches_forward = request.prefetches_forward
        self._make_scheduler = make_scheduler
        self._open: list[ModuleCall] = []
        self._awaited: weakref.WeakSet[ModuleCall] = weakref.WeakSet()
        self._ran: set[nn.Module] = set()
        self.readers: dict[Unit, Readers] = {}
        self._num_lookups: dict[Unit, int] = {}
        self.handles: list[RemovableHandle] = []
        for unit in units:
            unit.owner = self
        for module in self.modules:
            # Not setattr: a compiled module hands attributes on to the one that it wraps.
            module.__dict__[_ATTRIBUTE] = self
            self.handles += (
                module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.post_forward),
            )
        _managers.update((module, weakref.ref(self)) for module in managed)
        explain_uncaught(hooks_managing)

    @cached_property
    def inner(self) -> list[ModuleHooks]:
        """The hooks of modules inside of these."""
        return [hooks for hooks in hooks_below(*self.modules) if hooks is not self]

    @property
    def reads(self) -> list[Unit]:
        """The units that must be unsharded for these modules to run."""
        return [*self.units, *self.lenders] if self.lenders else self.units

    @property
    def root(self) -> ModuleHooks:
        """The hooks of the outermost modules; these, until a forward has run."""
        return self if self.scheduler is None else cast(ModuleHooks, self.scheduler.root)

    @property
    def is_root(self) -> bool:
        return self.scheduler is not None and self.scheduler.root is self

    @property
    def is_unsharded_in_backward(self) -> bool:
        return all(unit.settings.unshard_in_backward for unit in self.units)

    def ensure_scheduler(self) -> Scheduler:
        if self.scheduler is None:
            self.scheduler = self._make_scheduler(self)
        return self.scheduler

    # Forward

    def guarded(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one of our modules; whatever it raises, none of its calls stays open."""
        num_open = len(self._open)
        opens_forward = self.scheduler is None or self.scheduler.owner is None
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            if not hasattr(error, FAILED_UNIT):
                setattr(error, FAILED_UNIT, self.name)
            explain_error(error, hooks_managing)
            del self._open[num_open:]
            self.turnstile.fail(num_open, error)
            scheduler = self.scheduler
            if opens_forward and scheduler is not None and scheduler.owner is not None:
                scheduler.fail_forward(error)
            raise

    @untraced
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        scheduler = self.ensure_scheduler()
        # A forward inside backward is a recomputation: it leaves resharding and order alone.
        is_recomputing = in_backward()
        opens_forward = scheduler.owner is None and not is_recomputing
        if is_recomputing:
            scheduler.enter_backward()
        else:
            if opens_forward:
                scheduler.begin_forward(module, self.name)
            if self.turnstile.is_even:
                scheduler.start(self, (args, kwargs))
        if torch.is_grad_enabled():
            scheduler.pause_summons(self.reads)
        call = ModuleCall(self, scheduler.finished, opens_forward, self.turnstile.is_even)
        call.is_summoned = any(unit.is_summoned for unit in self.units)
        request = self.request
        device = request.device if opens_forward and request.device.type != "cpu" else None
        dtype = request.policy.param_dtype
        if dtype is not None and not request.policy.cast_forward_inputs:
            dtype = dtype if self.is_root and request.casts_root_inputs else None
        if call.is_summoned:
            dtype = None  # its parameters have the dtype that they are stored in
        args, kwargs = call.take_inputs(args, kwargs, device, dtype)
        scheduler.unshard(self)
        for unit in self.reads:
            unit.wait()
        (args, kwargs), num_more = self.turnstile.enter(call.input_arrived, (args, kwargs))
        call.num_inputs += num_more
        if call.is_even and not is_recomputing:
            scheduler.prefetch_forward(self)
        if torch.is_grad_enabled():
            for unit in self.units:
                if unit.is_large or not call.num_inputs:
                    unit.listen()
        self._open.append(call)
        if seam.observers:
            seam.begin(Activity.FORWARD, self.name)
        return args, kwargs

    @untraced
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        scheduler = self.ensure_scheduler()
        call = self._open.pop()
        if seam.observers:
            seam.end(Activity.FORWARD, self.name)
        output = self.turnstile.leave(output)
        if torch.is_grad_enabled() and call.hook_outputs(output):
            if len(self.modules) > 1:
                self._awaited.add(call)
            for unit in self.units:
                if unit.is_large and unit not in self.readers:
                    num_lookups = self._num_lookups.pop(unit, 0)
                    self.readers[unit] = readers_of(unit, output, num_lookups)
        finished = scheduler.finished
        if in_backward():
            before = finished[: -1 - finished[::-1].index(self)] if self in finished else []
            call.previous = before[-1] if before else None
        else:
            if call.is_even:
                call.previous = finished[-1] if finished else None
                finished.append(self)
            self._ran.add(module)
            if len(self._ran) == len(self.modules) and not self._open:
                self._ran.clear()
                self._reshard_after_forward()
            if call.opens_forward:
                scheduler.end_forward()
        dtype = self.request.policy.output_dtype
        if dtype is not None:
            output = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, output)
        return output

    def release_embeddings(self, inputs: Any) -> None:
        """Release weights that nothing looks up any more, as the first module inside begins."""
        for unit in () if self.turnstile.defers else self.units:
            readers = self.readers.get(unit)
            if readers is None and unit.is_large:
                self._num_lookups[unit] = len(nodes_reading(unit, inputs))
            if (
                readers is Readers.NONE_AFTER_LOOKUP
                and self._resharding_of(unit) is False
                and unit.settings.reshard_after_backward
            ):
                unit.release()

    def read_again(self, unit: Unit) -> None:
        """Gather a released parameter again for a reader that the graph did not show."""
        if not unit.is_unsharded:
            self.readers[unit] = Readers.HIDDEN
            unit.comm_ctx.all_gathers_follow_compute()  # compute may have written new shards
            self.ensure_scheduler().unshard(self, [unit])
            unit.wait()

    def _resharding_of(self, unit: Unit) -> bool | int:
        """Whether a unit is resharded after forward, or to how many ranks."""
        after = unit.settings.reshard_after_forward
        if after is None:
            # Without gradients, no backward will need the root, and users want their shards.
            after = not self.is_root or not torch.is_grad_enabled()
        return after

    def _reshard_after_forward(self) -> None:
        for unit in self.units:
            after = self._resharding_of(unit)
            if after is False:
                continue
            is_last = self.scheduler is not None and self.scheduler.expects_no_all_gather
            if is_last and unit.is_unsharded:
                unit.comm_ctx.free_leaving()  # no all-gather will follow that could free it
            unit.reshard(None if after is True else unit.mesh_info.subgroup_axis(after))
            if is_last and not torch.is_grad_enabled():
                unit.comm_ctx.free_now(unit)  # otherwise backward begins with it: keep it

    def end_forward(self) -> None:
        """Reshard what the forward of the root left open.

        That is a list of modules of which only some ran, a module whose error was caught, an
        all-gather that nothing used, and units that were lent to other modules. Users of a wrapper
        see their own parameters, and the gradients of these, before backward too.
        """
        self._ran.clear()
        self._reshard_after_forward()
        self._open.clear()
        is_owner = self.scheduler is not None and self.scheduler.owner in self.modules
        for unit in self.units:
            if isinstance(unit.state, Arriving):
                unit.reshard()
            elif (
                is_owner
                and self.request.form is ParamForm.ORIG_PARAMS
                and unit.settings.reshard_after_forward is None
            ):
                unit.keep()

    # Backward

    @untraced
    def pre_backward(self, call: ModuleCall) -> None:
        """A gradient reached a call's outputs."""
        scheduler = self.ensure_scheduler()
        scheduler.enter_backward()
        if call.is_summoned or any(unit.is_summoned for unit in self.units):
            raise LifecycleError(
                f"{self.name}: forward and backward must run outside of summon_full_params; "
                "leave the context first. A forward alone may run inside, and "
                "with use_orig_params=True and with_grads=False both may."
            )
        self.turnstile.reach(self, was_even=call.is_even)
        self._awaited.discard(call)
        self.active.add(call)
        if self.is_unsharded_in_backward:
            scheduler.unshard_for_backward(self)
            for unit in self.reads:
                unit.wait()
        if self.request.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            scheduler.prefetch_backward(self, call)
        if seam.observers:
            seam.begin(Activity.BACKWARD, self.name)

    def release_unread(self) -> None:
        """Release large units that are unsharded and that the backward to come does not read.

        Those that are sharded already are gathered: a rank sees only its own references, and
        whether there is a collective must not depend on them.
        """
        for unit, readers in () if self.turnstile.defers else self.readers.items():
            if readers.is_nobody and unit.settings.reshard_after_backward:
                unit.release()

    @untraced
    def post_backward(self, call: ModuleCall) -> None:
        """All inputs of a call have their gradients: its weights are not read any more."""
        self._leave([call])
        if not self.active:
            self.turnstile.settle()
        # In a list of modules, others that ran in the same forward may be still to come: the list
        # is one unit, gathered and reduced once for all of them.
        is_list = len(self.modules) > 1
        is_awaited = is_list and any(c.forward is call.forward for c in self._awaited)
        if not self.active and not is_awaited:
            self.finish_backward([call])

    @untraced
    def grads_ready(self, unit: Unit) -> None:
        """All gradients of a unit have arrived."""
        scheduler = self.ensure_scheduler()
        scheduler.enter_backward()
        # With no input to wait for, nothing is left to compute once the gradients are there. But
        # some inputs may be hidden, and computing their gradients still reads a frozen weight.
        waits = unit.has_frozen or any(call.num_inputs for call in self.active)
        waits = waits or self.turnstile.encloses  # units inside may still have work
        if len(self.units) == 1 and not waits:
            calls = list(self.active)
            self._leave(calls)
            self.finish_backward(calls)
            return
        is_seen = self.readers.get(unit, Readers.HIDDEN) is not Readers.HIDDEN
        is_done = is_seen and not self._open and not unit.is_saved
        if is_done and unit.settings.reshard_after_backward:
            unit.reshard()  # all its readers are done
            unit.comm_ctx.free_now(unit)  # before its gradient is cast
        self.turnstile.reduce(self, unit, scheduler.phase)

    def before_reduce(self, unit: Unit, num_bytes: int) -> None:
        """The gradients of a unit are about to be reduced."""
        self.turnstile.before_reduce(unit, num_bytes)

    def _leave(self, calls: Iterable[ModuleCall]) -> None:
        """Nothing more is computed in backward for these calls."""
        for call in calls:
            self.active.discard(call)
            if seam.observers:
                seam.end(Activity.BACKWARD, self.name)

    def finish_backward(self, calls: Sequence[ModuleCall]) -> None:
        """Reshard and reduce: nothing more is computed in backward for these calls."""
        scheduler = self.ensure_scheduler()
        for unit in self.units:
            # Reshard first, so that the full buffer is free before the bucket is allocated. A
            # backward inside forward (a gradient penalty) leaves units alone that still compute.
            if unit.settings.reshard_after_backward and not self._open:
                unit.reshard()
                if all(call.previous is None for call in calls):
                    unit.comm_ctx.free_now(unit)  # no all-gather will follow that could free it
            if unit.has_full_grads:
                self.turnstile.reduce(self, unit, scheduler.phase)
        if self.request.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            for call in calls:
                if call.previous not in self.inner:  # the backward of these is over
                    scheduler.prefetch_backward(self, call)

    def end_backward(self) -> None:
        """Reduce and reshard what a backward left open."""
        self._leave(list(self.active))
        scheduler = self.ensure_scheduler()
        for unit in self.units:
            is_due = unit.has_full_grads
            if is_due:
                self.turnstile.require_taken(unit)
                # An input that takes a gradient got none: do not wait for it again.
                unit.listen()
            elif unit.is_unsharded and unit.settings.reduce_scatter_unused_params:
                is_due = not unit.grads.was_reduced
            if is_due or unit.owes_kept_grads:
                self.turnstile.reduce(self, unit, scheduler.phase)
            unit.grads.end_backward()
            if unit.settings.reshard_after_backward and not self._open:
                unit.reshard()

    # Calls from outside

    def reset(self) -> None:
        """Forget the calls that a failed step left open."""
        self._leave(list(self.active))
        self._open.clear()
        self._ran.clear()

    @property
    def is_in_forward(self) -> bool:
        """Whether a call of these modules is in its forward."""
        return bool(self._open)

    @property
    def is_computing(self) -> bool:
        """Whether the unit's weights are being read right now."""
        return bool(self._open or self.active)

    def require_not_computing(self, what: str) -> None:
        """Raise if the unit's weights are being read right now."""
        if self.scheduler is not None:
            self.scheduler.end_failed_backward()
        if self.is_computing:
            phase = "idle" if self.scheduler is None else self.scheduler.phase
            raise LifecycleError(
                f"{self.name}: {what}() must not be called while the module computes, and it is "
                f"in {phase}; call it before the forward or after the backward of the module."
            )

    def enter_call(self, kind: str) -> None:
        """Compare a call that issues collectives, outside of forward and backward."""
        if self.scheduler is not None:
            self.scheduler.turnstile.call(kind, self.name)

    def unshard(self, async_op: bool) -> UnshardHandle | None:
        """All-gather the parameters, outside of forward and backward or ahead of them."""
        scheduler = self.scheduler
        if scheduler is not None:
            scheduler.end_failed_backward()
        is_past = any(unit.grads.was_reduced for unit in self.units)
        if scheduler is not None and scheduler.is_in_backward and is_past:
            raise LifecycleError(
                f"{self.name}: unshard() must come before a module's backward or after the whole "
                "backward, but its gradients were reduced in the backward that is still "
                "running; the optimizer would make what is gathered now stale. Call it after "
                "backward."
            )
        phase = "idle" if scheduler is None else scheduler.phase
        if scheduler is not None and phase == "idle":
            scheduler.turnstile.begin("unshard", self.name)
        for unit in self.reads:
            unit.refresh()
            if not unit.is_unsharded:
                unit.comm_ctx.all_gathers_follow_compute()
        self.turnstile.gather(self, self.reads, "idle")
        if scheduler is not None and phase == "idle":
            scheduler.turnstile.end()
        handle = UnshardHandle(self.reads)
        if not async_op:
            handle.wait()
        return handle if async_op else None


class UnshardHandle:
    """An all-gather under way, from `unshard(async_op=True)`."""

    def __init__(self, units: Sequence[Unit] = ()) -> None:
        self._units = list(units)

    def wait(self) -> None:
        """Wait until the parameters are there, and register them."""
        for unit in self._units:
            unit.wait()
        self._units.clear()


def hooks_of(module: nn.Module) -> ModuleHooks | None:
    """The hooks of a module; None if it was not given to `fully_shard` or a wrapper."""
    found = module.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, ModuleHooks) else None


def require_hooks(module: Any) -> ModuleHooks:
    """The hooks of a module; raises if it has none."""
    hooks = hooks_of(module)
    if hooks is None:
        raise LifecycleError(
            f"{type(module).__name__} has no unit, because fully_shard was not called on it; "
            "call fully_shard on it first."
        )
    return hooks


def hooks_below(*modules: nn.Module) -> list[ModuleHooks]:
    """All hooks at or below modules, outer before inner, each once."""
    found = (hooks_of(child) for module in modules for child in module.modules())
    return list(dict.fromkeys(hooks for hooks in found if hooks is not None))


def units_below(module: nn.Module) -> list[Unit]:
    """All units at or below a module, outer before inner."""
    return [unit for hooks in hooks_below(module) for unit in hooks.units]


def hooks_of_unit(unit: Unit) -> ModuleHooks | None:
    """The hooks that a unit belongs to."""
    return unit.owner if isinstance(unit.owner, ModuleHooks) else None


def hooks_managing(module: nn.Module) -> ModuleHooks | None:
    """The hooks that manage a module's own parameters."""
    found = _managers.get(module)
    return None if found is None else found()


def unit_holding(param: nn.Parameter) -> Unit | None:
    """The unit of a flat parameter; looks through all of them."""
    for reference in list(_managers.values()):
        hooks = reference()
        for unit in () if hooks is None else hooks.units:
            if unit.flat and any(holder.param is param for holder in unit.flat.holders):
                return unit
    return None
