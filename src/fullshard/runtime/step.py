"""The scheduler: when the modules of a tree are gathered, reduced, and given up.

A forward, its backward, and what goes wrong in them. Each module's own part is in `hooks.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import inf
from typing import Any, Protocol

import torch
from torch import nn

from fullshard._torch import in_backward, queue_backward_callback
from fullshard.comm import guard
from fullshard.comm.guard import Place
from fullshard.errors import DisagreementError, LifecycleError
from fullshard.runtime.calls import ModuleCall
from fullshard.runtime.turnstile import Member, Turnstile
from fullshard.runtime.uneven import UnevenScope, make_scopes
from fullshard.unit.context import CommContext
from fullshard.unit.unit import Unit, outside_modes

# Attributes of an error: the unit it comes from, and the memory of full parameters that it freed.
FAILED_UNIT = "_fullshard_unit"
FULL_BYTES = "_fullshard_full_bytes"


class Modules(Member, Protocol):
    """The hooks of the modules of one call, as the scheduler knows them."""

    modules: tuple[nn.Module, ...]
    prefetches_forward: bool

    @property
    def reads(self) -> list[Unit]: ...

    @property
    def forward_prefetch(self) -> Sequence[Modules]: ...

    @property
    def backward_prefetch(self) -> Sequence[Modules]: ...

    @property
    def is_unsharded_in_backward(self) -> bool: ...

    def release_embeddings(self, inputs: Any) -> None: ...

    def release_unread(self) -> None: ...

    def end_forward(self) -> None: ...

    def end_backward(self) -> None: ...

    def reset(self) -> None: ...


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
                "GradientReductionHandle.wait: reset_iter_state() has dropped this reduction; "
                "run the step again."
            )
        scheduler.settle_backward()


class Scheduler:
    """Owns the order of execution of all sharded modules in one tree, outer before inner.

    The root module makes it before its first forward. A forward begins with the first module that
    runs (`owner`) and ends with it; `started` and `finished` have the modules of the one under way
    or of the last one, in order. A backward may run inside a forward (a gradient penalty).
    With `finalizes_manually` a backward stays open (`_is_unfinalized`) until `finalize_backward`,
    and `reduction` is the handle of a reduction that has not been waited for.
    `_orders` has the order of the last forward of each owner, `_order` the expected order of the
    current one: empty once it is left. `turnstile` says how ranks come to collectives, unless a
    member has one of its own: those of `_scopes` and what is inside. `_thread` is the thread of the
    last forward.
    """

    def __init__(
        self, members: Sequence[Modules], comm_ctx: CommContext, turnstile: Turnstile
    ) -> None:
        self.members = list(members)
        self.turnstile = turnstile
        self.comm_ctx = comm_ctx
        self.owner: nn.Module | None = None
        self.is_in_backward = False
        self.started: list[Modules] = []
        self.finished: list[Modules] = []
        self.is_last_backward = True
        self.finalizes_manually = False
        self.reduction: GradientReductionHandle | None = None
        self.post_optim_event: Any = None
        self._is_unfinalized = False
        self._thread = threading.get_ident()
        self._orders: dict[nn.Module, list[Modules]] = {}
        self._order: list[Modules] = []
        self._num_forwards = 0
        self._scopes: list[UnevenScope] = []
        self.follow_uneven()
        guard.watch(self)

    @property
    def root(self) -> Modules:
        return self.members[0]

    @property
    def units(self) -> list[Unit]:
        return [unit for member in self.members for unit in member.units]

    @property
    def phase(self) -> str:
        if self.is_in_backward:
            return "backward"
        return "idle" if self.owner is None else "forward"

    def follow_uneven(self) -> None:
        """Make the units inside the outermost modules that are set uneven run by agreement."""
        self._orders.clear()
        self._scopes = list(make_scopes(self.members, self.turnstile))

    # For the watcher, which asks from its own thread

    def place(self) -> Place:
        computing = [member for member in self.members if member.is_computing]
        unit = computing[-1].name if computing else ""
        is_behind = float(self.comm_ctx.is_behind)
        phase = self.phase if self.reduction is None else "finalize_backward"
        meshes = {unit.mesh_info for unit in self.units}
        limit_s = min((mesh.timeout_s for mesh in meshes), default=inf)
        where = (self._num_forwards, phase, unit, self.comm_ctx.num_collectives)
        return Place(self.turnstile.num_steps, *where, waited_s=is_behind, limit_s=limit_s)

    # Forward

    def begin_forward(self, owner: nn.Module, name: str) -> None:
        guard.check()
        self._require_waited("forward")
        self._thread = threading.get_ident()
        self.end_failed_backward()
        self._num_forwards += 1
        self.owner = owner
        self.turnstile.begin("forward", name, takes_grad=torch.is_grad_enabled())
        self.started, self.finished = [], []
        self._order = self._orders.get(owner, [])
        self.comm_ctx.all_gathers_follow_compute(self.post_optim_event)
        # Compute reuses the memory of gradients, which an optimizer elsewhere may still read.
        self.comm_ctx.device.wait(self.post_optim_event)
        self.post_optim_event = None
        self.comm_ctx.forward = object()
        for member in self.members:
            for unit in member.units if member.turnstile.defers else ():
                unit.enter_forward()  # other ranks may have it gathered at any time

    def start(self, member: Modules, inputs: Any) -> None:
        expected = self._expected_next()
        self.started.append(member)
        if len(self.started) == 2 and torch.is_grad_enabled():
            self.started[0].release_embeddings(inputs)
        if expected is not member:
            self._leave_order(expected, f"{member.name}: gather in forward")

    def _leave_order(self, expected: Modules | None, found: str) -> None:
        """On another order than last time: stop predicting, and check that all ranks agree."""
        was_expected, self._order = bool(self._order), []
        if was_expected:
            before = f"{self.root.name}: end of forward"
            if expected is not None:
                before = f"{expected.name}: gather in forward"
            self.turnstile.leave_order(found, before)

    def _expected_next(self) -> Modules | None:
        num_started = len(self.started)
        return self._order[num_started] if num_started < len(self._order) else None

    @property
    def expects_no_all_gather(self) -> bool:
        """Whether this forward starts no further module, judging by the last one."""
        return bool(self._order) and len(self.started) == len(self._order)

    def unshard_for_backward(self, member: Modules) -> None:
        """Issue the all-gathers of what the backward of a module reads."""
        member.release_unread()
        for unit in member.reads:
            unit.require_not_replaced()
        self.unshard(member, [unit for unit in member.reads if not unit.is_released])

    def unshard(self, member: Modules, units: Sequence[Unit] | None = None) -> None:
        """Issue the all-gathers that a module needs, in forward or in backward."""
        units = member.reads if units is None else units
        for unit in units:
            unit.enter_forward()
        member.turnstile.gather(member, units, self.phase)

    def prefetch_forward(self, member: Modules) -> None:
        """Issue the all-gather of what comes next: as the user said, or as in the last forward."""
        others = member.forward_prefetch
        if not others and member.prefetches_forward:
            others = self._order[len(self.started) : len(self.started) + 1]
        for other in others:
            if other.turnstile.is_predictable:
                self.unshard(other)

    def end_forward(self) -> None:
        self.is_in_backward = False  # a backward inside this forward may have failed
        expected = self._expected_next()
        if expected is not None:
            self._leave_order(expected, f"{self.root.name}: end of forward")
        for member in self.members:
            member.end_forward()
        self._resume_summons()
        for unit in self.units:
            unit.enter_forward()  # those that it did not reach
        self.turnstile.end_checks("forward")
        self.turnstile.end()
        assert self.owner is not None
        self._orders[self.owner] = self.started
        self.owner = None
        guard.note_failure("")  # all ranks have come here
        if not torch.is_grad_enabled():
            self.comm_ctx.free_leaving()  # no backward will come to use it

    def pause_summons(self, units: Sequence[Unit]) -> None:
        """Let units train inside of `summon_full_params`, where that is possible."""
        for unit in units:
            if unit.summoned is not None:
                unit.summoned.pause()

    def _resume_summons(self) -> None:
        for unit in self.units:
            if unit.summoned is not None:
                unit.summoned.resume()

    # Backward

    def enter_backward(self) -> None:
        if not self.is_in_backward:
            self.is_in_backward = True
            self._is_unfinalized = self.finalizes_manually
            if self.owner is None:
                self.turnstile.begin_backward()
            self.pause_summons(self.units)
            queue_backward_callback(self.end_backward)

    def prefetch_backward(self, member: Modules, call: ModuleCall) -> None:
        """Issue the all-gather of what backward reaches next: as the user said, or by order."""
        others = member.backward_prefetch
        if not others and call.previous is not None and call.previous.scheduler is self:
            others = [call.previous]
        for other in others if call.is_even else ():
            if other.is_unsharded_in_backward and other.turnstile.is_predictable:
                self.unshard_for_backward(other)

    def end_backward(self) -> None:
        """Settle what backward left open, and make every gradient visible."""
        with outside_modes():  # a functional transform may reduce what was accumulated before it
            self._end_members()
            if self.is_last_backward and not self.finalizes_manually:
                self.settle_backward()
        self.is_in_backward = False

    def _end_members(self) -> None:
        """Reduce and reshard what the backward, or several, left open."""
        for scope in self._scopes:
            scope.end_backward()
        for member in reversed(self.members):
            member.end_backward()

    def settle_backward(self) -> None:
        """Wait for all reductions; if that fails, the next forward aborts what is left."""
        guard.check()
        self.reduction = None
        self.turnstile.end_checks("backward")
        if self.owner is None:
            self.turnstile.end()
        self.comm_ctx.finish_reduce_scatters()
        self.comm_ctx.free_leaving()
        for unit in self.units:
            unit.grads.synchronize_host()
        self._resume_summons()
        self.is_in_backward = self._is_unfinalized = False

    def set_manual_finalization(self, enabled: bool) -> None:
        self.end_failed_backward()
        if enabled != self.finalizes_manually and (self.is_in_backward or self._is_unfinalized):
            raise LifecycleError(
                f"{self.root.name}: set_manual_backward_finalization must be called before "
                "backward, and one is not finalized; call finalize_backward() first."
            )
        self.finalizes_manually = enabled

    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None:
        """Reduce and reshard what the backwards before it left open, by the units' settings."""
        self._require_waited("finalize_backward")
        if self.is_in_backward or not self.finalizes_manually:
            found = "one is running" if self.is_in_backward else "finalization is automatic"
            raise LifecycleError(
                f"{self.root.name}: finalize_backward must be called after backward and with "
                f"set_manual_backward_finalization(True), but {found}; set that before forward."
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
                f"{self.root.name}: {what} must come after the gradient reduction before it, "
                "which nobody waited for; call wait() on what finalize_backward returned."
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

        Never raises (rule 11: abort cannot raise): every unit is reset, whatever failed.
        """
        self.owner = None
        self.is_in_backward = False
        for scope in self._scopes:
            scope.abort()
        for member in self.members:
            member.reset()
        self.reduction, self._is_unfinalized = None, False
        self.comm_ctx.abort_reduce_scatters()
        self.turnstile.abort()
        for unit in self.units:
            unit.abort()

    def end_failed_backward(self) -> None:
        """Abort a backward that raised: it has ended if the thread of its forward goes on."""
        is_left = self.is_in_backward and self.owner is None and self.reduction is None
        if is_left and self._thread == threading.get_ident() and not in_backward():
            guard.note_failure("it left a backward before its end")
            self.abort()

    def give_up_step(self) -> None:
        """Abort a step that some ranks have not done, and reset the counts that places compare."""
        self.abort()
        self.turnstile.forget()
        self._num_forwards = self.comm_ctx.num_collectives = 0

    def fail_forward(self, error: BaseException) -> None:
        """The user's code raised: tell the others if they would wait for us, then abort."""
        setattr(error, FULL_BYTES, sum(unit.full_bytes for unit in self.units))
        guard.note_failure(f"it left the forward of {getattr(error, FAILED_UNIT)}", error)
        is_uneven = any(scope.is_open for scope in self._scopes)  # the watcher will tell
        try:
            if not isinstance(error, DisagreementError) and not is_uneven:
                self.turnstile.tell_failure(self.phase)
        finally:
            self.abort()
