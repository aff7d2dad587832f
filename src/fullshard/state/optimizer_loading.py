"""Optimizer state dicts, made into what the optimizer of a wrapped model can load on this rank."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.api import StateDictType
from fullshard.errors import ConfigError, DisagreementError, UnknownNameError
from fullshard.state.lanes import StatePart
from fullshard.state.optimizer_exchange import exchanged, is_same, shard_groups
from fullshard.state.optimizer_incoming import (
    Broadcast,
    Checked,
    Fetch,
    Incoming,
    fetch_here,
    is_cut,
    read,
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

State = dict[str, Any]


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """What `optim.load_state_dict` takes on this rank, from a state dict keyed by name.

    It may have been saved with any wrapping, strategy, number of ranks or door, in any form.
    With `rank0_only` in the settings only rank 0 needs to have it. `is_named_optimizer` is for
    optimizers whose own state dicts are keyed by name. Nothing is changed but with
    `load_directly`, and then only after all of it was found to fit.
    """
    settings = settings_of(model)
    is_full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
    rank0_only = is_full and getattr(settings.optim_state_dict_config, "rank0_only", False)
    target = _Target(model, optim, None, is_named_optimizer)
    result = target.converted(optim_state_dict, rank0_only=rank0_only, group=group)
    if load_directly:
        optim.load_state_dict(result)
    return result


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """What an optimizer can load on this rank, from whole tensors that every rank has."""
    warn_of_older_name("shard_full_optim_state_dict", "optim_state_dict_to_load")
    warn_of_optim_input(optim_input)
    # Every rank has everything, so that none needs another: it may be called on one alone.
    return _Target(model, optim, optim_input).converted(full_optim_state_dict, is_alone=True)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """What an optimizer can load on this rank, from whole tensors that rank 0 has."""
    warn_of_older_name("scatter_full_optim_state_dict", "optim_state_dict_to_load")
    warn_of_optim_input(optim_input)
    target = _Target(model, optim, optim_input)
    return target.converted(full_optim_state_dict, rank0_only=True, group=group)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """What an optimizer can load on this rank, from sharded tensors."""
    warn_of_older_name("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return _Target(model, optim, None).converted(sharded_optim_state_dict)


@dataclass(frozen=True, slots=True)
class _Target:
    """The optimizer that is to load the result, and how that is keyed."""

    model: nn.Module
    optim: Optimizer | None
    optim_input: OptimInput
    is_named: bool = False

    @torch.no_grad()
    def converted(
        self,
        state_dict: Mapping[str, Any] | None,
        *,
        rank0_only: bool = False,
        group: dist.ProcessGroup | None = None,
        is_alone: bool = False,
    ) -> dict[str, Any]:
        roster = Roster(self.model)
        fetch: Fetch = fetch_here
        told: list[dist.ProcessGroup | None] = []
        if rank0_only:
            broadcast = Broadcast(group, roster.lanes[0].device)
            fetch, told = broadcast.fetch, [group]
            state_dict = broadcast.outline(state_dict)
        elif not is_alone:
            told += shard_groups(roster.lanes)
        problem: Exception | None = None
        incoming = Incoming()
        try:
            groups = roster.groups_of(self.optim, self.optim_input, by_name=self.is_named)
            incoming = read(state_dict, roster)
            checked = Checked(incoming, roster, may_be_cut=not rank0_only)
            param_groups = self._param_groups(incoming, roster, groups)
        except Exception as error:
            problem = error
        _compare(told, incoming, problem)
        slicing = _Slicing(roster, incoming, checked, fetch, self._kept_when_empty(roster))
        # In the order of the model, which is the same on all ranks, also what is not held here.
        own = {holding: slicing.state_of(holding) for holding in roster.holdings}
        keyed = {key: own[holding] for group in groups for key, holding in group.items()}
        state: dict[Any, Any] = {key: each for key, each in keyed.items() if each is not None}
        state.update({name: slicing.loose(value) for name, value in incoming.loose.items()})
        if param_groups is None:
            return {"state": state}
        return {"state": state, "param_groups": param_groups}

    def _kept_when_empty(self, roster: Roster) -> set[Holding]:
        """Parameters that need state also where this rank has none of their elements."""
        if self.is_named:
            return set(roster.holdings)
        if self.optim is None:
            return set()
        # Some optimizers make state for all their parameters at once and then count on it.
        return {holding for holding in roster.holdings if self.optim.state.get(holding.param)}

    def _param_groups(
        self, incoming: Incoming, roster: Roster, groups: Sequence[Mapping[Key, Holding]]
    ) -> list[dict[str, Any]] | None:
        if incoming.groups is None:
            return None
        keys = {holding: key for group in groups for key, holding in group.items()}
        saved = [_holdings_of(group, roster, keys) for group in incoming.groups]
        if self.optim is None:
            result = [copy.deepcopy(dict(group)) for group in incoming.groups]
            for group, holdings in zip(result, saved, strict=True):
                group["params"] = sorted(keys[holding] for holding in holdings)
            return result
        own = [{k: v for k, v in g.items() if k != "params"} for g in self.optim.param_groups]
        return [
            _matched_group(index, group, own[index], incoming.groups, saved)
            for index, group in enumerate(groups)
        ]


def _compare(
    groups: Sequence[dist.ProcessGroup | None], incoming: Incoming, problem: Exception | None
) -> None:
    """Make sure that all ranks will fetch the same, and that none has found a mistake."""
    mine = incoming.fingerprint()
    for answers in exchanged(groups, [mine] * len(groups), problem):
        if len(set(answers)) > 1:
            raise DisagreementError(
                "optim_state_dict: all ranks must load state of the same parameters, in the same "
                "shapes and dtypes, found differences; load the same checkpoint on every rank."
            )


def _holdings_of(
    group: Mapping[str, Any], roster: Roster, held: Container[Holding]
) -> dict[Holding, None]:
    """What a saved parameter group has in it, as far as this optimizer has to do with it."""
    found: dict[Holding, None] = {}
    for name in group["params"]:
        if not isinstance(name, str):
            raise ConfigError(
                f"optim_state_dict: parameters must be called by name, found {name!r} in a "
                "parameter group; call rekey_optim_state_dict with OptimStateKeyType.PARAM_NAME."
            )
        _, holding = roster.named(name) or (name, None)
        if holding is not None and holding in held:
            found[holding] = None
        elif holding is None or holding.param.requires_grad:
            owner = "model" if holding is None else "optimizer"
            raise UnknownNameError(
                f"optim_state_dict: {name!r} in a parameter group must be a parameter of the "
                f"{owner}, found none of that name; pass the state of an optimizer of this model "
                "over the same parameters."
            )
    return found


def _matched_group(
    index: int,
    group: Mapping[Key, Holding],
    own: Mapping[str, Any],
    saved_groups: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[Holding, None]],
) -> dict[str, Any]:
    """One group of the optimizer, with the options that its parameters were saved with.

    Optimizers match groups and parameters by position, so both are put in the optimizer's order.
    """
    sources = [n for n, holdings in enumerate(saved) if any(h in holdings for h in group.values())]
    if not sources and not group:
        return {**copy.deepcopy(dict(own)), "params": []}
    known = {holding for holdings in saved for holding in holdings}
    unknown = [holding for holding in group.values() if holding not in known]
    # A frozen parameter has no state: optimizers are built with them or without.
    missing = [h.names[0] for h in unknown if h.param.requires_grad or not sources]
    if missing:
        raise ConfigError(
            f"optim_state_dict: every parameter of the optimizer must be in a parameter group, "
            f"found none with {missing}; pass the state of an optimizer over the same parameters."
        )
    options = [
        {k: v for k, v in saved_groups[n].items() if k not in ("params", "param_names")}
        for n in sources
    ]
    for other in options[1:]:
        different = [k for k in {*options[0], *other} if not _has_same(options[0], other, k)]
        if different:
            raise ConfigError(
                f"optim_state_dict: the parameters of group {index} of the optimizer must have "
                f"been saved with the same options, found different {sorted(different)}; build "
                "the optimizer with the groups that were saved."
            )
    result = copy.deepcopy(options[0])
    if "param_names" in own:
        result["param_names"] = list(own["param_names"])
    return {**result, "params": list(group)}


def _has_same(left: Mapping[str, Any], right: Mapping[str, Any], key: str) -> bool:
    return key in left and key in right and is_same(left[key], right[key])


@dataclass(frozen=True, slots=True)
class _Slicing:
    """Cuts this rank's part out of incoming state. All ranks must ask for the same holdings."""

    roster: Roster
    incoming: Incoming
    checked: Checked
    fetch: Fetch
    kept_when_empty: set[Holding]

    def state_of(self, holding: Holding) -> State | None:
        """The state of a parameter as an optimizer holds it; None if it has none here."""
        if holding.is_flat:
            return self._flat(holding)
        state = self.incoming.states.get(holding.names[0])
        if state is None:
            return None
        if holding.lane is None:
            return self._plain(holding, state)
        (part,) = holding.parts
        own: State = {}
        for key in sorted(state):
            value = state[key]
            is_elementwise = self.checked.is_elementwise(part, key, value)
            value = self.fetch(value, holding.lane)
            if is_elementwise and not holding.is_whole:
                value = part.cut(value)
            own[key] = _copied(value)
        has_elements = bool(part.elements) or not part.numel or holding.is_whole
        return own if has_elements or holding in self.kept_when_empty else None

    def _plain(self, holding: Holding, state: Mapping[str, Any]) -> State:
        return {
            key: _copied(state[key])
            if isinstance(holding.param, DTensor) and is_cut(state[key])
            else self.loose(state[key])
            for key in sorted(state)
        }

    def loose(self, value: Any) -> Any:
        """State of no wrapped parameter: whole on every rank."""
        if isinstance(value, Mapping):
            return {key: self.loose(inner) for key, inner in value.items()}
        return _copied(self.fetch(value, self.roster.lanes[0]))

    def _flat(self, holding: Holding) -> State | None:
        states = self.incoming.states
        entries = [(p, states[p.names[0]]) for p in holding.parts if p.names[0] in states]
        if not entries:
            return None
        keys = sorted({key for _, state in entries for key in state})
        return {
            key: self._flat_value(holding, key, [(p, s[key]) for p, s in entries if key in s])
            for key in keys
        }

    def _flat_value(
        self, holding: Holding, key: str, entries: Sequence[tuple[StatePart, Any]]
    ) -> Any:
        """One state of a flat parameter; what its parts have no value for is zero."""
        lane = holding.lane
        assert lane is not None
        if all(self.checked.is_elementwise(part, key, value) for part, value in entries):
            segment: torch.Tensor | None = None
            for part, value in entries:
                mine = part.cut(self.fetch(value, lane))
                if segment is None:
                    segment = mine.new_zeros(lane.segment_numel)
                part.of_segment(segment).copy_(mine)
            return segment
        values = [self.fetch(value, lane) for _, value in entries]
        if not all(is_same(value, values[0]) for value in values[1:]):
            raise ConfigError(
                f"optim_state_dict: state {key!r} must be the same for all parameters of one flat "
                f"parameter, found {values} for {[part.names[0] for part, _ in entries]}; wrap "
                "with use_orig_params=True to keep them apart."
            )
        return _copied(values[0])


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
