"""How ranks come to collectives: each by itself, or after a comparison with the others.

Units that only some ranks run come in a third way (`uneven.py`). Hooks and scheduler say when
something is gathered or reduced, and do not ask in which way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]

from fullshard.comm import guard
from fullshard.comm.agreement import Agreement
from fullshard.comm.order import Collective
from fullshard.unit.unit import Unit


class Member(Protocol):
    """The hooks of the modules of one call, as a turnstile knows them."""

    name: str
    units: list[Unit]
    lenders: list[Unit]
    turnstile: Turnstile
    is_uneven: bool

    @property
    def inner(self) -> Sequence[Member]: ...

    @property
    def is_computing(self) -> bool: ...

    @property
    def is_in_forward(self) -> bool: ...


class Turnstile:
    """Nobody compares: this is the only rank, or it plays all of them.

    `is_even` says that all ranks run the module now, in the same order, and `is_predictable` that
    they always do; `defers` that gradients are reduced later, when all ranks have theirs;
    `encloses` that other modules run inside on some ranks only.
    """

    is_even = is_predictable = True
    defers = encloses = False
    num_steps = 0

    # Collectives

    def gather(self, member: Member, units: Sequence[Unit], phase: str) -> None:
        """Issue the all-gathers of units that are not unsharded."""
        for unit in units:
            if not unit.is_unsharded and not unit.is_summoned:
                guard.check()
                self._compare("gather", member, phase)
                self._follow(("gather", unit))
                try:
                    unit.unshard()
                except dist.DistError as error:
                    guard.raise_explained(error)

    def reduce(self, member: Member, unit: Unit, phase: str) -> None:
        """Start the reduction of a unit's gradients, or accumulate them without a sync."""
        if unit.settings.requires_gradient_sync:
            self._compare("reduce", member, phase)
        start_reduction(unit)

    def before_reduce(self, unit: Unit, num_bytes: int) -> None:
        """Gradients are about to be reduced."""
        self._follow(("reduce", unit, num_bytes, unit.num_trainable))

    def _compare(self, op: str, member: Member, phase: str) -> None:
        """Ranks that compare all they do are about to do this."""

    def _follow(self, doing: Collective) -> None:
        """A collective is about to be issued."""

    # One module

    def enter(self, hook: Callable[[torch.Tensor], None], given: Any) -> tuple[Any, int]:
        """A module begins to run: what it is given, and how many more gradients it waits for."""
        return given, 0

    def leave(self, output: Any) -> Any:
        """A module has run: what it returns."""
        return output

    def reach(self, member: Member, *, was_even: bool) -> None:
        """A gradient has reached a module, which ran evenly or not."""

    def settle(self) -> None:
        """No call of the module is in backward any more."""

    def fail(self, num_open: int, error: BaseException) -> None:
        """A module has raised; `num_open` calls of it are still open."""

    def require_taken(self, unit: Unit) -> None:
        """At the end of backward: raise if a unit has gradients that came another way."""

    # A whole pass

    def begin(self, kind: str, name: str, *, takes_grad: bool = False) -> None:
        """A forward begins, or another call that issues collectives."""

    def begin_backward(self) -> None:
        """The backward of the last forward begins."""

    def call(self, kind: str, name: str) -> None:
        """A call that issues collectives, outside of forward and backward."""

    def leave_order(self, found: str, expected: str) -> None:
        """This rank runs modules in another order than the last time."""

    def end_checks(self, phase: str) -> None:
        """A forward or a backward is about to end."""

    def end(self) -> None:
        """The pass has ended."""

    def tell_failure(self, phase: str) -> None:
        """The user's code has raised in the middle of a pass."""

    def abort(self) -> None:
        """The pass may have ended before its time."""

    def forget(self) -> None:
        """All ranks have given up a step alike."""


# What ranks compare in the first step, before they do it.
_CHECKED_OPS = (
    "gather in forward",
    "gather in backward",
    "reduce",
    "end of forward",
    "end of backward",
    "failure in the user's code",
)


class CheckedTurnstile(Turnstile):
    """Ranks compare: in the first step all they do, and after it what is not as it was before.

    `_unchecked` has the phases in which they still compare everything.
    """

    def __init__(self, members: Sequence[Member], agreement: Agreement) -> None:
        self.passes = agreement.passes()
        self._members = members
        self._agreement = agreement
        self._unchecked = {"forward", "backward"}

    @property
    def num_steps(self) -> int:  # type: ignore[override]
        return self.passes.num_steps

    def _follow(self, doing: Collective) -> None:
        self.passes.follow(doing)

    def _compare(self, op: str, member: Member, phase: str) -> None:
        if phase in self._unchecked:
            self.passes.enter()
            op = f"{op} in {phase}" if op == "gather" else op
            number = _CHECKED_OPS.index(op) * len(self._members) + self._members.index(member)
            self._agreement.compare_step(number, self._describe)

    def _describe(self, number: int) -> str:
        op, index = divmod(number, len(self._members))
        return f"{self._members[index].name}: {_CHECKED_OPS[op]}"

    def begin(self, kind: str, name: str, *, takes_grad: bool = False) -> None:
        self.passes.begin(kind, name, takes_grad=takes_grad)

    def begin_backward(self) -> None:
        self.passes.begin_backward()

    def call(self, kind: str, name: str) -> None:
        self.passes.begin(kind, name)
        self.passes.enter()
        self.passes.end()

    def leave_order(self, found: str, expected: str) -> None:
        if "forward" in self._unchecked:
            return
        if get_debug_level() != DebugLevel.OFF:
            warnings.warn(
                f"{found}: rank {dist.get_rank()} runs units in another order than in the last "
                f"forward, which had '{expected}' here.",
                stacklevel=2,
            )
        self.passes.leave(found, expected)

    def end_checks(self, phase: str) -> None:
        self._compare(f"end of {phase}", self._members[0], phase)
        # In the first step ranks compare all they do; in the others only if asked to.
        if get_debug_level() != DebugLevel.DETAIL:
            self._unchecked.discard(phase)

    def end(self) -> None:
        self.passes.end()

    def tell_failure(self, phase: str) -> None:
        # The others know after this, or cannot be told; this rank raises what happened to it.
        with suppress(Exception):
            self._compare("failure in the user's code", self._members[0], phase)

    def abort(self) -> None:
        self.passes.abort()

    def forget(self) -> None:
        self.passes.forget()


def start_reduction(unit: Unit, *, with_zeros: bool = False) -> None:
    """Start the reduction of a unit's gradients; a collective that fails says why."""
    try:
        unit.reduce_scatter(with_zeros=with_zeros)
    except dist.DistError as error:
        guard.raise_explained(error)
