"""Optimizer state dicts of wrapped models, saved and loaded by the names of parameters.

An optimizer holds this rank's slices, or flat parameters, and numbers them. A saved state dict is
keyed by the names of the original parameters and holds whole tensors or shards of them, so that it
can be loaded into a model that is wrapped in another way, over another number of ranks, or not at
all.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.api import OptimStateKeyType, own_value
from fullshard.errors import ConfigError, DisagreementError, UnknownNameError
from fullshard.runtime.names import clean_name
from fullshard.state.module_state import require_kind, settings_of
from fullshard.state.optim_params import (
    Key,
    ModelParams,
    OptimInput,
    OptimParam,
    State,
    is_same,
    param_groups,
    saved_options,
)
from fullshard.state.shards import FlatLane, FlatShard, TensorShard, exchange, wrappers_of
from fullshard.state.values import (
    StateForm,
    copied,
    full_tensor_of,
    has_dims,
    is_array,
    is_sharded,
    leaves,
    mapped,
    on_meta,
    outline,
    shape_of,
)

# Saving


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The state of a wrapped model's optimizer, keyed by the names of the original parameters.

    It has the form that `set_state_dict_type` asked for. `optim_state_dict` is the state dict to
    convert, by default that of the optimizer. All ranks of the model call this.
    """
    for wrapper in wrappers_of(model):
        require_kind(wrapper, "optim_state_dict")
    config = settings_of(model).optim_state_dict_config
    is_kept = not getattr(config, "rank0_only", False) or dist.get_rank(group) == 0
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    return _save(model, optim, given, StateForm.of(config), is_kept=is_kept)


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
    form = StateForm.of(settings_of(model).optim_state_dict_config)
    form = replace(form, is_sharded=True, to_cpu=True)
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
    params = ModelParams(model)
    states: dict[OptimParam, State] = {}
    unmatched: State = {}
    groups: list[State] = []
    problem: Exception | None = None
    try:
        known = dict(params.by_key)
        for group in params.groups_of(optim, optim_input):
            known |= group
        for key, value in state_dict["state"].items():
            param = known.get(clean_name(key) if isinstance(key, str) else key)
            if param is not None:
                states[param] = value
                continue
            warnings.warn(
                f"optim_state_dict: {key!r} in the optimizer's state is no parameter of the "
                "model; it is saved as it is.",
                stacklevel=4,  # the caller of optim_state_dict
            )
            unmatched[str(key)] = copy.deepcopy(value)
        for group in state_dict.get("param_groups", ()):
            keys = [clean_name(key) if isinstance(key, str) else key for key in group["params"]]
            if unknown := [key for key in keys if key not in known]:
                raise UnknownNameError(
                    f"optim_state_dict: {unknown} in a parameter group are not parameters of the "
                    "model and the optimizer; pass the optimizer's own state dict."
                )
            names = [name for key in keys for name in known[key].names]
            groups.append(copy.deepcopy({**group, "params": names}))
    except Exception as error:
        problem = error
    agreed = _agreed_states(params, states, problem)
    saved = _gathered_states(params, agreed, states, form, is_kept=is_kept)
    if not is_kept:
        return {}
    result: dict[str, Any] = {"state": saved | unmatched}
    return result | ({"param_groups": groups} if "param_groups" in state_dict else {})


class _PerElement(NamedTuple):
    """State with one value for each element of a parameter: sharded and gathered like it."""

    dtype: torch.dtype


