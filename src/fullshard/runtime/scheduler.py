"""The outermost runner's part: phases, order, the end of backward, abort."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from fullshard.comm.agreement import Agreement
from fullshard.errors import DisagreementError
from fullshard.unit.context import CommContext
from fullshard.unit.reduce_scatter import GradBucket
from fullshard.unit.unit import UNSHARDED, Unit

if TYPE_CHECKING:
    from fullshard.runtime.hooks import ModuleCall, ModuleHooks


class Phase(Enum):
    """What a root is doing. A backward may run inside a forward (a penalty on a gradient)."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class ForwardPass:
    """One forward, from its outermost unit to its end: which runners finished, in what order."""

    def __init__(self) -> None:
        self.started: list[ModuleHooks] = []
        self.finished: list[ModuleHooks] = []

    def before(self, position: int) -> ModuleHooks | None:
        """The runner that backward reaches after the one at `position`."""
        return self.finished[position - 1] if position > 0 else None

    def last_position(self, hooks: ModuleHooks) -> int:
        for position in range(len(self.finished) - 1, -1, -1):
            if self.finished[position] is hooks:
                return position
        return 0


class CheckedOp(Enum):
    """What ranks compare in the first step, before they do it."""

    GATHER_FORWARD = "gather in forward"
    GATHER_BACKWARD = "gather in backward"
    REDUCE = "reduce"
    END_FORWARD = "end of forward"
    END_BACKWARD = "end of backward"
    FAILURE = "failure in the user's code"


_DEEDS = list(CheckedOp)


