"""What `load` reads into an optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from fullshard.errors import CheckpointError
from fullshard.layout.split import Box
from fullshard.state.checkpoint.index import OPTIMIZER
from fullshard.state.checkpoint.reader import StoredCheckpoint
from fullshard.state.matching import NameMatch
from fullshard.state.optim_params import OptimParam, optim_params, saved_options
from fullshard.state.plain import from_json, is_quantized
from fullshard.state.shards import LocalPart, TensorShard

_OPTIMIZER_PREFIXES = (OPTIMIZER, "optim.state.", "optimizer.", "optim.")
_OPTION_KEY = re.compile(r"optim(?:izer)?\.param_groups\.(\d+)\.(\w+)(?:\.(\d+))?")


def plan_optimizer(
    stored: StoredCheckpoint,
    shards: Sequence[TensorShard],
    match: NameMatch,
    optimizer: Optimizer,
    strict: bool,
    wanted: dict[str, list[LocalPart]],
) -> Callable[[], None]:
    """Add an optimizer's state to `wanted`, in new tensors; return a function that installs it."""
    manifest = stored.manifest
    prefix = max(_OPTIMIZER_PREFIXES, key=lambda p: sum(k.startswith(p) for k in stored.keys))
    by_name: dict[str, dict[str, str]] = {}
    for key in stored.keys:
        name, _, state = key.removeprefix(prefix).rpartition(".")
        if key.startswith(prefix) and name and not name.startswith("param_groups"):
            by_name.setdefault(name, {})[state] = key
    if not by_name if manifest is None else manifest.optimizer is None:
        raise CheckpointError(
            "optimizer: the checkpoint has no optimizer state, only a model; leave the "
            "optimizer out."
        )
    groups = optim_params([group["params"] for group in optimizer.param_groups], shards)
    saved = _saved_groups(stored)
    trained = {name for group in saved or () for name in group["params"]} | set(by_name)
    if strict:
        _require_same_params(groups, trained, are_all=bool(saved))
    options = saved_options(groups, saved or [], CheckpointError)
    params = [each for group in groups for each in group]
    states = _wanted_states(stored, params, match, by_name, wanted)
    values = {} if manifest is None or not manifest.optimizer else manifest.optimizer["values"]
    for each in params:
        if not trained.isdisjoint(name for shard in each.shards for name in shard.names):
            own = states.setdefault(each.param, {})  # stays empty if saved before its first step
            own |= {n: from_json(value) for n, value in values.get(each.names[0], {}).items()}

    def install() -> None:
        for group, changed in zip(optimizer.param_groups, options, strict=True):
            group.update(changed or {})
            on_device = bool(group.get("fused") or group.get("capturable"))
            for param in group["params"]:
                for name, value in states.get(param, {}).items():
                    there = optimizer.state.get(param, {}).get(name)
                    if is_quantized(there):
                        states[param][name] = there.copy_(value)
                    elif on_device and isinstance(value, torch.Tensor):
                        states[param][name] = value.to(param.device)
                if states.get(param):
                    optimizer.state[param] = states[param]
                elif param in states:
                    optimizer.state.pop(param, None)

    return install


def _wanted_states(
    stored: StoredCheckpoint,
    params: Sequence[OptimParam],
    match: NameMatch,
    by_name: Mapping[str, Mapping[str, str]],
    wanted: dict[str, list[LocalPart]],
) -> dict[torch.Tensor, dict[str, Any]]:
    """Make tensors to read the state of parameters into."""
    found = [
        (each, shard, state, key)
        for each in params
        for shard in each.shards
        for state, key in next((by_name[n] for n in shard.names if n in by_name), {}).items()
    ]
    # State with one value per element. For parameters without dims, only other parameters tell.
    per_element = {
        state
        for _, shard, state, key in found
        if shard.shape and stored.shape(key) == tuple(shard.shape)
    }
    if not any(shard.shape for _, shard, _, _ in found):
        per_element = {state for _, _, state, _ in found if state != "step"}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for each, shard, state, key in found:
        own, shape, dtype = states.setdefault(each.param, {}), stored.shape(key), stored.dtype(key)
        if state not in per_element:
            if state not in own:  # one count stands for all shards of a flat parameter
                own[state] = torch.zeros(shape, dtype=dtype)
                wanted[key] = [LocalPart(Box.whole(shape), own[state])]
            continue
        if shape != tuple(shard.shape):
            raise CheckpointError(
                f"{key}: its shape is {list(shard.shape)}, but {list(shape)} in the checkpoint; "
                "the optimizer state is of another model."
            )
        if state not in own:  # stays zero where a shard of a flat parameter has no such state
            source = match.sources.get(shard.name)
            if source is not None and dtype == stored.dtype(source):
                dtype = each.param.dtype  # it was saved in the parameter's dtype
            own[state] = torch.zeros_like(each.param, dtype=dtype, requires_grad=False)
        wanted[key] = shard.local_parts(own[state])
    return states


def _require_same_params(
    groups: Sequence[Sequence[OptimParam]], trained: set[str], *, are_all: bool
) -> None:
    shards = [shard for group in groups for each in group for shard in each.shards]
    removed = sorted(trained - {name for shard in shards for name in shard.names})
    added = sorted(shard.name for shard in shards if are_all and not trained & set(shard.names))
    if added or removed:
        raise CheckpointError(
            f"optimizer: it trains other parameters than the one that was saved: {added} added "
            f"and {removed} removed; nothing was loaded. Pass strict=False to load the others."
        )


def _saved_groups(stored: StoredCheckpoint) -> list[dict[str, Any]] | None:
    """The parameter groups of a checkpoint, if it says which parameters they had."""
    manifest = stored.manifest
    if manifest is not None:
        groups = [] if manifest.optimizer is None else manifest.optimizer["param_groups"]
        return [from_json({"kind": "dict", "value": group}) for group in groups]
    # torch wrote an entry for each option, and for each item of a list.
    options: dict[int, dict[str, Any]] = {}
    items: dict[tuple[int, str], dict[int, Any]] = {}
    for key in stored.object_keys:
        match = _OPTION_KEY.fullmatch(key)
        if match is not None:
            index, option, item = int(match[1]), match[2], match[3]
            if item is None:
                options.setdefault(index, {})[option] = stored.read_object(key)
            else:
                items.setdefault((index, option), {})[int(item)] = stored.read_object(key)
    for (index, option), found in items.items():
        options.setdefault(index, {})[option] = tuple(found[number] for number in sorted(found))
    listed = [options[index] for index in sorted(options)]
    if not listed or not all("params" in group for group in listed):
        return None
    for names in (group["params"] for group in listed):
        if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
            raise CheckpointError(
                f"{stored.path}: the parameters of an optimizer's group are "
                f"{type(names).__name__}, not names; the checkpoint is damaged. `latest` finds "
                "whole ones."
            )
    return listed
