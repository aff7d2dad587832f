"""The norm of gradients that are sharded over ranks, and clipping by it."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from fullshard._torch import foreach_mul_, foreach_norm
from fullshard.comm.collectives import all_reduce_any
from fullshard.errors import ConfigError

# Avoids a division by zero; the value that `torch.nn.utils.clip_grad_norm_` adds to the norm.
NORM_MARGIN = 1e-6


Groups: TypeAlias = tuple[dist.ProcessGroup | None, ...]


@torch.no_grad()
def clip_grads(
    sharded: Sequence[tuple[Iterable[torch.Tensor], Groups]],
    replicated: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; return the norm.

    `sharded` has parameters whose gradients are split over the ranks of groups, one for each axis
    of more than one rank; `replicated` has those whose gradients are whole on every rank. A
    parameter that is given twice counts once. There is one all-reduce per group, on `device`. Ranks
    without gradients take part in it: all ranks of a group must call this.

    The norm is computed in float32 or more, and returned on `device` in the largest dtype of this
    rank's gradients.
    """
    try:
        limit, order = float(max_norm), float(norm_type)
    except (TypeError, ValueError):
        limit = order = math.nan
    if not order > 0:
        raise ConfigError(
            "clip_grad_norm_: max_norm must be a number and norm_type must be greater than zero, "
            f"not {max_norm!r} and {norm_type!r}; pass 2.0 or another order, or inf for the "
            "largest magnitude."
        )
    seen: set[torch.Tensor] = set()
    by_groups: dict[Groups, list[torch.Tensor]] = {}
    for params, groups in (*sharded, (replicated, ())):
        grads = by_groups.setdefault(groups, [])
        for param in params:
            if param.grad is not None and param not in seen:
                seen.add(param)
                grads.append(param.grad)
    total = torch.stack([_measure(some, order, device, key) for key, some in by_groups.items()])
    norm = total.max() if order == math.inf else total.sum() ** (1.0 / order)

    grads = [grad for some in by_groups.values() for grad in some]
    factor = (limit / (norm + NORM_MARGIN)).clamp(max=1.0)
    # Multiply even by a factor of 1: testing for it would make the host wait for the device.
    for alike in by_kind(grads):
        foreach_mul_(alike, factor.to(alike[0].device, alike[0].dtype))
    if grads:
        return norm.to(functools.reduce(torch.promote_types, (grad.dtype for grad in grads)))
    if any(group is not None for groups in by_groups for group in groups):
        # Ranks with gradients return their dtype, which this rank does not know.
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {dist.get_rank()} with no gradients -- "
            "returning the total norm in the default dtype torch.float32, whatever that of other "
            "ranks is.",
            stacklevel=4,
        )
    return norm.float()


def by_kind(grads: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Gradients by device and dtype, as foreach kernels take them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        if grad.numel() > 0:  # the largest of no elements is an error
            kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    return kinds.values()


def _measure(
    grads: list[torch.Tensor], order: float, device: torch.device, groups: Groups
) -> torch.Tensor:
    """The sum of powers, or the largest magnitude, over groups; norms are combined from these.

    It is computed in float64, so that the total does not depend on how gradients are sharded.
    """
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    for alike in by_kind(grads):
        # The sum inside a norm does not fit into float16.
        wide = torch.promote_types(alike[0].dtype, torch.float32)
        norms.append(torch.stack(foreach_norm(alike, order, wide)).to(device).double())
    several = [group for group in groups if group is not None and group.size() > 1]
    if order != math.inf:
        powers = (torch.cat(norms) ** order).sum()
        for group in several:
            all_reduce_any(powers, dist.ReduceOp.SUM, group)
        return powers
    largest = torch.cat(norms).max()
    if not several:
        return largest
    # The maximum of a collective may drop a nan, which must reach every rank: send it separately.
    is_nan = largest.isnan()
    sent = torch.stack([largest.masked_fill(is_nan, 0.0), is_nan.double()])
    for group in several:
        all_reduce_any(sent, dist.ReduceOp.MAX, group)
    return sent[0].masked_fill(sent[1] > 0, math.nan)
