"""What a module's forward and backward trigger, and in which order. The only file that says when.

[Note: hooks and autograd] Autograd runs ready nodes in the reverse order of forward, and gives a
parameter its gradient before anything else: when the inputs of a call have their gradients, so have
its parameters. So most units need no hooks on parameters: a call gives its module views of the
inputs, whose hooks tell when their gradients arrive. A unit counts the gradients of its parameters
(`Unit.listen`) if a call has no input that takes a gradient, or if a backward has ended before an
input got one. Resharding waits for the inputs' gradients in any case: a frozen weight, or a weight
used through `detach()`, is still read after the last trainable one has its gradient.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle

from fullshard._torch import (
    has_own_grad_dtype,
    in_backward,
    node_sequence_nr,
    queue_backward_callback,
    sequence_nr,
    set_grad_dtype,
    untraced,
    view_base,
)
from fullshard.api import BackwardPrefetch, MixedPrecisionPolicy, OffloadPolicy
from fullshard.comm import watcher
from fullshard.comm.agreement import Agreement
from fullshard.comm.mesh import MeshInfo
from fullshard.comm.places import Place
from fullshard.errors import ConfigError, DisagreementError, LifecycleError, MisuseError
from fullshard.runtime.explained import explain_error, explain_uncaught
from fullshard.runtime.readers import Readers, nodes_reading, readers_of
from fullshard.runtime.trees import map_tensors
from fullshard.runtime.uneven import UnevenScope
from fullshard.trace import seam
from fullshard.trace.seam import Activity
from fullshard.unit.context import CommContext
from fullshard.unit.flat_param import ParamForm
from fullshard.unit.settings import UnitSettings
from fullshard.unit.unit import UNSHARDED, Unit

_ATTRIBUTE = "_fullshard_hooks"
# Attributes of an error: the unit it comes from, and the memory of full parameters that it freed.
_FAILED_UNIT = "_fullshard_unit"
FULL_BYTES = "_fullshard_full_bytes"
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
    offload: OffloadPolicy
    settings: UnitSettings
    placement_fn: Callable[[nn.Parameter], Any] | None = None
    ignored: Collection[nn.Parameter] = ()
    ignored_modules: Collection[nn.Module] = ()
    form: ParamForm = ParamForm.DTENSOR
    owner: nn.Module | None = None
    prefetches_forward: bool = True
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    casts_root_inputs: bool = False


@dataclass(slots=True, eq=False, weakref_slot=True)
class ModuleCall:
    """One run of one module: what autograd's hooks point to.

    Autograd keeps it alive through the hooks; it holds no tensors. `forward` is the forward that it
    is part of (`Scheduler.finished`), `previous` the hooks that finished before it, which backward
    reaches next. It is active in backward (`ModuleHooks.active`) from the first gradient at its
    outputs until all inputs that take a gradient have it. `is_uneven` says it ran by agreement,
    `is_summoned` that it computed with what `summon_full_params` showed.
    """

    hooks: ModuleHooks
    forward: list[ModuleHooks]
    opens_forward: bool
    is_uneven: bool = False
    is_summoned: bool = False
    previous: ModuleHooks | None = None
    num_inputs: int = 0
    _num_pending: int = 0
    _first_node: int = 0

    def take_inputs(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move and cast the arguments, and replace inputs that take a gradient by views.

        A view's gradient is complete when this call is done with it. The input's own would wait
        for all other users of the same tensor, and hooks would pile up on a leaf.
        """
        views: dict[torch.Tensor, torch.Tensor] = {}
        is_followed = torch.is_grad_enabled()

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            if device is not None:
                tensor = tensor.to(device, non_blocking=True)
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            if not is_followed or not tensor.requires_grad:
                return tensor
            view = views.get(tensor)
            if view is None:
                is_strided = tensor.layout is torch.strided and not tensor.is_nested
                view = views[tensor] = tensor.view_as(tensor) if is_strided else tensor
                view.register_hook(self.input_arrived)
            return view

        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            args = (taken(args[0]),)  # the common case: not worth a walk (rule 7)
        else:
            args, kwargs = map_tensors(taken, args), map_tensors(taken, kwargs)
        self.num_inputs = len(views)
        # Autograd numbers its nodes as it makes them: nodes from here on belong to this call.
        self._first_node = sequence_nr()
        return args, kwargs

    def hook_outputs(self, output: Any) -> bool:
        """Hook the outputs; return whether a gradient can reach this call at all."""
        num_hooked = 0

        def hooked(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal num_hooked
            node = self._own_node(tensor) if tensor.requires_grad else None
            if node is not None:
                node.register_prehook(self._reached)
                num_hooked += 1
            return tensor

        map_tensors(hooked, output)
        return num_hooked > 0

    def _own_node(self, output: torch.Tensor) -> Any:
        """The first node of this call that a gradient reaches; None if it only passes through."""
        # An in-place operation on a view replaces the view's node, but not its base's.
        for tensor in (view_base(output), output):
            node = None if tensor is None else tensor.grad_fn
            if node is not None and node_sequence_nr(node) >= self._first_node:
                return node
        return None

    def _reached(self, grads: Any) -> None:
        if self not in self.hooks.active:
            self._num_pending = self.num_inputs
            self.hooks.pre_backward(self)

    def input_arrived(self, grad: torch.Tensor) -> None:
        if grad.grad_fn is not None:
            # With create_graph: the weights will be read again to differentiate this gradient.
            grad.grad_fn.register_prehook(self._reached)
        if self in self.hooks.active:
            self._num_pending -= 1
            if self._num_pending == 0:
                self.hooks.post_backward(self)


class ModuleHooks:
    """The hooks of the modules of one `fully_shard` call or wrapper.

    `units` were made of their parameters. `lenders` are units of other calls that own parameters
    which these modules use too. The prefetch lists are those that the user set. `active` are the
    calls in backward, `_open` those in forward, `_awaited` those of a list of modules that backward
    has not reached yet (weakly: a graph that is dropped takes its calls with it), `_ran` the
    modules that ran in the current forward. `handles` are those of the forward hooks, in pairs.
    `readers` says what reads each large unit (rule 15). `_num_lookups` is how many nodes had read
    it when the first module inside began, in the forward that determines `readers`. `is_scope` says
    that the units inside are uneven; `within` of their hooks is the `scope` of these.
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
        self.is_scope = False
        self.scope: UnevenScope | None = None
        self.within: UnevenScope | None = None
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
    def is_root(self) -> bool:
        return self.scheduler is not None and self.scheduler.members[0] is self

    @property
    def is_uneven(self) -> bool:
        """Whether other ranks may run something else now."""
        return self.within is not None and self.within.is_open

    @property
    def is_agreed(self) -> bool:
        """Whether ranks agree on which gradients to reduce, since some may have none."""
        return self.scope is not None or self.within is not None

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
            if not hasattr(error, _FAILED_UNIT):
                setattr(error, _FAILED_UNIT, self.name)
            explain_error(error, hooks_managing)
            del self._open[num_open:]
            if self.scope is not None:
                del self.scope.entered[num_open:]
                if not self.is_computing and not isinstance(error, dist.DistError):
                    # A recomputation that ends early, or a failure that the program may catch.
                    with suppress(Exception):
                        self.scope.finish()
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
                scheduler.begin_forward(module)
            if not self.is_uneven:
                scheduler.start(self, (args, kwargs))
        call = ModuleCall(self, scheduler.finished, opens_forward, self.is_uneven)
        call.is_summoned = any(unit.is_summoned for unit in self.units)
        request = self.request
        device = request.device if opens_forward and request.device.type != "cpu" else None
        dtype = request.policy.param_dtype
        if dtype is not None and not request.policy.cast_forward_inputs:
            dtype = dtype if self.is_root and request.casts_root_inputs else None
        if call.is_summoned:
            dtype = None  # its parameters have the dtype that they are stored in
        args, kwargs = call.take_inputs(args, kwargs, device, dtype)
        if self.scope is not None:
            args, kwargs = self.scope.enter(call.input_arrived, (args, kwargs))
            call.num_inputs += torch.is_grad_enabled()  # the hook for the end of all inside
        scheduler.unshard(self)
        for unit in self.reads:
            unit.wait()
        if not is_recomputing and not call.is_uneven:  # uneven calls gather only by agreement
            scheduler.prefetch_forward(self)
        if torch.is_grad_enabled():
            for unit in self.units:
                if unit.is_large or not call.num_inputs:
                    unit.listen()
        self._open.append(call)
        if self.scope is not None:
            self.scope.is_open = True
        if seam.observers:
            seam.begin(Activity.FORWARD, self.name)
        return args, kwargs

    @untraced
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        scheduler = self.ensure_scheduler()
        call = self._open.pop()
        if seam.observers:
            seam.end(Activity.FORWARD, self.name)
        if self.scope is not None:
            output = self.scope.leave(output)
            if not self.is_computing:
                self.scope.finish()
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
            if not call.is_uneven:
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
        for unit in () if self.is_agreed else self.units:
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
                unit.comm_ctx.free_pending()  # no all-gather will follow that could free it
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
            if not unit.is_unsharded and not unit.is_released and not unit.is_kept:
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
                f"{self.name}: forward and backward must run outside of summon_full_params, found "
                "one of them inside; leave the context first. A forward alone may run inside."
            )
        if call.is_uneven and not self.is_uneven:
            raise _outside_of_scope(self.name)
        self._awaited.discard(call)
        self.active.add(call)
        if self.is_unsharded_in_backward:
            scheduler.unshard_for_backward(self)
            for unit in self.reads:
                unit.wait()
        if self.request.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            scheduler.prefetch_backward(call)
        if self.scope is not None:
            self.scope.is_open = True
        if seam.observers:
            seam.begin(Activity.BACKWARD, self.name)

    def release_unread(self) -> None:
        """Release large units that are unsharded and that the backward to come does not read.

        Those that are sharded already are gathered: a rank sees only its own references, and
        whether there is a collective must not depend on them.
        """
        for unit, readers in () if self.is_agreed else self.readers.items():
            if readers.is_nobody and unit.settings.reshard_after_backward:
                unit.release()
            unit.is_unread |= unit.is_released

    @untraced
    def post_backward(self, call: ModuleCall) -> None:
        """All inputs of a call have their gradients: its weights are not read any more."""
        self._leave([call])
        if self.scope is not None and not self.active:
            self.ensure_scheduler().settle_scope(self)
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
        waits = waits or self.scope is not None  # units inside may still have work
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
        scheduler.reduce_scatter(unit, self)

    def before_reduce(self, unit: Unit, num_bytes: int) -> None:
        """The gradients of a unit are about to be reduced."""
        passes = None if self.scheduler is None else self.scheduler.passes
        if passes is not None and not self.is_agreed:
            passes.follow(("reduce", unit, num_bytes, unit.num_trainable))

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
                scheduler.reduce_scatter(unit, self)
        if self.request.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            for call in calls:
                if call.previous not in self.inner:  # the backward of these is over
                    scheduler.prefetch_backward(call)

    def end_backward(self) -> None:
        """Reduce and reshard what a backward left open."""
        self._leave(list(self.active))
        scheduler = self.ensure_scheduler()
        for unit in self.units:
            is_due = unit.has_full_grads
            if is_due and self.is_agreed and unit.settings.requires_gradient_sync:
                raise _outside_of_scope(self.name)
            if is_due:
                unit.listen()  # an input that takes a gradient got none: do not wait for it again
            elif unit.is_unsharded and unit.settings.reduce_scatter_unused_params:
                is_due = not unit.grads.was_reduced
            if is_due or unit.owes_kept_grads:
                scheduler.reduce_scatter(unit, self)
            unit.grads.end_backward()
            unit.is_unread = False  # another backward may read what this one has saved
            if unit.settings.reshard_after_backward and not self._open:
                unit.reshard()

    # Calls from outside

    def reset(self) -> None:
        """Forget the calls that a failed step left open."""
        self._leave(list(self.active))
        self._open.clear()
        self._ran.clear()

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
                f"{self.name}: {what}() must not be called while the module computes, found it in "
                f"{phase}; call it before the forward or after the backward of the module."
            )

    def enter_call(self, kind: str) -> None:
        """Compare a call that issues collectives, outside of forward and backward."""
        passes = None if self.scheduler is None else self.scheduler.passes
        if passes is not None:
            passes.begin(kind, self.name)
            passes.enter()
            passes.end()

    def unshard(self, async_op: bool) -> UnshardHandle | None:
        """All-gather the parameters, outside of forward and backward or ahead of them."""
        scheduler = self.scheduler
        if scheduler is not None:
            scheduler.end_failed_backward()
        is_past = any(unit.grads.was_reduced for unit in self.units)
        if scheduler is not None and scheduler.is_in_backward and is_past:
            raise LifecycleError(
                f"{self.name}: unshard() must come before a module's backward or after the whole "
                "backward, found its gradients reduced in the backward that is still running; the "
                "optimizer would make what is gathered now stale. Call it after backward."
            )
        is_idle = scheduler is not None and scheduler.phase == "idle"
        passes = None if scheduler is None or self.is_uneven else scheduler.passes
        if passes is not None and is_idle:
            passes.begin("unshard", self.name)
        for unit in self.reads:
            unit.refresh()
            if not unit.is_unsharded:
                unit.comm_ctx.all_gathers_follow_compute()
                if passes is not None:
                    passes.follow(("gather", unit))
                unit.unshard()
        if passes is not None and is_idle:
            passes.end()
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


class GradientReductionHandle:
    """A gradient reduction under way, from `finalize_backward(async_op=True)`."""

    def __init__(self, scheduler: Scheduler | None = None) -> None:
        self._scheduler = scheduler

    def wait(self) -> None:
        """Make every gradient visible, and free what its reduction needed."""
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is None:
            return
        if scheduler.reduction is not self:
            raise LifecycleError(
                "GradientReductionHandle.wait: a reduction under way is expected, found one that "
                "reset_iter_state() has dropped; run the step again."
            )
        scheduler.settle_backward()


def _outside_of_scope(unit: str) -> LifecycleError:
    return LifecycleError(
        f"{unit}: a gradient must reach an uneven unit through the outputs of the module that "
        "set_uneven was called on, found one that came another way; return what the loss needs "
        "from that module, or call set_uneven on one around it."
    )


# What ranks compare in the first step, before they do it.
_CHECKED_OPS = (
    "gather in forward",
    "gather in backward",
    "reduce",
    "end of forward",
    "end of backward",
    "failure in the user's code",
)


class Scheduler:
    """Owns the order of execution of all sharded modules in one tree, outer before inner.

    The root module makes it before its first forward. A forward begins with the first module that
    runs (`owner`) and ends with it; `started` and `finished` have the modules of the one under way
    or of the last one, in order. A backward may run inside a forward (a gradient penalty).
    With `finalizes_manually` a backward stays open (`_is_unfinalized`) until `finalize_backward`,
    and `reduction` is the handle of a reduction that has not been waited for.
    `_orders` has the order of the last forward of each owner, `_order` the expected order of the
    current one: empty once it is left. `_unchecked` has the phases that ranks still compare.
    `_scopes` are the modules inside of which units are uneven, `_thread` is the thread of the last
    forward.
    """

    def __init__(
        self, members: Sequence[ModuleHooks], comm_ctx: CommContext, agreement: Agreement | None
    ) -> None:
        self.members = list(members)
        self.comm_ctx = comm_ctx
        self.owner: nn.Module | None = None
        self.is_in_backward = False
        self.started: list[ModuleHooks] = []
        self.finished: list[ModuleHooks] = []
        self.is_last_backward = True
        self.finalizes_manually = False
        self.reduction: GradientReductionHandle | None = None
        self.post_optim_event: Any = None
        self._is_unfinalized = False
        self._thread = threading.get_ident()
        self._agreement = agreement
        self.passes = None if agreement is None else agreement.passes()
        self._unchecked = {"forward", "backward"} if agreement is not None else set()
        self._orders: dict[nn.Module, list[ModuleHooks]] = {}
        self._order: list[ModuleHooks] = []
        self._num_forwards = 0
        self._scopes: list[tuple[ModuleHooks, UnevenScope]] = []
        self.follow_scopes()
        watcher.watch(self)

    @property
    def root(self) -> ModuleHooks:
        return self.members[0]

    @property
    def units(self) -> list[Unit]:
        return [unit for member in self.members for unit in member.units]

    @property
    def phase(self) -> str:
        if self.is_in_backward:
            return "backward"
        return "idle" if self.owner is None else "forward"

    def follow_scopes(self) -> None:
        """Make the units inside the outermost modules that are set uneven run by agreement."""
        self._scopes.clear()
        self._orders.clear()
        for member in self.members:
            member.scope = member.within = None
        for member in self.members:
            if not member.is_scope or member.within is not None:
                continue
            for each in (member, *member.inner):
                if each.lenders or each.within is not None:
                    found = "tied parameters" if each.lenders else "it inside of two such modules"
                    raise ConfigError(
                        f"{each.name}: an uneven unit must have its parameters for itself, found "
                        f"{found}; leave them to the unit that set_uneven is called on."
                    )
            groups = [each.units for each in member.inner]
            member.scope = UnevenScope(member.name, groups, member.units)
            self._scopes.append((member, member.scope))
            for each in member.inner:
                each.within = member.scope

    # For the watcher, which asks from its own thread

    def place(self) -> Place:
        computing = [member for member in self.members if member.is_computing]
        unit = computing[-1].name if computing else ""
        is_behind = float(self.comm_ctx.is_behind)
        phase = self.phase if self.reduction is None else "finalize_backward"
        meshes = {unit.mesh_info for unit in self.units}
        limit_s = min((mesh.timeout_s for mesh in meshes), default=inf)
        where = (self._num_forwards, phase, unit, self.comm_ctx.num_collectives)
        num_steps = 0 if self.passes is None else self.passes.num_steps
        return Place(num_steps, *where, waited_s=is_behind, limit_s=limit_s)

    # Forward

    def begin_forward(self, owner: nn.Module) -> None:
        watcher.check()
        self._require_waited("forward")
        self._thread = threading.get_ident()
        self.end_failed_backward()
        self._num_forwards += 1
        self.owner = owner
        if self.passes is not None:
            name = require_hooks(owner).name
            self.passes.begin("forward", name, takes_grad=torch.is_grad_enabled())
        self.started, self.finished = [], []
        self._order = self._orders.get(owner, [])
        self.comm_ctx.all_gathers_follow_compute(self.post_optim_event)
        # Compute reuses the memory of gradients, which an optimizer elsewhere may still read.
        self.comm_ctx.device.wait(self.post_optim_event)
        self.post_optim_event = None
        for member in self.members:
            for unit in member.units:
                unit.begin_forward()
                if member.is_agreed:  # other ranks may have it gathered at any time
                    unit.enter_forward()

    def start(self, member: ModuleHooks, inputs: Any) -> None:
        expected = self._expected_next()
        self.started.append(member)
        if len(self.started) == 2 and torch.is_grad_enabled():
            self.started[0].release_embeddings(inputs)
        if expected is not member:
            self._leave_order(expected, f"{member.name}: gather in forward")

    def _leave_order(self, expected: ModuleHooks | None, found: str) -> None:
        """On another order than last time: stop predicting, and check that all ranks agree."""
        was_expected, self._order = bool(self._order), []
        if not was_expected or self._agreement is None or "forward" in self._unchecked:
            return
        before = f"{self.root.name}: end of forward"
        if expected is not None:
            before = f"{expected.name}: gather in forward"
        if get_debug_level() != DebugLevel.OFF:
            warnings.warn(
                f"{found}: rank {dist.get_rank()} runs units in another order than in the last "
                f"forward, which had '{before}' here.",
                stacklevel=2,
            )
        assert self.passes is not None
        self.passes.leave(found, before)

    def _expected_next(self) -> ModuleHooks | None:
        num_started = len(self.started)
        return self._order[num_started] if num_started < len(self._order) else None

    @property
    def expects_no_all_gather(self) -> bool:
        """Whether this forward starts no further module, judging by the last one."""
        return bool(self._order) and len(self.started) == len(self._order)

    def unshard_for_backward(self, member: ModuleHooks) -> None:
        """Issue the all-gathers of what the backward of a module reads."""
        member.release_unread()
        for unit in member.reads:
            unit.require_not_replaced()
        self.unshard(member, [unit for unit in member.reads if not unit.is_unread])

    def unshard(self, member: ModuleHooks, units: Sequence[Unit] | None = None) -> None:
        """Issue the all-gathers that a module needs, in forward or in backward."""
        units = member.reads if units is None else units
        for unit in units:
            unit.enter_forward()
        if member.within is not None and member.within.is_open:
            if any(unit.state is not UNSHARDED for unit in units):
                member.within.round(member.units)
            return
        for unit in units:
            if unit.state is not UNSHARDED and not unit.is_summoned:
                watcher.check()
                if self._unchecked:
                    self._agree(f"gather in {self.phase}", member)
                if self.passes is not None:
                    self.passes.follow(("gather", unit))
                try:
                    unit.unshard()
                except dist.DistError as error:
                    watcher.raise_explained(error)

    def prefetch_forward(self, member: ModuleHooks) -> None:
        """Issue the all-gather of what comes next: as the user said, or as in the last forward."""
        others = member.forward_prefetch
        if not others and member.request.prefetches_forward:
            others = self._order[len(self.started) : len(self.started) + 1]
        for other in others:
            if other.within is None:
                self.unshard(other)

    def end_forward(self) -> None:
        self.is_in_backward = False  # a backward inside this forward may have failed
        expected = self._expected_next()
        if expected is not None:
            self._leave_order(expected, f"{self.root.name}: end of forward")
        for member in self.members:
            member.end_forward()
        for unit in self.units:
            unit.enter_forward()  # those that it did not reach
        self._end_checks("forward")
        if self.passes is not None:
            self.passes.end()
        assert self.owner is not None
        self._orders[self.owner] = self.started
        self.owner = None
        watcher.note_failure("")  # all ranks have come here
        if not torch.is_grad_enabled():
            self.comm_ctx.free_pending()  # no backward will come to use it

    # Backward

    def enter_backward(self) -> None:
        if not self.is_in_backward:
            self.is_in_backward = True
            self._is_unfinalized = self.finalizes_manually
            if self.passes is not None and self.owner is None:
                self.passes.begin_backward()
            queue_backward_callback(self.end_backward)

    def prefetch_backward(self, call: ModuleCall) -> None:
        """Issue the all-gather of what backward reaches next: as the user said, or by order."""
        others = call.hooks.backward_prefetch
        if not others and call.previous is not None and call.previous.scheduler is self:
            others = [call.previous]
        for other in () if call.is_uneven else others:
            if other.is_unsharded_in_backward and other.within is None:
                self.unshard_for_backward(other)

    def settle_scope(self, member: ModuleHooks) -> None:
        """Reduce the gradients of uneven units, once no rank needs any of these units."""
        scope = member.scope
        assert scope is not None
        if scope.is_open:
            scope.finish()
        for unit in scope.units_to_reduce():
            self._reduce_scatter(unit, with_zeros=True)
        scope.is_open = bool(member._open)  # a backward inside of its forward has ended

    def reduce_scatter(self, unit: Unit, member: ModuleHooks) -> None:
        if unit.settings.requires_gradient_sync:
            if member.is_agreed:
                return  # they are reduced when the scope ends
            if self._unchecked:
                self._agree("reduce", member)
        self._reduce_scatter(unit)

    def _reduce_scatter(self, unit: Unit, *, with_zeros: bool = False) -> None:
        try:
            unit.reduce_scatter(with_zeros=with_zeros)
        except dist.DistError as error:
            watcher.raise_explained(error)

    def end_backward(self) -> None:
        """Settle what backward left open, and make every gradient visible."""
        self._end_members()
        if self.is_last_backward and not self.finalizes_manually:
            self.settle_backward()
        self.is_in_backward = False

    def _end_members(self) -> None:
        """Reduce and reshard what backwards have left open."""
        for member, scope in self._scopes:
            if scope.is_open or not scope.is_reduced:
                self.settle_scope(member)
            scope.is_reduced = False
        for member in reversed(self.members):
            member.end_backward()

    def settle_backward(self) -> None:
        """Wait for all reductions; if that fails, the next forward aborts what is left."""
        watcher.check()
        self.reduction = None
        self._end_checks("backward")
        if self.passes is not None and self.owner is None:
            self.passes.end()
        self.comm_ctx.finish_reduce_scatters()
        self.comm_ctx.free_pending()
        for unit in self.units:
            unit.grads.synchronize_host()
        self.is_in_backward = self._is_unfinalized = False

    def set_manual_finalization(self, enabled: bool) -> None:
        if enabled != self.finalizes_manually and (self.is_in_backward or self._is_unfinalized):
            raise LifecycleError(
                f"{self.root.name}: set_manual_backward_finalization must be called before "
                "backward, found one that is not finalized; call finalize_backward() first."
            )
        self.finalizes_manually = enabled

    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None:
        """Reduce and reshard what backwards have left open, by the current settings of units."""
        self._require_waited("finalize_backward")
        if self.is_in_backward or not self.finalizes_manually:
            found = "it inside of one" if self.is_in_backward else "automatic finalization"
            raise LifecycleError(
                f"{self.root.name}: finalize_backward must be called after backward and with "
                f"set_manual_backward_finalization(True), found {found}; set that before forward."
            )
        self.is_in_backward = True  # until it is settled
        self._end_members()
        if async_op:
            self.reduction = GradientReductionHandle(self)
            return self.reduction
        self.settle_backward()
        return None

    def _require_waited(self, what: str) -> None:
        if self.reduction is not None:
            raise LifecycleError(
                f"{self.root.name}: {what} must come after the gradient reduction before it, found "
                "that nobody waited for that; call wait() on what finalize_backward returned."
            )

    # Captures

    def begin_capture(self) -> None:
        """Recreate, as part of a CUDA graph, all that outlives a step except the shards."""
        if self.is_in_backward or self.owner is not None:
            self.abort()
        for unit in self.units:
            unit.forget_full()
        self.comm_ctx.begin_capture()

    def end_capture(self, *, has_failed: bool) -> None:
        """Leave nothing of a capture behind for eager steps."""
        self.comm_ctx.end_capture()
        if has_failed:
            self.abort()
        for unit in self.units:
            unit.forget_full()
        self.comm_ctx.end_capture()

    def end_replay(self) -> None:
        """Drop what eager forwards have gathered: a graph has changed the shards."""
        for unit in self.units:
            unit.reshard_now()

    # Failure

    def abort(self) -> None:
        """Leave everything sharded, nothing in flight, and no gradient of the failed step.

        Never raises (rule 11): every unit is reset, whatever failed, even a collective.
        """
        self.owner = None
        self.is_in_backward = False
        for _, scope in self._scopes:
            scope.reset()
        for member in self.members:
            member.reset()
        self.reduction, self._is_unfinalized = None, False
        self.comm_ctx.abort_reduce_scatters()
        if self.passes is not None:
            self.passes.abort()
        for unit in self.units:
            unit.abort()

    def end_failed_backward(self) -> None:
        """Abort a backward that raised: it has ended if the thread of its forward goes on."""
        is_left = self.is_in_backward and self.owner is None and self.reduction is None
        if is_left and self._thread == threading.get_ident() and not in_backward():
            watcher.note_failure("it left a backward before its end")
            self.abort()

    def give_up_step(self) -> None:
        """Abort a step that some ranks have not done, and reset the counts that places compare."""
        self.abort()
        if self.passes is not None:
            self.passes.forget()
        self._num_forwards = self.comm_ctx.num_collectives = 0

    def fail_forward(self, error: BaseException) -> None:
        """The user's code raised: tell the others if they would wait for us, then abort."""
        setattr(error, FULL_BYTES, sum(unit.full_bytes for unit in self.units))
        watcher.note_failure(f"it left the forward of {getattr(error, _FAILED_UNIT)}", error)
        try:
            is_uneven = any(scope.is_open for _, scope in self._scopes)  # the watcher will tell
            if not isinstance(error, DisagreementError) and not is_uneven:
                self._agree("failure in the user's code", self.root)
        except Exception:
            pass  # the others know now, or cannot be told; this rank raises what happened to it
        finally:
            self.abort()

    # Agreement between ranks

    def _agree(self, op: str, member: ModuleHooks) -> None:
        """Until the first step of a phase is over, check that all ranks are about to do this."""
        if self.phase in self._unchecked:
            assert self._agreement is not None
            assert self.passes is not None
            self.passes.enter()
            number = _CHECKED_OPS.index(op) * len(self.members) + self.members.index(member)
            self._agreement.compare_step(number, self._describe)

    def _describe(self, number: int) -> str:
        op, index = divmod(number, len(self.members))
        return f"{self.members[index].name}: {_CHECKED_OPS[op]}"

    def _end_checks(self, phase: str) -> None:
        self._agree(f"end of {phase}", self.root)
        # In the first step ranks compare all they do; in the others only if asked to.
        if get_debug_level() != DebugLevel.DETAIL:
            self._unchecked.discard(phase)


def hooks_of(module: nn.Module) -> ModuleHooks | None:
    """The hooks of a module; None if it was not given to `fully_shard` or a wrapper."""
    found = module.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, ModuleHooks) else None


