"""Optimizer state dicts of wrapped models, saved and loaded by the names of parameters.

An optimizer holds this rank's slices, or flat parameters, and numbers them. A saved state dict is
keyed by the names of the original parameters and holds whole tensors or shards of them, so that it
can be loaded into a model that is wrapped in another way, over another number of ranks, or not at
all.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.api import OptimStateKeyType, StateDictType
from fullshard.errors import ConfigError, DisagreementError, FullshardError, UnknownNameError
from fullshard.runtime.names import clean_name
from fullshard.state.module_state import settings_of
from fullshard.state.shards import (
    FlatLane,
    FlatShard,
    StateForm,
    TensorShard,
    dtype_of,
    full_tensor_of,
    is_sharded,
    lanes_of,
    other_shards,
    shape_of,
)

Key: TypeAlias = int | str
OptimInput: TypeAlias = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None
State: TypeAlias = dict[str, Any]
_T = TypeVar("_T")


# Parameters of an optimizer, and what they stand for


@dataclass(frozen=True, slots=True, eq=False)
class OptimParam:
    """One parameter as an optimizer holds it, and the tensors of the model that it stands for.

    That is one tensor, or all those of a lane where the optimizer holds a flat parameter.
    """

    param: torch.Tensor
    shards: tuple[TensorShard, ...]

    @property
    def names(self) -> list[str]:
        """The canonical names of its tensors."""
        return [shard.name for shard in self.shards]

    @property
    def flat_shards(self) -> list[FlatShard]:
        """Its tensors, if a wrapper shards them."""
        return [shard for shard in self.shards if isinstance(shard, FlatShard)]

    @property
    def lane(self) -> FlatLane | None:
        return next((shard.lane for shard in self.flat_shards), None)

    @property
    def is_flat(self) -> bool:
        return self.lane is not None and self.lane.flat_param is not None

    @property
    def is_whole(self) -> bool:
        """Whether an optimizer's state of it is what it would be without any wrapper."""
        return self.lane is None or not (self.lane.is_sharded or self.is_flat)

    @property
    def local_numel(self) -> int:
        """How many elements this rank has; a flat parameter's include its padding."""
        if self.lane is None:
            return self.param.numel()
        return self.lane.shard_numel if self.is_flat else len(self.flat_shards[0].elements)


def optim_params(
    groups: Iterable[Iterable[torch.Tensor]], shards: Iterable[TensorShard]
) -> list[list[OptimParam]]:
    """The parameters of an optimizer, group by group, each with the shards that it stands for.

    A parameter that no shard belongs to stands for none.
    """
    by_tensor: dict[torch.Tensor, list[TensorShard]] = {}
    for shard in shards:
        by_tensor.setdefault(shard.tensor, []).append(shard)
    return [[OptimParam(p, tuple(by_tensor.get(p, ()))) for p in group] for group in groups]


def saved_options(
    groups: Sequence[Iterable[OptimParam]],
    saved: Sequence[Mapping[str, Any]],
    error: type[FullshardError] = ConfigError,
) -> list[State | None]:
    """For each group of an optimizer, the options that its parameters were saved with.

    `saved` are parameter groups with names as "params". None stands for a group of which no
    parameter was saved. Parameters of one group must have been saved with the same options.
    """
    group_of = {clean_name(name): i for i, group in enumerate(saved) for name in group["params"]}
    result: list[State | None] = []
    for index, group in enumerate(groups):
        names = [name for param in group for shard in param.shards for name in shard.names]
        sources = sorted({group_of[name] for name in names if name in group_of})
        options = [
            {k: v for k, v in saved[source].items() if k not in ("params", "param_names")}
            for source in sources
        ]
        different = {
            key
            for other in options[1:]
            for key in {*options[0], *other}
            if not (key in options[0] and key in other and is_same(options[0][key], other[key]))
        }
        if different:
            raise error(
                f"optimizer: the parameters of group {index} must have been saved with the same "
                f"options, found different {sorted(different)} in the saved groups {sources}; "
                "build the optimizer with the groups that were saved."
            )
        result.append(copy.deepcopy(options[0]) if options else None)
    return result


