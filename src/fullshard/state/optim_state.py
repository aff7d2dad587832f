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
from dataclasses import dataclass, field
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
    TensorShard,
    dtype_of,
    full_tensor_of,
    is_sharded,
    lanes_of,
    other_shards,
    shape_of,
    sharded_copy,
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
    def names(self) -> tuple[str, ...]:
        """The canonical names of its tensors."""
        return tuple(shard.name for shard in self.shards)

    @property
    def lane(self) -> FlatLane | None:
        """The lane that it belongs to; None if no wrapper shards it."""
        shard = self.shards[0] if self.shards else None
        return shard.lane if isinstance(shard, FlatShard) else None

    @property
    def is_flat(self) -> bool:
        return self.lane is not None and self.lane.flat_param is not None

    @property
    def is_whole(self) -> bool:
        """Whether an optimizer's state of it is what it would be without any wrapper."""
        return self.lane is None or not (self.lane.is_sharded or self.is_flat)

    @property
    def flat_shards(self) -> tuple[FlatShard, ...]:
        return tuple(shard for shard in self.shards if isinstance(shard, FlatShard))

    @property
    def local_numel(self) -> int:
        """How many elements this rank has; a flat parameter's include its padding."""
        if self.lane is None:
            return self.param.numel()
        return self.lane.shard_numel if self.is_flat else len(self.flat_shards[0].elements)

    def slice_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its elements, as a view of a tensor arranged like the shard buffer of its lane."""
        return buffer if self.is_flat else self.flat_shards[0].slice_of(buffer)


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
        for other in options[1:]:
            if different := [
                k for k in {*options[0], *other} if not _has_same(options[0], other, k)
            ]:
                raise error(
                    f"optimizer: the parameters of group {index} must have been saved with the "
                    f"same options, found different {sorted(different)} in the saved groups "
                    f"{sources}; build the optimizer with the groups that were saved."
                )
        result.append(copy.deepcopy(options[0]) if options else None)
    return result


def _has_same(left: Mapping[str, Any], right: Mapping[str, Any], key: str) -> bool:
    return key in left and key in right and is_same(left[key], right[key])


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
    """All parameters of a wrapped model as its optimizers see them, in one order on all ranks."""

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
        shards = [*flat, *(shard for shard in other_shards(model, flat) if not shard.is_buffer)]
        (self.params,) = optim_params([dict.fromkeys(s.tensor for s in shards)], shards)
        self._by_tensor = {param.param: param for param in self.params}
        self._by_name = {name: shard for shard in shards for name in shard.names}
        self._by_key: dict[str, OptimParam] = {}
        self._keys: dict[torch.Tensor, str] = {}
        for key, tensor in model.named_parameters(remove_duplicate=False):
            self._by_key[clean_name(key)] = self._by_tensor[tensor]
            self._keys.setdefault(tensor, key)

    def named(self, name: str) -> TensorShard | None:
        """The original parameter of a name, which may be any of its names."""
        return self._by_name.get(clean_name(name))

    def keyed(self, key: str) -> OptimParam | None:
        """The parameter that the model lists under a name: this may be a flat parameter."""
        return self._by_key.get(clean_name(key))

    def holding(self, shard: TensorShard) -> OptimParam:
        return self._by_tensor[shard.tensor]

    def groups_of(
        self, optim: Optimizer | None, optim_input: OptimInput, *, by_name: bool = False
    ) -> list[dict[Key, OptimParam]]:
        """The parameters of each group of an optimizer, by the keys of its own state dict."""
        groups: list[dict[Key, OptimParam]] = []
        number = 0
        for tensors in _param_groups(self.model, optim, optim_input):
            groups.append({})
            for tensor in tensors:
                if (param := self._by_tensor.get(tensor)) is None:
                    raise UnknownNameError(
                        f"optimizer: parameter {number}: an optimizer's parameter must be one of "
                        f"the model's, found a tensor of shape {tuple(tensor.shape)} that is none "
                        "of them; pass the optimizer of this model, built from its parameters "
                        "after it was wrapped."
                    )
                name = self._keys.get(tensor, param.names[0])
                groups[-1][name if by_name else number] = param
                number += 1
        return groups


def _param_groups(
    model: nn.Module, optim: Optimizer | None, optim_input: OptimInput
) -> list[list[nn.Parameter]]:
    """The parameters of an optimizer, group by group.

    They are those that it was built with if that is given, else those of the optimizer; without
    either it is assumed to have all parameters of the model.
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


