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
from fullshard.runtime.calls import Call, Pass
from fullshard.unit.flow import Flow
from fullshard.unit.gradient_lane import GradientMessage
from fullshard.unit.states import UNSHARDED
from fullshard.unit.unit import Unit

if TYPE_CHECKING:
    from fullshard.runtime.runner import Runner


class Phase(Enum):
    """What a root is doing. A backward may run inside a forward (a penalty on a gradient)."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class Deed(Enum):
    """What ranks compare in the first step, before they do it."""

    GATHER_FORWARD = "gather in forward"
    GATHER_BACKWARD = "gather in backward"
    REDUCE = "reduce"
    END_FORWARD = "end of forward"
    END_BACKWARD = "end of backward"
    FAILURE = "failure in the user's code"


_DEEDS = list(Deed)


class Root:
    """Owns the order of execution of all runners in one module tree.

    A pass begins with the first module that runs (its owner) and ends with it. Everything that
    must happen once per forward or once per backward happens here.
    """

    def __init__(self, runners: Sequence[Runner], flow: Flow, agreement: Agreement | None) -> None:
        self.runners = list(runners)
        self.flow = flow
        self.phase = Phase.IDLE
        self.owner: nn.Module | None = None
        self.is_last_backward = True
        self.post_optim_event: Any = None
        self.current = Pass()
        self._agreement = agreement
        self._unchecked = {Phase.FORWARD, Phase.BACKWARD} if agreement is not None else set()
        # In the first step ranks compare all they do; in the others only if asked to.
        self._compares_always = get_debug_level() == DebugLevel.DETAIL
        self._orders: dict[nn.Module, list[Runner]] = {}
        self._order: list[Runner] = []
        self._cursor = 0
        self._is_as_expected = False
        self._before_backward = Phase.IDLE

    @property
    def units(self) -> list[Unit]:
        return [unit for runner in self.runners for unit in runner.units]

    def share(self, flow: Flow) -> None:
        """Move on another flow from now on."""
        for unit in self.units:
            unit.reshard_now()
            unit.flow = flow
        self.flow = flow

    # Forward

    def begin_pass(self, owner: nn.Module) -> None:
        if self.phase is not Phase.IDLE:
            # The pass or backward before this one did not reach its end.
            self.abort()
        self.owner = owner
        self.phase = Phase.FORWARD
        self.current = Pass()
        self._order = self._orders.get(owner, [])
        self._cursor = 0
        self._is_as_expected = bool(self._order)
        self.flow.start_gathers_after_compute(self.post_optim_event)
        # Compute gets the memory of gradients back, which an optimizer elsewhere may still read.
        self.flow.device.wait(self.post_optim_event)
        self.post_optim_event = None
        for runner in self.runners:
            for unit in runner.units:
                unit.refresh()
                unit.gradients.rest()

    def started(self, runner: Runner) -> None:
        self.current.started.append(runner)
        expected = self._expected_next()
        self._cursor += 1
        if expected is not runner:
            self._take_detour(expected, f"{runner.name}: {Deed.GATHER_FORWARD.value}")

    def _take_detour(self, expected: Runner | None, found: str) -> None:
        """Another order than last time: predict no more, and make sure that all ranks agree."""
        if not self._is_as_expected:
            return
        self._is_as_expected = False
        if self._agreement is None or Phase.FORWARD in self._unchecked:
            return
        deed = Deed.END_FORWARD if expected is None else Deed.GATHER_FORWARD
        before = f"{(expected or self.runners[0]).name}: {deed.value}"
        if get_debug_level() != DebugLevel.OFF:
            warnings.warn(
                f"{found}: rank {dist.get_rank()} runs units in another order than in the last "
                f"forward, which had '{before}' here.",
                stacklevel=2,
            )
        self._agreement.compare_detour(found, before)

    def _expected_next(self) -> Runner | None:
        if self._is_as_expected and self._cursor < len(self._order):
            return self._order[self._cursor]
        return None

    @property
    def expects_no_gather(self) -> bool:
        """Whether this pass, as far as the last one tells, starts no further runner."""
        return self._is_as_expected and self._cursor == len(self._order)

    def unshard(self, runner: Runner) -> None:
        """Issue the gathers that a runner needs, in forward or in backward."""
        for unit in runner.reads:
            if unit.state is not UNSHARDED:
                if self._unchecked and self.phase in self._unchecked:
                    forward = self.phase is Phase.FORWARD
                    deed = Deed.GATHER_FORWARD if forward else Deed.GATHER_BACKWARD
                    self._agree(deed, runner)
                unit.unshard()

    def prefetch_forward(self, runner: Runner) -> None:
        """Issue the gather of what comes next: as told, or as in the last pass."""
        if runner.forward_prefetch:
            for other in runner.forward_prefetch:
                self.unshard(other)
        elif runner.habits.prefetches_forward:
            expected = self._expected_next()
            if expected is not None:
                self.unshard(expected)

    def end_pass(self) -> None:
        assert self.owner is not None
        expected = self._expected_next()
        if expected is not None:
            self._take_detour(expected, f"{self.runners[0].name}: {Deed.END_FORWARD.value}")
        for runner in self.runners:
            runner.end_pass()
        if Phase.FORWARD in self._unchecked:
            self._agree(Deed.END_FORWARD, self.runners[0])
            self._checked(Phase.FORWARD)
        self._orders[self.owner] = self.current.started
        self.owner = None
        self.phase = Phase.IDLE
        if not torch.is_grad_enabled():
            self.flow.release_late()  # no backward will come to use it

    # Backward

    def enter_backward(self) -> None:
        if self.phase is not Phase.BACKWARD:
            self._before_backward = self.phase
            self.phase = Phase.BACKWARD
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.end_backward)

    def prefetch_backward(self, call: Call) -> None:
        runner = call.runner
        if runner.backward_prefetch:
            for other in runner.backward_prefetch:
                self._prefetch_one_backward(other)
            return
        before = call.part_of.before(call.position)
        if before is not None and before.root is self:
            self._prefetch_one_backward(before)

    def _prefetch_one_backward(self, runner: Runner) -> None:
        if runner.is_unsharded_in_backward:
            self.unshard(runner)

    def reduce(self, unit: Unit, runner: Runner, only: GradientMessage | None = None) -> None:
        is_checked = not self._unchecked or Phase.BACKWARD not in self._unchecked
        if not is_checked and unit.settings.requires_gradient_sync:
            self._agree(Deed.REDUCE, runner)
        unit.reduce(only)

    def end_backward(self) -> None:
        """Settle what backward left open, and make every gradient visible."""
        for runner in reversed(self.runners):
            runner.end_backward()
        if Phase.BACKWARD in self._unchecked and self.is_last_backward:
            self._agree(Deed.END_BACKWARD, self.runners[0])
            self._checked(Phase.BACKWARD)
        if self.is_last_backward:
            self.flow.conclude_reductions()
            self.flow.release_late()
            for unit in self.units:
                unit.gradients.settle(self.flow)
        self.phase = self._before_backward

    # Failure

    def abort(self) -> None:
        """Everything sharded, nothing in flight, no gradient of the failed step."""
        for runner in self.runners:
            runner.forget()
        self.flow.abandon_reductions()
        for unit in self.units:
            unit.reshard_now()
            unit.forget_gradients()
        self.owner = None
        self.phase = Phase.IDLE

    def fail_pass(self, error: BaseException) -> None:
        """The user's code raised: tell the others if they would wait for us, then abort."""
        if self.phase in self._unchecked and not isinstance(error, DisagreementError):
            try:
                self._agree(Deed.FAILURE, self.runners[0])
            except DisagreementError:
                pass  # the others know now; this rank raises what happened to it
        self.abort()

    def _checked(self, phase: Phase) -> None:
        if not self._compares_always:
            self._unchecked.discard(phase)

    def _agree(self, deed: Deed, runner: Runner) -> None:
        assert self._agreement is not None
        number = _DEEDS.index(deed) * len(self.runners) + self.runners.index(runner)
        self._agreement.compare_step(number, self._describe)

    def _describe(self, number: int) -> str:
        deed, index = divmod(number, len(self.runners))
        return f"{self.runners[index].name}: {_DEEDS[deed].value}"
