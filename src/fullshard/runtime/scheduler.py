"""The scheduler: order, prefetch, phases, the end of backward, and abort.

One scheduler serves all sharded modules of a tree; the root module makes it before its first
forward. It checks with the other ranks that all do the same.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]

from fullshard._torch import queue_backward_callback
from fullshard.api import BackwardPrefetch
from fullshard.comm.agreement import Agreement
from fullshard.errors import DisagreementError
from fullshard.unit.context import CommContext
from fullshard.unit.reduce_scatter import GradBucket
from fullshard.unit.unit import UNSHARDED, Unit


@dataclass(frozen=True, slots=True)
class HookOptions:
    """When a module prefetches, and whether the root casts its inputs."""

    prefetches_forward: bool = True
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    casts_root_inputs: bool = False


class ScheduledModules(ABC):
    """The modules of one `fully_shard` call or wrapper, as the scheduler sees them.

    `units` were made of their parameters. `lenders` are units of other calls that own parameters
    which these modules use too. The prefetch lists are those that the user set.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        units: Sequence[Unit],
        options: HookOptions,
    ) -> None:
        self.name = name
        self.modules = tuple(modules)
        self.units = list(units)
        self.lenders: list[Unit] = []
        self.options = options
        self.forward_prefetch: Sequence[ScheduledModules] = ()
        self.backward_prefetch: Sequence[ScheduledModules] = ()
        self.scheduler: Scheduler | None = None

    @property
    def reads(self) -> list[Unit]:
        """The units that must be unsharded for these modules to run."""
        return [*self.units, *self.lenders] if self.lenders else self.units

    @property
    def is_unsharded_in_backward(self) -> bool:
        return all(unit.settings.unshard_in_backward for unit in self.units)

    @abstractmethod
    def end_forward(self) -> None:
        """Reshard what a forward of the root left open."""

    @abstractmethod
    def end_backward(self) -> None:
        """Reduce and reshard what a backward left open."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the calls that a failed step left open."""