# What ranks tell each other before any state is communicated


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


def _shard_groups(lanes: Sequence[FlatLane]) -> dict[dist.ProcessGroup, set[FlatLane]]:
    """The process groups that lanes are sharded over, each with its lanes."""
    groups: dict[dist.ProcessGroup, set[FlatLane]] = {}
    for lane in lanes:
        group = lane.mesh_info.shard.group
        if lane.is_sharded and group is not None:
            groups.setdefault(group, set()).add(lane)
    return groups


# Saving


@dataclass(frozen=True, slots=True)
class _SavedForm:
    """Whether a state dict holds whole tensors or shards, where, and whether on this rank."""

    is_sharded: bool
    use_dtensor: bool
    to_cpu: bool
    is_kept: bool

    def copy_whole(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        device = torch.device("cpu") if self.to_cpu else value.device
        return value.detach().to(device, copy=True)

    def copy_gathered(self, full: torch.Tensor, lane: FlatLane) -> Any:
        """State of one parameter out of a gathered lane, in memory of its own."""
        if self.is_sharded and lane.is_sharded:
            return sharded_copy(full, lane, use_dtensor=self.use_dtensor, to_cpu=self.to_cpu)
        return self.copy_whole(full)


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
    form = _SavedForm(
        is_sharded,
        use_dtensor=getattr(config, "_use_dtensor", False),
        to_cpu=config.offload_to_cpu,
        is_kept=not rank0_only or dist.get_rank(group) == 0,
    )
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    return _save(model, optim, given, None, form)


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
    form = _SavedForm(is_sharded=False, use_dtensor=False, to_cpu=True, is_kept=is_kept)
    return _save(model, optim, optim.state_dict(), optim_input, form)


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Each tensor split along its first dim, in host memory: for distributed checkpoints."""
    _warn_deprecated("sharded_optim_state_dict", "optim_state_dict")
    use_dtensor = getattr(settings_of(model).optim_state_dict_config, "_use_dtensor", False)
    form = _SavedForm(is_sharded=True, use_dtensor=use_dtensor, to_cpu=True, is_kept=True)
    return _save(model, optim, optim.state_dict(), None, form)


@torch.no_grad()
def _save(
    model: nn.Module,
    optim: Optimizer,
    state_dict: Mapping[str, Any],
    optim_input: OptimInput,
    form: _SavedForm,
) -> dict[str, Any]:
    params = _ModelParams(model)
    problem: Exception | None = None
    states: dict[OptimParam, State] = {}
    unmatched: State = {}
    try:
        groups = params.groups_of(optim, optim_input)
        found = {key: param for group in groups for key, param in group.items()}
        for key, value in state_dict["state"].items():
            param = params.keyed(key) if isinstance(key, str) else found.get(key)
            if param is not None:
                states[param] = value
                continue
            warnings.warn(
                f"optim_state_dict: {key!r} in the optimizer's state is no parameter of the "
                "model; it is saved as it is.",
                stacklevel=4,  # the caller of optim_state_dict
            )
            unmatched[str(key)] = copy.deepcopy(value)
        named_groups = _named_groups(state_dict, params, found)
    except Exception as error:
        problem = error
    agreed = _agreed_states(params, states, problem)
    saved = _gathered_states(params, states, agreed, form)
    if not form.is_kept:
        return {}
    in_order = {name: None for group in named_groups or () for name in group["params"]}
    state = {name: saved[name] for name in [*in_order, *saved] if name in saved} | unmatched
    return {"state": state} | ({} if named_groups is None else {"param_groups": named_groups})


def _named_groups(
    state_dict: Mapping[str, Any], params: _ModelParams, found: Mapping[Key, OptimParam]
) -> list[dict[str, Any]] | None:
    """The parameter groups, with the names of the original parameters in them."""
    if "param_groups" not in state_dict:
        return None
    groups: list[dict[str, Any]] = copy.deepcopy(state_dict["param_groups"])
    for group in groups:
        names: list[str] = []
        for key in group["params"]:
            param = params.keyed(key) if isinstance(key, str) else found.get(key)
            if param is None:
                raise UnknownNameError(
                    f"optim_state_dict: {key!r} in a parameter group must be a parameter of the "
                    "model and of the optimizer, found neither; pass the optimizer's own state "
                    "dict."
                )
            names += param.names
        group["params"] = names
    return groups


@dataclass(frozen=True, slots=True)
class _PerElement:
    """State with one value for each element of a parameter: sharded and gathered like it."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Outline:
    """One rank's state of one parameter: `_PerElement`, or the value itself."""

    numel: int
    state: State | None


def _agreed_states(
    params: _ModelParams, states: Mapping[OptimParam, State], problem: Exception | None
) -> dict[OptimParam, State]:
    """What the state of every sharded or flat parameter consists of, the same on all ranks."""
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
    outlines: dict[OptimParam, Sequence[_Outline]] = {
        param: [_outline(param, states.get(param), own_shaped)] for param in cut
    }
    groups = _shard_groups(params.lanes)
    members = [[param for param in cut if param.lane in lanes] for lanes in groups.values()]
    own = [[outlines[param][0] for param in inside] for inside in members]
    for inside, answers in zip(members, _exchange(list(groups), own, problem), strict=True):
        outlines.update(zip(inside, zip(*answers, strict=True), strict=True))
    agreed = {param: _agreed_state(param, everyone) for param, everyone in outlines.items()}
    return {param: state for param, state in agreed.items() if state is not None}


def _outline(param: OptimParam, state: State | None, own_shaped: set[str]) -> _Outline:
    if state is None:
        return _Outline(param.local_numel, None)
    outline: State = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            outline[name] = value
        elif value.dim() > 0 and name not in own_shaped:
            outline[name] = _PerElement(value.dtype)
        else:
            outline[name] = value.detach().cpu()
    return _Outline(param.local_numel, outline)


def _agreed_state(param: OptimParam, everyone: Sequence[_Outline]) -> State | None:
    """What the state of a parameter consists of; None if no rank has any.

    A rank that has no element of the parameter may have numbers about it, such as a count of
    steps, but its optimizer does not keep them up to date: they do not count.
    """
    trained = [outline for outline in everyone if outline.numel] or list(everyone)
    states = [outline.state for outline in trained if outline.state is not None]
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
                f"state {name!r} in one dtype, found {[each.state for each in trained]}; step "
                "the optimizer on all ranks alike."
            )
        agreed[name] = (values or told)[0]
    return agreed


