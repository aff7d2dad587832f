"""How `load_state_dict` fills a wrapped model.

The outermost wrapper of a load takes the entries of all parameters below it, checks everything,
and only then writes this rank's slices. What it leaves in the dict (buffers, ignored parameters)
`nn.Module` loads as usual; it finds the parameters of wrappers missing, and that is not reported.

An entry may be a whole tensor, a DTensor or a ShardedTensor, whatever the settings ask for: it
says itself what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from fullshard.comm.agreement import Agreement
from fullshard.errors import CheckpointError
from fullshard.runtime.hooks import hooks_of
from fullshard.runtime.names import WRAPPED, clean_name
from fullshard.state.lanes import StateLane, StatePart, borrowed_lanes_of, lanes_of, wrappers_of
from fullshard.state.sharded import as_full, made_whole
from fullshard.state.summon import is_summoned
from fullshard.unit.flat_param import flat_name

_STRICT = "_fullshard_loads_strictly"
_LOAD = "_fullshard_load"
_CHECKPOINTED = "_checkpoint_wrapped_module."

Entries = dict[str, Any]


def install_load_hooks(wrapper: nn.Module) -> None:
    """Let `load_state_dict` of a wrapper, and of every module around it, fill its parameters."""
    wrapper.register_load_state_dict_pre_hook(_before_loading)
    wrapper.register_load_state_dict_post_hook(_after_loading)


@contextmanager
def strict_loading(wrapper: nn.Module, strict: bool) -> Iterator[None]:
    """Inside, a load of this wrapper refuses missing and unexpected entries before it writes.

    `nn.Module` tells nobody whether a load is strict until it is over.
    """
    wrapper.__dict__[_STRICT] = strict
    try:
        yield
    finally:
        del wrapper.__dict__[_STRICT]


@dataclass(slots=True)
class _Load:
    """A load under way below `wrapper`.

    `missing` is the list that `nn.Module` reports missing entries in, by which the load is known;
    `taken` are the names that it will report though they were loaded.
    """

    wrapper: nn.Module
    prefix: str
    missing: list[str]
    taken: set[str]


@dataclass(slots=True)
class _Findings:
    """What is wrong with a state dict. Some of it is an error only in a strict load."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)

    def errors(self, strict: bool) -> list[str]:
        lines = list(self.unfit)
        if strict and self.unexpected:
            lines.insert(0, f"Unexpected key(s) in state_dict: {_quoted(self.unexpected)}.")
        if strict and self.missing:
            lines.insert(0, f"Missing key(s) in state_dict: {_quoted(self.missing)}.")
        return lines


