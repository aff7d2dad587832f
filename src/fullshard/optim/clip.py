"""The norm of gradients whose parts are on many ranks, and clipping by it."""

from __future__ import annotations

import functools
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from fullshard._torch import foreach_mul_, foreach_norm
from fullshard.errors import ConfigError

# Keeps a norm of zero from dividing; the value that `torch.nn.utils.clip_grad_norm_` adds.
NORM_MARGIN = 1e-6


@torch.no_grad()
def clip_grads(
    sharded: Sequence[tuple[Iterable[torch.Tensor], dist.ProcessGroup | None]],
    replicated: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; return the norm.

    `sharded` has parameters whose gradients are disjoint parts over the ranks of a group (None for
    an axis of one rank, as in `Axis`); `replicated` has those whose gradients are whole on every
    rank. A parameter that is given twice counts once. There is one all-reduce per group, on
    `device`, which ranks without gradients take part in: all ranks of a group must call this.

    The norm is computed in float32 or more, and returned on `device` in the largest dtype of this
    rank's gradients.
    """
    limit, order = _number("max_norm", max_norm), _number("norm_type", norm_type)
    if not order > 0:
        raise ConfigError(
            f"clip_grad_norm_: norm_type must be greater than zero, found {norm_type!r}; pass 2.0, "
            "another order, or inf for the largest magnitude."
        )
    seen: set[torch.Tensor] = set()
    by_group: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {}
    for params, group in sharded:
        by_group.setdefault(group, []).extend(_unseen_grads(params, seen))
    whole = _unseen_grads(replicated, seen)

    measures = [_measure(whole, order, device)]
    for group, grads in by_group.items():
        measures.append(_all_reduce(_measure(grads, order, device), order, group))
    total = _combine(torch.stack(measures), order)
    if order != math.inf:
        total = total ** (1.0 / order)

    grads = [grad for some in by_group.values() for grad in some] + whole
    factor = (limit / (total + NORM_MARGIN)).clamp(max=1.0)
    # A factor of 1 is multiplied by, too: testing for it would make the host wait for the device.
    for (grad_device, dtype), alike in _by_kind(grads).items():
        foreach_mul_(alike, factor.to(grad_device, dtype))
    if grads:
        return total.to(functools.reduce(torch.promote_types, (grad.dtype for grad in grads)))
    if any(group is not None for group in by_group):
        # Ranks with gradients return their dtype, which this rank does not know.
        warnings.warn(
            f"clip_grad_norm_: rank {dist.get_rank()} was called with no gradients; it returns "
            "the total norm in float32, whatever dtype the gradients of other ranks have.",
            stacklevel=4,
        )
    return total.float()


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"clip_grad_norm_: {name} must be a number, found {value!r}; pass a float."
        ) from None


def _unseen_grads(params: Iterable[torch.Tensor], seen: set[torch.Tensor]) -> list[torch.Tensor]:
    grads = []
    for param in params:
        if param.grad is not None and param not in seen:
            seen.add(param)
            grads.append(param.grad)
    return grads


def _by_kind(
    grads: Iterable[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Gradients by device and dtype, as foreach kernels take them."""
    kinds: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        if grad.numel() > 0:  # the largest of no elements is an error
            kinds[grad.device, grad.dtype].append(grad)
    return kinds


def _measure(grads: list[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The sum of powers, or the largest magnitude: what norms are combined by.

    It is computed in float64, so that the total does not depend on how gradients are sharded.
    """
    norms = []
    for (_, dtype), alike in _by_kind(grads).items():
        # The sum inside a norm does not fit into float16.
        wide = torch.promote_types(dtype, torch.float32)
        norms.append(torch.stack(foreach_norm(alike, order, wide)).to(device).double())
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    all_norms = torch.cat(norms)
    return _combine(all_norms if order == math.inf else all_norms**order, order)


def _combine(measures: torch.Tensor, order: float) -> torch.Tensor:
    return measures.max() if order == math.inf else measures.sum()


def _all_reduce(
    measure: torch.Tensor, order: float, group: dist.ProcessGroup | None
) -> torch.Tensor:
    if group is None or group.size() == 1:
        return measure
    if order != math.inf:
        dist.all_reduce(measure, group=group)
        return measure
    # The maximum of a collective may drop a nan, which must reach every rank: send it separately.
    is_nan = measure.isnan()
    sent = torch.stack([measure.masked_fill(is_nan, 0.0), is_nan.double()])
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=group)
    return sent[0].masked_fill(sent[1] > 0, math.nan)
