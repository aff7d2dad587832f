"""What a module's forward and backward trigger. The only file that says when.

[Note: hooks and autograd] Autograd runs what is ready in the reverse order of forward, and hands a
parameter its gradient before anything else: when the inputs of a call have their gradients, so have
its parameters. So most units need no hooks on parameters: a call gives its module views of the
inputs, whose hooks tell when their gradients arrive. A unit counts the gradients of its parameters
(`Unit.listen`) if a call has no input that takes a gradient, or if a backward has ended before an
input got one. Resharding waits for the inputs' gradients in any case: a frozen weight, or a weight
used through `detach()`, is still read after the last trainable one has its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fullshard._torch import in_backward, node_sequence_nr, sequence_nr, untraced, view_base
from fullshard.api import BackwardPrefetch, MixedPrecisionPolicy
from fullshard.errors import LifecycleError
from fullshard.runtime.scheduler import (
    ForwardPass,
    HookOptions,
    Phase,
    ScheduledModules,
    Scheduler,
)
from fullshard.runtime.trees import map_arguments, map_tensors, tensors
from fullshard.trace import seam
from fullshard.trace.seam import Activity
from fullshard.unit.context import CommContext
from fullshard.unit.reduce_scatter import GradBucket
from fullshard.unit.unit import Unit

_ATTRIBUTE = "_fullshard_hooks"
# Weak dictionaries, because a module that is not sharded itself, but whose parameters are, must not
# get an attribute that keeps the hooks alive or that a copy of the module would share.
_managers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ModuleHooks]]
_managers = weakref.WeakKeyDictionary()


class ModuleCall:
    """One run of one module: what autograd's hooks point to.

    Active in backward from the first gradient at its outputs until all of its inputs that take a
    gradient have it. Autograd keeps it alive through the hooks; it holds no tensors.
    """

    __slots__ = (
        "__weakref__",
        "_first_node",
        "_num_pending",
        "forward",
        "hooks",
        "is_active",
        "num_inputs",
        "opens_forward",
        "position",
    )

    def __init__(self, hooks: ModuleHooks, forward: ForwardPass, *, opens_forward: bool) -> None:
        self.hooks = hooks
        self.forward = forward
        self.opens_forward = opens_forward
        self.position = 0
        self.num_inputs = 0
        self.is_active = False
        self._num_pending = 0
        self._first_node = 0

    @property
    def is_last_in_backward(self) -> bool:
        """Whether backward reaches no other module of the same forward after this call."""
        return self.forward.before(self.position) is None

    def follow_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with views in place of inputs that take a gradient.

        A view's gradient is complete when this call is done with it. The input's own would wait
        for everyone who was given the same tensor, and hooks would pile up on a leaf.
        """
        views: dict[torch.Tensor, torch.Tensor] = {}

        def followed(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            view = views.get(tensor)
            if view is None:
                is_strided = tensor.layout is torch.strided and not tensor.is_nested
                view = tensor.view_as(tensor) if is_strided else tensor
                view.register_hook(self._input_arrived)
                views[tensor] = view
            return view

        args, kwargs = map_arguments(followed, args, kwargs)
        self.num_inputs = len(views)
        # Autograd numbers its nodes as it makes them: from here on they are this call's.
        self._first_node = sequence_nr()
        return args, kwargs

    def hook_outputs(self, output: Any) -> bool:
        """Hook the outputs; whether a gradient can reach this call at all."""
        is_hooked = False
        for tensor in (output,) if type(output) is torch.Tensor else tensors(output):
            node = self._own_node(tensor) if tensor.requires_grad else None
            if node is not None:
                node.register_prehook(self._reached)
                is_hooked = True
        return is_hooked

    def _own_node(self, output: torch.Tensor) -> Any:
        """The node that a gradient meets first in this call; None if it only passes through."""
        # An in-place operation on a view replaces the view's node, but not its base's.
        for tensor in (view_base(output), output):
            node = None if tensor is None else tensor.grad_fn
            if node is not None and node_sequence_nr(node) >= self._first_node:
                return node
        return None

    def _reached(self, grads: Any) -> None:
        if not self.is_active:
            self.is_active = True
            self._num_pending = self.num_inputs
            self.hooks.pre_backward(self)

    def _input_arrived(self, grad: torch.Tensor) -> None:
        if grad.grad_fn is not None:
            # With create_graph: the weights will be read again to differentiate this gradient.
            grad.grad_fn.register_prehook(self._reached)
        if self.is_active:
            self._num_pending -= 1
            if self._num_pending == 0:
                self.hooks.post_backward(self)


class ModuleHooks(ScheduledModules):
    """The hooks of the modules of one `fully_shard` call or wrapper.

    `_open` are the calls in forward, `_active` those in backward, `_awaited` those of a list of
    modules that backward has not reached yet (weakly: a graph that is dropped takes its calls with
    it), `_ran` the modules that ran in the current forward.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        units: Sequence[Unit],
        policy: MixedPrecisionPolicy,
        device: torch.device,
        make_scheduler: Callable[[ModuleHooks], Scheduler],
        options: HookOptions = HookOptions(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(name, modules, units, options)
        self.policy = policy
        self.device = device
        self.shared_comm_ctx: CommContext | None = None
        self.is_root = False
        self._make_scheduler = make_scheduler
        self._open: list[ModuleCall] = []
        self._active: set[ModuleCall] = set()
        self._awaited: weakref.WeakSet[ModuleCall] = weakref.WeakSet()
        self._ran: set[nn.Module] = set()
        for unit in units:
            unit.on_grads_ready = self._grads_ready
        for module in self.modules:
            # Not setattr: a compiled module hands attributes on to the one that it wraps.
            module.__dict__[_ATTRIBUTE] = self
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward)

    def ensure_scheduler(self) -> Scheduler:
        if self.scheduler is None:
            self.scheduler = self._make_scheduler(self)
        return self.scheduler

    # Forward

    def guarded(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one of our modules; whatever it raises, nothing of it stays open."""
        num_open = len(self._open)
        opens_forward = self.scheduler is None or self.scheduler.owner is None
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            del self._open[num_open:]
            scheduler = self.scheduler
            if opens_forward and scheduler is not None and scheduler.owner is not None:
                scheduler.fail_forward(error)
            raise

    @untraced
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        scheduler = self.scheduler if self.scheduler is not None else self.ensure_scheduler()
        # A forward inside backward is a recomputation: it leaves resharding and order alone.
        is_recomputing = in_backward()
        opens_forward = scheduler.owner is None and not is_recomputing
        if is_recomputing:
            scheduler.enter_backward()
        else:
            if opens_forward:
                scheduler.begin_forward(module)
                if self.device.type != "cpu":
                    args, kwargs = map_arguments(_moving(self.device), args, kwargs)
            scheduler.started(self)
        if self.policy.param_dtype is not None and self._casts_inputs:
            args, kwargs = map_arguments(_casting(self.policy.param_dtype), args, kwargs)
        scheduler.unshard(self)
        for unit in self.reads:
            unit.wait()
        if not is_recomputing:
            scheduler.prefetch_forward(self)
        call = ModuleCall(self, scheduler.current, opens_forward=opens_forward)
        if torch.is_grad_enabled():
            args, kwargs = call.follow_inputs(args, kwargs)
            for unit in self.units:
                if not call.num_inputs:
                    unit.listen()
                else:
                    unit.listen_for_large()
        self._open.append(call)
        if seam.observers:
            seam.begin(Activity.FORWARD, self.name)
        return args, kwargs

    @property
    def _casts_inputs(self) -> bool:
        is_cast_as_root = self.is_root and self.options.casts_root_inputs
        return self.policy.cast_forward_inputs or is_cast_as_root

    @untraced
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        scheduler = self.scheduler
        assert scheduler is not None
        call = self._open.pop()
        if seam.observers:
            seam.end(Activity.FORWARD, self.name)
        if torch.is_grad_enabled() and call.hook_outputs(output) and len(self.modules) > 1:
            self._awaited.add(call)
        if in_backward():
            call.position = scheduler.current.last_position(self)
        else:
            call.position = len(scheduler.current.finished)
            scheduler.current.finished.append(self)
            self._ran.add(module)
            if len(self._ran) == len(self.modules) and not self._open:
                self._ran.clear()
                self._reshard_after_forward()
            if call.opens_forward:
                scheduler.end_forward()
        if self.policy.output_dtype is not None:
            output = map_tensors(_casting(self.policy.output_dtype), output)
        return output

    def _reshard_after_forward(self) -> None:
        for unit in self.units:
            after = unit.settings.reshard_after_forward
            if after is None:
                # Without gradients no backward will want the root, and users want their shards.
                after = not self.is_root or not torch.is_grad_enabled()
            if after is False:
                continue
            unit.reshard(None if after is True else unit.mesh_info.subgroup_axis(after))
            if self.scheduler is not None and self.scheduler.expects_no_all_gather:
                unit.comm_ctx.free_now(unit)  # no all-gather will follow that could free it

    def end_forward(self) -> None:
        """Reshard what the forward of the root left open.

        That is a list of modules of which only some ran, a module that raised and was caught, an
        all-gather that nobody used, and what was lent to other modules.
        """
        self._ran.clear()
        self._reshard_after_forward()
        self._open.clear()
        for unit in self.units:
            if not unit.is_unsharded:
                unit.reshard()

    # Backward

    @untraced
    def pre_backward(self, call: ModuleCall) -> None:
        """A gradient reached a call's outputs."""
        scheduler = self.scheduler
        assert scheduler is not None
        scheduler.enter_backward()
        self._awaited.discard(call)
        self._active.add(call)
        if self.is_unsharded_in_backward:
            scheduler.unshard(self)
            for unit in self.reads:
                unit.wait()
        if self.options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            scheduler.prefetch_backward(self, call.forward, call.position)
        if seam.observers:
            seam.begin(Activity.BACKWARD, self.name)

    @untraced
    def post_backward(self, call: ModuleCall) -> None:
        """All inputs of a call have their gradients: its weights are not read any more."""
        self._leave([call])
        if self._active:
            return
        # Of a list of modules, others that ran in the same forward are still to come: gathering and
        # reducing once for all of them is what makes them one unit.
        if len(self.modules) > 1 and any(c.forward is call.forward for c in self._awaited):
            return
        self._finish_backward([call])

    @untraced
    def _grads_ready(self, unit: Unit, only: GradBucket | None) -> None:
        """All gradients of a unit are there, or one that is a large bucket by itself."""
        scheduler = self.scheduler
        assert scheduler is not None
        scheduler.enter_backward()
        if only is not None:
            scheduler.reduce_scatter(unit, self, only)
            return
        # With no input to wait for, nothing is left to be computed once the gradients are there;
        # but inputs may be out of sight, and then a frozen weight is still read for theirs.
        waits = unit.has_frozen or any(call.num_inputs for call in self._active)
        if len(self.units) == 1 and not waits:
            calls = list(self._active)
            self._leave(calls)
            self._finish_backward(calls)
        else:
            scheduler.reduce_scatter(unit, self)

    def _leave(self, calls: Iterable[ModuleCall]) -> None:
        """Nothing more is computed in backward for these calls."""
        for call in calls:
            call.is_active = False
            if seam.observers:
                seam.end(Activity.BACKWARD, self.name)
        self._active.difference_update(calls)

    def _finish_backward(self, calls: Sequence[ModuleCall]) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        for unit in self.units:
            # Reshard first, so that the full buffer is free before the bucket is allocated. A
            # backward inside forward (a gradient penalty) leaves what still computes.
            if unit.settings.reshard_after_backward and not self._open:
                unit.reshard()
                if all(call.is_last_in_backward for call in calls):
                    unit.comm_ctx.free_now(unit)  # no all-gather will follow that could free it
            if unit.has_full_grads:
                scheduler.reduce_scatter(unit, self)
        if self.options.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            for call in calls:
                scheduler.prefetch_backward(self, call.forward, call.position)

    def end_backward(self) -> None:
        if self._active:
            self._leave(list(self._active))
        scheduler = self.scheduler
        assert scheduler is not None
        for unit in self.units:
            is_due = unit.has_full_grads
            if is_due:
                unit.listen()  # an input that takes a gradient got none: do not wait for it again
            elif unit.is_unsharded and unit.settings.reduce_scatter_unused_params:
                is_due = not unit.grads.was_reduced
            if is_due or unit.owes_kept_grads:
                scheduler.reduce_scatter(unit, self)
            unit.grads.end_backward()
            if unit.settings.reshard_after_backward and not self._open:
                unit.reshard()

    # Calls from outside

    def reset(self) -> None:
        self._leave(list(self._active))
        self._open.clear()
        self._ran.clear()

    def require_not_computing(self, what: str) -> None:
        """Raise if the unit's weights are being read right now."""
        if self._open or self._active:
            phase = self.scheduler.phase if self.scheduler is not None else Phase.IDLE
            raise LifecycleError(
                f"{self.name}: {what}() must not be called while the module computes, found it in "
                f"{phase.value}; call it before the forward or after the backward of the module."
            )

    def unshard(self, async_op: bool) -> UnshardHandle | None:
        """All-gather the parameters, outside of forward and backward or ahead of them."""
        is_past = any(unit.grads.was_reduced for unit in self.units)
        scheduler = self.scheduler
        if scheduler is not None and scheduler.phase is Phase.BACKWARD and is_past:
            raise LifecycleError(
                f"{self.name}: unshard() must come before a module's backward or after the whole "
                "backward, found its gradients reduced in the backward that is still running; the "
                "optimizer would make what is gathered now stale. Call it after backward."
            )
        for unit in self.reads:
            unit.refresh()
            if not unit.is_unsharded:
                unit.comm_ctx.all_gathers_follow_compute()
                unit.unshard()
        handle = UnshardHandle(self.reads)
        if async_op:
            return handle
        handle.wait()
        return None


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
    """The hooks of a module that was given to `fully_shard` or a wrapper, if it was."""
    found = module.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, ModuleHooks) else None


def hooks_of_unit(unit: Unit) -> ModuleHooks | None:
    """The hooks that a unit belongs to."""
    found = getattr(unit.on_grads_ready, "__self__", None)
    return found if isinstance(found, ModuleHooks) else None


def hooks_managing(module: nn.Module) -> ModuleHooks | None:
    """The hooks that manage a module's own parameters."""
    found = _managers.get(module)
    return None if found is None else found()


def manage(hooks: ModuleHooks, modules: Iterable[nn.Module]) -> None:
    """Remember that hooks manage the parameters of these modules."""
    _managers.update((module, weakref.ref(hooks)) for module in modules)


def _casting(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return cast


def _moving(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

    return move