class Scheduler:
    """Owns the order of execution of all runners in one module tree.

    A pass begins with the first module that runs (its owner) and ends with it. Everything that
    must happen once per forward or once per backward happens here.
    """

    def __init__(
        self, hooks_list: Sequence[ModuleHooks], comm_ctx: CommContext, agreement: Agreement | None
    ) -> None:
        self.hooks = list(hooks_list)
        self.comm_ctx = comm_ctx
        self.phase = Phase.IDLE
        self.owner: nn.Module | None = None
        self.is_last_backward = True
        self.post_optim_event: Any = None
        self.current = ForwardPass()
        self._agreement = agreement
        self._unchecked = {Phase.FORWARD, Phase.BACKWARD} if agreement is not None else set()
        # In the first step ranks compare all they do; in the others only if asked to.
        self._compares_always = get_debug_level() == DebugLevel.DETAIL
        self._orders: dict[nn.Module, list[ModuleHooks]] = {}
        self._order: list[ModuleHooks] = []
        self._cursor = 0
        self._is_as_expected = False
        self._before_backward = Phase.IDLE

    @property
    def units(self) -> list[Unit]:
        return [unit for hooks in self.hooks for unit in hooks.units]

    def share(self, comm_ctx: CommContext) -> None:
        """Move on another flow from now on."""
        for unit in self.units:
            unit.reshard_now()
            unit.comm_ctx = comm_ctx
        self.comm_ctx = comm_ctx

    # Forward

    def begin_pass(self, owner: nn.Module) -> None:
        if self.phase is not Phase.IDLE:
            # The pass or backward before this one did not reach its end.
            self.abort()
        self.owner = owner
        self.phase = Phase.FORWARD
        self.current = ForwardPass()
        self._order = self._orders.get(owner, [])
        self._cursor = 0
        self._is_as_expected = bool(self._order)
        self.comm_ctx.start_gathers_after_compute(self.post_optim_event)
        # Compute gets the memory of gradients back, which an optimizer elsewhere may still read.
        self.comm_ctx.device.wait(self.post_optim_event)
        self.post_optim_event = None
        for hooks in self.hooks:
            for unit in hooks.units:
                unit.refresh()
                unit.gradients.rest()

    def started(self, hooks: ModuleHooks) -> None:
        self.current.started.append(hooks)
        expected = self._expected_next()
        self._cursor += 1
        if expected is not hooks:
            self._take_detour(expected, f"{hooks.name}: {CheckedOp.GATHER_FORWARD.value}")

    def _take_detour(self, expected: ModuleHooks | None, found: str) -> None:
        """Another order than last time: predict no more, and make sure that all ranks agree."""
        if not self._is_as_expected:
            return
        self._is_as_expected = False
        if self._agreement is None or Phase.FORWARD in self._unchecked:
            return
        deed = CheckedOp.END_FORWARD if expected is None else CheckedOp.GATHER_FORWARD
        before = f"{(expected or self.hooks[0]).name}: {deed.value}"
        if get_debug_level() != DebugLevel.OFF:
            warnings.warn(
                f"{found}: rank {dist.get_rank()} runs units in another order than in the last "
                f"forward, which had '{before}' here.",
                stacklevel=2,
            )
        self._agreement.compare_detour(found, before)

    def _expected_next(self) -> ModuleHooks | None:
        if self._is_as_expected and self._cursor < len(self._order):
            return self._order[self._cursor]
        return None

    @property
    def expects_no_gather(self) -> bool:
        """Whether this pass, as far as the last one tells, starts no further runner."""
        return self._is_as_expected and self._cursor == len(self._order)

    def unshard(self, hooks: ModuleHooks) -> None:
        """Issue the gathers that a runner needs, in forward or in backward."""
        for unit in hooks.reads:
            if unit.state is not UNSHARDED:
                if self._unchecked and self.phase in self._unchecked:
                    forward = self.phase is Phase.FORWARD
                    deed = CheckedOp.GATHER_FORWARD if forward else CheckedOp.GATHER_BACKWARD
                    self._agree(deed, hooks)
                unit.unshard()

    def prefetch_forward(self, hooks: ModuleHooks) -> None:
        """Issue the gather of what comes next: as told, or as in the last pass."""
        if hooks.forward_prefetch:
            for other in hooks.forward_prefetch:
                self.unshard(other)
        elif hooks.options.prefetches_forward:
            expected = self._expected_next()
            if expected is not None:
                self.unshard(expected)

    def end_pass(self) -> None:
        assert self.owner is not None
        expected = self._expected_next()
        if expected is not None:
            self._take_detour(expected, f"{self.hooks[0].name}: {CheckedOp.END_FORWARD.value}")
        for hooks in self.hooks:
            hooks.end_pass()
        if Phase.FORWARD in self._unchecked:
            self._agree(CheckedOp.END_FORWARD, self.hooks[0])
            self._checked(Phase.FORWARD)
        self._orders[self.owner] = self.current.started
        self.owner = None
        self.phase = Phase.IDLE
        if not torch.is_grad_enabled():
            self.comm_ctx.release_late()  # no backward will come to use it

    # Backward

    def enter_backward(self) -> None:
        if self.phase is not Phase.BACKWARD:
            self._before_backward = self.phase
            self.phase = Phase.BACKWARD
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.end_backward)

    def prefetch_backward(self, call: ModuleCall) -> None:
        hooks = call.hooks
        if hooks.backward_prefetch:
            for other in hooks.backward_prefetch:
                self._prefetch_one_backward(other)
            return
        before = call.part_of.before(call.position)
        if before is not None and before.scheduler is self:
            self._prefetch_one_backward(before)

    def _prefetch_one_backward(self, hooks: ModuleHooks) -> None:
        if hooks.is_unsharded_in_backward:
            self.unshard(hooks)

    def reduce(self, unit: Unit, hooks: ModuleHooks, only: GradBucket | None = None) -> None:
        is_checked = not self._unchecked or Phase.BACKWARD not in self._unchecked
        if not is_checked and unit.settings.requires_gradient_sync:
            self._agree(CheckedOp.REDUCE, hooks)
        unit.reduce(only)

    def end_backward(self) -> None:
        """Settle what backward left open, and make every gradient visible."""
        for hooks in reversed(self.hooks):
            hooks.end_backward()
        if Phase.BACKWARD in self._unchecked and self.is_last_backward:
            self._agree(CheckedOp.END_BACKWARD, self.hooks[0])
            self._checked(Phase.BACKWARD)
        if self.is_last_backward:
            self.comm_ctx.conclude_reductions()
            self.comm_ctx.release_late()
            for unit in self.units:
                unit.gradients.settle(self.comm_ctx)
        self.phase = self._before_backward

    # Failure

    def abort(self) -> None:
        """Everything sharded, nothing in flight, no gradient of the failed step."""
        for hooks in self.hooks:
            hooks.forget()
        self.comm_ctx.abandon_reductions()
        for unit in self.units:
            unit.reshard_now()
            unit.forget_gradients()
        self.owner = None
        self.phase = Phase.IDLE

    def fail_pass(self, error: BaseException) -> None:
        """The user's code raised: tell the others if they would wait for us, then abort."""
        if self.phase in self._unchecked and not isinstance(error, DisagreementError):
            try:
                self._agree(CheckedOp.FAILURE, self.hooks[0])
            except DisagreementError:
                pass  # the others know now; this rank raises what happened to it
        self.abort()

    def _checked(self, phase: Phase) -> None:
        if not self._compares_always:
            self._unchecked.discard(phase)

    def _agree(self, deed: CheckedOp, hooks: ModuleHooks) -> None:
        assert self._agreement is not None
        number = _DEEDS.index(deed) * len(self.hooks) + self.hooks.index(hooks)
        self._agreement.compare_step(number, self._describe)

    def _describe(self, number: int) -> str:
        deed, index = divmod(number, len(self.hooks))
        return f"{self.hooks[index].name}: {_DEEDS[deed].value}"
