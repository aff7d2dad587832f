"""Units that ranks run in different numbers or orders: gathered and reduced by agreement.

A scope is a module that all ranks run equally often; the units inside may run on some ranks only,
in any order. In its forward and backward, ranks meet in rounds: each says which unit it needs next,
if any, and all of them gather the units that any rank needs, in a fixed order. A rank that does not
need one frees it at once. At the end of the scope a rank takes part in rounds until no rank needs
anything. Every round brings every other rank further, so nothing can deadlock.

At the end of its backward, ranks compare which units have gradients on any rank, those of the scope
itself included, and reduce these in a fixed order; who has none takes part with zeros.

[Note: both ends of a scope] Ranks must begin and end the backward of a scope alike, whatever they
have run inside: all that enters passes through one node of autograd (`_Enter`), and all that leaves
through another (`_Leave`), which depends on the first. So a gradient at any output reaches the
scope, and then its inputs, also on a rank that ran nothing. Autograd runs what was made last first,
so all that was made inside has run when `_Enter` does.
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
    """Aliases of tensors; those that get no gradient are given zeros, so that all have arrived."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Not views: whoever writes to a view that a function returns is refused.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads


class _Leave(torch.autograd.Function):
    """Aliases of tensors, which depend on the first one, too."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *grads


class UnevenScope:
    """The uneven units of one scope, by the module that they belong to, and those of its own.

    `is_open` says that the scope runs, in forward or backward; `is_reduced` that the gradients of
    the backward under way have been. `entered` are the tensors by which outputs will depend on
    inputs, of the calls under way: not part of a call, which hooks of the same graph refer to.
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
            # Made once: memory of a stream's pool may still be read by another one (rule 2).
            self._counts = torch.zeros(len(self._units), dtype=torch.int32)

    # Gathers

    def finish(self) -> None:
        """Take part in rounds until no rank needs a unit."""
        while self.is_open:
            self.is_open = self.round()

    def round(self, wanted: list[Unit] | None = None) -> bool:
        """Gather the units of a module, and what the other ranks ask for; whether any does."""
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
        """The units for which any rank has gradients: a collective, if they are to be reduced."""
        self.is_reduced = True
        if not any(unit.settings.requires_gradient_sync for unit in self._units):
            return []
        own = [(u.has_full_grads or u.owes_kept_grads) for u in self._units]
        due = self._summed(own, self._mesh_info.shard, self._mesh_info.replicate)
        return [unit for unit, num_ranks in zip(self._units, due, strict=True) if num_ranks]

    def _summed(self, flags: Sequence[bool], *axes: Axis) -> list[int]:
        """On how many ranks each flag is set."""
        comm_ctx = self._units[0].comm_ctx
        # The host waits for it; on the stream that computes, it would wait for all of compute.
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
        """The inputs of a call, such that `hook` is called once nothing inside is left to do."""
        if not torch.is_grad_enabled():
            self.entered.append(None)
            return given
        # Something that takes a gradient, also if no input does.
        token = torch.zeros(0, device=self._counts.device, requires_grad=True)
        token.register_hook(hook)
        inputs: dict[torch.Tensor, torch.Tensor] = {}
        map_tensors(lambda t: inputs.setdefault(t, t) if t.requires_grad else t, given)
        entered, *aliases = _Enter.apply(token, *inputs)  # type: ignore[no-untyped-call]
        self.entered.append(entered)
        inputs = dict(zip(inputs, aliases, strict=True))
        return map_tensors(lambda t: inputs.get(t, t), given)

    def leave(self, output: Any) -> Any:
        """The output of a call: all of it takes a gradient, and passes it on to the inputs."""
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