def _gathered_states(
    params: _ModelParams,
    states: Mapping[OptimParam, State],
    agreed: Mapping[OptimParam, State],
    form: _SavedForm,
) -> dict[str, State]:
    """The state of every original parameter that has any, by its name."""
    saved: dict[str, State] = {}
    wanted: dict[tuple[FlatLane, str, torch.dtype], list[OptimParam]] = {}
    for param in params.params:
        state = states.get(param) if param.is_whole else agreed.get(param)
        if state is None:
            continue
        if form.is_kept:
            for name in param.names:
                saved[name] = {key: form.copy_whole(value) for key, value in state.items()}
        for key, value in state.items():
            if isinstance(value, _PerElement) and param.lane is not None:
                wanted.setdefault((param.lane, key, value.dtype), []).append(param)
    for (lane, key, dtype), owners in wanted.items():
        buffer = lane.zeros(dtype)
        for param in owners:
            value = states.get(param, {}).get(key)
            if value is not None and param.local_numel:
                param.slice_of(buffer).copy_(value.flatten())
        full = lane.gather(buffer)  # only one state of one lane at a time
        for shard in (shard for param in owners for shard in param.flat_shards if form.is_kept):
            saved[shard.name][key] = form.copy_gathered(shard.view_of(full), lane)
    return saved


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
        device = params.lanes[0].device
        source = _Rank0Source(device, group) if rank0_only else _Source(device)
        state_dict = source.outline(state_dict)
        process_groups: list[dist.ProcessGroup | None] = [group] if rank0_only else []
        if not rank0_only and not is_alone:
            process_groups += _shard_groups(params.lanes)
        problem: Exception | None = None
        fingerprint = ""
        try:
            groups = params.groups_of(self.optim, self.optim_input, by_name=self.is_named)
            incoming = _Incoming.read(state_dict, params)
            incoming.check(params, may_be_sharded=not rank0_only)
            param_groups = self._param_groups(incoming.groups, params, groups)
            fingerprint = incoming.fingerprint()
        except Exception as error:
            problem = error
        told = _exchange(process_groups, [fingerprint] * len(process_groups), problem)
        if any(len(set(answers)) > 1 for answers in told):
            raise DisagreementError(
                "optim_state_dict: all ranks must load state of the same parameters, in the same "
                "shapes and dtypes, found differences; load the same checkpoint on every rank."
            )
        slicing = _Slicing(incoming, source, self._kept_when_empty(params))
        # In the order of the model, which is the same on all ranks, also what is not held here.
        own = {param: slicing.state_of(param) for param in params.params}
        keyed = {key: own[param] for group in groups for key, param in group.items()}
        state: dict[Any, Any] = {key: each for key, each in keyed.items() if each is not None}
        state |= {name: slicing.unsharded(value) for name, value in incoming.unmatched.items()}
        return {"state": state} | ({} if param_groups is None else {"param_groups": param_groups})

    def _kept_when_empty(self, params: _ModelParams) -> set[OptimParam]:
        """Parameters that need state also where this rank has none of their elements."""
        if self.is_named:
            return set(params.params)
        if self.optim is None:
            return set()
        # Some optimizers make state for all their parameters at once and then count on it.
        return {param for param in params.params if self.optim.state.get(param.param)}

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
            numbers = [sorted(keys[param] for param in inside) for inside in members]
            copies = [copy.deepcopy(dict(group)) for group in saved]
            return [{**g, "params": n} for g, n in zip(copies, numbers, strict=True)]
        known = {param for inside in members for param in inside}
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
        shard = params.named(name)
        if shard is not None and params.holding(shard) in held:
            found.add(params.holding(shard))
        elif shard is None or shard.is_trainable:
            owner = "model" if shard is None else "optimizer"
            raise UnknownNameError(
                f"optim_state_dict: {name!r} in a parameter group must be a parameter of the "
                f"{owner}, found none of that name; pass the state of an optimizer of this model "
                "over the same parameters."
            )
    return found


