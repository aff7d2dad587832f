"""`load`: each rank reads the blocks that its shards need, whichever rank wrote them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.errors import CheckpointError, ConfigError
from fullshard.layout.split import Box
from fullshard.state.checkpoint.folder import located
from fullshard.state.checkpoint.index import MODEL, OPTIMIZER
from fullshard.state.checkpoint.reader import StoredCheckpoint, open_checkpoint, verify
from fullshard.state.checkpoint.save import ranks_after_saves
from fullshard.state.optim_params import OptimParam, optim_params, saved_options
from fullshard.state.plain import RANDOM, from_json, is_quantized, restore_random_state
from fullshard.state.shards import LocalPart, TensorShard, tensor_shards
from fullshard.state.stored import NameMatch


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load found: the step, what was saved besides tensors, and what did not fit.

    `missing` are names of the model that the checkpoint does not have, and `unexpected` are names
    of the checkpoint that the model does not have.
    """

    path: Path
    step: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    extra: Mapping[str, Any] | None = None,
    verified: bool = True,
    random_state: bool = True,
) -> Loaded:
    """Load a checkpoint. All ranks call it, and each rank reads the blocks that its shards need.

    Everything is checked before anything is written: names that are missing, unexpected or of
    another shape are listed in one error, on all ranks.

    Args:
        path: The folder of a checkpoint that fullshard or `torch.distributed.checkpoint` wrote.
        model: The model, sharded in any way or not at all, on any number of ranks.
        optimizer: Receives the saved state by parameter name; groups may be in another order.
        strict: Whether names that only the model or only the checkpoint has are an error. What a
            partial checkpoint left out on purpose never is.
        extra: Objects with `load_state_dict` to restore, by the names that they were saved under.
        verified: Whether to compare all content with the manifest's checksums first; ranks share
            the work.
        random_state: Whether to restore random generators, on a world of the same size.
    """
    ranks = ranks_after_saves(wait=True)
    objects, subject = extra or {}, f"load {located(Path(path))}"
    wanted: dict[str, list[LocalPart]] = {}

    def planned() -> tuple[StoredCheckpoint, NameMatch, Callable[[], None] | None, dict[str, Any]]:
        stored = open_checkpoint(path, check_files=False)
        shards = tensor_shards(model)
        match = _match_model(stored, shards, strict)
        for shard in shards:
            if shard.name in match.sources:
                wanted[match.sources[shard.name]] = shard.local_parts(shard.tensor)
        install = None
        with stored.unchanged():
            if optimizer is not None:
                install = _plan_optimizer(stored, shards, match, optimizer, strict, wanted)
            return stored, match, install, _restorable_state(stored, ranks.rank, objects)

    stored, match, install, own = ranks.run(subject, planned)
    manifest = stored.manifest
    if verified and manifest.is_ours:
        share = (ranks.rank, ranks.size)
        everyone = ranks.gather(subject, lambda: verify(stored.path, share=share))
        problems = dict.fromkeys(f"{p.subject}: {p.what}" for some in everyone for p in some)
        if problems:
            ranks.run_first(subject, stored.require_unchanged)
            raise CheckpointError(
                f"{subject}: its content is not what was saved; nothing was loaded: "
                f"{'; '.join(problems)}. Load an older checkpoint."
            )
    consequence = "the model may hold some of it: load again, or another checkpoint."

    def read() -> None:
        with stored.unchanged(), torch.no_grad():
            stored.read_into(wanted)

    ranks.run(subject, read, consequence)
    if install is not None:
        install()
    saved = own.get("extra", {})
    for name, value in objects.items():
        value.load_state_dict(saved[name])
    # An imported checkpoint has no random state.
    if random_state and manifest.num_ranks == ranks.size and RANDOM in own:
        restore_random_state(own[RANDOM])
    missing, unexpected = tuple(match.missing), tuple(match.unexpected)
    return Loaded(stored.path, manifest.step, saved, missing, unexpected)


def _restorable_state(
    stored: StoredCheckpoint, rank: int, objects: Mapping[str, Any]
) -> dict[str, Any]:
    """A rank's own state, from which all `objects` can be restored."""
    own = stored.rank_state(rank)
    saved = own.get("extra", {})
    missing = sorted(set(objects) - set(saved))
    if missing:
        raise CheckpointError(
            f"extra: the checkpoint has no {missing}, only {sorted(saved)}; leave out what was "
            "not saved."
        )
    for name, value in objects.items():
        if not callable(getattr(value, "load_state_dict", None)):
            raise ConfigError(
                f"extra: {name!r} is a {type(value).__name__}, which has no load_state_dict "
                "method; read it from what load returns."
            )
    return own


def _match_model(
    stored: StoredCheckpoint, shards: Sequence[TensorShard], strict: bool
) -> NameMatch:
    def misfit(key: str, shard: TensorShard) -> str:
        if shard.tensor.is_meta:
            raise CheckpointError(
                f"{shard.name} is on meta and has no memory to be loaded into; call "
                "model.to_empty(device=...) first."
            )
        found, expected = list(stored.info(key).shape), list(shard.shape)
        return "" if found == expected else f"its shape is {expected}, but {found} in the file"

    # Other programs nest their state dicts in various ways.
    names = [name for shard in shards for name in shard.names]
    prefix = max(_MODEL_PREFIXES, key=lambda p: sum(p + name in stored for name in names))
    keys = [k for k in stored.keys if k.startswith(prefix) and not k.startswith(_NOT_MODEL)]
    match = NameMatch(shards, keys, lambda name: prefix + name, misfit)
    match.unexpected = [key.removeprefix(prefix) for key in match.unexpected]
    is_partial = stored.manifest.selection != "all"
    match.require(
        f"load {stored.path}",
        "checkpoint",
        missing=strict and not is_partial,
        unexpected=strict,
        mismatched=True,
    )
    return match


_MODEL_PREFIXES = (MODEL, "", "app.model.", "state_dict.", "module.")
_NOT_MODEL = ("optimizer.", "optim.", "optimizers.")


# What is read into an optimizer

_OPTIMIZER_PREFIXES = (OPTIMIZER, "optim.state.", "optimizer.", "optim.")
_OPTION_KEY = re.compile(r"optim(?:izer)?\.param_groups\.(\d+)\.(\w+)(?:\.(\d+))?")


def _plan_optimizer(
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
    if manifest.optimizer is None if manifest.is_ours else not by_name:
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
    values = {} if manifest.optimizer is None else manifest.optimizer["values"]
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
        if shard.shape and stored.info(key).shape == tuple(shard.shape)
    }
    if not any(shard.shape for _, shard, _, _ in found):
        per_element = {state for _, _, state, _ in found if state != "step"}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for each, shard, state, key in found:
        own, info = states.setdefault(each.param, {}), stored.info(key)
        shape, dtype = info.shape, info.dtype
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
            if source is not None and dtype == stored.info(source).dtype:
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
    if manifest.is_ours:
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
