"""The gradients of a unit between its reductions: kept, shown, assigned to shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fullshard._torch import (
    backward_hooks,
    disable_torch_function,
    foreach_add_,
    post_accumulate_grad_hooks,
    to_local,
    version_of,
)
from fullshard.comm.mesh import MeshInfo
from fullshard.comm.placement import local_gradient
from fullshard.device import Device
from fullshard.unit.grad_buffer import GradSlot, GradTarget, has_hooks, part_of, set_grad
from fullshard.unit.grad_lane import Grad, GradLane
from fullshard.unit.param import ShardedParam
from fullshard.unit.settings import UnitSettings
from fullshard.unit.store import Store


def sum_of(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum in the wider dtype, in the memory of one of the two."""
    return one.add_(other) if one.dtype.itemsize >= other.dtype.itemsize else other.add_(one)


class UnitGrads:
    """The full gradients of a unit's parameters, and what became of them.

    `was_reduced` says whether the backward under way has taken some gradients already. `_created`
    are the targets that it gave a `.grad`, and `_added_to` the gradients from before that it adds
    to. `_host_events` are copies of gradients to the host that nothing has waited for. `_shown` has
    the gradients that a wrapper's parameters show while more is kept unreduced, with their
    versions, and whether they are mere placeholders.
    """

    def __init__(self, mesh_info: MeshInfo, store: Store, device: Device) -> None:
        self.was_reduced = False
        self.mesh_info = mesh_info
        self.store = store
        self.device = device
        self._host_events: list[Any] = []
        self._created: list[GradTarget] = []
        self._added_to: list[torch.Tensor] = []
        self._shown: dict[torch.Tensor, tuple[torch.Tensor, int, bool]] = {}
        self.lanes: list[GradLane] = []

    def follow_lanes(self, lanes: list[GradLane]) -> None:
        """Follow a new plan of the unit from the next reduce-scatter on."""
        self.lanes = lanes

    # Accumulation without communication

    def were_kept(self, params: Sequence[ShardedParam], settings: UnitSettings) -> bool:
        """Whether an earlier step kept gradients that are to be reduced now."""
        self._drop_zeroed(params)
        if not settings.requires_gradient_sync:
            return False
        if any(param.accumulated is not None for param in params):
            return True
        return settings.requires_all_reduce and any(p.partial_grad is not None for p in params)

    def accumulate(self, params: Sequence[ShardedParam], *, is_flat: bool) -> None:
        """Take the full gradients and keep them unreduced, in the dtype of the reduction.

        Those of wrapped parameters are kept in the dtype that they compute in, as torch's class
        does: it takes half the memory. They show a gradient, so that `zero_grad` drops what is
        kept.
        """
        self._drop_zeroed(params)
        self.was_reduced = True
        for each in params:
            grad = self.take_full(each)
            if grad is None:
                continue
            if each.dtypes.grad is not None:
                grad = grad.to(each.dtypes.computed if is_flat else each.dtypes.reduced)
            each.accumulated = grad if each.accumulated is None else sum_of(each.accumulated, grad)
            param = each.param
            if is_flat and param not in self._shown:
                is_placeholder = param.grad is None
                if param.grad is None:
                    dtype = each.dtypes.computed
                    set_grad(param, torch.zeros_like(param, dtype=dtype, requires_grad=False))
                    assert param.grad is not None
                self._shown[param] = (param.grad, version_of(param.grad), is_placeholder)

    def drop_kept(self, params: Sequence[ShardedParam]) -> None:
        """Forget gradients that were not reduced, or not over the replicas."""
        for param in params:
            param.accumulated = param.partial_grad = None

    def _drop_zeroed(self, params: Sequence[ShardedParam]) -> None:
        """Forget what was kept for parameters whose gradients were zeroed or set to None since."""
        for param, (grad, version, is_placeholder) in list(self._shown.items()):
            kept = [each for each in params if each.param is param and each.accumulated is not None]
            if param.grad is None:
                del self._shown[param]
                for each in kept:
                    each.accumulated = None
            elif param.grad is grad and version_of(grad) != version:
                # Somebody has written to it. The device finds out what; the host does not wait.
                is_zeroed = grad.any().logical_not_()
                for each in kept:
                    assert each.accumulated is not None
                    each.accumulated.masked_fill_(is_zeroed.to(each.accumulated.device), 0)
                self._shown[param] = (grad, version_of(grad), is_placeholder)

    def _hide(self) -> None:
        """Remove the gradients that were only placeholders."""
        for param, (grad, _, is_placeholder) in self._shown.items():
            if is_placeholder and param.grad is grad:
                param.grad = None
        self._shown.clear()

    # For a reduction

    def begin_taking(self) -> None:
        """A reduction takes what there is: nothing is shown or kept for another one."""
        if self._shown:
            self._drop_zeroed([p for lane in self.lanes for b in lane.buckets for p in b.params])
            self._hide()
        self.was_reduced = True

    def take_full(self, param: ShardedParam) -> Grad:
        """The gradient that autograd left on a full parameter."""
        full = param.full
        if full is None or full.grad is None:
            return None
        grad, full.grad = full.grad, None
        if param.full_spec is None:
            return grad
        if param.annotations is not None:
            grad = param.annotations.placed(grad, param.full_spec.mesh)
        return local_gradient(grad, param.full_spec, self.mesh_info)

    def assign_made(
        self, targets: Sequence[GradSlot], made: Mapping[GradTarget, torch.Tensor]
    ) -> None:
        """Assign the gradients that were made for targets that have none (rule 8: one buffer)."""
        with disable_torch_function():
            for target, _ in targets:
                target.param.grad = made[target]
        self._created += [target for target, _ in targets]

    def assign(
        self,
        sums: torch.Tensor,
        targets: Sequence[GradSlot],
        made: Mapping[GradTarget, torch.Tensor],
    ) -> bool:
        """Assign parts of sums as gradients; return whether some were added to others or hooked.

        `made` has the gradients that already exist as views of the sums.
        """
        if not self.store.is_on_device:
            sums = self._stored(sums, targets)
        before: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        hooked: list[tuple[GradTarget, torch.Tensor]] = []
        with disable_torch_function():
            for target, offset in targets:
                param, grad = target.param, made.get(target)
                if has_hooks(param):
                    hooked.append((target, target.as_grad(part_of(sums, target, offset))))
                elif param.grad is not None:
                    before.append(to_local(param.grad))
                    added.append(part_of(sums, target, offset))
                else:
                    if grad is None:
                        set_grad(param, target.as_grad(part_of(sums, target, offset)))
                    else:
                        param.grad = grad
                    self._created.append(target)
        if before:
            # Compute may have allocated these, and waits for this at the end of backward. Until
            # then nobody else may get their memory, also if a failed backward is followed by
            # `zero_grad` (rule 5: in flight).
            self._added_to += before
            foreach_add_(before, added)
        for target, grad in hooked:
            self._assign_with_hooks(target, grad)
        return bool(before or hooked)

    def _assign_with_hooks(self, target: GradTarget, grad: torch.Tensor) -> None:
        param = target.param
        for hook in (backward_hooks(param) or {}).values():
            changed = hook(grad)
            grad = grad if changed is None else changed
        if param.grad is not None:
            self._added_to.append(to_local(param.grad))
            self._added_to[-1].add_(to_local(grad))
        else:
            set_grad(param, grad)
            self._created.append(target)
        for hook in (post_accumulate_grad_hooks(param) or {}).values():
            hook(param)

    def _stored(self, sums: torch.Tensor, targets: Sequence[GradSlot]) -> torch.Tensor:
        stored, event = self.store.write(sums, self.device)
        # Adding to an existing gradient reads on the host right away, and so do users' hooks.
        if any(t.param.grad is not None or has_hooks(t.param) for t, _ in targets):
            self.device.synchronize(event)
        else:
            self._host_events.append(event)
        return stored

    def end_backward(self) -> None:
        self.was_reduced = False
        for lane in self.lanes:
            lane.in_buffer.clear()

    def release_unused_buffers(self) -> None:
        """Free the memory of gradients that were dropped."""
        for lane in self.lanes:
            buffer = lane.buffer
            if buffer is not None and buffer.memory.is_allocated and buffer.is_unused:
                buffer.memory.free()

    def forget_buffers(self) -> None:
        """Drop the buffers, so that later gradients are made in other memory."""
        for lane in self.lanes:
            lane.buffer = None
            lane.in_buffer.clear()
            for bucket in lane.buckets:
                bucket.forget_programs()

    def synchronize_host(self) -> None:
        """Make the host wait for gradients that are still being copied to it.

        Compute has waited for all of them.
        """
        for event in self._host_events:
            self.device.synchronize(event)
        self._host_events.clear()
        self._created.clear()
        self._added_to.clear()

    def reset(self, params: Sequence[ShardedParam]) -> None:
        """Drop everything that a failed step left behind, also gradients that it created."""
        self.was_reduced = False
        self.forget_buffers()  # they may hold results that were assigned to nothing
        self._hide()
        self._host_events.clear()
        self.drop_kept(params)
        for param in params:
            if param.full is not None:
                param.full.grad = None
        for target in self._created:
            target.param.grad = None
        self._created.clear()
        self._added_to.clear()
