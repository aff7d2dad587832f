"""One run of a module: what autograd's hooks point to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr

from fullshard.api import MixedPrecisionPolicy
from fullshard.device import untraced
from fullshard.errors import LifecycleError
from fullshard.runtime.scheduler import ForwardPass, Phase, Scheduler
from fullshard.runtime.trees import map_arguments, map_tensors, tensors
from fullshard.trace import seam
from fullshard.trace.seam import Activity
from fullshard.unit.context import CommContext
from fullshard.unit.reduce_scatter import GradBucket
from fullshard.unit.unit import Unit


class ModuleCall:
    """One run of one module of a runner.

    Active in backward from the first gradient at its outputs until all of its inputs that take a
    gradient have it. Autograd keeps it alive through the hooks; it holds no tensors.
    """

    __slots__ = (
        "__weakref__",
        "_first_node",
        "_num_pending",
        "hooks",
        "is_active",
        "num_inputs",
        "opens_pass",
        "part_of",
        "position",
    )

    def __init__(self, hooks: ModuleHooks, part_of: ForwardPass, *, opens_pass: bool) -> None:
        self.hooks = hooks
        self.part_of = part_of
        self.opens_pass = opens_pass
        self.position = 0
        self.num_inputs = 0
        self.is_active = False
        self._num_pending = 0
        self._first_node = 0

    @property
    def is_last_in_backward(self) -> bool:
        """Whether backward, going through the calls of a pass, reaches no other after this one."""
        return self.part_of.before(self.position) is None

    def follow_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module is given, with views in the place of inputs that take a gradient.

        A view's gradient is complete when this call is done with it. The input's own would wait
        for everyone who was given the same tensor, and hooks would pile up on a leaf.
        """
        views: dict[int, torch.Tensor] = {}

        def followed(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            if id(tensor) not in views:
                is_strided = tensor.layout is torch.strided and not tensor.is_nested
                view = tensor.view_as(tensor) if is_strided else tensor
                view.register_hook(self._input_arrived)
                views[id(tensor)] = view
            return views[id(tensor)]

        args, kwargs = map_arguments(followed, args, kwargs)
        self.num_inputs = len(views)
        # Autograd numbers its nodes as it makes them: from here on they are this call's.
        self._first_node = _get_sequence_nr()
        return args, kwargs

    def hook_outputs(self, output: Any) -> bool:
        """Whether a gradient can reach this call at all."""
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
        for tensor in (output._base, output):
            node = None if tensor is None else tensor.grad_fn
            if node is not None and node._sequence_nr() >= self._first_node:
                return node
        return None

    def _reached(self, grads: Any) -> None:
        if not self.is_active:
            self.is_active = True
            self._num_pending = self.num_inputs
            self.hooks.reached(self)

    def _input_arrived(self, grad: torch.Tensor) -> None:
        if grad.grad_fn is not None:
            # With create_graph: the weights will be read again to differentiate this gradient.
            grad.grad_fn.register_prehook(self._reached)
        if self.is_active:
            self._num_pending -= 1
            if self._num_pending == 0:
                self.hooks.passed(self)


_ATTRIBUTE = "_fullshard_hooks"
_managers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ModuleHooks]] = (
    weakref.WeakKeyDictionary()
)
_hooks_by_unit: weakref.WeakKeyDictionary[Unit, weakref.ref[ModuleHooks]] = (
    weakref.WeakKeyDictionary()
)


class Prefetch(Enum):
    """When backward gathers what it reaches next."""

    BEFORE = "before the current unit computes"
    AFTER = "after the current unit has computed"
    NEVER = "when it is reached"


@dataclass(frozen=True, slots=True)
class HookOptions:
    """How a runner goes about its work, unlike others."""

    prefetches_forward: bool = True
    backward_prefetch: Prefetch = Prefetch.BEFORE
    casts_root_inputs: bool = False


