"""Optimizer state from a checkpoint, by the names of parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from fullshard.errors import CheckpointError
from fullshard.layout.split import Box
from fullshard.state.dcp_format import HeldTensor
from fullshard.state.inventory import sites_by_param
from fullshard.state.manifest import Manifest
from fullshard.state.opened import Opened
from fullshard.state.plain_values import from_json
from fullshard.state.sites import Block, Site

PREFIXES = ("optimizer.state.", "optim.state.", "optimizer.", "optim.")
_TORCHS_OPTION = re.compile(r"optim(?:izer)?\.param_groups\.(\d+)\.(\w+)(?:\.(\d+))?")


@dataclass(slots=True)
class _ParamState:
    """The state of one parameter of the optimizer, made and waiting to be read into."""

    param: torch.Tensor
    sites: list[Site]
    state: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, list[tuple[Site, str]]] = field(default_factory=dict)
    """For each state name, the sites that have it in the checkpoint, and under which key."""


class OptimizerLoad:
    """Reads state into new tensors, and gives them to the optimizer when all of it is there."""

    def __init__(
        self,
        optimizer: Optimizer,
        params: list[_ParamState],
        options: list[dict[str, Any]],
        shapes: Mapping[str, torch.Size],
    ) -> None:
        self._optimizer = optimizer
        self._params = params
        self._options = options
        self._shapes = shapes
        self._per_element = _per_element(params, shapes)
        self._param_dtypes: dict[Site, torch.dtype] = {}

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        sites: Sequence[Site],
        shapes: Mapping[str, torch.Size],
        opened: Opened,
        strict: bool,
    ) -> OptimizerLoad:
        """Match parameters and groups with what is stored; raise what does not fit."""
        manifest = opened.manifest
        prefix = max(PREFIXES, key=lambda p: sum(key.startswith(p) for key in shapes))
        has_state = any(key.startswith(prefix) for key in shapes)
        if not has_state if manifest is None else manifest.optimizer is None:
            raise CheckpointError(
                "optimizer: the checkpoint must hold optimizer state to load it, found a model "
                "only; leave the optimizer out."
            )
        by_name = _keys_by_name(shapes, prefix)
        groups = sites_by_param(optimizer, sites)
        params: list[_ParamState] = []
        for members in groups:
            for param, its_sites in members:
                params.append(_ParamState(param, its_sites, keys=_keys(its_sites, by_name)))
        names = {name for each in params for site in each.sites for name in site.names}
        unknown = sorted(set(by_name) - names)
        stored = _torchs_groups(opened) if manifest is None else _stored_groups(manifest)
        if strict and unknown:
            raise CheckpointError(
                f"optimizer: state must be of parameters that it trains, found state of {unknown}; "
                "nothing was loaded. Pass strict=False to leave it."
            )
        if strict and stored is not None:
            _require_same_names(names, params, stored)
        made = cls(optimizer, params, _matched_options(groups, stored), shapes)
        made._add_values(manifest)
        return made

    def held(
        self, dtype_of: Callable[[str], torch.dtype], key_of: Callable[[Site], str | None]
    ) -> dict[str, HeldTensor]:
        """Make the tensors to read into.

        `dtype_of` gives the dtype that a key was stored in, `key_of` a parameter's own key.
        """
        self._param_dtypes = {
            site: dtype_of(key)
            for each in self._params
            for site in each.sites
            if (key := key_of(site)) is not None
        }
        held: dict[str, HeldTensor] = {}
        for each in self._params:
            for name, pairs in each.keys.items():
                self._hold(each, name, pairs, dtype_of, held)
        return held

    def _hold(
        self,
        each: _ParamState,
        name: str,
        pairs: list[tuple[Site, str]],
        dtype_of: Callable[[str], torch.dtype],
        held: dict[str, HeldTensor],
    ) -> None:
        first, first_key = pairs[0]
        dtype, shape = dtype_of(first_key), self._shapes[first_key]
        if name in self._per_element:
            if dtype == self._param_dtypes.get(first):
                dtype = each.param.dtype  # it was in the parameter's dtype, and shall be again
            tensor = torch.zeros_like(each.param, dtype=dtype, requires_grad=False)
            for site, key in pairs:
                if self._shapes[key] != site.shape:
                    raise CheckpointError(
                        f"{key}: {list(site.shape)} is expected, found {list(self._shapes[key])}; "
                        "the optimizer state is of another model."
                    )
                held[key] = HeldTensor(site.shape, dtype, site.blocks(tensor))
        else:
            # One count stands for all parts of a flat parameter.
            tensor = torch.zeros(shape, dtype=dtype)
            where = Box((0,) * len(shape), tuple(shape))
            held[first_key] = HeldTensor(shape, dtype, [Block(where, tensor)])
        each.state[name] = tensor

    def _add_values(self, manifest: Manifest | None) -> None:
        if manifest is None or manifest.optimizer is None:
            return
        values = manifest.optimizer["values"]
        for each in self._params:
            for site in each.sites[:1]:
                for name, value in values.get(site.name, {}).items():
                    each.state[name] = from_json(value)

    def install(self) -> None:
        """Give everything to the optimizer."""
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            group.update(options)
        for each in self._params:
            if not each.state:
                continue
            group = next(g for g in self._optimizer.param_groups if _holds(g, each.param))
            on_device = bool(group.get("fused") or group.get("capturable"))
            state = {
                name: value.to(each.param.device)
                if on_device and isinstance(value, torch.Tensor)
                else value
                for name, value in each.state.items()
            }
            self._optimizer.state[each.param] = state


def _per_element(params: Sequence[_ParamState], shapes: Mapping[str, torch.Size]) -> set[str]:
    """The names of state that has one value per element of its parameter.

    Of a parameter without dims every state looks so; the others tell.
    """
    pairs = [(n, site, key) for each in params for n, its in each.keys.items() for site, key in its]
    found = {name for name, site, key in pairs if site.shape and shapes[key] == site.shape}
    has_dims = any(site.shape for _, site, _ in pairs)
    return found if has_dims else {name for name, _, _ in pairs if name != "step"}


def _holds(group: Mapping[str, Any], param: torch.Tensor) -> bool:
    return any(each is param for each in group["params"])


def _keys_by_name(shapes: Mapping[str, torch.Size], prefix: str) -> dict[str, dict[str, str]]:
    """For each parameter's name, the keys of its state by state name."""
    found: dict[str, dict[str, str]] = {}
    for key in shapes:
        if key.startswith(prefix):
            name, _, state = key.removeprefix(prefix).rpartition(".")
            if name and not name.startswith("param_groups"):
                found.setdefault(name, {})[state] = key
    return found