def is_same(left: Any, right: Any) -> bool:
    """Whether two values of an optimizer's state are equal; nan is equal to itself."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and torch.allclose(left.cpu(), right.cpu(), rtol=0, atol=0, equal_nan=True)
        )
    return type(left) is type(right) and pickle.dumps(left) == pickle.dumps(right)


class _ModelParams:
    """All parameters of a wrapped model as its optimizers see them, in one order on all ranks.

    `by_key` has them by their names in `named_parameters`, where flat parameters are listed;
    `by_name` has the shards of the original parameters, by any of their names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.lanes = lanes_of(model)
        if not self.lanes:
            raise ConfigError(
                f"{type(model).__name__}: a model with at least one FullyShardedDataParallel "
                "module that has parameters expected, found none; use the state dict of the "
                "optimizer as it is."
            )
        flat = [shard for lane in self.lanes for shard in lane.shards]
        others = [s for s in other_shards(model, flat) if not s.is_buffer]
        shards = [*flat, *others]
        (self.params,) = optim_params([dict.fromkeys(s.tensor for s in shards)], shards)
        self.by_tensor = {param.param: param for param in self.params}
        self.by_name = {name: shard for shard in shards for name in shard.names}
        listed = list(model.named_parameters(remove_duplicate=False))
        self.by_key: dict[Key, OptimParam] = {
            clean_name(key): self.by_tensor[tensor] for key, tensor in listed
        }
        self._keys = {tensor: key for key, tensor in reversed(listed)}

    def groups_of(
        self, optim: Optimizer | None, optim_input: OptimInput, *, by_name: bool = False
    ) -> list[dict[Key, OptimParam]]:
        """The parameters of each group of an optimizer, by the keys of its own state dict."""
        groups: list[dict[Key, OptimParam]] = []
        for tensors in _param_groups(self.model, optim, optim_input):
            first = sum(len(group) for group in groups)
            groups.append({})
            for number, tensor in enumerate(tensors, first):
                if (param := self.by_tensor.get(tensor)) is None:
                    raise UnknownNameError(
                        f"optimizer: parameter {number} must be one of the model's, found a "
                        f"tensor of shape {tuple(tensor.shape)} that is none of them; pass the "
                        "optimizer of this model, built from its parameters after it was wrapped."
                    )
                name = self._keys.get(tensor, param.names[0])
                groups[-1][name if by_name else number] = param
        return groups


def _param_groups(
    model: nn.Module, optim: Optimizer | None, optim_input: OptimInput
) -> list[list[nn.Parameter]]:
    """The parameters of an optimizer, group by group.

    They are those that it was built with if that is given, else those of the optimizer; without
    either it is assumed to have all parameters of the model.
    """
    if optim_input is None:
        groups = [{"params": model.parameters()}] if optim is None else optim.param_groups
        return [list(group["params"]) for group in groups]
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