def _before_loading(
    wrapper: nn.Module,
    state: Entries,
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    load = wrapper.__dict__.get(_LOAD)
    if not isinstance(load, _Load) or load.missing is not missing:
        with torch.no_grad():
            _load_below(wrapper, state, prefix, missing)
    for key in [key for key in state if key.startswith(prefix)]:
        rest = key[len(prefix) :]
        if not rest.startswith(f"{WRAPPED}."):
            state[f"{prefix}{WRAPPED}.{rest}"] = state.pop(key)


def _after_loading(wrapper: nn.Module, incompatible: Any) -> None:
    load = wrapper.__dict__.get(_LOAD)
    if not isinstance(load, _Load) or load.wrapper is not wrapper:
        return
    for inner in wrappers_of(wrapper):
        inner.__dict__.pop(_LOAD, None)

    def reported(names: list[str]) -> list[str]:
        return [
            clean_name(name) if name.startswith(load.prefix) else name
            for name in names
            if name not in load.taken
        ]

    incompatible.missing_keys[:] = reported(incompatible.missing_keys)
    incompatible.unexpected_keys[:] = reported(incompatible.unexpected_keys)


def _load_below(wrapper: nn.Module, state: Entries, prefix: str, missing: list[str]) -> None:
    """Check all entries below an outermost wrapper, and write those of its parameters."""
    tree = _Tree(wrapper)
    tree.run_hooks(state, prefix)
    keys = {clean_name(key[len(prefix) :]): key for key in state if key.startswith(prefix)}
    entries = {name: state[key] for name, key in keys.items()}
    findings = tree.check(entries)
    strict = wrapper.__dict__.get(_STRICT, False)
    _agree(wrapper, findings.errors(strict))
    if is_summoned(wrapper):
        # The parameters are registered in their full shape: nn.Module can load them itself.
        for name in sorted(entries.keys() & tree.parameter_names):
            state[keys[name]] = made_whole(entries[name])
        wrapper.__dict__[_LOAD] = _Load(wrapper, prefix, missing, set())
        return
    for name in sorted(entries.keys() & tree.plain.keys()):
        path, target = tree.plain[name]
        value = state.pop(keys[name])
        is_sharded = isinstance(value, ShardedTensor | DTensor)
        if is_sharded and not isinstance(target, DTensor):
            value = made_whole(value)
        state[prefix + path] = value
    for lane in tree.lanes:
        _write(lane, entries, tree.flat_names.get(lane))
    for name in entries.keys() & tree.parameter_names:
        del state[keys[name]]
    lost = [name for name in findings.missing if name in tree.parameter_names]
    missing.extend(clean_name(prefix) + name for name in lost)
    taken = {prefix + name for name in tree.registered_names}
    load = _Load(wrapper, prefix, missing, taken)
    for inner in wrappers_of(wrapper):
        inner.__dict__[_LOAD] = load


class _Tree:
    """What a state dict of a wrapper is expected to hold, by clean names."""

    def __init__(self, wrapper: nn.Module) -> None:
        own = lanes_of(wrapper)
        self.lanes = [*own, *borrowed_lanes_of(wrapper)]
        # Not wrapper.named_modules: a wrapper may be registered at several places.
        modules = list(nn.Module.named_modules(wrapper, remove_duplicate=False))
        paths: dict[nn.Module, str] = {}
        for name, module in modules:
            paths.setdefault(module, name)
        self.flat_names = {
            lane: clean_name(f"{paths[lane.wrapper]}.{flat_name(lane.index)}").removeprefix(".")
            for lane in own
        }
        self.parameter_names = {n for lane in self.lanes for p in lane.parts for n in p.names}
        self.parameter_names.update(self.flat_names.values())
        self.registered_names: set[str] = set()
        """Of parameters that wrappers care for, where nn.Module looks for them."""
        self.plain: dict[str, tuple[str, Any]] = {}
        """Of everything else: the path that nn.Module looks for it at, and what is there."""
        self.optional: set[str] = set()
        self.lenient: list[str] = []
        """Modules that load in their own way, which this check leaves alone."""
        self.hooked: list[tuple[str, str, nn.Module]] = []
        """Modules with hooks of their own: their path, as keys have it and in full."""
        cared_for = {
            (id(place.module), place.name)
            for lane in self.lanes
            for part in lane.parts
            for place in part.locations
        }
        flat = {id(lane.flat_param) for lane in self.lanes}
        for path, module in modules:
            self._add(path, module, cared_for, flat)

    def _add(
        self, path: str, module: nn.Module, cared_for: set[tuple[int, str]], flat: set[int]
    ) -> None:
        before = f"{path}." if path else ""
        loads_alone = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
        if loads_alone and not isinstance(module, _NormBase):
            self.lenient.append(clean_name(before))
        if isinstance(module, _NormBase):
            # Older state dicts have no such counter, and nn.Module takes them.
            self.optional.add(clean_name(f"{before}num_batches_tracked"))
        found: dict[str, Any] = {}
        for name, param in module._parameters.items():
            if (id(module), name) in cared_for or id(param) in flat:
                self.registered_names.add(before + name)
            elif param is not None:
                found[name] = param
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[name] = buffer
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found["_extra_state"] = None
        # Wrappers and checkpoint wrappers put their names into the keys when their turn comes.
        seen_as = before.replace(f"{WRAPPED}.", "").replace(_CHECKPOINTED, "")
        is_wrapper = hooks_of(module) is not None or _CHECKPOINTED[:-1] in module._modules
        if module._load_state_dict_pre_hooks and not is_wrapper:
            self.hooked.append((seen_as, path, module))
        self.plain.update(
            (clean_name(before + name), (seen_as + name, target)) for name, target in found.items()
        )

    def run_hooks(self, state: Entries, prefix: str) -> None:
        """Let modules rename entries of an older form before those of parameters are taken.

        nn.Module will call these hooks again, as it does for state dicts of the present form.
        """
        metadata: dict[str, Any] = getattr(state, "_metadata", None) or {}
        for seen_as, path, module in self.hooked:
            own = metadata.get(prefix + path, metadata.get(clean_name(prefix + path), {}))
            for hook in module._load_state_dict_pre_hooks.values():
                hook(state, prefix + seen_as, own, True, [], [], [])

    def check(self, entries: Entries) -> _Findings:
        findings = _Findings()
        for lane in self.lanes:
            flat = self.flat_names.get(lane)
            if flat is not None and flat in entries:
                findings.unfit += _unfit(flat, entries[flat], torch.Size([_numel(lane)]))
                continue
            for part in lane.parts:
                found = [name for name in part.names if name in entries]
                findings.missing += [] if found else part.names
                for name in found:
                    findings.unfit += _unfit(name, entries[name], part.shape)
        for name, (_, target) in self.plain.items():
            if self._is_lenient(name):
                continue
            if name not in entries:
                findings.missing += [] if name in self.optional else [name]
            elif isinstance(target, torch.Tensor) and not _is_lazy(target):
                findings.unfit += _unfit(name, entries[name], target.shape)
        known = self.parameter_names | self.plain.keys()
        findings.unexpected = [n for n in entries if n not in known and not self._is_lenient(n)]
        return findings

    def _is_lenient(self, name: str) -> bool:
        return any(name.startswith(module) for module in self.lenient)


def _write(lane: StateLane, entries: Entries, flat: str | None) -> None:
    """Write this rank's slices of one lane; a collective where entries are sharded."""
    segment = lane.segment()
    if flat is not None and flat in entries:
        full = as_full(entries[flat], lane).reshape(-1)
        start = lane.mesh_info.shard.rank * lane.segment_numel
        mine = full[start : start + lane.segment_numel]
        segment[: mine.numel()].copy_(mine)
        return
    for part in lane.parts:
        for name in part.names:
            if name in entries:
                part.of_segment(segment).copy_(_cut(entries[name], lane, part))
                break


def _cut(value: Any, lane: StateLane, part: StatePart) -> torch.Tensor:
    is_sharded = isinstance(value, ShardedTensor | DTensor)
    # A whole tensor is cut where it is: it may be too large for the device.
    return part.cut(as_full(value, lane) if is_sharded else value.detach())


def _numel(lane: StateLane) -> int:
    return max((part.start + part.numel for part in lane.parts), default=0)


def _unfit(name: str, value: Any, shape: torch.Size) -> list[str]:
    if not torch.overrides.is_tensor_like(value):
        return [f"{name}: a tensor is expected, found {type(value).__name__}."]
    # Asked for anything else, a ShardedTensor warns that it is deprecated.
    size = value.metadata().size if isinstance(value, ShardedTensor) else value.shape
    found = torch.Size(size)
    # A scalar used to be stored with one dim; nn.Module takes both.
    is_scalar = not shape and len(found) == 1 and found.numel() == 1
    if found == shape or is_scalar:
        return []
    return [f"size mismatch for {name}: {list(shape)} is expected, found {list(found)}."]


def _is_lazy(target: torch.Tensor) -> bool:
    return torch.nn.parameter.is_lazy(target)


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in dict.fromkeys(names))


def _agree(wrapper: nn.Module, errors: list[str]) -> None:
    """Raise on every rank if any of them cannot load; writing may need all of them."""
    hooks = hooks_of(wrapper)
    assert hooks is not None  # it is a wrapper
    mesh_info = hooks.units[0].mesh_info
    failed = dist.get_rank() + 1 if errors else 0
    for axis in (mesh_info.shard, mesh_info.replicate):
        failed = max(max(row) for row in Agreement.exchanged([failed], axis, hooks.device))
    if not failed:
        return
    if not errors:
        errors = [f"rank {failed - 1} found errors in what it was given; see what it raised."]
    lines = "\n\t".join(errors)
    raise CheckpointError(
        f"Error(s) in loading state_dict for {type(wrapper).__name__}; nothing was loaded:"
        f"\n\t{lines}\nLoad the state dict of this model, or with strict=False what fits of it."
    )