def _agreed_states(
    params: ModelParams, states: Mapping[OptimParam, State], problem: Exception | None
) -> dict[OptimParam, State]:
    """What the state of every parameter consists of, the same on all ranks that share it."""
    cut = [(param, param.lane) for param in params.params if param.lane is not None]
    # State whose size differs from that of this rank's part of a parameter has a shape of its own,
    # even for parameters where the sizes happen to be equal.
    own_shaped = {
        name
        for param, _ in cut
        for name, value in states.get(param, {}).items()
        if has_dims(value) and value.numel() != param.local_numel
    }

    def outlined(name: str, value: Any) -> Any:
        if has_dims(value) and name not in own_shaped:
            return _PerElement(value.dtype)
        return copied(value, to_cpu=True)

    # A rank that has no element of a parameter may have numbers about it, such as a count of
    # steps, but its optimizer does not keep them up to date.
    outlines = {
        param.names[0]: {key: outlined(key, value) for key, value in states.get(param, {}).items()}
        for param, _ in cut
        if param.local_numel or not param.shards[0].shape.numel()
    }
    groups = params.shard_groups
    answers = dict(zip(groups, exchange(groups, outlines, problem), strict=True))
    agreed = {param: state for param, state in states.items() if param.lane is None}
    for param, lane in cut:
        name = param.names[0]
        everyone = answers.get(lane.mesh_info.shard.group, [outlines])
        told = [each[name] for each in everyone if name in each]
        for key in dict.fromkeys(key for state in told for key in state):
            found = [state.get(key) for state in told]
            # An optimizer that sums up the flat parameter that it sees has a different number on
            # every rank: the first rank's is as good as any.
            is_free = lane.is_flat and not isinstance(found[0], _PerElement)
            if not is_free and not all(is_same(value, found[0]) for value in found):
                raise DisagreementError(
                    f"{name}: the optimizer state {key!r} differs between the ranks that have a "
                    f"part of the parameter: {found}; step the optimizer on all ranks alike."
                )
            agreed.setdefault(param, {})[key] = found[0]
    return agreed