def _exchange(
    groups: Sequence[dist.ProcessGroup | None], values: Sequence[_T], problem: Exception | None
) -> list[list[_T]]:
    """One value for each group, from all its ranks; raises what went wrong on any of them.

    A rank that has a problem takes part, so that the others hear of it and do not wait forever.
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


def _shard_groups(lanes: Sequence[FlatLane]) -> list[dist.ProcessGroup]:
    """The process groups that lanes are sharded over."""
    groups = dict.fromkeys(lane.mesh_info.shard.group for lane in lanes if lane.is_sharded)
    return [group for group in groups if group is not None]


# Saving


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
    rank0_only = not is_sharded and getattr(config, "rank0_only", False)
    is_kept = not rank0_only or dist.get_rank(group) == 0
    form = StateForm(is_sharded, getattr(config, "_use_dtensor", False), config.offload_to_cpu)
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    return _save(model, optim, given, form, is_kept=is_kept)


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: OptimInput = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Whole tensors in host memory, on rank 0 or on all ranks; others return an empty dict."""
    _warn_deprecated("full_optim_state_dict", "optim_state_dict", optim_input)
    is_kept = not rank0_only or dist.get_rank(group) == 0
    form = StateForm(is_sharded=False, to_cpu=True)
    return _save(model, optim, optim.state_dict(), form, optim_input, is_kept=is_kept)


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Each tensor split along its first dim, in host memory: for distributed checkpoints."""
    _warn_deprecated("sharded_optim_state_dict", "optim_state_dict")
    use_dtensor = getattr(settings_of(model).optim_state_dict_config, "_use_dtensor", False)
    form = StateForm(is_sharded=True, use_dtensor=use_dtensor, to_cpu=True)
    return _save(model, optim, optim.state_dict(), form)


@torch.no_grad()
def _save(
    model: nn.Module,
    optim: Optimizer,
    state_dict: Mapping[str, Any],
    form: StateForm,
    optim_input: OptimInput = None,
    *,
    is_kept: bool = True,
) -> dict[str, Any]:
    """The state dict in a form; an empty one if this rank does not keep it."""
    params = _ModelParams(model)
    states: dict[OptimParam, State] = {}
    result: dict[str, Any] = {"state": {}}
    problem: Exception | None = None
    try:
        known = dict(params.by_key)
        for group in params.groups_of(optim, optim_input):
            known |= group
        for key, value in state_dict["state"].items():
            param = known.get(_clean_key(key))
            if param is not None:
                states[param] = value
                continue
            warnings.warn(
                f"optim_state_dict: {key!r} in the optimizer's state is no parameter of the "
                "model; it is saved as it is.",
                stacklevel=4,  # the caller of optim_state_dict
            )
            result["state"][str(key)] = copy.deepcopy(value)
        if "param_groups" in state_dict:
            result["param_groups"] = _named_groups(state_dict["param_groups"], known)
    except Exception as error:
        problem = error
    agreed = _agreed_states(params, states, problem)
    saved = _gathered_states(params, agreed, states, form if is_kept else None)
    if not is_kept:
        return {}
    in_order = [name for group in result.get("param_groups", ()) for name in group["params"]]
    in_order = [name for name in dict.fromkeys([*in_order, *saved]) if name in saved]
    result["state"] = {name: saved[name] for name in in_order} | result["state"]
    return result


def _clean_key(key: Key) -> Key:
    return clean_name(key) if isinstance(key, str) else key


def _named_groups(groups: Any, known: Mapping[Key, OptimParam]) -> list[dict[str, Any]]:
    """Parameter groups with the names of the original parameters in them."""
    for key in (key for group in groups for key in group["params"]):
        if _clean_key(key) not in known:
            raise UnknownNameError(
                f"optim_state_dict: {key!r} in a parameter group must be a parameter of the "
                "model and of the optimizer, found neither; pass the optimizer's own state dict."
            )
    return [
        copy.deepcopy({k: v for k, v in group.items() if k != "params"})
        | {"params": [name for key in group["params"] for name in known[_clean_key(key)].names]}
        for group in groups
    ]


@dataclass(frozen=True, slots=True)
class _PerElement:
    """State with one value for each element of a parameter: sharded and gathered like it."""

    dtype: torch.dtype


_Outline: TypeAlias = tuple[int, State | None]
"""How many elements a rank has, and its state: `_PerElement` stands for elements of tensors."""


def _agreed_states(
    params: _ModelParams, states: Mapping[OptimParam, State], problem: Exception | None
) -> dict[OptimParam, State]:
    """What the state of every parameter consists of, the same on all ranks that share it."""
    cut = [param for param in params.params if not param.is_whole]
    # State of another size than what this rank has of a parameter has a shape of its own, also
    # where that happens to be the size of a slice.
    own_shaped = {
        name
        for param in cut
        for name, value in states.get(param, {}).items()
        if isinstance(value, torch.Tensor) and value.dim() > 0
        if value.numel() != param.local_numel
    }

    def outlined(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_per_element = value.dim() > 0 and name not in own_shaped
        return _PerElement(value.dtype) if is_per_element else value.detach().cpu()

    outlines: dict[OptimParam, Sequence[_Outline]] = {}
    for param in cut:
        state = states.get(param)
        outline = None if state is None else {k: outlined(k, v) for k, v in state.items()}
        outlines[param] = [(param.local_numel, outline)]
    groups = _shard_groups(params.lanes)
    members = [
        [param for param in cut if param.lane and param.lane.mesh_info.shard.group is group]
        for group in groups
    ]
    own = [[outlines[param][0] for param in inside] for inside in members]
    for inside, answers in zip(members, _exchange(groups, own, problem), strict=True):
        outlines.update(zip(inside, zip(*answers, strict=True), strict=True))
    agreed: dict[OptimParam, State | None] = {**states}
    agreed |= {param: _agreed_state(param, everyone) for param, everyone in outlines.items()}
    return {param: state for param, state in agreed.items() if state is not None}


def _agreed_state(param: OptimParam, everyone: Sequence[_Outline]) -> State | None:
    """What the state of a parameter consists of; None if no rank has any.

    A rank that has no element of the parameter may have numbers about it, such as a count of
    steps, but its optimizer does not keep them up to date: they do not count.
    """
    trained = [state for numel, state in everyone if numel] or [state for _, state in everyone]
    states = [state for state in trained if state is not None]
    if not states:
        return None
    agreed: State = {}
    for name in {name: None for state in states for name in state}:
        told = [state[name] for state in states if name in state]
        values = [value for value in told if not isinstance(value, _PerElement)]
        # An optimizer that sums up the flat parameter that it sees has another number on every
        # rank: the first rank's is as good as any.
        if not param.is_flat and not all(is_same(value, values[0]) for value in values[1:]):
            raise DisagreementError(
                f"{param.names[0]}: the optimizer state {name!r} must be the same on all ranks, "
                f"found {values}; a number that depends on a rank's part of a parameter cannot be "
                "saved."
            )
        if not values and (len(told) != len(trained) or len(set(told)) != 1):
            raise DisagreementError(
                f"{param.names[0]}: every rank that has a part of it must have the optimizer "
                f"state {name!r} in one dtype, found {trained}; step the optimizer on all ranks "
                "alike."
            )
        agreed[name] = (values or told)[0]
    return agreed


def _gathered_states(
    params: _ModelParams,
    agreed: Mapping[OptimParam, State],
    states: Mapping[OptimParam, State],
    form: StateForm | None,
) -> dict[str, State]:
    """The state of every original parameter that has any, by its name; with no form, none."""
    saved: dict[str, State] = {}
    gathered: dict[tuple[FlatLane, str, torch.dtype], list[OptimParam]] = {}
    for param in params.params:
        state = agreed.get(param)
        if state is None:
            continue
        if form is not None:
            for name in param.names:
                saved[name] = {key: _whole_copy(value, form) for key, value in state.items()}
        for key, value in state.items():
            if isinstance(value, _PerElement) and param.lane is not None:
                gathered.setdefault((param.lane, key, value.dtype), []).append(param)
    for (lane, key, dtype), owners in gathered.items():
        buffer = lane.zeros(dtype)
        for param in owners:
            value = states.get(param, {}).get(key)
            if value is not None and param.local_numel:
                region = buffer if param.is_flat else param.flat_shards[0].slice_of(buffer)
                region.copy_(value.flatten())
        full = lane.gather(buffer)  # only one state of one lane at a time
        if form is not None:
            for shard in (shard for param in owners for shard in param.flat_shards):
                saved[shard.name][key] = form.copy(shard.view_of(full), lane)
    return saved


def _whole_copy(value: Any, form: StateForm) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.detach().to(torch.device("cpu") if form.to_cpu else value.device, copy=True)


# Loading


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """What `optim.load_state_dict` takes on this rank, from a state dict keyed by name.

    It may have been saved with any wrapping, strategy, number of ranks or API, in any form.
    With `rank0_only` in the settings only rank 0 needs to have it. `is_named_optimizer` is for
    optimizers whose own state dicts are keyed by name. Nothing is changed except with
    `load_directly`, and then only after all of it was found to fit.
    """
    settings = settings_of(model)
    is_full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
    rank0_only = is_full and getattr(settings.optim_state_dict_config, "rank0_only", False)
    target = _Target(model, optim, None, is_named_optimizer)
    result = target.convert(optim_state_dict, rank0_only=rank0_only, group=group)
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
    _warn_deprecated("shard_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
    # Every rank has everything and needs no other: it may be called on one rank alone.
    return _Target(model, optim, optim_input).convert(full_optim_state_dict, is_alone=True)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """What an optimizer can load on this rank, from whole tensors that rank 0 has."""
    _warn_deprecated("scatter_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
    target = _Target(model, optim, optim_input)
    return target.convert(full_optim_state_dict, rank0_only=True, group=group)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """What an optimizer can load on this rank, from sharded tensors."""
    _warn_deprecated("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return _Target(model, optim, None).convert(sharded_optim_state_dict)


@dataclass(frozen=True, slots=True)
class _Target:
    """The optimizer that is to load the result, and whether that is keyed by name."""

    model: nn.Module
    optim: Optimizer | None
    optim_input: OptimInput
    is_named: bool = False

    @torch.no_grad()
    def convert(
        self,
        state_dict: Mapping[str, Any] | None,
        *,
        rank0_only: bool = False,
        group: dist.ProcessGroup | None = None,
        is_alone: bool = False,
    ) -> dict[str, Any]:
        params = _ModelParams(self.model)
        source = _Source(params.lanes[0].device, rank0_only, group)
        state_dict = source.outline(state_dict)
        compared: list[dist.ProcessGroup | None] = [group] if rank0_only else []
        compared += _shard_groups(params.lanes) if not rank0_only and not is_alone else []
        problem: Exception | None = None
        fingerprint = ""
        try:
            groups = params.groups_of(self.optim, self.optim_input, by_name=self.is_named)
            incoming = _Incoming(state_dict, params, source)
            param_groups = self._param_groups(incoming.groups, params, groups)
            fingerprint = incoming.fingerprint()
        except Exception as error:
            problem = error
        told = _exchange(compared, [fingerprint] * len(compared), problem)
        if any(len(set(answers)) > 1 for answers in told):
            raise DisagreementError(
                "optim_state_dict: all ranks must load state of the same parameters, in the same "
                "shapes and dtypes, found differences; load the same checkpoint on every rank."
            )
        # In the order of the model, which is the same on all ranks, also what is not held here.
        own = {param: incoming.state_of(param) for param in params.params}
        state: dict[Any, Any] = {}
        for key, param in ((key, param) for group in groups for key, param in group.items()):
            # A rank without elements needs no state, except for named optimizers and for those
            # that make state for all their parameters at once and then count on it.
            has_state = self.optim is not None and bool(self.optim.state.get(param.param))
            is_empty = (
                not param.is_whole and not param.local_numel and param.shards[0].shape.numel()
            )
            if own[param] is not None and (not is_empty or has_state or self.is_named):
                state[key] = own[param]
        state |= {name: incoming.whole(value) for name, value in incoming.unmatched.items()}
        return {"state": state} | ({} if param_groups is None else {"param_groups": param_groups})

    def _param_groups(
        self,
        saved: Sequence[Mapping[str, Any]] | None,
        params: _ModelParams,
        groups: Sequence[Mapping[Key, OptimParam]],
    ) -> list[dict[str, Any]] | None:
        """The saved groups in the order of the optimizer's, which matches by position."""
        if saved is None:
            return None
        keys = {param: key for group in groups for key, param in group.items()}
        members = [_saved_params(group, params, set(keys)) for group in saved]
        if self.optim is None:
            return [
                {**copy.deepcopy(dict(group)), "params": sorted(keys[param] for param in inside)}
                for group, inside in zip(saved, members, strict=True)
            ]
        known = set().union(*members)
        for group in groups:
            # A frozen parameter has no state: optimizers are built with them or without.
            is_found = any(param in known for param in group.values())
            unknown = [param for param in group.values() if param not in known]
            missing = [p.names[0] for p in unknown if p.param.requires_grad or not is_found]
            if missing:
                raise ConfigError(
                    "optim_state_dict: every parameter of the optimizer must be in a parameter "
                    f"group, found none with {missing}; pass the state of an optimizer over the "
                    "same parameters."
                )
        options = saved_options([list(group.values()) for group in groups], saved)
        result: list[dict[str, Any]] = []
        for own, group, chosen in zip(self.optim.param_groups, groups, options, strict=True):
            if chosen is None:  # a group without parameters
                chosen = copy.deepcopy({key: own[key] for key in own if key != "params"})
            if "param_names" in own:
                chosen["param_names"] = list(own["param_names"])
            result.append({**chosen, "params": list(group)})
        return result


