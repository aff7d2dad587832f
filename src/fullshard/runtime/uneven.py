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

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import watcher
from fullshard.comm.collectives import all_reduce
from fullshard.comm.mesh import Axis
from fullshard.errors import ConfigError
from fullshard.runtime.trees import map_tensors
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


class UnevenScope:
    """The uneven units of one scope, grouped by module, and the scope's own units.

    `is_open` says that the scope runs, in forward or backward; `is_reduced` that the gradients of
    the backward under way have been reduced. `entered` has, for each call under way, the tensor
    through which outputs depend on inputs. Calls do not hold it: hooks of the same graph hold them.
    """

    def __init__(self, name: str, groups: Sequence[list[Unit]], own: Sequence[Unit]) -> None:
        self.is_open = False
        self.is_reduced = False
        self._groups = list(groups)
        self._units = [*(unit for group in groups for unit in group), *own]
        self.entered: list[torch.Tensor | None] = []
        meshes = list(dict.fromkeys(unit.mesh_info for unit in self._units))
        if not groups or len(meshes) != 1:
            raise ConfigError(
                f"{name}: set_uneven needs units inside of the module, on the same mesh, found "
                f"{len(groups)} on {len(meshes)}; shard what ranks may skip as the module itself."
            )
        self._mesh_info = meshes[0]
        with torch.inference_mode(False), self._units[0].comm_ctx.device.torch_device:
            # Made once: memory of a stream's pool may still be read by another stream (rule 2).
            self._counts = torch.zeros(len(self._units), dtype=torch.int32)

    # Gathers

    def finish(self) -> None:
        """Take part in rounds until no rank needs a unit."""
        while self.is_open:
            self.is_open = self.round()

    def round(self, wanted: list[Unit] | None = None) -> bool:
        """Gather the wanted units, and those other ranks ask for; return whether any rank asks."""
        watcher.check()
        try:
            asked = self._summed([group is wanted for group in self._groups], self._mesh_info.shard)
            for group, num_ranks in zip(self._groups, asked, strict=True):
                for unit in group if num_ranks else ():
                    unit.join_all_gather(is_wanted=group is wanted)
        except dist.DistError as error:
            watcher.raise_explained(error)
        return any(asked)

    # Gradients

    def units_to_reduce(self) -> list[Unit]:
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

    def enter(self, hook: Callable[[torch.Tensor], None], given: Any) -> Any:
        """Alias the inputs of a call, so that `hook` runs once nothing inside is left to do."""
        if not torch.is_grad_enabled():
            self.entered.append(None)
            return given
        # A tensor that takes a gradient, even if no input does.
        token = torch.zeros(0, device=self._counts.device, requires_grad=True)
        token.register_hook(hook)
        inputs: dict[torch.Tensor, torch.Tensor] = {}
        map_tensors(lambda t: inputs.setdefault(t, t) if t.requires_grad else t, given)
        entered, *aliases = _Enter.apply(token, *inputs)  # type: ignore[no-untyped-call]
        self.entered.append(entered)
        inputs = dict(zip(inputs, aliases, strict=True))
        return map_tensors(lambda t: inputs.get(t, t), given)

    def leave(self, output: Any) -> Any:
        """Alias the outputs of a call, so that all take a gradient and pass it on to the inputs."""
        entered = self.entered.pop()
        if entered is None:
            return output
        outputs: dict[torch.Tensor, torch.Tensor] = {}
        map_tensors(lambda t: outputs.setdefault(t, t) if t.is_floating_point() else t, output)
        if outputs:
            aliases = _Leave.apply(entered, *outputs)  # type: ignore[no-untyped-call]
            outputs = dict(zip(outputs, aliases, strict=True))
        return map_tensors(lambda t: outputs.get(t, t), output)

    def reset(self) -> None:
        """Forget everything of a failed step."""
        self.is_open = self.is_reduced = False
        self.entered.clear()
