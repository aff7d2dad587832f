"""What the parameters of an optimizer are called, by number and by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.api import OptimStateKeyType
from fullshard.errors import ConfigError, UnknownNameError
from fullshard.runtime.names import clean_name
from fullshard.state.lanes import StateLane, StatePart, lanes_of

Key: TypeAlias = int | str
OptimInput: TypeAlias = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """One parameter as an optimizer holds it, and what it stands for in the model.

    That is one original parameter, or all those of a lane where the optimizer holds its flat
    parameter. A parameter that is not wrapped has no lane.
    """

    param: nn.Parameter
    names: tuple[str, ...]
    key: str
    lane: StateLane | None = None
    parts: tuple[StatePart, ...] = ()

    @property
    def is_flat(self) -> bool:
        return self.lane is not None and self.lane.flat_param is not None

    @property
    def is_whole(self) -> bool:
        """Whether an optimizer's state of it is what it would be without any wrapper."""
        return self.lane is None or (self.lane.num_ranks == 1 and not self.is_flat)

    @property
    def local_numel(self) -> int:
        """How many elements this rank has: for a flat parameter, with those that pad it."""
        if self.lane is None:
            return self.param.numel()
        return self.lane.segment_numel if self.is_flat else len(self.parts[0].elements)

    def region(self, segment: torch.Tensor) -> torch.Tensor:
        """Where its elements lie in a segment of its lane."""
        return segment if self.is_flat else self.parts[0].of_segment(segment)