def _gathered_states(
    params: ModelParams,
    agreed: Mapping[OptimParam, State],
    states: Mapping[OptimParam, State],
    form: StateForm,
    *,
    is_kept: bool,
) -> dict[str, State]:
    """The state of every original parameter that has any, by its name."""
    saved: dict[str, State] = {}
    gathered: dict[tuple[FlatLane, str, torch.dtype], list[OptimParam]] = {}
    for param in (param for param in params.params if param in agreed):
        for name in param.names:
            saved[name] = {k: copied(v, to_cpu=form.to_cpu) for k, v in agreed[param].items()}
        for key, value in agreed[param].items():
            if isinstance(value, _PerElement) and param.lane is not None:
                gathered.setdefault((param.lane, key, value.dtype), []).append(param)
    for (lane, key, dtype), owners in gathered.items():
        buffer = lane.zeros(dtype)
        for param in owners:
            value = states.get(param, {}).get(key)
            if value is not None and param.local_numel:
                region = buffer if lane.is_flat else param.flat_shards[0].slice_of(buffer)
                region.copy_(value.flatten())
        whole = full = lane.gather(buffer)  # only one state of one lane at a time
        for shard in (shard for param in owners for shard in param.flat_shards):
            whole = full_tensor_of(shard.view_of(full))
            if is_kept:
                saved[shard.name][key] = form.copy(whole, shard)
        del buffer, full, whole  # before the next ones are allocated
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
    """Convert a state dict keyed by name to what `optim.load_state_dict` takes on this rank.

    It may have been saved with any wrapping, strategy, number of ranks or API, in any form.
    With `rank0_only` in the settings, only rank 0 needs to have it. `is_named_optimizer` is for
    optimizers whose own state dicts are keyed by name. The optimizer is changed only with
    `load_directly`, and then only after everything was found to fit.
    """
    config = settings_of(model).optim_state_dict_config
    rank0_only = getattr(config, "rank0_only", False)
    load = Load(model, optim, is_named=is_named_optimizer, rank0_only=rank0_only, group=group)
    result = load.convert(optim_state_dict)
    if load_directly:
        optim.load_state_dict(result)
    return result


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Convert whole tensors that every rank has to what an optimizer loads on this rank."""
    _warn_deprecated("shard_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
    # Every rank has everything and needs no other: it may be called on one rank alone.
    return Load(model, optim, optim_input, is_alone=True).convert(full_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Convert whole tensors that rank 0 has to what an optimizer loads on this rank."""
    _warn_deprecated("scatter_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
    load = Load(model, optim, optim_input, rank0_only=True, group=group)
    return load.convert(full_optim_state_dict)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """Convert sharded tensors to what an optimizer loads on this rank."""
    _warn_deprecated("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return Load(model, optim).convert(sharded_optim_state_dict)


@dataclass(slots=True)
class Load:
    """A load of state into an optimizer of a model.

    Attributes:
        is_named: Whether the result is keyed by name.
        rank0_only: Whether only rank 0 of `group` has values, which it sends tensor by tensor.
        is_alone: Whether this rank loads without the others.
        states: What is loaded, by the canonical names of parameters.
        unmatched: State that belongs to no parameter.
        per_element: The names of state with one value per element of its parameter. Other state has
            a shape of its own, the same for all parameters, and is whole on every rank.
    """

    model: nn.Module
    optim: Optimizer | None
    optim_input: OptimInput = None
    is_named: bool = False
    rank0_only: bool = False
    group: dist.ProcessGroup | None = None
    is_alone: bool = False
    params: ModelParams = field(init=False)
    states: dict[str, Mapping[str, Any]] = field(init=False, default_factory=dict)
    unmatched: State = field(init=False, default_factory=dict)
    per_element: set[str] = field(init=False, default_factory=set)

    @torch.no_grad()
    def convert(self, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
        self.params = ModelParams(self.model)
        if self.rank0_only:
            # The others learn what there is; tensors are on meta until they are fetched.
            is_source = dist.get_rank(self.group) == 0
            sent = [mapped(state_dict, outline) if is_source else None]
            dist.broadcast_object_list(sent, group=self.group, group_src=0)
            state_dict = state_dict if is_source else sent[0]
        compared = [self.group] if self.rank0_only else self.params.shard_groups
        problem: Exception | None = None
        fingerprint = ""
        try:
            groups = self.params.groups_of(self.optim, self.optim_input, by_name=self.is_named)
            saved_groups = self._match(state_dict)
            self._find_per_element()
            param_groups = self._param_groups(saved_groups, groups)
            # Values that other ranks do not fetch may differ between ranks, such as the parts of a
            # model that is split in another way.
            shared = [
                (path, self._described(value))
                for path, value in leaves({"own": self.states, "other": self.unmatched})
                if self.rank0_only
                or is_sharded(value)
                or isinstance(self.params.by_name.get(path[1]), FlatShard)
            ]
            fingerprint = hashlib.sha256(repr(sorted(shared)).encode()).hexdigest()
        except Exception as error:
            problem = error
        told = exchange([] if self.is_alone else compared, fingerprint, problem)
        if any(len(set(answers)) > 1 for answers in told):
            raise DisagreementError(
                "optim_state_dict: ranks load state of different parameters, or in other shapes "
                "or dtypes; load the same checkpoint on every rank."
            )
        # In the order of the model, the same on all ranks, including parameters not held here.
        own = {param: self._state_of(param) for param in self.params.params}
        state: dict[Any, Any] = {}
        keys = {param: key for group in groups for key, param in group.items()}
        for key, param in ((keys[param], param) for param in own if param in keys):
            # A rank without elements needs no state, except for named optimizers and for those
            # that make state for all their parameters at once and then count on it.
            has_state = self.optim is not None and bool(self.optim.state.get(param.param))
            is_empty = not param.local_numel and param.shards[0].shape.numel() > 0
            is_saved = any(name in self.states for name in param.names)
            if is_saved and (not is_empty or has_state or self.is_named):
                state[key] = own[param]
        state |= self._whole(self.unmatched)
        return {"state": state} | ({} if param_groups is None else {"param_groups": param_groups})

    def _match(self, state_dict: Any) -> list[Mapping[str, Any]] | None:
        """Find out what belongs to which parameter; returns the saved groups."""
        is_dict = isinstance(state_dict, Mapping) and "state" in state_dict
        states: Mapping[Any, Any] = state_dict["state"] if is_dict else {}
        groups: list[Mapping[str, Any]] | None = state_dict.get("param_groups") if is_dict else None
        wrong = [name for group in groups or () for name in group["params"]] + [*states]
        wrong = [name for name in wrong if not isinstance(name, str)]
        for key, state in states.items() if not wrong else ():
            shard = self.params.by_name.get(clean_name(key))
            if shard is None:
                self.unmatched[key] = state
            elif not isinstance(state, Mapping):
                wrong.append(key)
            elif clean_name(key) == shard.name or shard.name not in self.states:
                # Tied parameters may have an entry for each name: that of the canonical one counts.
                self.states[shard.name] = state
        if wrong or not is_dict:
            found = [*state_dict] if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise ConfigError(
                'optim_state_dict: `optim_state_dict` must have the keys "state", with a dict for '
                f"each parameter by its name, but has {found} and as parameters {wrong}; pass what "
                "optim_state_dict returned, on every rank that it was saved for, and numbers "
                "through rekey_optim_state_dict first."
            )
        return groups

    def _find_per_element(self) -> None:
        arrays: dict[str, list[tuple[FlatShard, torch.Size]]] = {}
        for shard in (shard for lane in self.params.lanes for shard in lane.shards):
            for key, value in self.states.get(shard.name, {}).items():
                if has_dims(value):
                    arrays.setdefault(key, []).append((shard, shape_of(value)))
        for key, entries in arrays.items():
            odd = [(shard, shape) for shard, shape in entries if shape != shard.shape]
            has_own_shape = len({shape for _, shape in entries}) == 1
            # A parameter that is not split may have any state, such as factors of moments.
            is_cut = any(shard.lane.is_sharded or shard.lane.is_flat for shard, _ in odd)
            if not odd:
                self.per_element.add(key)
            elif 2 * len(odd) <= len(entries) or (is_cut and not has_own_shape):
                shard, shape = odd[0]
                raise ConfigError(
                    f"optim_state_dict: state {key!r} of {shard.name!r} has shape "
                    f"{tuple(shape)}, but the parameter has {tuple(shard.shape)}; pass the state "
                    "of an optimizer of this model."
                )

    def _param_groups(
        self, saved: Sequence[Mapping[str, Any]] | None, groups: Sequence[Mapping[Key, OptimParam]]
    ) -> list[dict[str, Any]] | None:
        """The saved groups in the order of the optimizer's, which loads groups by position.

        Parameters outside of all wrappers that were not saved are left out, as in torch.
        """
        if saved is None:
            return None
        keys = {param: key for group in groups for key, param in group.items()}
        held = {name: key for p, key in keys.items() for s in p.shards for name in s.names}
        names = [[clean_name(name) for name in group["params"]] for group in saved]
        known = {name for group in names for name in group}
        # Frozen parameters have no state, and optimizers are built with them or without.
        shards = self.params.by_name
        unknown = [n for n in known - held.keys() if n not in shards or shards[n].is_trainable]
        absent = [
            param
            for param in (keys if self.optim is not None else ())
            if param.param.requires_grad and not any(known & {*s.names} for s in param.shards)
        ]
        missing = [param.names[0] for param in absent if param.lane is not None]
        if unknown or missing:
            raise UnknownNameError(
                "optim_state_dict: its parameter groups are not those of the optimizer: "
                f"{sorted(unknown)} are not in the optimizer, and {missing} are in no group; "
                "pass the state of an optimizer of this model over the same parameters."
            )
        if self.optim is None:
            numbers = [sorted({held[name] for name in its if name in held}) for its in names]
            pairs = zip(saved, numbers, strict=True)
            return [copy.deepcopy({**group, "params": params}) for group, params in pairs]
        result: list[dict[str, Any]] = []
        options = saved_options([list(group.values()) for group in groups], saved)
        for own, params, chosen in zip(self.optim.param_groups, groups, options, strict=True):
            if chosen is None:  # nothing of this group was saved
                chosen = copy.deepcopy({key: own[key] for key in own if key != "params"})
            if "param_names" in own:
                chosen["param_names"] = list(own["param_names"])
            result.append({**chosen, "params": [k for k, p in params.items() if p not in absent]})
        return result

    def _described(self, value: Any) -> str:
        """What ranks must have in common to fetch a value."""
        if self.rank0_only and is_sharded(value):
            raise ConfigError(
                "optim_state_dict: one rank has all of this state, but in a "
                f"{type(value).__name__} instead of whole tensors; load it without rank0_only."
            )
        kind = "" if isinstance(value, torch.Tensor) and not is_sharded(value) else type(value)
        return f"{kind} {on_meta(value) if is_array(value) else ''}"

    def _fetch(self, value: Any) -> Any:
        """The whole value on this rank; all ranks must fetch the same in the same order."""
        device = self.params.lanes[0].device
        if not self.rank0_only:
            return full_tensor_of(value).to(device) if is_sharded(value) else value
        if not has_dims(value):
            return value
        tensor = torch.empty_like(value, device=device) if value.is_meta else value.detach()
        tensor = tensor.to(device).contiguous()
        if tensor.numel():
            # As bytes: gloo does not know every dtype.
            dist.broadcast(tensor.view(torch.uint8), group=self.group, group_src=0)
        return tensor

    def _whole(self, value: Any) -> Any:
        """State that is whole on every rank."""
        return mapped(value, lambda each: copied(self._fetch(each)))

    def _state_of(self, param: OptimParam) -> State:
        """The state of a parameter as an optimizer holds it on this rank."""
        states = {shard: self.states.get(shard.name, {}) for shard in param.shards}
        names = dict.fromkeys(key for state in states.values() for key in state)
        own: State = {}
        for key in sorted(names):  # in the same order on all ranks, unlike the names
            entries = [(shard, state[key]) for shard, state in states.items() if key in state]
            own[key] = self._value(param, key, entries)
        return {key: own[key] for key in names}

    def _value(
        self, param: OptimParam, key: str, entries: Sequence[tuple[TensorShard, Any]]
    ) -> Any:
        """One state of a parameter; zero where parts of a flat parameter have none."""
        if isinstance(param.param, DTensor) and is_sharded(entries[0][1]):
            return copied(entries[0][1])
        # For a parameter without dims, only the state of others tells elements from other numbers.
        is_unclear = not self.per_element and key != "step"
        cuts = [
            (shard, value)
            for shard, value in entries
            if isinstance(shard, FlatShard) and is_array(value) and shape_of(value) == shard.shape
            if key in self.per_element or (is_unclear and not shard.shape)
        ]
        if len(cuts) == len(entries):
            buffer: torch.Tensor | None = None
            for shard, value in cuts:
                cut = shard.cut(self._fetch(value)).detach()
                if not shard.lane.is_flat:
                    return cut.clone().view(param.param.shape)
                buffer = cut.new_zeros(param.local_numel) if buffer is None else buffer
                shard.slice_of(buffer).copy_(cut)
            return buffer
        first, *others = (self._whole(value) for _, value in entries)
        missing = {*param.names} - {shard.name for shard, _ in entries}
        if missing or not all(is_same(value, first) for value in others):
            raise ConfigError(
                f"optim_state_dict: state {key!r} differs between the parameters of one flat "
                f"parameter: {[first, *others]} for {[shard.name for shard, _ in entries]} and "
                f"none for {sorted(missing)}; wrap with use_orig_params=True to keep them apart."
            )
        return first


# Keys


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state dict with parameters keyed by name, or by number.

    This converts between optimizers of wrapped models, whose state dicts are keyed by name, and
    those of a `model` that is not wrapped. The same dict is returned if there is nothing to do.
    """
    _warn_deprecated(None, None, optim_input)
    optim_state_key_type = own_value(OptimStateKeyType, optim_state_key_type)
    if not isinstance(optim_state_key_type, OptimStateKeyType):
        raise ConfigError(
            "optim_state_key_type must be OptimStateKeyType.PARAM_NAME or PARAM_ID, not "
            f"{optim_state_key_type!r}."
        )
    state, groups = optim_state_dict["state"], copy.deepcopy(optim_state_dict["param_groups"])
    keys = [*state, *(key for group in groups for key in group["params"])]
    wanted = str if optim_state_key_type is OptimStateKeyType.PARAM_NAME else int
    if all(isinstance(key, wanted) for key in keys):
        return optim_state_dict
    params = [param for group in param_groups(model, optim, optim_input) for param in group]
    numbers = {param: number for number, param in enumerate(params)}
    listed = model.named_parameters(remove_duplicate=False)
    pairs = [(clean_name(name), numbers[param]) for name, param in listed if param in numbers]
    new_keys: dict[Any, Any] = dict(pairs)
    if wanted is str:
        new_keys = {number: name for name, number in reversed(pairs)}  # the canonical name
    unknown = [key for key in keys if key not in new_keys]
    if unknown:
        raise UnknownNameError(
            f"optim_state_dict: {unknown} are not parameters of the model and its optimizer, "
            f"which have {list(new_keys)}; pass an optimizer's state dict as it was saved, the "
            "model that it belongs to, and its optimizer."
        )
    for group in groups:
        group["params"] = sorted(new_keys[key] for key in group["params"])
    return {"state": {new_keys[key]: value for key, value in state.items()}, "param_groups": groups}


def _warn_deprecated(name: str | None, instead: str | None, optim_input: OptimInput = None) -> None:
    """Warn the caller of the public function that calls this."""
    texts = []
    if name is not None:
        api = "FullyShardedDataParallel"
        texts = [f"{api}.{name}: deprecated; call {api}.{instead}, after set_state_dict_type."]
    if optim_input is not None:
        texts.append("optim_input: deprecated; leave it out and pass the optimizer.")
    for text in texts:
        warnings.warn(text, FutureWarning, stacklevel=3)
