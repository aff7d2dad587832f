"""One run of a module: what autograd's hooks point to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import _get_sequence_nr

from fullshard.runtime.trees import map_arguments, tensors

if TYPE_CHECKING:
    from fullshard.runtime.runner import Runner


class Pass:
    """One forward, from its outermost unit to its end: which runners finished, in what order."""

    def __init__(self) -> None:
        self.started: list[Runner] = []
        self.finished: list[Runner] = []

    def before(self, position: int) -> Runner | None:
        """The runner that backward reaches after the one at `position`."""
        return self.finished[position - 1] if position > 0 else None

    def last_position(self, runner: Runner) -> int:
        for position in range(len(self.finished) - 1, -1, -1):
            if self.finished[position] is runner:
                return position
        return 0


class Call:
    """One run of one module of a runner.

    Active in backward from the first gradient at its outputs until all of its inputs that take a
    gradient have it. Autograd keeps it alive through the hooks; it holds no tensors.
    """

    __slots__ = (
        "__weakref__",
        "_first_node",
        "_num_pending",
        "is_active",
        "num_inputs",
        "opens_pass",
        "part_of",
        "position",
        "runner",
    )

    def __init__(self, runner: Runner, part_of: Pass, *, opens_pass: bool) -> None:
        self.runner = runner
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
            self.runner.reached(self)

    def _input_arrived(self, grad: torch.Tensor) -> None:
        if grad.grad_fn is not None:
            # With create_graph: the weights will be read again to differentiate this gradient.
            grad.grad_fn.register_prehook(self._reached)
        if self.is_active:
            self._num_pending -= 1
            if self._num_pending == 0:
                self.runner.passed(self)