class ModuleHooks:
    """The modules of one call and the units that it made of their parameters.

    `lenders` are units of other runners that own parameters which our modules use too.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        units: Sequence[Unit],
        policy: MixedPrecisionPolicy,
        device: torch.device,
        prepare: Callable[[ModuleHooks], Scheduler],
        options: HookOptions = HookOptions(),  # noqa: B008 (frozen)
    ) -> None:
        self.name = name
        self.modules = tuple(modules)
        self.units = list(units)
        self.lenders: list[Unit] = []
        self.policy = policy
        self.device = device
        self.options = options
        self.scheduler: Scheduler | None = None
        self.shared_comm_ctx: CommContext | None = None
        self.is_root = False
        self.forward_prefetch: list[ModuleHooks] = []
        self.backward_prefetch: list[ModuleHooks] = []
        self._prepare = prepare
        self._open: list[ModuleCall] = []
        self._active: set[ModuleCall] = set()
        # Weakly: a graph that is dropped takes its calls with it.
        self._awaited: weakref.WeakSet[ModuleCall] = weakref.WeakSet()
        self._ran: set[nn.Module] = set()
        for unit in units:
            unit.on_gradients = self._gradients_arrived
            _hooks_by_unit[unit] = weakref.ref(self)
        for module in self.modules:
            # Not setattr: a compiled module hands attributes on to the one that it wraps.
            module.__dict__[_ATTRIBUTE] = self
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward)

    @property
    def reads(self) -> list[Unit]:
        """The units that must be unsharded for our modules to run."""
        return [*self.units, *self.lenders] if self.lenders else self.units

    @property
    def _casts_inputs(self) -> bool:
        is_cast_as_root = self.is_root and self.options.casts_root_inputs
        return self.policy.cast_forward_inputs or is_cast_as_root

    def ensure_scheduler(self) -> Scheduler:
        if self.scheduler is None:
            self.scheduler = self._prepare(self)
        return self.scheduler

    # Forward

    def guarded(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one of our modules; whatever it raises, nothing of it stays open."""
        num_open = len(self._open)
        opens_pass = self.scheduler is None or self.scheduler.owner is None
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            del self._open[num_open:]
            root = self.scheduler
            if opens_pass and root is not None and root.owner is not None:
                root.fail_pass(error)
            raise

    @untraced
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        root = self.scheduler if self.scheduler is not None else self.ensure_scheduler()
        is_recomputing = torch._C._current_graph_task_id() != -1
        opens_pass = root.owner is None and not is_recomputing
        if is_recomputing:
            root.enter_backward()
        else:
            if opens_pass:
                root.begin_pass(module)
                if self.device.type != "cpu":
                    args, kwargs = self._moved(args, kwargs)
            root.started(self)
        if self.policy.param_dtype is not None and self._casts_inputs:
            args, kwargs = map_arguments(_casting(self.policy.param_dtype), args, kwargs)
        root.unshard(self)
        for unit in self.reads:
            unit.wait()
        if not is_recomputing:
            root.prefetch_forward(self)
        call = ModuleCall(self, root.current, opens_pass=opens_pass)
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

    @untraced
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        root = self.scheduler
        assert root is not None
        is_recomputing = torch._C._current_graph_task_id() != -1
        call = self._open.pop()
        if seam.observers:
            seam.end(Activity.FORWARD, self.name)
        if torch.is_grad_enabled() and call.hook_outputs(output) and len(self.modules) > 1:
            self._awaited.add(call)
        if is_recomputing:
            call.position = root.current.last_position(self)
        else:
            call.position = len(root.current.finished)
            root.current.finished.append(self)
            self._ran.add(module)
            if len(self._ran) == len(self.modules) and not self._open:
                self._ran.clear()
                self._reshard_after_forward()
            if call.opens_pass:
                root.end_pass()
        if self.policy.output_dtype is not None:
            output = map_tensors(_casting(self.policy.output_dtype), output)
        return output

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = self.device

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

        return map_arguments(move, args, kwargs)

    def _reshard_after_forward(self) -> None:
        for unit in self.units:
            after = unit.settings.reshard_after_forward
            if after is None:
                # Without gradients no backward will want the root, and users want their shards.
                after = not self.is_root or not torch.is_grad_enabled()
            if after is False:
                continue
            unit.reshard(None if after is True else unit.mesh_info.subgroup_axis(after))
            if self.scheduler is not None and self.scheduler.expects_no_gather:
                unit.comm_ctx.release_now(unit)  # nothing will come that it would be in the way of

    def end_pass(self) -> None:
        """Reshard what the pass left open.

        That is a list of modules of which only some ran, a module that raised and was caught, a
        gather that nobody used, and what was lent to another runner.
        """
        self._ran.clear()
        self._reshard_after_forward()
        self._open.clear()
        for unit in self.units:
            if not unit.is_unsharded:
                unit.reshard()

    # Backward

    @property
    def is_unsharded_in_backward(self) -> bool:
        return all(unit.settings.unshard_in_backward for unit in self.units)

    @untraced
    def reached(self, call: ModuleCall) -> None:
        """A gradient reached a call's outputs."""
        root = self.scheduler
        assert root is not None
        root.enter_backward()
        self._awaited.discard(call)
        self._active.add(call)
        if self.is_unsharded_in_backward:
            root.unshard(self)
            for unit in self.reads:
                unit.wait()
        if self.options.backward_prefetch is Prefetch.BEFORE:
            root.prefetch_backward(call)
        if seam.observers:
            seam.begin(Activity.BACKWARD, self.name)

    @untraced
    def passed(self, call: ModuleCall) -> None:
        """All inputs of a call have their gradients: its weights are not read any more."""
        self._leave([call])
        if self._active:
            return
        # Of a list of modules, others that ran in the same pass are still to come: gathering and
        # reducing once for all of them is what makes them one unit.
        if len(self.modules) > 1 and any(c.part_of is call.part_of for c in self._awaited):
            return
        self._finish_backward([call])

    @untraced
    def _gradients_arrived(self, unit: Unit, only: GradBucket | None) -> None:
        root = self.scheduler
        assert root is not None
        root.enter_backward()
        if only is not None:
            root.reduce(unit, self, only)
            return
        # With no input to wait for, nothing is left to be computed once the gradients are here;
        # but inputs may be out of sight, and then a frozen weight is still read for theirs.
        waits = unit.has_frozen or any(call.num_inputs for call in self._active)
        if len(self.units) == 1 and not waits:
            calls = list(self._active)
            self._leave(calls)
            self._finish_backward(calls)
        else:
            root.reduce(unit, self)

    def _leave(self, calls: Iterable[ModuleCall]) -> None:
        """Nothing more is computed in backward for these calls."""
        for call in calls:
            call.is_active = False
            if seam.observers:
                seam.end(Activity.BACKWARD, self.name)
        self._active.difference_update(calls)

    def _finish_backward(self, calls: Sequence[ModuleCall]) -> None:
        root = self.scheduler
        assert root is not None
        for unit in self.units:
            # First, so that its memory is not there beside that of the message. A backward inside
            # forward (a penalty on a gradient) leaves what still computes.
            if unit.settings.reshard_after_backward and not self._open:
                unit.reshard()
                if all(call.is_last_in_backward for call in calls):
                    unit.comm_ctx.release_now(
                        unit
                    )  # no gather will come that it would be in the way of
            if unit.has_gradients:
                root.reduce(unit, self)
        if self.options.backward_prefetch is Prefetch.AFTER:
            for call in calls:
                root.prefetch_backward(call)

    def end_backward(self) -> None:
        if self._active:
            self._leave(list(self._active))
        root = self.scheduler
        assert root is not None
        for unit in self.units:
            is_due = unit.has_gradients
            if is_due:
                unit.listen()  # an input that takes a gradient got none: do not wait for it again
            elif unit.is_unsharded and unit.settings.reduce_scatter_unused_params:
                is_due = not unit.gradients.was_reduced
            if is_due or unit.owes_kept_gradients:
                root.reduce(unit, self)
            unit.gradients.end_backward()
            if unit.settings.reshard_after_backward and not self._open:
                unit.reshard()

    def forget(self) -> None:
        """Drop what a failed step left open."""
        self._leave(list(self._active))
        self._open.clear()
        self._ran.clear()

    # Calls from outside

    def require_not_computing(self, what: str) -> None:
        """Raise if the unit's weights are being read right now."""
        if self._open or self._active:
            phase = self.scheduler.phase if self.scheduler is not None else Phase.IDLE
            raise LifecycleError(
                f"{self.name}: {what}() must not be called while the module computes, found it in "
                f"{phase.value}; call it before the forward or after the backward of the module."
            )


def hooks_of(module: nn.Module) -> ModuleHooks | None:
    """The runner of a module that was given to `fully_shard`, if it was."""
    found = module.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, ModuleHooks) else None


def manage(hooks: ModuleHooks, modules: Iterable[nn.Module]) -> None:
    """Remember that a runner cares for the parameters of these modules."""
    _managers.update((module, weakref.ref(hooks)) for module in modules)


def hooks_of_unit(unit: Unit) -> ModuleHooks | None:
    """The runner that a unit belongs to."""
    found = _hooks_by_unit.get(unit)
    return None if found is None else found()


def hooks_managing(module: nn.Module) -> ModuleHooks | None:
    """The runner that cares for a module's own parameters."""
    found = _managers.get(module)
    return None if found is None else found()


def _casting(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return cast