def require_hooks(module: Any) -> ModuleHooks:
    """The hooks of a module; raises if it has none."""
    hooks = hooks_of(module)
    if hooks is None:
        raise LifecycleError(
            f"{type(module).__name__}: a module that fully_shard was called on is expected, found "
            "one without a unit; call fully_shard on it first."
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


class ShardedModule:
    """The methods that modules sharded by `fully_shard` and wrappers have in common."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; if it raises, reset the scheduler."""
        return require_hooks(self).guarded(super().__call__, args, kwargs)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, also those that were accumulated without communication."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for unit in units_below(cast(nn.Module, self)):
            unit.grads.drop_kept(unit.params)
            for param in (each.param for each in unit.params):  # modules may have others now
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.zero_()

    def set_uneven(self, is_uneven: bool = True) -> None:
        """Set whether ranks may run different units inside of this module, in any order.

        They are then gathered and reduced by agreement. The module itself must run equally often
        on all ranks, and all of them must call this.
        """
        hooks = require_hooks(self)
        hooks.require_not_computing("set_uneven")
        hooks.is_scope = is_uneven
        if hooks.scheduler is not None:
            hooks.scheduler.follow_scopes()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise MisuseError(
            f"{type(self).__name__}: a sharded module must not be copied object by object, found "
            "copy.deepcopy on it; copy before sharding, or build a second model, shard it alike "
            "and load the state dict of this one."
        )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or convert the shards, and plan the units again."""
        hooks = require_hooks(self)
        for unit in hooks.reads:
            unit.reshard_now()
        # Gradients keep a user's own `grad_dtype` after a conversion.
        own = {}
        for param in (param for unit in hooks.units for param in unit.params):
            if has_own_grad_dtype(param.shard):
                own[param] = param.grad_dtype, param.shard.grad
                param.shard.grad = None
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for unit in hooks.units:
            unit.refresh()
        for param, (dtype, grad) in own.items():
            set_grad_dtype(param.shard, dtype)
            param.shard.grad = None if grad is None else grad.to(param.shard.device)
        return result