def _saved_params(
    group: Mapping[str, Any], params: _ModelParams, held: set[OptimParam]
) -> set[OptimParam]:
    """The parameters of a saved group, as far as the optimizer holds them."""
    found: set[OptimParam] = set()
    for name in group["params"]:
        if not isinstance(name, str):
            raise ConfigError(
                f"optim_state_dict: parameters must be called by name, found {name!r} in a "
                "parameter group; call rekey_optim_state_dict with OptimStateKeyType.PARAM_NAME."
            )
        shard = params.by_name.get(clean_name(name))
        if shard is not None and params.by_tensor[shard.tensor] in held:
            found.add(params.by_tensor[shard.tensor])
        elif shard is None or shard.is_trainable:
            owner = "model" if shard is None else "optimizer"
            raise UnknownNameError(
                f"optim_state_dict: {name!r} in a parameter group must be a parameter of the "
                f"{owner}, found none of that name; pass the state of an optimizer of this model "
                "over the same parameters."
            )
    return found


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_sharded(value)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where whole values come from: from this rank, or from rank 0, one tensor at a time."""

    device: torch.device
    rank0_only: bool
    group: dist.ProcessGroup | None

    def outline(self, state_dict: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The state dict that is loaded; what rank 0 has yet to send is on meta elsewhere."""
        if not self.rank0_only:
            return state_dict
        is_source = dist.get_rank(self.group) == 0
        sent = [_on_meta(state_dict) if is_source else None]
        dist.broadcast_object_list(sent, group=self.group, group_src=0)
        return state_dict if is_source else sent[0]

    def fetch(self, value: Any) -> Any:
        """The whole value on this rank; all ranks must fetch the same in the same order."""
        if not self.rank0_only:
            return full_tensor_of(value).to(self.device) if is_sharded(value) else value
        if not _is_array(value) or not shape_of(value):
            return value
        tensor = value.detach()
        if tensor.is_meta:
            tensor = torch.empty_like(tensor, device=self.device)
        tensor = tensor.to(self.device).contiguous()
        if tensor.numel():
            # As bytes: gloo does not know every dtype.
            dist.broadcast(tensor.view(torch.uint8), group=self.group, group_src=0)
        return tensor