class Roster:
    """All parameters of a wrapped model as its optimizers see them, alike on every rank."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.lanes = lanes_of(model)
        if not self.lanes:
            raise ConfigError(
                f"{type(model).__name__}: a model with at least one FullyShardedDataParallel "
                "module that has parameters expected, found none; use the state dict of the "
                "optimizer as it is."
            )
        self.holdings = list(_wrapped_holdings(model, self.lanes))
        self._by_param = {id(holding.param): holding for holding in self.holdings}
        self._by_key: dict[str, Holding] = {}
        self._by_name: dict[str, tuple[str, Holding]] = {}
        for holding in self.holdings:
            for part in holding.parts:
                self._by_name.update(dict.fromkeys(part.names, (part.names[0], holding)))
        for key, param in model.named_parameters(remove_duplicate=False):
            holding = self._by_param.get(id(param)) or self._add_plain(key, param)
            self._by_key[clean_name(key)] = holding
            if holding.lane is None:
                self._by_name[clean_name(key)] = (holding.names[0], holding)

    def _add_plain(self, key: str, param: nn.Parameter) -> Holding:
        holding = Holding(param, (clean_name(key),), key)
        self.holdings.append(holding)
        self._by_param[id(param)] = holding
        return holding

    def named(self, name: str) -> tuple[str, Holding] | None:
        """The canonical name and the holding of an original parameter, by any of its names."""
        return self._by_name.get(clean_name(name))

    def keyed(self, key: str) -> Holding | None:
        """The holding that the model lists under this name."""
        return self._by_key.get(clean_name(key))

    def of_param(self, param: nn.Parameter, position: str) -> Holding:
        holding = self._by_param.get(id(param))
        if holding is None:
            raise UnknownNameError(
                f"{position}: an optimizer's parameter must be one of the model's, found a "
                f"tensor of shape {tuple(param.shape)} that is none of them; pass the optimizer "
                "of this model, built from its parameters after it was wrapped."
            )
        return holding

    def groups_of(
        self, optim: Optimizer | None, optim_input: OptimInput, *, by_name: bool = False
    ) -> list[dict[Key, Holding]]:
        """The parameters of each group of an optimizer, by the key it has in a state dict."""
        numbered = parameter_groups(self.model, optim, optim_input)
        groups: list[dict[Key, Holding]] = []
        number = 0
        for params in numbered:
            group: dict[Key, Holding] = {}
            for param in params:
                holding = self.of_param(param, f"optimizer: parameter {number}")
                group[holding.key if by_name else number] = holding
                number += 1
            groups.append(group)
        return groups


def _wrapped_holdings(model: nn.Module, lanes: Sequence[StateLane]) -> Iterator[Holding]:
    keys: dict[int, str] = {}
    for key, param in model.named_parameters(remove_duplicate=False):
        keys.setdefault(id(param), key)
    for lane in lanes:
        if lane.flat_param is not None:
            names = tuple(part.names[0] for part in lane.parts)
            key = keys.get(id(lane.flat_param), names[0])
            yield Holding(lane.flat_param, names, key, lane, lane.parts)
            continue
        for part in lane.parts:
            key = keys.get(id(part.param), part.names[0])
            yield Holding(part.param, (part.names[0],), key, lane, (part,))


def parameter_groups(
    model: nn.Module, optim: Optimizer | None, optim_input: OptimInput
) -> list[list[nn.Parameter]]:
    """The parameters of an optimizer, group by group.

    Taken from what it was built with if that is given, from the optimizer otherwise; without
    either it is thought to have all parameters of the model.
    """
    if optim_input is None and optim is None:
        return [list(model.parameters())]
    if optim_input is None:
        assert optim is not None
        return [list(group["params"]) for group in optim.param_groups]
    entries: list[Any] = list(optim_input)
    if not entries:
        raise ConfigError(
            "optim_input: at least one parameter or parameter group expected, found none; leave "
            "it out."
        )
    if all(isinstance(entry, torch.Tensor) for entry in entries):
        return [entries]
    if all(isinstance(entry, Mapping) and "params" in entry for entry in entries):
        given = [entry["params"] for entry in entries]
        return [[each] if isinstance(each, nn.Parameter) else list(each) for each in given]
    raise TypeError(
        "optim_input: tensors, or dicts that each have 'params', expected, found "
        f"{sorted({type(entry).__name__ for entry in entries})}; leave it out."
    )


def warn_of_older_name(name: str, instead: str) -> None:
    """For the caller of the function that calls this."""
    warnings.warn(
        f"FullyShardedDataParallel.{name}: deprecated; call FullyShardedDataParallel.{instead}, "
        "after set_state_dict_type.",
        FutureWarning,
        stacklevel=3,
    )


def warn_of_optim_input(optim_input: OptimInput) -> None:
    """For the caller of the function that calls this."""
    if optim_input is not None:
        warnings.warn(
            "optim_input: deprecated; leave it out and pass the optimizer.",
            FutureWarning,
            stacklevel=3,
        )


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """An optimizer's state dict with parameters called by name, or by number.

    For going between optimizers of wrapped models, whose state dicts are keyed by name, and
    those of a `model` that is not wrapped. The same dict is returned if there is nothing to do.
    """
    warn_of_optim_input(optim_input)
    if not isinstance(optim_state_key_type, OptimStateKeyType):
        raise ConfigError(
            "optim_state_key_type: a value of OptimStateKeyType expected, found "
            f"{optim_state_key_type!r}; pass PARAM_NAME or PARAM_ID."
        )
    wanted = str if optim_state_key_type is OptimStateKeyType.PARAM_NAME else int
    if _key_type(optim_state_dict) in (wanted, None):
        return optim_state_dict
    params = [param for g in parameter_groups(model, optim, optim_input) for param in g]
    new_keys = _names_by_number(model, params) if wanted is str else _numbers_by_name(model, params)

    def renamed(key: Key) -> Key:
        if key not in new_keys:
            raise UnknownNameError(
                f"optim_state_dict: {key!r} must be a parameter of the model and of its "
                f"optimizer, found only {list(new_keys)}; pass the model that the state dict "
                "belongs to, and its optimizer."
            )
        return new_keys[key]

    groups = copy.deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = sorted(renamed(key) for key in group["params"])
    state = {renamed(key): value for key, value in optim_state_dict["state"].items()}
    return {"state": state, "param_groups": groups}


def _key_type(optim_state_dict: Mapping[str, Any]) -> type | None:
    """What parameters are called by: the type of all keys; None if there are none."""
    keys = list(optim_state_dict["state"])
    keys += [key for group in optim_state_dict["param_groups"] for key in group["params"]]
    types = {type(key) for key in keys}
    if not types:
        return None
    if len(types) > 1 or types - {int, str}:
        raise ConfigError(
            "optim_state_dict: parameters must all be called by name or all by number, found the "
            f"keys {keys}; pass an optimizer's state dict as it was saved."
        )
    return types.pop()


def _names_by_number(model: nn.Module, params: Sequence[nn.Parameter]) -> dict[Key, Key]:
    names: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), clean_name(name))
    return {number: names[id(param)] for number, param in enumerate(params) if id(param) in names}


def _numbers_by_name(model: nn.Module, params: Sequence[nn.Parameter]) -> dict[Key, Key]:
    numbers = {id(param): number for number, param in enumerate(params)}
    return {
        clean_name(name): numbers[id(param)]
        for name, param in model.named_parameters(remove_duplicate=False)
        if id(param) in numbers
    }
