"""Runs the units of one `fully_shard` call at the right times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from fullshard.api import MixedPrecisionPolicy
from fullshard.errors import LifecycleError
from fullshard.runtime.calls import Call
from fullshard.runtime.root import Phase, Root
from fullshard.runtime.trees import map_tensors
from fullshard.unit.flow import Flow
from fullshard.unit.unit import Unit

_ATTRIBUTE = "_fullshard_runner"


class Runner:
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
        prepare: Callable[[Runner], Root],
    ) -> None:
        self.name = name
        self.modules = tuple(modules)
        self.units = list(units)
        self.lenders: list[Unit] = []
        self.policy = policy
        self.device = device
        self.root: Root | None = None
        self.shared_flow: Flow | None = None
        self.is_root = False
        self.forward_prefetch: list[Runner] = []
        self.backward_prefetch: list[Runner] = []
        self._prepare = prepare
        self._open: list[Call] = []
        self._active: set[Call] = set()
        self._ran: set[nn.Module] = set()
        for unit in units:
            unit.on_gradients = self._gradients_arrived
        for module in self.modules:
            setattr(module, _ATTRIBUTE, self)
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward, always_call=True)

    @property
    def reads(self) -> list[Unit]:
        """The units that must be unsharded for our modules to run."""
        return [*self.units, *self.lenders] if self.lenders else self.units

    def ensure_root(self) -> Root:
        if self.root is None:
            self.root = self._prepare(self)
        return self.root

    # Forward

    @_disable_dynamo
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        root = self.root if self.root is not None else self.ensure_root()
        is_recomputing = torch._C._current_graph_task_id() != -1
        if is_recomputing:
            root.enter_backward()
        else:
            if root.owner is None or root.owner is module:
                root.begin_pass(module)
                if self.device.type != "cpu":
                    args, kwargs = self._moved(args, kwargs)
            root.started(self)
        if self.policy.param_dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), self.policy.param_dtype)
        root.unshard(self)
        for unit in self.reads:
            unit.wait()
        if not is_recomputing:
            root.prefetch_forward(self)
        call = Call(self, root.current)
        if torch.is_grad_enabled():
            call.hook_inputs(args, kwargs)
        self._open.append(call)
        return args, kwargs

    @_disable_dynamo
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        root = self.root
        if root is None:
            return output  # preparing failed
        is_recomputing = torch._C._current_graph_task_id() != -1
        if root.is_unwinding and not is_recomputing:
            if root.owner is module:
                root.fail_pass()
            return None
        call = self._open.pop()
        if torch.is_grad_enabled():
            call.hook_outputs(output)
        if is_recomputing:
            call.position = root.current.last_position(self)
        else:
            call.position = len(root.current.finished)
            root.current.finished.append(self)
            self._ran.add(module)
            if len(self._ran) == len(self.modules):
                self._ran.clear()
                self._reshard_after_forward()
            if root.owner is module:
                root.end_pass()
        if self.policy.output_dtype is not None:
            output = _cast(output, self.policy.output_dtype)
        return output

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = self.device

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

        return map_tensors(move, (args, kwargs))

    def _reshard_after_forward(self) -> None:
        for unit in self.units:
            after = unit.settings.reshard_after_forward
            if after is None:
                # Without gradients no backward will want the root, and users want their shards.
                after = not self.is_root or not torch.is_grad_enabled()
            if after is False:
                continue
            unit.reshard(None if after is True else unit.topology.thin_axis(after))
            if self.root is not None and self.root.expects_no_gather:
                unit.flow.release_now(unit)  # nothing will come that it would be in the way of

    def end_pass(self, *, has_run: bool) -> None:
        """Reshard what the pass left open.

        That is a list of modules of which only some ran, a gather that nobody used, and what was
        only lent to another runner.
        """
        if self._ran or not has_run:
            self._ran.clear()
            self._reshard_after_forward()
        self._open.clear()
        for unit in self.units:
            if not unit.is_unsharded:
                unit.reshard()

    # Backward

    @_disable_dynamo
    def reached(self, call: Call) -> None:
        """A gradient reached a call's outputs."""
        root = self.root
        assert root is not None
        root.enter_backward()
        self._active.add(call)
        if all(unit.settings.unshard_in_backward for unit in self.units):
            root.unshard(self)
            for unit in self.reads:
                unit.wait()
        root.prefetch_backward(call)

    @_disable_dynamo
    def passed(self, call: Call) -> None:
        """All inputs of a call have their gradients: its weights are not read any more."""
        call.is_active = False
        self._active.discard(call)
        if not self._active:
            self._finish_backward()

    @_disable_dynamo
    def _gradients_arrived(self, unit: Unit) -> None:
        root = self.root
        assert root is not None
        root.enter_backward()
        root.reduce(unit, self)
        # With no input to wait for, nothing is left to be computed once the gradients are here.
        if len(self.units) == 1 and not any(call.num_inputs for call in self._active):
            for call in self._active:
                call.is_active = False
            self._active.clear()
            self._finish_backward()

    def _finish_backward(self) -> None:
        root = self.root
        assert root is not None
        for unit in self.units:
            if unit.gradients.arrived:
                root.reduce(unit, self)
            if unit.settings.reshard_after_backward:
                unit.reshard()

    def end_backward(self) -> None:
        for call in self._active:
            call.is_active = False
        self._active.clear()
        root = self.root
        assert root is not None
        for unit in self.units:
            unused = unit.is_unsharded and unit.settings.reduce_scatter_unused_params
            if unit.owes_reduction or (unused and not unit.gradients.was_reduced):
                root.reduce(unit, self)
            unit.gradients.end_backward()
            if unit.settings.reshard_after_backward:
                unit.reshard()

    def forget(self) -> None:
        """Drop what a failed step left open."""
        for call in self._active:
            call.is_active = False
        self._active.clear()
        self._open.clear()
        self._ran.clear()

    # Calls from outside

    def require_not_computing(self, what: str) -> None:
        """Raise if the unit's weights are being read right now."""
        if self._open or self._active:
            phase = self.root.phase if self.root is not None else Phase.IDLE
            raise LifecycleError(
                f"{self.name}: {what}() must not be called while the module computes, found it in "
                f"{phase.value}; call it before the forward or after the backward of the module."
            )


def runner_of(module: nn.Module) -> Runner | None:
    """The runner of a module that was given to `fully_shard`, if it was."""
    found = module.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Runner) else None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, value)