class Phase(Enum):
    """What a scheduler is doing. A backward may run inside a forward (a gradient penalty)."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class ForwardPass:
    """One forward of the root: which modules started and finished in it, in order."""

    def __init__(self) -> None:
        self.started: list[ScheduledModules] = []
        self.finished: list[ScheduledModules] = []

    def before(self, position: int) -> ScheduledModules | None:
        """What backward reaches after the one at `position`."""
        return self.finished[position - 1] if position > 0 else None

    def last_position(self, modules: ScheduledModules) -> int:
        for position in range(len(self.finished) - 1, -1, -1):
            if self.finished[position] is modules:
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


_CHECKED_OPS = list(CheckedOp)


class Scheduler:
    """Owns the order of execution of all sharded modules in one tree.

    A forward begins with the first module that runs (`owner`) and ends with it; `current` is the
    one under way. `_orders` has the order of the last forward of each owner, `_order` and `_cursor`
    what is expected of the current one. `_unchecked` has the phases that ranks still compare.
    """

    def __init__(
        self,
        members: Sequence[ScheduledModules],
        comm_ctx: CommContext,
        agreement: Agreement | None,
    ) -> None:
        self.members = list(members)
        self.comm_ctx = comm_ctx
        self.phase = Phase.IDLE
        self.owner: nn.Module | None = None
        self.current = ForwardPass()
        self.is_last_backward = True
        self.post_optim_event: Any = None
        self._agreement = agreement
        self._unchecked = {Phase.FORWARD, Phase.BACKWARD} if agreement is not None else set()
        self._orders: dict[nn.Module, list[ScheduledModules]] = {}
        self._order: list[ScheduledModules] = []
        self._cursor = 0
        self._is_as_expected = False
        self._before_backward = Phase.IDLE

    @property
    def root(self) -> ScheduledModules:
        return self.members[0]

    @property
    def units(self) -> list[Unit]:
        return [unit for member in self.members for unit in member.units]

    def share(self, comm_ctx: CommContext) -> None:
        """Use another comm context from now on."""
        for unit in self.units:
            unit.reshard_now()
            unit.comm_ctx = comm_ctx
        self.comm_ctx = comm_ctx

    # Forward

    def begin_forward(self, owner: nn.Module) -> None:
        if self.phase is not Phase.IDLE:
            # The forward or backward before this one did not reach its end.
            self.abort()
        self.owner = owner
        self.phase = Phase.FORWARD
        self.current = ForwardPass()
        self._order = self._orders.get(owner, [])
        self._cursor = 0
        self._is_as_expected = bool(self._order)
        self.comm_ctx.all_gathers_follow_compute(self.post_optim_event)
        # Compute gets the memory of gradients back, which an optimizer elsewhere may still read.
        self.comm_ctx.device.wait(self.post_optim_event)
        self.post_optim_event = None
        for member in self.members:
            for unit in member.units:
                unit.refresh()
                unit.grads.release_unused_buffers()

    def started(self, member: ScheduledModules) -> None:
        self.current.started.append(member)
        expected = self._expected_next()
        self._cursor += 1
        if expected is not member:
            self._leave_order(expected, f"{member.name}: {CheckedOp.GATHER_FORWARD.value}")

    def _leave_order(self, expected: ScheduledModules | None, found: str) -> None:
        """Another order than last time: predict no more, and check that all ranks agree."""
        if not self._is_as_expected:
            return
        self._is_as_expected = False
        if self._agreement is None or Phase.FORWARD in self._unchecked:
            return
        op = CheckedOp.END_FORWARD if expected is None else CheckedOp.GATHER_FORWARD
        before = f"{(expected or self.root).name}: {op.value}"
        if get_debug_level() != DebugLevel.OFF:
            warnings.warn(
                f"{found}: rank {dist.get_rank()} runs units in another order than in the last "
                f"forward, which had '{before}' here.",
                stacklevel=2,
            )
        self._agreement.compare_detour(found, before)

    def _expected_next(self) -> ScheduledModules | None:
        if self._is_as_expected and self._cursor < len(self._order):
            return self._order[self._cursor]
        return None

    @property
    def expects_no_all_gather(self) -> bool:
        """Whether this forward, as far as the last one tells, starts no further module."""
        return self._is_as_expected and self._cursor == len(self._order)

    def unshard(self, member: ScheduledModules) -> None:
        """Issue the all-gathers that a module needs, in forward or in backward."""
        for unit in member.reads:
            if unit.state is not UNSHARDED:
                if self._unchecked and self.phase in self._unchecked:
                    is_forward = self.phase is Phase.FORWARD
                    op = CheckedOp.GATHER_FORWARD if is_forward else CheckedOp.GATHER_BACKWARD
                    self._agree(op, member)
                unit.unshard()

    def prefetch_forward(self, member: ScheduledModules) -> None:
        """Issue the all-gather of what comes next: as the user said, or as in the last forward."""
        if member.forward_prefetch:
            for other in member.forward_prefetch:
                self.unshard(other)
        elif member.options.prefetches_forward:
            expected = self._expected_next()
            if expected is not None:
                self.unshard(expected)

    def end_forward(self) -> None:
        assert self.owner is not None
        expected = self._expected_next()
        if expected is not None:
            self._leave_order(expected, f"{self.root.name}: {CheckedOp.END_FORWARD.value}")
        for member in self.members:
            member.end_forward()
        if Phase.FORWARD in self._unchecked:
            self._agree(CheckedOp.END_FORWARD, self.root)
            self._checked(Phase.FORWARD)
        self._orders[self.owner] = self.current.started
        self.owner = None
        self.phase = Phase.IDLE
        if not torch.is_grad_enabled():
            self.comm_ctx.free_pending()  # no backward will come to use it

    # Backward

    def enter_backward(self) -> None:
        if self.phase is not Phase.BACKWARD:
            self._before_backward = self.phase
            self.phase = Phase.BACKWARD
            queue_backward_callback(self.end_backward)

    def prefetch_backward(
        self, member: ScheduledModules, forward: ForwardPass, position: int
    ) -> None:
        """Issue the all-gather of what backward reaches next: as the user said, or by order."""
        before = forward.before(position)
        if member.backward_prefetch:
            others: Sequence[ScheduledModules] = member.backward_prefetch
        else:
            others = [before] if before is not None and before.scheduler is self else []
        for other in others:
            if other.is_unsharded_in_backward:
                self.unshard(other)

    def reduce_scatter(
        self, unit: Unit, member: ScheduledModules, only: GradBucket | None = None
    ) -> None:
        is_unchecked = bool(self._unchecked) and Phase.BACKWARD in self._unchecked
        if is_unchecked and unit.settings.requires_gradient_sync:
            self._agree(CheckedOp.REDUCE, member)
        unit.reduce_scatter(only)

    def end_backward(self) -> None:
        """Settle what backward left open, and make every gradient visible."""
        for member in reversed(self.members):
            member.end_backward()
        if Phase.BACKWARD in self._unchecked and self.is_last_backward:
            self._agree(CheckedOp.END_BACKWARD, self.root)
            self._checked(Phase.BACKWARD)
        if self.is_last_backward:
            self.comm_ctx.finish_reduce_scatters()
            self.comm_ctx.free_pending()
            for unit in self.units:
                unit.grads.synchronize_host()
        self.phase = self._before_backward

    # Failure

    def abort(self) -> None:
        """Everything sharded, nothing in flight, no gradient of the failed step.

        Never raises (rule 11): whatever failed, also a collective, every unit is reset.
        """
        self.owner = None
        self.phase = Phase.IDLE
        for member in self.members:
            member.reset()
        self.comm_ctx.abort_reduce_scatters()
        for unit in self.units:
            unit.abort()

    def fail_forward(self, error: BaseException) -> None:
        """The user's code raised: tell the others if they would wait for us, then abort."""
        try:
            if self.phase in self._unchecked and not isinstance(error, DisagreementError):
                self._agree(CheckedOp.FAILURE, self.root)
        except Exception:
            pass  # the others know now, or cannot be told; this rank raises what happened to it
        finally:
            self.abort()

    # Agreement between ranks

    def _checked(self, phase: Phase) -> None:
        # In the first step ranks compare all they do; in the others only if asked to.
        if get_debug_level() != DebugLevel.DETAIL:
            self._unchecked.discard(phase)

    def _agree(self, op: CheckedOp, member: ScheduledModules) -> None:
        assert self._agreement is not None
        number = _CHECKED_OPS.index(op) * len(self.members) + self.members.index(member)
        self._agreement.compare_step(number, self._describe)

    def _describe(self, number: int) -> str:
        op, index = divmod(number, len(self.members))
        return f"{self.members[index].name}: {_CHECKED_OPS[op].value}"
