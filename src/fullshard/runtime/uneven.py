"""Units that ranks run in different numbers or orders; ranks agree on gathers and reductions.

A scope is a module that all ranks run equally often; the units inside may run on some ranks only,
in any order. In its forward and backward, ranks meet in rounds: each says which unit it needs next,
if any, and all of them gather the units that any rank needs, in a fixed order. A rank that does not
need one frees it at once. At the end of the scope a rank takes part in rounds until no rank needs
anything. Every round lets every other rank advance, so nothing can deadlock.

At the end of its backward, ranks find out which units have gradients on any rank, including the
scope's own, and reduce these in a fixed order; a rank without gradients takes part with zeros.

[Note: both ends of a scope] Ranks must begin and end the backward of a scope alike, whatever they
have run inside. So all inputs pass through one autograd node (`_Enter`), and all outputs through
another (`_Leave`), which depends on the first: a gradient at any output reaches the scope, and then
its inputs, even on a rank that ran nothing. Autograd runs the nodes that were made last first, so
all nodes made inside have run when `_Enter` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import guard
from fullshard.comm.collectives import all_reduce
from fullshard.comm.mesh import Axis
from fullshard.errors import ConfigError, LifecycleError
from fullshard.runtime.trees import map_tensors
from fullshard.runtime.turnstile import Member, Turnstile, start_reduction
from fullshard.unit.unit import Unit


class _Enter(torch.autograd.Function):
    """Aliases of tensors; those without a gradient get zeros, so that all gradients arrive."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Not views: autograd refuses writes to a view that a function returns.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads


class _Leave(torch.autograd.Function):
    """Aliases of tensors that also depend on the first one."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *grads


def make_scopes(members: Sequence[Member], usual: Turnstile) -> Iterator[UnevenScope]:
    """Give all members their turnstiles: scopes to the outermost ones that are set uneven."""
    for member in members:
        member.turnstile = usual
    for member in members:
        if not member.is_uneven or member.turnstile is not usual:
            continue
        for each in (member, *member.inner):
            if each.lenders or each.turnstile is not usual:
                found = "tied parameters" if each.lenders else "it inside of two such modules"
                raise ConfigError(
                    f"{each.name}: an uneven unit cannot share its parameters ({found}); leave "
                    "them to the unit that set_uneven is called on."
                )
        yield UnevenScope(member, usual)


class _Inside(Turnstile):
    """The turnstile of a module in a scope: ranks gather in rounds while the scope is open."""

    is_predictable = False
    defers = True

    def __init__(self, scope: UnevenScope, usual: Turnstile) -> None:
        self._scope, self._usual = scope, usual

    @property
    def is_even(self) -> bool:  # type: ignore[override]
        return not self._scope.is_open

    def gather(self, member: Member, units: Sequence[Unit], phase: str) -> None:
        if not self._scope.is_open:
            self._usual.gather(member, units, phase)
        elif not all(unit.is_unsharded for unit in units):
            self._scope.round(member.units)

    def reduce(self, member: Member, unit: Unit, phase: str) -> None:
        if not unit.settings.requires_gradient_sync:
            start_reduction(unit)

    def before_reduce(self, unit: Unit, num_bytes: int) -> None:
        pass

    def reach(self, member: Member, *, was_even: bool) -> None:
        if not was_even and not self._scope.is_open:
            raise _outside(member.name)

    def require_taken(self, unit: Unit) -> None:
        if unit.settings.requires_gradient_sync:
            raise _outside(unit.name)


def _outside(unit: str) -> LifecycleError:
    return LifecycleError(
        f"{unit}: a gradient reached this uneven unit in another way than through the outputs of "
        "the module that set_uneven was called on; return what the loss needs from that module, "
        "or call set_uneven on one around it."
    )


class UnevenScope(Turnstile):
    """The turnstile of a module that was set uneven, and the units inside, grouped by module.

    `is_open` says that the scope runs, in forward or backward; `is_reduced` that the gradients of
    the backward under way have been reduced. `_entered` has, for each call under way, the tensor
    through which outputs depend on inputs. Calls do not hold it: hooks of the same graph hold them.
    """

    defers = encloses = True

    def __init__(self, member: Member, usual: Turnstile) -> None:
        self.is_open = False
        self.is_reduced = False
        self._member, self._usual = member, usual
        self._groups = groups = [each.units for each in member.inner]
        self._units = [*(unit for group in groups for unit in group), *member.units]
        self._entered: list[torch.Tensor | None] = []
        meshes = list(dict.fromkeys(unit.mesh_info for unit in self._units))
        if not groups or len(meshes) != 1:
            found = f"they are on {len(meshes)} meshes" if groups else "there are none"
            raise ConfigError(
                f"{member.name}: set_uneven needs units inside of this module, all on its mesh, "
                f"but {found}; call fully_shard on each module that ranks may skip, with the same "
                "mesh."
            )
        member.turnstile = self
        for each in member.inner:
            each.turnstile = _Inside(self, usual)
        self._mesh_info = meshes[0]
        with torch.inference_mode(False), self._units[0].comm_ctx.device.torch_device:
            # Made once: another stream may still read a stream's memory (rule 2: memory by stream).
            self._counts = torch.zeros(len(self._units), dtype=torch.int32)

    # Gathers

    def finish(self) -> None:
        """Take part in rounds until no rank needs a unit."""
        while self.is_open:
            self.is_open = self.round()

    def round(self, wanted: list[Unit] | None = None) -> bool:
        """Gather the wanted units, and those other ranks ask for; return whether any rank asks."""
        guard.check()
        try:
            asked = self._summed([group is wanted for group in self._groups], self._mesh_info.shard)
            for group, num_ranks in zip(self._groups, asked, strict=True):
                for unit in group if num_ranks else ():
                    unit.join_all_gather(is_wanted=group is wanted)
        except dist.DistError as error:
            guard.raise_explained(error)
        return any(asked)

    def gather(self, member: Member, units: Sequence[Unit], phase: str) -> None:
        self._usual.gather(member, units, phase)  # all ranks run the module itself

    # Gradients

    def reduce(self, member: Member, unit: Unit, phase: str) -> None:
        if not unit.settings.requires_gradient_sync:
            start_reduction(unit)

    def before_reduce(self, unit: Unit, num_bytes: int) -> None:
        pass

    def require_taken(self, unit: Unit) -> None:
        if unit.settings.requires_gradient_sync:
            raise _outside(unit.name)

    def settle(self) -> None:
        """Reduce the gradients of uneven units, once no rank needs any of these units."""
        self.finish()
        for unit in self._units_to_reduce():
            start_reduction(unit, with_zeros=True)
        self.is_open = self._member.is_in_forward  # a backward inside of its forward has ended

    def end_backward(self) -> None:
        """Reduce what the backward has left open."""
        if self.is_open or not self.is_reduced:
            self.settle()
        self.is_reduced = False

    def _units_to_reduce(self) -> list[Unit]:
        """The units for which any rank has gradients; a collective if any are to be reduced."""
        self.is_reduced = True
        if not any(unit.settings.requires_gradient_sync for unit in self._units):
            return []
        own = [(u.has_full_grads or u.owes_kept_grads) for u in self._units]
        due = self._summed(own, self._mesh_info.shard, self._mesh_info.replicate)
        return [unit for unit, num_ranks in zip(self._units, due, strict=True) if num_ranks]

    def _summed(self, flags: Sequence[bool], *axes: Axis) -> list[int]:
        """On how many ranks each flag is set."""
        comm_ctx = self._units[0].comm_ctx
        # The host waits for the result; on the compute stream, it would wait for all of compute.
        with comm_ctx.device.on(comm_ctx.streams.all_gather):
            counts = self._counts[: len(flags)].zero_()
            for index in (index for index, flag in enumerate(flags) if flag):
                counts[index].fill_(1)
            for axis in axes:
                if axis.group is not None and not axis.is_single:
                    all_reduce(counts, axis.group, average=False)
            summed: list[int] = counts.tolist()
        return summed

    # Both ends, for autograd

    def enter(self, hook: Callable[[torch.Tensor], None], given: Any) -> tuple[Any, int]:
        """Alias the inputs of a call, so that `hook` runs once nothing inside is left to do."""
        self.is_open = True
        if not torch.is_grad_enabled():
            self._entered.append(None)
            return given, 0
        # A tensor that takes a gradient, even if no input does.
        token = torch.zeros(0, device=self._counts.device, requires_grad=True)
        token.register_hook(hook)
        inputs: dict[torch.Tensor, torch.Tensor] = {}
        map_tensors(lambda t: inputs.setdefault(t, t) if t.requires_grad else t, given)
        entered, *aliases = _Enter.apply(token, *inputs)  # type: ignore[no-untyped-call]
        self._entered.append(entered)
        inputs = dict(zip(inputs, aliases, strict=True))
        return map_tensors(lambda t: inputs.get(t, t), given), 1

    def leave(self, output: Any) -> Any:
        """Alias the outputs of a call, so that all take a gradient and pass it on to the inputs."""
        entered = self._entered.pop()
        if entered is not None:
            output = self._alias(entered, output)
        if not self._member.is_computing:
            self.finish()
        return output

    def _alias(self, entered: torch.Tensor, output: Any) -> Any:
        outputs: dict[torch.Tensor, torch.Tensor] = {}
        map_tensors(lambda t: outputs.setdefault(t, t) if t.is_floating_point() else t, output)
        if outputs:
            aliases = _Leave.apply(entered, *outputs)  # type: ignore[no-untyped-call]
            outputs = dict(zip(outputs, aliases, strict=True))
        return map_tensors(lambda t: outputs.get(t, t), output)

    def reach(self, member: Member, *, was_even: bool) -> None:
        self.is_open = True

    def fail(self, num_open: int, error: BaseException) -> None:
        del self._entered[num_open:]
        if not self._member.is_computing and not isinstance(error, dist.DistError):
            # A recomputation that ends early, or a failure that the program may catch.
            with suppress(Exception):
                self.finish()

    def abort(self) -> None:
        """Forget everything of a failed step."""
        self.is_open = self.is_reduced = False
        self._entered.clear()
