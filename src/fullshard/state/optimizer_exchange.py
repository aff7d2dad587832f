"""What ranks tell each other about their optimizer state before any of it travels."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard.errors import DisagreementError, FullshardError
from fullshard.state.lanes import StateLane
from fullshard.state.optimizer_keys import Holding

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Elements:
    """State with one value for each element that a rank has: gathered like the parameter."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Said:
    """What one rank says of its state of one parameter: `Elements`, or the value itself."""

    numel: int
    state: dict[str, Any] | None


def own_shaped(states: Mapping[Holding, Mapping[str, Any]]) -> set[str]:
    """The names of state whose tensors are not as large as what this rank has of a parameter.

    Such state has a shape of its own, also where that happens to be the size of a slice.
    """
    return {
        name
        for holding, state in states.items()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() > 0
        if value.numel() != holding.local_numel and not holding.is_whole
    }


def said_of(holding: Holding, state: Mapping[str, Any] | None, own_shapes: set[str]) -> Said:
    """Describe this rank's state, with what is small enough to be told outright."""
    numel = holding.local_numel
    if state is None:
        return Said(numel, None)
    told = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            told[name] = value
        elif value.dim() > 0 and name not in own_shapes:
            told[name] = Elements(value.dtype)
        else:
            told[name] = value.detach().cpu()
    return Said(numel, told)


def agreed_state(holding: Holding, everyone: Sequence[Said]) -> dict[str, Any] | None:
    """What the state of a parameter consists of, from what all ranks said; None if no rank has any.

    A rank that has no element of the parameter may still have numbers about it, such as a count
    of steps, but nothing that its optimizer keeps up to date: it is not listened to.
    """
    speakers = [said for said in everyone if said.numel] or list(everyone)
    states = [said.state for said in speakers if said.state is not None]
    if not states:
        return None
    agreed: dict[str, Any] = {}
    for name in {name: None for state in states for name in state}:
        told = [state[name] for state in states if name in state]
        values = [value for value in told if not isinstance(value, Elements)]
        if values:
            agreed[name] = _agreed_value(holding, name, values)
        elif len(told) == len(speakers) and len(set(told)) == 1:
            agreed[name] = told[0]
        else:
            raise DisagreementError(
                f"{holding.names[0]}: every rank that has a part of it must have the optimizer "
                f"state {name!r} in one dtype, found {[said.state for said in speakers]}; step "
                "the optimizer on all ranks alike."
            )
    return agreed


def _agreed_value(holding: Holding, name: str, values: Sequence[Any]) -> Any:
    # Of a flat parameter's state the first rank's values are as good as any: an optimizer that
    # sums up the segment that it sees in one number has another number on every rank.
    if not holding.is_flat and not all(is_same(value, values[0]) for value in values[1:]):
        raise DisagreementError(
            f"{holding.names[0]}: the optimizer state {name!r} must be the same on all ranks, "
            f"found {values}; a number that depends on a rank's part of a parameter cannot be "
            "saved."
        )
    return values[0]


def is_same(left: Any, right: Any) -> bool:
    """Whether two values of an optimizer's state are equal; nan is equal to itself."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and torch.allclose(left.cpu(), right.cpu(), rtol=0, atol=0, equal_nan=True)
        )
    return type(left) is type(right) and pickle.dumps(left) == pickle.dumps(right)


def exchanged(
    groups: Sequence[dist.ProcessGroup | None], values: Sequence[_T], problem: Exception | None
) -> list[list[_T]]:
    """One value for each group, from all its ranks; raises what went wrong on any of them.

    A rank that has found a mistake takes part, so that the others learn of it and do not wait.
    """
    # As words: not every exception can be sent.
    kind = type(problem) if isinstance(problem, FullshardError) else DisagreementError
    said = None if problem is None else (kind, f"rank {dist.get_rank()}: {problem}")
    received: list[list[Any]] = []
    for group, value in zip(groups, values, strict=True):
        answers: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, (said, value), group=group)
        received.append(answers)
    if problem is not None:
        raise problem
    for other, _ in (answer for answers in received for answer in answers):
        if other is not None:
            raise other[0](other[1])
    return [[value for _, value in answers] for answers in received]


def shard_groups(lanes: Sequence[StateLane]) -> dict[dist.ProcessGroup, list[StateLane]]:
    """The process groups that lanes are cut over, each with its lanes."""
    groups: dict[dist.ProcessGroup, list[StateLane]] = {}
    for lane in lanes:
        group = lane.mesh_info.shard.group
        if lane.num_ranks > 1 and group is not None:
            groups.setdefault(group, []).append(lane)
    return groups
