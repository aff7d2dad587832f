"""One run of a module: what autograd's hooks point to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fullshard.runtime.trees import tensors

if TYPE_CHECKING:
    from fullshard.runtime.runner import Runner


class Pass:
    """One forward, from its outermost unit to its end: which runners finished, in what order.

    `handled` is the exception that was being handled when it began: another one seen at its end
    is one that ended it.
    """

    def __init__(self, handled: BaseException | None) -> None:
        self.handled = handled
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

    __slots__ = ("_num_pending", "is_active", "num_inputs", "part_of", "position", "runner")

    def __init__(self, runner: Runner, part_of: Pass) -> None:
        self.runner = runner
        self.part_of = part_of
        self.position = 0
        self.num_inputs = 0
        self.is_active = False
        self._num_pending = 0

    def hook_inputs(self, args: Any, kwargs: Any) -> None:
        for tensor in tensors((args, kwargs) if kwargs else args):
            if tensor.requires_grad:
                tensor.register_hook(self._input_arrived)
                self.num_inputs += 1

    def hook_outputs(self, output: Any) -> None:
        for tensor in tensors(output):
            if not tensor.requires_grad:
                continue
            # An in-place operation on a view replaces the view's node, but not its base's.
            base = tensor._base
            node = tensor.grad_fn if base is None or base.grad_fn is None else base.grad_fn
            if node is None:
                tensor.register_hook(self._reached_leaf)
            else:
                node.register_prehook(self._reached)

    def _reached_leaf(self, grad: torch.Tensor) -> None:
        self._reached(())

    def _reached(self, grads: Any) -> None:
        if not self.is_active:
            self.is_active = True
            self._num_pending = self.num_inputs
            self.runner.reached(self)

    def _input_arrived(self, grad: torch.Tensor) -> None:
        if self.is_active:
            self._num_pending -= 1
            if self._num_pending == 0:
                self.runner.passed(self)
