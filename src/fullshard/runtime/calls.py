"""One run of one module, as autograd sees it.

[Note: hooks and autograd] Autograd runs ready nodes in the reverse order of forward, and gives a
parameter its gradient before anything else: when the inputs of a call have their gradients, so have
its parameters. So most units need no hooks on parameters: a call gives its module views of the
inputs, whose hooks tell when their gradients arrive. A unit counts the gradients of its parameters
(`Unit.listen`) if a call has no input that takes a gradient, or if a backward has ended before an
input got one. Resharding waits for the inputs' gradients in any case: a frozen weight, or a weight
used through `detach()`, is still read after the last trainable one has its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fullshard._torch import node_sequence_nr, sequence_nr, view_base
from fullshard.runtime.trees import map_tensors


class Caller(Protocol):
    """The hooks of a module that runs."""

    active: set[ModuleCall]

    def pre_backward(self, call: ModuleCall) -> None:
        """A gradient reached a call's outputs."""

    def post_backward(self, call: ModuleCall) -> None:
        """All inputs of a call have their gradients."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ModuleCall:
    """One run of one module: what autograd's hooks point to.

    Autograd keeps it alive through the hooks; it holds no tensors. `forward` is the forward that it
    is part of (`Scheduler.finished`), `previous` the hooks that finished before it, which backward
    reaches next. It is active in backward (`ModuleHooks.active`) from the first gradient at its
    outputs until all inputs that take a gradient have it. `is_even` says that all ranks run
    it, `is_summoned` that it computed with what `summon_full_params` showed.
    """

    hooks: Caller
    forward: list[Any]
    opens_forward: bool
    is_even: bool = True
    is_summoned: bool = False
    previous: Any = None
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
            args = (taken(args[0]),)  # the common case: not worth a walk (rule 7: host time)
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