@dataclass(frozen=True, slots=True)
class _Remote:
    """A tensor that rank 0 has."""

    shape: torch.Size
    dtype: torch.dtype


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | _Remote) or is_sharded(value)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where whole values come from: every rank has them, or a part of each."""

    device: torch.device

    def outline(self, state_dict: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        return state_dict

    def fetch(self, value: Any) -> Any:
        """The whole value on this rank; all ranks must fetch the same in the same order."""
        return full_tensor_of(value).to(self.device) if is_sharded(value) else value


@dataclass(frozen=True, slots=True)
class _Rank0Source(_Source):
    """Rank 0 of a group has all values and sends them to the others, one tensor at a time."""

    group: dist.ProcessGroup | None

    def outline(self, state_dict: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Rank 0's state dict; on the other ranks its tensors are yet to be received."""
        is_source = dist.get_rank(self.group) == 0
        sent = [_without_tensors(state_dict) if is_source else None]
        dist.broadcast_object_list(sent, group=self.group, group_src=0)
        return state_dict if is_source else sent[0]

    def fetch(self, value: Any) -> Any:
        if not _is_array(value) or not shape_of(value):
            return value
        if isinstance(value, _Remote):
            tensor = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        else:
            tensor = value.detach().to(self.device).contiguous()
        if tensor.numel():
            # As bytes: gloo does not know every dtype.
            dist.broadcast(tensor.view(torch.uint8), group=self.group, group_src=0)
        return tensor


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_tensors(inner) for key, inner in value.items()}
    if not _is_array(value):
        return value
    is_number = not shape_of(value) and not is_sharded(value)
    return value.detach().cpu() if is_number else _Remote(shape_of(value), dtype_of(value))


