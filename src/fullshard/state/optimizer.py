"""Optimizer state dicts of wrapped models, as they are saved: one lane and one state at a time."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fullshard.api import StateDictType
from fullshard.errors import UnknownNameError
from fullshard.state.lanes import StateLane
from fullshard.state.optimizer_exchange import (
    Elements,
    Said,
    agreed_state,
    exchanged,
    own_shaped,
    said_of,
    shard_groups,
)
from fullshard.state.optimizer_keys import (
    Holding,
    Key,
    OptimInput,
    Roster,
    warn_of_older_name,
    warn_of_optim_input,
)
from fullshard.state.settings import settings_of
from fullshard.state.sharded import as_sharded

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParamForm:
    """What a state dict is to hold: whole tensors or shards, where, and whether on this rank."""

    is_sharded: bool
    use_dtensor: bool
    to_cpu: bool
    is_kept: bool

    def of_whole(self, value: Any) -> Any:
        """State that lies whole on this rank, in memory of its own."""
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        device = torch.device("cpu") if self.to_cpu else value.device
        return value.detach().to(device, copy=True)

    def of_gathered(self, value: torch.Tensor, lane: StateLane) -> torch.Tensor:
        """A parameter's part of a gathered lane, in memory of its own."""
        if self.is_sharded and lane.num_ranks > 1:
            return as_sharded(value, lane, use_dtensor=self.use_dtensor, to_cpu=self.to_cpu)
        whole: torch.Tensor = self.of_whole(value)
        return whole


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The state of a wrapped model's optimizer, keyed by the names of the original parameters.

    In the form that `set_state_dict_type` asked for. `optim_state_dict` is what to convert, by
    default what the optimizer has. All ranks of the model call it.
    """
    settings = settings_of(model)
    config = settings.optim_state_dict_config
    is_sharded = settings.state_dict_type is not StateDictType.FULL_STATE_DICT
    form = ParamForm(
        is_sharded,
        getattr(config, "_use_dtensor", False),
        config.offload_to_cpu,
        is_sharded or not getattr(config, "rank0_only", False) or dist.get_rank(group) == 0,
    )
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    return _saved(model, optim, given, None, form)


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: OptimInput = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Whole tensors in host memory, on rank 0 or on all ranks; others return an empty dict."""
    warn_of_older_name("full_optim_state_dict", "optim_state_dict")
    warn_of_optim_input(optim_input)
    is_kept = not rank0_only or dist.get_rank(group) == 0
    form = ParamForm(is_sharded=False, use_dtensor=False, to_cpu=True, is_kept=is_kept)
    return _saved(model, optim, optim.state_dict(), optim_input, form)


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Each tensor split along its first dim, in host memory: for distributed checkpoints."""
    warn_of_older_name("sharded_optim_state_dict", "optim_state_dict")
    use_dtensor = getattr(settings_of(model).optim_state_dict_config, "_use_dtensor", False)
    form = ParamForm(is_sharded=True, use_dtensor=use_dtensor, to_cpu=True, is_kept=True)
    return _saved(model, optim, optim.state_dict(), None, form)


@torch.no_grad()
def _saved(
    model: nn.Module,
    optim: Optimizer,
    state_dict: Mapping[str, Any],
    optim_input: OptimInput,
    form: ParamForm,
) -> dict[str, Any]:
    roster = Roster(model)
    problem: Exception | None = None
    states: dict[Holding, State] = {}
    try:
        lookup = _Lookup(roster, roster.groups_of(optim, optim_input))
        states, loose = lookup.split(state_dict["state"])
        groups = lookup.named_groups(state_dict)
    except Exception as error:
        problem = error
    agreed = _agreed(roster, states, problem)
    saved = _gathered(roster, states, agreed, form)
    if not form.is_kept:
        return {}
    names = {name: None for group in groups or () for name in group["params"]}
    saved = {name: saved[name] for name in [*names, *saved] if name in saved}
    saved.update(loose)
    return {"state": saved} if groups is None else {"state": saved, "param_groups": groups}


class _Lookup:
    """Which parameter is meant by a key of an optimizer's own state dict."""

    def __init__(self, roster: Roster, groups: Sequence[Mapping[Key, Holding]]) -> None:
        self._roster = roster
        self._numbered = {key: holding for group in groups for key, holding in group.items()}

    def find(self, key: Key) -> Holding | None:
        return self._roster.keyed(key) if isinstance(key, str) else self._numbered.get(key)

    def split(self, state: Mapping[Key, Any]) -> tuple[dict[Holding, State], State]:
        """The state of each parameter, and what belongs to none."""
        states: dict[Holding, State] = {}
        loose: State = {}
        for key, value in state.items():
            holding = self.find(key)
            if holding is not None:
                states[holding] = value
                continue
            warnings.warn(
                f"optim_state_dict: {key!r} in the optimizer's state is no parameter of the "
                "model; it is saved as it is.",
                stacklevel=5,  # the caller of optim_state_dict
            )
            loose[str(key)] = copy.deepcopy(value)
        return states, loose

    def named_groups(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The parameter groups, with the names of the original parameters in them."""
        if "param_groups" not in state_dict:
            return None
        groups = copy.deepcopy(state_dict["param_groups"])
        for group in groups:
            names: list[str] = []
            for key in group["params"]:
                holding = self.find(key)
                if holding is None:
                    raise UnknownNameError(
                        f"optim_state_dict: {key!r} in a parameter group must be a parameter of "
                        "the model and of the optimizer, found neither; pass the optimizer's own "
                        "state dict."
                    )
                names += holding.names
            group["params"] = names
        return list(groups)


def _agreed(
    roster: Roster, states: Mapping[Holding, State], problem: Exception | None
) -> dict[Holding, State]:
    """What the state of every cut parameter consists of, the same on all ranks."""
    cut = [holding for holding in roster.holdings if not holding.is_whole]
    groups = shard_groups(roster.lanes)
    own_shapes = own_shaped(states)
    told: list[list[Said]] = []
    members: list[list[Holding]] = []
    for lanes in groups.values():
        inside = [h for h in cut if any(h.lane is lane for lane in lanes)]
        members.append(inside)
        told.append([said_of(h, states.get(h), own_shapes) for h in inside])
    agreed: dict[Holding, State] = {}
    everyone = exchanged(list(groups), told, problem)
    for inside, answers in zip(members, everyone, strict=True):
        for holding, said in zip(inside, zip(*answers, strict=True), strict=True):
            _note(agreed, holding, agreed_state(holding, said))
    for holding in cut:
        if holding.lane is not None and holding.lane.num_ranks == 1:
            _note(agreed, holding, said_of(holding, states.get(holding), own_shapes).state)
    return agreed


def _note(agreed: dict[Holding, State], holding: Holding, state: State | None) -> None:
    if state is not None:
        agreed[holding] = state


def _gathered(
    roster: Roster,
    states: Mapping[Holding, State],
    agreed: Mapping[Holding, State],
    form: ParamForm,
) -> dict[str, State]:
    """The state of every original parameter that has any, by its name."""
    saved: dict[str, State] = {}
    by_lane: dict[StateLane, list[Holding]] = {}
    for holding in roster.holdings:
        if holding in agreed:
            assert holding.lane is not None
            by_lane.setdefault(holding.lane, []).append(holding)
        elif holding in states and form.is_kept:
            values = states[holding].items()
            saved[holding.names[0]] = {name: form.of_whole(value) for name, value in values}
    for lane, holdings in by_lane.items():
        saved.update(_gathered_lane(lane, holdings, states, agreed, form))
    return saved


def _gathered_lane(
    lane: StateLane,
    holdings: Sequence[Holding],
    states: Mapping[Holding, State],
    agreed: Mapping[Holding, State],
    form: ParamForm,
) -> dict[str, State]:
    saved: dict[str, State] = {}
    wanted: dict[tuple[str, torch.dtype], list[Holding]] = {}
    for holding in holdings:
        for name in holding.names:
            saved[name] = {key: form.of_whole(value) for key, value in agreed[holding].items()}
        for key, value in agreed[holding].items():
            if isinstance(value, Elements):
                wanted.setdefault((key, value.dtype), []).append(holding)
    for (key, dtype), owners in wanted.items():
        values = {holding: states.get(holding, {}).get(key) for holding in owners}
        for name, value in _gathered_elements(lane, dtype, values, form):
            saved[name][key] = value
    return saved


def _gathered_elements(
    lane: StateLane,
    dtype: torch.dtype,
    values: Mapping[Holding, torch.Tensor | None],
    form: ParamForm,
) -> Iterator[tuple[str, torch.Tensor]]:
    """One state of a lane's parameters, by name; no more than one is gathered at a time."""
    segment = lane.empty_segment(dtype)
    for holding, value in values.items():
        if value is not None and holding.local_numel:
            holding.region(segment).copy_(value.flatten())
    whole = lane.gather(segment)
    if form.is_kept:
        for part in (part for holding in values for part in holding.parts):
            yield part.names[0], form.of_gathered(part.of_full(whole), lane)