def _keys(
    sites: Sequence[Site], by_name: Mapping[str, Mapping[str, str]]
) -> dict[str, list[tuple[Site, str]]]:
    """For each state name, the sites of a parameter that have it. The others' stays zero."""
    found: dict[str, list[tuple[Site, str]]] = {}
    for site in sites:
        known = next((by_name[name] for name in site.names if name in by_name), {})
        for state, key in known.items():
            found.setdefault(state, []).append((site, key))
    return found


def _torchs_groups(opened: Opened) -> list[dict[str, Any]] | None:
    """The parameter groups of a checkpoint that torch wrote: an entry for each option."""
    groups: dict[int, dict[str, Any]] = {}
    lists: dict[tuple[int, str], dict[int, Any]] = {}
    for key in opened.object_keys:
        match = _TORCHS_OPTION.fullmatch(key)
        if match is None:
            continue
        index, option, item = int(match[1]), match[2], match[3]
        value = opened.read_object(key)
        if item is None:
            groups.setdefault(index, {})[option] = value
        else:
            lists.setdefault((index, option), {})[int(item)] = value
    for (index, option), items in lists.items():
        groups.setdefault(index, {})[option] = tuple(items[number] for number in sorted(items))
    found = [groups[index] for index in sorted(groups)]
    return found if found and all("params" in group for group in found) else None


def _stored_groups(manifest: Manifest) -> list[dict[str, Any]] | None:
    if manifest.optimizer is None:
        return None
    return [from_json({"kind": "dict", "value": g}) for g in manifest.optimizer["param_groups"]]


def _require_same_names(
    names: set[str], params: Sequence[_ParamState], stored: Sequence[Mapping[str, Any]]
) -> None:
    saved = {name for group in stored for name in group["params"]}
    added = sorted(
        site.name for each in params for site in each.sites if not saved & set(site.names)
    )
    removed = sorted(saved - names)
    if added or removed:
        raise CheckpointError(
            f"optimizer: it must train the parameters that were saved, found {added} added and "
            f"{removed} removed; nothing was loaded. Pass strict=False to load the others."
        )


def _matched_options(
    groups: Sequence[Sequence[tuple[torch.Tensor, list[Site]]]],
    stored: Sequence[Mapping[str, Any]] | None,
) -> list[dict[str, Any]]:
    """For each group of the optimizer, the options of the stored group that its parameters had."""
    if stored is None:
        return [{} for _ in groups]
    group_of = {name: index for index, group in enumerate(stored) for name in group["params"]}
    options: list[dict[str, Any]] = []
    for members in groups:
        names = [name for _, sites in members for site in sites for name in site.names]
        found = sorted({group_of[name] for name in names if name in group_of})
        chosen = [{k: v for k, v in stored[i].items() if k != "params"} for i in found]
        if len(chosen) > 1 and any(each != chosen[0] for each in chosen[1:]):
            raise CheckpointError(
                f"optimizer: parameters of one group must have had the same options, found those "
                f"of {names[:3]}... in groups {found} with {chosen}; make the same groups again."
            )
        options.append(dict(chosen[0]) if chosen else {})
    return options