def _on_meta(value: Any) -> Any:
    """Nested state without its tensors; numbers stay."""
    if isinstance(value, Mapping):
        return {key: _on_meta(inner) for key, inner in value.items()}
    if not _is_array(value):
        return value
    if not shape_of(value) and not is_sharded(value):
        return value.detach().cpu()
    return torch.empty(shape_of(value), dtype=dtype_of(value), device="meta")


class _Incoming:
    """State to load, by the canonical names of parameters, and what belongs to no parameter.

    Some state has one value per element of its parameter; other state has a shape of its own, the
    same for all parameters, and is whole on every rank.
    """

    def __init__(
        self, state_dict: Mapping[str, Any] | None, params: _ModelParams, source: _Source
    ) -> None:
        if not isinstance(state_dict, Mapping) or "state" not in state_dict:
            found = [*state_dict] if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise ConfigError(
                f"optim_state_dict: a dict with the key 'state' expected, found {found}; pass what "
                "optim_state_dict returned, on every rank that it was saved for."
            )
        self.groups: list[Mapping[str, Any]] | None = state_dict.get("param_groups")
        self.unmatched: dict[Any, Any] = {}
        self._states: dict[str, Mapping[str, Any]] = {}
        self._source = source
        canonical: set[str] = set()
        for key, state in state_dict["state"].items():
            if not isinstance(key, str):
                raise ConfigError(
                    f"optim_state_dict: parameters must be called by name, found the key {key!r}; "
                    "call rekey_optim_state_dict with OptimStateKeyType.PARAM_NAME and the model "
                    "that the state dict belongs to."
                )
            shard = params.by_name.get(clean_name(key))
            if shard is None:
                self.unmatched[key] = state
            elif not isinstance(state, Mapping):
                raise ConfigError(
                    f"optim_state_dict: the state of {key!r} must be a dict, found "
                    f"{type(state).__name__}; pass what optim_state_dict returned."
                )
            elif shard.name not in canonical:
                # Tied parameters may come under each of their names: the canonical one decides.
                self._states[shard.name] = state
                canonical |= {shard.name} & {key}
        self._per_element = self._checked(params)

    def _checked(self, params: _ModelParams) -> set[str]:
        """The names of state that is per element; raises for shapes that fit no parameter."""
        arrays: dict[str, list[tuple[FlatShard, Any]]] = {}
        for shard in (shard for param in params.params for shard in param.flat_shards):
            for key, value in self._states.get(shard.name, {}).items():
                if is_sharded(value) and self._source.rank0_only:
                    raise ConfigError(
                        "optim_state_dict: whole tensors expected where one rank has them all, "
                        f"found a {type(value).__name__} in state {key!r} of {shard.name!r}; "
                        "load it without rank0_only."
                    )
                if _is_array(value) and shape_of(value):
                    arrays.setdefault(key, []).append((shard, value))
        per_element: set[str] = set()
        for key, entries in arrays.items():
            odd = [(shard, value) for shard, value in entries if shape_of(value) != shard.shape]
            if not odd:
                per_element.add(key)
                continue
            has_own_shape = len({shape_of(value) for _, value in entries}) == 1
            # A parameter that is not split may have any state, such as factors of moments.
            is_cut = any(s.lane.is_sharded or s.lane.flat_param is not None for s, _ in odd)
            is_rule = 2 * len(odd) > len(entries)
            if not is_rule or (is_cut and not has_own_shape):
                shard, value = odd[0]
                raise ConfigError(
                    f"optim_state_dict: state {key!r} of {shard.name!r} must have the parameter's "
                    f"shape {tuple(shard.shape)}, found {tuple(shape_of(value))}; pass the state "
                    "of an optimizer of this model."
                )
        return per_element

    def _is_per_element(self, shard: FlatShard, key: str, value: Any) -> bool:
        if not _is_array(value) or shape_of(value) != shard.shape:
            return False
        # For a parameter without dims only the state of others tells elements from numbers.
        return key in self._per_element or not (shard.shape or self._per_element or key == "step")

    def fingerprint(self) -> str:
        """The same on ranks that will have to fetch the same values."""
        lines = [*_described(self._states), *_described(self.unmatched)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def state_of(self, param: OptimParam) -> State | None:
        """The state of a parameter as an optimizer holds it on this rank; None if there is none.

        All ranks must ask for the same parameters in the same order.
        """
        entries = [(s, self._states[s.name]) for s in param.shards if s.name in self._states]
        if not entries:
            return None
        own: State = {}
        for key in sorted({key for _, state in entries for key in state}):
            values = [(shard, state[key]) for shard, state in entries if key in state]
            if param.lane is not None:
                own[key] = self._value(param, key, values)
            elif isinstance(param.param, DTensor) and is_sharded(values[0][1]):
                own[key] = _copied(values[0][1])
            else:
                own[key] = self.whole(values[0][1])
        return own

    def _value(self, param: OptimParam, key: str, entries: Sequence[tuple[Any, Any]]) -> Any:
        """One state of a wrapped parameter; zero where parts of a flat parameter have none."""
        is_per_element = all(self._is_per_element(shard, key, value) for shard, value in entries)
        values = (self._source.fetch(value) for _, value in entries)
        if is_per_element and not param.is_whole:
            cuts = (shard.cut(value) for (shard, _), value in zip(entries, values, strict=True))
            if not param.is_flat:
                return next(cuts).detach().clone()
            buffer: torch.Tensor | None = None
            for (shard, _), cut in zip(entries, cuts, strict=True):
                buffer = cut.new_zeros(param.local_numel) if buffer is None else buffer
                shard.slice_of(buffer).copy_(cut)
            return buffer
        first, *others = values
        if not all(is_same(value, first) for value in others):
            raise ConfigError(
                f"optim_state_dict: state {key!r} must be the same for all parameters of one flat "
                f"parameter, found {[first, *others]} for {[shard.name for shard, _ in entries]}; "
                "wrap with use_orig_params=True to keep them apart."
            )
        return _copied(first)

    def whole(self, value: Any) -> Any:
        """State of no wrapped parameter: whole on every rank."""
        if isinstance(value, Mapping):
            return {key: self.whole(inner) for key, inner in value.items()}
        return _copied(self._source.fetch(value))


def _described(value: Any, name: str = "") -> Iterator[str]:
    """What nested state consists of, whatever its order."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _described(value[key], f"{name} {key}")
    elif _is_array(value):
        kind = type(value).__name__ if is_sharded(value) else "Tensor"
        yield f"{name}: {kind} {tuple(shape_of(value))} {dtype_of(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


# Keys


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """An optimizer's state dict with parameters called by name, or by number.

    For converting between optimizers of wrapped models, whose state dicts are keyed by name, and
    those of a `model` that is not wrapped. The same dict is returned if there is nothing to do.
    """
    _warn_deprecated(None, None, optim_input)
    if not isinstance(optim_state_key_type, OptimStateKeyType):
        raise ConfigError(
            "optim_state_key_type: a value of OptimStateKeyType expected, found "
            f"{optim_state_key_type!r}; pass PARAM_NAME or PARAM_ID."
        )
    state, groups = optim_state_dict["state"], optim_state_dict["param_groups"]
    keys = [*state, *(key for group in groups for key in group["params"])]
    wanted = str if optim_state_key_type is OptimStateKeyType.PARAM_NAME else int
    found = {type(key) for key in keys}
    if len(found) > 1 or found - {int, str}:
        raise ConfigError(
            "optim_state_dict: parameters must all be called by name or all by number, found the "
            f"keys {keys}; pass an optimizer's state dict as it was saved."
        )
    if found <= {wanted}:
        return optim_state_dict
    params = [param for group in _param_groups(model, optim, optim_input) for param in group]
    numbers = {param: number for number, param in enumerate(params)}
    listed = model.named_parameters(remove_duplicate=False)
    pairs = [(clean_name(name), numbers[param]) for name, param in listed if param in numbers]
    new_keys: dict[Any, Any] = dict(pairs)
    if wanted is str:
        new_keys = {number: name for name, number in reversed(pairs)}  # the canonical name
    for key in keys:
        if key not in new_keys:
            raise UnknownNameError(
                f"optim_state_dict: {key!r} must be a parameter of the model and of its "
                f"optimizer, found only {list(new_keys)}; pass the model that the state dict "
                "belongs to, and its optimizer."
            )
    groups = copy.deepcopy(groups)
    for group in groups:
        group["params"] = sorted(new_keys[key] for key in group["params"])
    return {"state": {new_keys[key]: value for key, value in state.items()}, "param_groups": groups}


def _warn_deprecated(name: str | None, instead: str | None, optim_input: OptimInput = None) -> None:
    """Warn the caller of the public function that calls this."""
    if name is not None:
        warnings.warn(
            f"FullyShardedDataParallel.{name}: deprecated; call "
            f"FullyShardedDataParallel.{instead}, after set_state_dict_type.",
            FutureWarning,
            stacklevel=3,
        )
    if optim_input is not None:
        warnings.warn(
            "optim_input: deprecated; leave it out and pass the optimizer.",
            FutureWarning,
            stacklevel=3,
        )
