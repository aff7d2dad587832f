"""What a step of `Muon` reads and writes on the shards: gradients, momenta and parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch

from fullshard._torch import (
    foreach_add_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
    to_local,
    triton_kernels,
)
from fullshard.errors import ConfigError
from fullshard.layout.split import Box
from fullshard.optim.matrices import HeldTensor
from fullshard.optim.muon_options import State, adjustment
from fullshard.optim.owners import Matrix

Scale = float | torch.Tensor

_LARGE_NUMEL = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a matrix on this rank: box `box` of tensor `held`, or matrix `index` of that."""

    held: int
    box: int
    index: int | None
    matrix: Matrix

    def of(self, boxes: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        found = boxes[self.held][self.box]
        return found if self.index is None else found[self.index]


class Shares(Protocol):
    """What this rank has of tensors that are matrices, or stacks of them, by their numbers."""

    held: list[HeldTensor]
    group_of: list[int]
    own_boxes: dict[int, list[Box]]

    def kept_boxes(self, number: int, value: torch.Tensor) -> list[torch.Tensor]: ...
    def is_divided(self, number: int) -> bool: ...


class Values:
    """Gradients, momenta and parameters of a step, as lists of this rank's boxes.

    A part's momentum is updated when the part is filled. Where replicas divide the work, so that a
    rank fills only a share of its parts, all momenta are updated when this is made.
    """

    def __init__(
        self, work: Shares, groups: list[State], states: Any, found_inf: torch.Tensor | None
    ) -> None:
        self._work, self._groups = work, groups
        self._factor = None if found_inf is None else 1 - found_inf.reshape(())
        self._scales: dict[Any, tuple[Scale, Scale]] = {}
        none: list[list[torch.Tensor]] = [[] for _ in work.held]
        self.grads, self.momenta, self.params = list(none), list(none), list(none)
        lerped: defaultdict[int, list[tuple[Any, ...]]] = defaultdict(list)
        seen: set[torch.Tensor] = set()
        for number, held in enumerate(work.held):
            param = held.param
            grad = param.grad
            if grad is None:
                continue
            momentum = _momentum(states[param], grad, held.name)
            if work.is_divided(number) and param not in seen:
                seen.add(param)
                lerped[work.group_of[number]].append((to_local(grad), to_local(momentum)))
            # Not kept: the engine reuses gradients that nobody holds (rule 8: one buffer per lane).
            self.grads[number] = held.parts_of(grad, work.own_boxes[number])
            self.momenta[number] = work.kept_boxes(number, momentum)
            self.params[number] = work.kept_boxes(number, param)
        for index, pairs in lerped.items():
            self._update(groups[index], *(list(each) for each in zip(*pairs, strict=True)))

    def _update(self, group: State, grads: list[torch.Tensor], momenta: list[torch.Tensor]) -> None:
        weight = 1 - group["momentum"]
        if self._factor is not None:
            for grad in grads:
                grad.masked_fill_((self._factor == 0).to(grad.device), 0.0)
            share = self._factor * weight
            for some, others in _alike(momenta, grads):
                kind = some[0].device, some[0].dtype
                foreach_lerp_(some, others, [share.to(*kind)] * len(some))
        else:
            for some, others in _alike(momenta, grads):
                foreach_lerp_(some, others, weight)

    def fill(self, targets: Sequence[torch.Tensor], parts: Sequence[Part]) -> None:
        """Write what is orthogonalized of each part; zeros if it has no gradient."""
        by_group: defaultdict[Any, list[int]] = defaultdict(list)
        for place, (target, part) in enumerate(zip(targets, parts, strict=True)):
            if not self.grads[part.held]:
                target.zero_()
                continue
            number, grad = self._work.group_of[part.held], part.of(self.grads)
            is_divided = self._work.is_divided(part.held)
            momentum, group = part.of(self.momenta), self._groups[number]
            kernels = None if is_divided else _kernels_for(grad, momentum, target)
            if kernels is None:
                by_group[number, is_divided, grad.dtype, grad.device].append(place)
            else:
                kept, nesterov = group["momentum"], group["nesterov"]
                kernels.update(grad, momentum, target, kept, self._factor, nesterov=nesterov)
        for (number, is_divided, *_), places in by_group.items():
            group = self._groups[number]
            grads = [parts[place].of(self.grads) for place in places]
            results: Any = [parts[place].of(self.momenta) for place in places]
            if not is_divided:
                self._update(group, grads, results)
            if group["nesterov"]:
                results = foreach_lerp(grads, results, group["momentum"])
            foreach_copy_([targets[place] for place in places], results)

    def apply(self, parts: Sequence[Part], results: Sequence[torch.Tensor]) -> None:
        """Let parameters decay, and add the orthogonalized updates that belong to them."""
        alike: defaultdict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for part, result in zip(parts, results, strict=True):
            if self.params[part.held]:
                param = part.of(self.params)
                number, matrix = self._work.group_of[part.held], part.matrix
                adjust = adjustment(matrix.rows, matrix.cols, self._groups[number]["adjust_lr_fn"])
                kernels = _kernels_for(param, result)
                if kernels is None:
                    alike[number, adjust, param.dtype, param.device].append((param, result))
                else:
                    kernels.add(param, result, *self._scales_of(number, adjust, param.device))
        for (number, adjust, _, device), pairs in alike.items():
            params = [param for param, _ in pairs]
            results = [result.to(device) for _, result in pairs]
            rest, scale = self._scales_of(number, adjust, device)
            if self._groups[number]["weight_decay"]:
                foreach_mul_(params, rest)
            if isinstance(scale, torch.Tensor):
                foreach_addcmul_(params, results, [scale] * len(params))
            else:
                foreach_add_(params, results, alpha=scale)

    def _scales_of(self, number: int, adjust: float, device: torch.device) -> tuple[Scale, Scale]:
        """What a parameter and its update are multiplied by: on the device only if need be."""
        found = self._scales.get((number, adjust, device))
        if found is None:
            group = self._groups[number]
            lr = group["lr"]
            if isinstance(lr, torch.Tensor) and lr.is_cpu:
                lr = lr.item()
            if self._factor is not None:
                lr = lr * self._factor
            if isinstance(lr, torch.Tensor):
                lr = lr.to(device)
            found = 1 - lr * group["weight_decay"], -lr * adjust
            self._scales[number, adjust, device] = found
        return found


def _kernels_for(*tensors: torch.Tensor) -> ModuleType | None:
    """The kernels for large tensors that lie on a GPU as one piece each."""
    is_fit = all(each.is_cuda and each.is_contiguous() for each in tensors)
    if not is_fit or tensors[0].numel() < _LARGE_NUMEL:
        return None
    return triton_kernels("fullshard.optim.muon_kernels")


def _alike(*tensors: list[torch.Tensor]) -> Iterable[tuple[list[torch.Tensor], ...]]:
    """Lists of tensors as foreach kernels take them: of one dtype, on one device."""
    kinds: defaultdict[Any, list[Any]] = defaultdict(list)
    for some in zip(*tensors, strict=True):
        if some[0].numel():
            kinds[some[0].dtype, some[0].device].append(some)
    return (tuple(map(list, zip(*some, strict=True))) for some in kinds.values())


def _momentum(state: State, grad: torch.Tensor, name: str) -> torch.Tensor:
    if "momentum_buffer" not in state:
        if grad.is_sparse:
            raise ConfigError(
                f"{name}: Muon cannot train a parameter with sparse gradients; make them dense, "
                "or let AdamW train it, in a group that has 'betas'."
            )
        state["momentum_buffer"] = torch.zeros_like(grad)
    found: torch.Tensor = state["momentum_buffer"]
    return found
