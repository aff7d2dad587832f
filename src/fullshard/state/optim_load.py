"""Converting a saved optimizer state dict to what an optimizer of this rank loads."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.errors import ConfigError, DisagreementError, UnknownNameError
from fullshard.runtime.names import clean_name
from fullshard.state.optim_params import (
    Key,
    ModelParams,
    OptimInput,
    OptimParam,
    State,
    is_same,
    saved_options,
)
from fullshard.state.optim_values import copied, has_dims, is_array, leaves, mapped, outline
from fullshard.state.shards import (
    FlatShard,
    TensorShard,
    exchange,
    full_tensor_of,
    is_sharded,
    on_meta,
    shape_of,
)


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