@dataclass(slots=True)
class _Incoming:
    """State to load, by the canonical names of parameters, and what belongs to no parameter.

    `per_element` are the names of state that has one value per element of its parameter. Other
    state has a shape of its own, the same for all parameters, and is whole on every rank.
    """

    states: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    unmatched: dict[Any, Any] = field(default_factory=dict)
    groups: list[Mapping[str, Any]] | None = None
    per_element: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, state_dict: Mapping[str, Any] | None, params: _ModelParams) -> _Incoming:
        """Find the parameter of every entry, by any of its names."""
        if not isinstance(state_dict, Mapping) or "state" not in state_dict:
            is_dict = isinstance(state_dict, Mapping)
            found = list(state_dict) if is_dict else type(state_dict).__name__
            raise ConfigError(
                f"optim_state_dict: a dict with the key 'state' expected, found {found}; pass what "
                "optim_state_dict returned, on every rank that it was saved for."
            )
        incoming = cls(groups=state_dict.get("param_groups"))
        canonical: set[str] = set()
        for key, state in state_dict["state"].items():
            if not isinstance(key, str):
                raise ConfigError(
                    f"optim_state_dict: parameters must be called by name, found the key {key!r}; "
                    "call rekey_optim_state_dict with OptimStateKeyType.PARAM_NAME and the model "
                    "that the state dict belongs to."
                )
            shard = params.named(key)
            if shard is None:
                incoming.unmatched[key] = state
            elif not isinstance(state, Mapping):
                raise ConfigError(
                    f"optim_state_dict: the state of {key!r} must be a dict, found "
                    f"{type(state).__name__}; pass what optim_state_dict returned."
                )
            elif shard.name not in canonical:
                # Tied parameters may come under each of their names: the canonical one decides.
                incoming.states[shard.name] = state
                canonical |= {shard.name} & {key}
        return incoming

    def fingerprint(self) -> str:
        """The same on ranks that will have to fetch the same values."""
        lines = [*_described(self.states), *_described(self.unmatched)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def check(self, params: _ModelParams, *, may_be_sharded: bool) -> None:
        """Find out which state is per element; raise for shapes that fit no parameter."""
        arrays: dict[str, list[tuple[FlatShard, Any]]] = {}
        for shard in (shard for param in params.params for shard in param.flat_shards):
            for key, value in self.states.get(shard.name, {}).items():
                if is_sharded(value) and not may_be_sharded:
                    raise ConfigError(
                        "optim_state_dict: whole tensors expected where one rank has them all, "
                        f"found a {type(value).__name__} in state {key!r} of {shard.name!r}; "
                        "load it without rank0_only."
                    )
                if _is_array(value) and shape_of(value):
                    arrays.setdefault(key, []).append((shard, value))
        for key, entries in arrays.items():
            odd = [(shard, value) for shard, value in entries if shape_of(value) != shard.shape]
            if not odd:
                self.per_element.add(key)
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

    def is_per_element(self, shard: FlatShard, key: str, value: Any) -> bool:
        if not _is_array(value) or shape_of(value) != shard.shape:
            return False
        # For a parameter without dims only the state of others tells elements from numbers.
        return key in self.per_element or not (shard.shape or self.per_element or key == "step")


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


@dataclass(frozen=True, slots=True)
class _Slicing:
    """Cuts this rank's part out of incoming state. All ranks must ask for the same parameters."""

    incoming: _Incoming
    source: _Source
    kept_when_empty: set[OptimParam]

    def state_of(self, param: OptimParam) -> State | None:
        """The state of a parameter as an optimizer holds it; None if it has none here."""
        states = self.incoming.states
        if param.is_flat:
            entries = [(s, states[s.name]) for s in param.flat_shards if s.name in states]
            keys = sorted({key for _, state in entries for key in state})
            values = [[(s, state[key]) for s, state in entries if key in state] for key in keys]
            own = {k: self._flat_value(param, k, v) for k, v in zip(keys, values, strict=True)}
            return own if entries else None
        state = states.get(param.names[0])
        if state is None:
            return None
        if param.lane is None:
            is_dtensor = isinstance(param.param, DTensor)
            return {
                key: _copied(state[key])
                if is_dtensor and is_sharded(state[key])
                else self.unsharded(state[key])
                for key in sorted(state)
            }
        (shard,) = param.flat_shards
        own = {}
        for key in sorted(state):
            is_per_element = self.incoming.is_per_element(shard, key, state[key])
            value = self.source.fetch(state[key])
            own[key] = _copied(shard.cut(value) if is_per_element and not param.is_whole else value)
        has_elements = bool(shard.elements) or not shard.shape.numel() or param.is_whole
        return own if has_elements or param in self.kept_when_empty else None

    def unsharded(self, value: Any) -> Any:
        """State of no wrapped parameter: whole on every rank."""
        if isinstance(value, Mapping):
            return {key: self.unsharded(inner) for key, inner in value.items()}
        return _copied(self.source.fetch(value))

    def _flat_value(
        self, param: OptimParam, key: str, entries: Sequence[tuple[FlatShard, Any]]
    ) -> Any:
        """One state of a flat parameter; zero where its original parameters have none."""
        if all(self.incoming.is_per_element(shard, key, value) for shard, value in entries):
            buffer: torch.Tensor | None = None
            for shard, value in entries:
                mine = shard.cut(self.source.fetch(value))
                if buffer is None:
                    buffer = mine.new_zeros(param.local_numel)
                shard.slice_of(buffer).copy_(mine)
            return buffer
        values = [self.source.fetch(value) for _, value in entries]
        if not all(is_same(value, values[0]) for value in values[1:]):
            raise ConfigError(
                f"optim_state_dict: state {key!r} must be the same for all parameters of one flat "
                f"parameter, found {values} for {[shard.name for shard, _ in entries]}; wrap "
                "with use_orig_params=True to keep them apart."
            )
        return _copied(values[0])


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
    wanted = str if optim_state_key_type is OptimStateKeyType.PARAM_NAME else int
    if _key_type(optim_state_dict) in (wanted, None):
        return optim_state_dict
    params = [param for group in _param_groups(model, optim, optim_input) for param in group]
    numbers = {param: number for number, param in enumerate(params)}
    new_keys: dict[Key, Key] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in numbers and wanted is str:
            new_keys.setdefault(numbers[param], clean_name(name))
        elif param in numbers:
            new_keys[clean_name(name)] = numbers[param]

    def renamed(key: Key) -> Any:
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
    """The type of all keys that parameters have; None if there are none."""
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


def _warn_deprecated(
    name: str | None, instead: str | None = None, optim_input: OptimInput = None
) -> None:
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
