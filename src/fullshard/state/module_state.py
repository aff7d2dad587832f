"""`state_dict` and `load_state_dict` of wrapped models, in the form that their settings ask for.

Saving: hooks on every wrapper convert the entries that `nn.Module.state_dict` found, which are
slices. Each wrapper is gathered when its turn comes and freed before the next one, so that only
one unit at a time is whole beside the result.

Loading: the outermost wrapper takes the entries of all parameters below it, checks everything, and
only then writes this rank's slices. An entry may be a whole tensor, a DTensor or a ShardedTensor,
whatever the settings are. What is left in the dict (buffers, ignored parameters) `nn.Module` loads
as usual; it misses the parameters of wrappers, which is not reported.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard._torch import NormBase
from fullshard.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard.comm.agreement import Agreement
from fullshard.errors import CheckpointError, LifecycleError
from fullshard.layout.split import Box
from fullshard.runtime.hooks import hooks_of
from fullshard.runtime.names import WRAPPED, clean_name
from fullshard.state.shards import (
    FlatLane,
    StateForm,
    StateValue,
    borrowed_lanes_of,
    full_tensor_of,
    is_sharded,
    lanes_of,
    shape_of,
    sharded_tensor,
    wrapper_mesh,
    wrappers_of,
)
from fullshard.state.summon import is_first_rank, is_summoned
from fullshard.unit.flat_param import flat_name

Entries = dict[str, Any]

_SETTINGS = "_fullshard_state_settings"
_STRICT = "_fullshard_loads_strictly"
_LOAD = "_fullshard_load"
_CHECKPOINTED = "_checkpoint_wrapped_module"


def install_state_dict_hooks(wrapper: nn.Module) -> None:
    """Let the state dict of a wrapper, and of every module around it, follow its settings."""
    wrapper.register_state_dict_pre_hook(_before_saving)
    wrapper.register_state_dict_post_hook(_after_saving)
    wrapper.register_load_state_dict_pre_hook(_before_loading)
    wrapper.register_load_state_dict_post_hook(_after_loading)


# Settings

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}

_DEFAULT = StateDictSettings(
    StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
)


def settings_of(module: nn.Module) -> StateDictSettings:
    """The settings of all wrappers at or below a module, which must have the same."""
    found = {_own_settings(wrapper) for wrapper in wrappers_of(module)}
    if len(found) > 1:
        raise LifecycleError(
            f"{type(module).__name__}: all wrappers below it must have the same state-dict type, "
            f"found {sorted(str(each) for each in found)}; call set_state_dict_type on the root."
        )
    return found.pop() if found else _DEFAULT


def set_settings(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Change the settings of all wrappers at or below a module; returns the ones before."""
    if state_dict_type not in _CONFIGS:
        raise LifecycleError(
            f"state_dict_type: one of {[str(each) for each in StateDictType]} is expected, found "
            f"{state_dict_type!r}; import StateDictType from fullshard."
        )
    before = settings_of(module)
    config_cls, optim_config_cls = _CONFIGS[state_dict_type]
    config = config_cls() if state_dict_config is None else state_dict_config
    optim_config = (
        optim_config_cls() if optim_state_dict_config is None else optim_state_dict_config
    )
    for given, wanted in ((config, config_cls), (optim_config, optim_config_cls)):
        if type(given) is not wanted:
            raise LifecycleError(
                f"state_dict_type: {state_dict_type} goes with a {wanted.__name__}, found "
                f"{type(given).__name__}; pass a {wanted.__name__}."
            )
    settings = StateDictSettings(state_dict_type, config, optim_config)
    for wrapper in wrappers_of(module):
        wrapper.__dict__[_SETTINGS] = _settings_for(wrapper, settings)
    return before


def _settings_for(wrapper: nn.Module, settings: StateDictSettings) -> StateDictSettings:
    """With a mesh, sharded tensors are DTensors."""
    config, optim_config = settings.state_dict_config, settings.optim_state_dict_config
    if wrapper.__dict__.get("_device_mesh") is not None:
        if isinstance(config, ShardedStateDictConfig):
            config = replace(config, _use_dtensor=True)
        if isinstance(optim_config, ShardedOptimStateDictConfig):
            optim_config = replace(optim_config, _use_dtensor=True)
    return StateDictSettings(settings.state_dict_type, config, optim_config)


@contextmanager
def settings_scope(module: nn.Module, *given: Any) -> Iterator[None]:
    """Change the settings inside a scope; each wrapper gets its own ones back at the end."""
    before = [(wrapper, _own_settings(wrapper)) for wrapper in wrappers_of(module)]
    try:
        set_settings(module, *given)
        yield
    finally:
        for wrapper, settings in before:
            wrapper.__dict__[_SETTINGS] = settings


def _own_settings(wrapper: nn.Module) -> StateDictSettings:
    found = wrapper.__dict__.get(_SETTINGS)
    return found if isinstance(found, StateDictSettings) else _DEFAULT


def _form_of(settings: StateDictSettings) -> StateForm:
    config = settings.state_dict_config
    is_sharded = settings.state_dict_type is StateDictType.SHARDED_STATE_DICT
    return StateForm(is_sharded, getattr(config, "_use_dtensor", False), config.offload_to_cpu)


# Saving


def _before_saving(wrapper: nn.Module, prefix: str, keep_vars: bool) -> None:
    wanted = _own_settings(wrapper).state_dict_type
    if wanted is StateDictType.FULL_STATE_DICT:
        return
    lanes = lanes_of(wrapper, recurse=False)
    if wanted is StateDictType.LOCAL_STATE_DICT and wrapper.__dict__.get("_device_mesh"):
        raise LifecycleError(
            f"{clean_name(prefix) or 'model'}: LOCAL_STATE_DICT needs a wrapper without "
            "device_mesh, found one; use SHARDED_STATE_DICT, which holds DTensors."
        )
    if not all(lane.is_sharded for lane in lanes):
        warnings.warn(
            f"{clean_name(prefix) or 'model'}: parameters are not sharded, so the state dict holds "
            f"them whole and not as {wanted.name} asks.",
            stacklevel=2,
        )


@torch.no_grad()
def _after_saving(wrapper: nn.Module, state: Entries, prefix: str, local_metadata: Any) -> None:
    settings = _own_settings(wrapper)
    config = settings.state_dict_config
    _clean_keys(state, prefix)
    rank0_only = isinstance(config, FullStateDictConfig) and config.rank0_only
    is_kept = not rank0_only or is_first_rank(wrapper)
    _convert_buffers(wrapper, state, prefix, is_kept=is_kept, to_cpu=config.offload_to_cpu)
    before = set(state)
    added: set[str] = set()
    own = lanes_of(wrapper, recurse=False)
    for lane in [*own, *borrowed_lanes_of(wrapper)]:
        names = [name for shard in lane.shards for name in shard.names]
        names += [flat_name(lane.index)] if lane in own else []
        values: Entries = {}
        if is_summoned(lane.wrapper):
            values = _summoned_values(lane, state, prefix)
        elif settings.state_dict_type is StateDictType.LOCAL_STATE_DICT and lane.is_sharded:
            if lane in own:
                values = {flat_name(lane.index): _local_value(lane, config.offload_to_cpu)}
        else:
            full = lane.gather(lane.shard_buffer())
            for shard in lane.shards if is_kept else ():
                value = _form_of(settings).copy(shard.view_of(full), lane)
                values.update(dict.fromkeys(shard.names, value))
        for name in names:
            if name not in values:
                state.pop(prefix + name, None)
        state.update({prefix + name: value for name, value in values.items()})
        added.update(prefix + name for name in values)
    if not added <= before:
        shards = sorted((s for lane in own for s in lane.shards), key=lambda shard: shard.index)
        names = [prefix + name for shard in shards for name in shard.names]
        ranks = {name: rank for rank, name in enumerate(names)}
        _sort_entries(wrapper, state, prefix, {key: ranks.get(key, 0) for key in added})


def _summoned_values(lane: FlatLane, state: Entries, prefix: str) -> Entries:
    """Summoned parameters with what was written to them; those on other ranks as they are."""
    form = _form_of(_own_settings(lane.wrapper))
    values: Entries = {}
    for shard in lane.shards:
        for name in shard.names:
            found = state.get(prefix + name)
            if isinstance(found, torch.Tensor):
                is_whole = found.shape == shard.shape
                values[name] = form.copy(found, lane) if is_whole else found.clone()
    return values


def _local_value(lane: FlatLane, to_cpu: bool) -> StateValue:
    """This rank's slice as it is in memory, without the padding of the last ranks."""
    starts = range(0, max(lane.numel, 1), max(lane.shard_numel, 1))
    boxes = [Box((start,), (min(lane.shard_numel, lane.numel - start),)) for start in starts]
    axis = lane.mesh_info.shard
    local = lane.shard_buffer()[: boxes[axis.rank].numel if axis.rank < len(boxes) else 0]
    return sharded_tensor(local.cpu() if to_cpu else local, boxes, torch.Size([lane.numel]), axis)


def _convert_buffers(
    wrapper: nn.Module, state: Entries, prefix: str, *, is_kept: bool, to_cpu: bool
) -> None:
    """Give buffers the dtype that they had before `buffer_dtype` took effect."""
    dtypes: dict[str, torch.dtype] = wrapper.__dict__.get("_buffer_dtypes", {})
    # Not wrapper.named_buffers: its names depend on whether parameters are summoned.
    for found, _ in nn.Module.named_buffers(wrapper, remove_duplicate=False):
        name = clean_name(found)
        key = prefix + name
        if key not in state:
            continue  # not persistent
        buffer = state.pop(key) if not is_kept else state[key]
        if is_kept:
            buffer = buffer.to(dtype=dtypes.get(name, buffer.dtype))
            state[key] = buffer.cpu() if to_cpu and not isinstance(buffer, DTensor) else buffer


def _clean_keys(state: Entries, prefix: str) -> None:
    """Take the names of wrappers out of the keys; the order stays."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[prefix + clean_name(key[len(prefix) :])] = state.pop(key)
    if WRAPPED in prefix:
        return  # the outermost wrapper does the rest
    metadata: dict[str, Any] = getattr(state, "_metadata", {})
    for key in list(metadata):
        # Versions of modules are found under both names: by wrapped models and by others.
        metadata.setdefault(clean_name(key), metadata[key])


def _sort_entries(wrapper: nn.Module, state: Entries, prefix: str, added: dict[str, int]) -> None:
    """Sort entries as they are in a model that is not wrapped.

    In each module those that were `added`, by their numbers, come before the others.
    """
    owners: dict[str, int] = {}
    for index, (name, _) in enumerate(nn.Module.named_modules(wrapper, remove_duplicate=False)):
        owners.setdefault(clean_name(name), index)

    def position(key: str) -> tuple[int, bool, int]:
        owner = key[len(prefix) :].rpartition(".")[0]
        while owner and owner not in owners:
            owner = owner.rpartition(".")[0]
        return owners.get(owner, 0), key not in added, added.get(key, 0)

    for key in sorted((key for key in state if key.startswith(prefix)), key=position):
        state[key] = state.pop(key)


# Loading


@contextmanager
def strict_loading(wrapper: nn.Module, strict: bool) -> Iterator[None]:
    """Inside, a load of this wrapper refuses missing and unexpected entries before it writes.

    `nn.Module` does not tell whether a load is strict before it is over.
    """
    wrapper.__dict__[_STRICT] = strict
    try:
        yield
    finally:
        del wrapper.__dict__[_STRICT]


@dataclass(slots=True)
class _Load:
    """A load in progress below `wrapper`.

    `missing` is the list in which `nn.Module` reports missing entries, by which the load is
    recognized; `taken` are the names that it will report although they were loaded.
    """

    wrapper: nn.Module
    prefix: str
    missing: list[str]
    taken: set[str]


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
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [
            clean_name(name) if name.startswith(load.prefix) else name
            for name in names
            if name not in load.taken
        ]


def _load_below(wrapper: nn.Module, state: Entries, prefix: str, missing: list[str]) -> None:
    """Check all entries below an outermost wrapper, and write those of its parameters."""
    expected = _Expected(wrapper)
    expected.run_hooks(state, prefix)
    keys = {clean_name(key[len(prefix) :]): key for key in state if key.startswith(prefix)}
    entries = {name: state[key] for name, key in keys.items()}
    problems = expected.check(entries)
    _raise_together(wrapper, problems.errors(strict=wrapper.__dict__.get(_STRICT, False)))
    own = sorted(entries.keys() & expected.parameter_names)
    if is_summoned(wrapper):
        # The parameters are registered in their full shape: nn.Module can load them itself.
        for name in own:
            state[keys[name]] = full_tensor_of(entries[name])
        wrapper.__dict__[_LOAD] = _Load(wrapper, prefix, missing, set())
        return
    for name in sorted(entries.keys() & expected.others.keys()):
        path, target = expected.others[name]
        value = state.pop(keys[name])
        if is_sharded(value) and not isinstance(target, DTensor):
            value = full_tensor_of(value)
        state[prefix + path] = value
    for lane in expected.lanes:
        _write(lane, entries, expected.flat_names.get(lane))
    for name in own:
        del state[keys[name]]
    lost = [name for name in problems.missing if name in expected.parameter_names]
    missing.extend(clean_name(prefix) + name for name in lost)
    load = _Load(wrapper, prefix, missing, {prefix + name for name in expected.registered_names})
    for inner in wrappers_of(wrapper):
        inner.__dict__[_LOAD] = load


def _write(lane: FlatLane, entries: Entries, flat: str | None) -> None:
    """Write this rank's slices of one lane; a collective where entries are sharded."""
    buffer = lane.shard_buffer()
    if flat is not None and flat in entries:
        full = full_tensor_of(entries[flat]).reshape(-1)
        start = lane.mesh_info.shard.rank * lane.shard_numel
        mine = full[start : start + lane.shard_numel]
        buffer[: mine.numel()].copy_(mine)
        return
    for shard in lane.shards:
        name = next((name for name in shard.names if name in entries), None)
        if name is not None:
            shard.slice_of(buffer).copy_(shard.cut(full_tensor_of(entries[name])))


@dataclass(slots=True)
class _Problems:
    """What is wrong with a state dict. Only a strict load minds missing and unexpected entries."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)

    def errors(self, *, strict: bool) -> list[str]:
        lines = []
        if strict and self.missing:
            lines.append(f"Missing key(s) in state_dict: {_quoted(self.missing)}.")
        if strict and self.unexpected:
            lines.append(f"Unexpected key(s) in state_dict: {_quoted(self.unexpected)}.")
        return lines + self.unfit


class _Expected:
    """What a state dict of a wrapper is expected to hold, by clean names.

    Attributes:
        lanes: The lanes whose parameters are loaded.
        flat_names: What the flat parameter of a lane is called, with LOCAL_STATE_DICT.
        parameter_names: All names of the lanes' parameters.
        registered_names: Where `nn.Module` looks for those of them that are registered.
        others: Everything else: the path at which `nn.Module` looks for it, and what is there.
        optional: Names that may be missing.
        lenient: Modules that load in their own way, which are not checked.
        hooked: Modules with hooks of their own: their path, as keys have it and in full.
    """

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
        shards = [shard for lane in self.lanes for shard in lane.shards]
        self.parameter_names = {name for shard in shards for name in shard.names}
        self.parameter_names.update(self.flat_names.values())
        self.registered_names: set[str] = set()
        self.others: dict[str, tuple[str, Any]] = {}
        self.optional: set[str] = set()
        self.lenient: list[str] = []
        self.hooked: list[tuple[str, str, nn.Module]] = []
        managed = {(place.module, place.name) for shard in shards for place in shard.locations}
        flat_params = {lane.flat_param for lane in self.lanes}
        for path, module in modules:
            before = f"{path}." if path else ""
            found: Entries = {}
            for name, param in module._parameters.items():
                if (module, name) in managed or (param is not None and param in flat_params):
                    self.registered_names.add(before + name)
                elif param is not None:
                    found[name] = param
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    found[name] = buffer
            self._add_others(path, before, module, found)

    def _add_others(self, path: str, before: str, module: nn.Module, found: Entries) -> None:
        if isinstance(module, NormBase):
            # Older state dicts have no such counter, and nn.Module accepts them.
            self.optional.add(clean_name(f"{before}num_batches_tracked"))
        elif type(module)._load_from_state_dict is not nn.Module._load_from_state_dict:
            self.lenient.append(clean_name(before))
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found["_extra_state"] = None
        # Wrappers and checkpoint wrappers put their names into the keys when their turn comes.
        seen_as = before.replace(f"{WRAPPED}.", "").replace(f"{_CHECKPOINTED}.", "")
        is_wrapper = hooks_of(module) is not None or _CHECKPOINTED in module._modules
        if module._load_state_dict_pre_hooks and not is_wrapper:
            self.hooked.append((seen_as, path, module))
        for name, target in found.items():
            self.others[clean_name(before + name)] = (seen_as + name, target)

    def run_hooks(self, state: Entries, prefix: str) -> None:
        """Let modules rename entries of an older form before those of parameters are taken.

        nn.Module will call these hooks again, as it does for state dicts of the present form.
        """
        metadata: dict[str, Any] = getattr(state, "_metadata", None) or {}
        for seen_as, path, module in self.hooked:
            own = metadata.get(prefix + path, metadata.get(clean_name(prefix + path), {}))
            for hook in module._load_state_dict_pre_hooks.values():
                hook(state, prefix + seen_as, own, True, [], [], [])

    def check(self, entries: Entries) -> _Problems:
        problems = _Problems()
        for lane in self.lanes:
            flat = self.flat_names.get(lane)
            if flat is not None and flat in entries:
                problems.unfit += _unfit(flat, entries[flat], torch.Size([lane.numel]))
                continue
            for shard in lane.shards:
                found = [name for name in shard.names if name in entries]
                problems.missing += [] if found else shard.names
                for name in found:
                    problems.unfit += _unfit(name, entries[name], shard.shape)
        for name, (_, target) in self.others.items():
            if self._is_lenient(name):
                continue
            if name not in entries:
                problems.missing += [] if name in self.optional else [name]
            elif isinstance(target, torch.Tensor) and not torch.nn.parameter.is_lazy(target):
                problems.unfit += _unfit(name, entries[name], target.shape)
        known = self.parameter_names | self.others.keys()
        problems.unexpected = [n for n in entries if n not in known and not self._is_lenient(n)]
        return problems

    def _is_lenient(self, name: str) -> bool:
        return any(name.startswith(module) for module in self.lenient)


def _unfit(name: str, value: Any, shape: torch.Size) -> list[str]:
    if not torch.overrides.is_tensor_like(value):
        return [f"{name}: a tensor is expected, found {type(value).__name__}."]
    found = shape_of(value)
    # A scalar used to be stored with one dim; nn.Module takes both.
    if found == shape or (not shape and found == torch.Size([1])):
        return []
    return [f"size mismatch for {name}: {list(shape)} is expected, found {list(found)}."]


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in dict.fromkeys(names))


def _raise_together(wrapper: nn.Module, errors: list[str]) -> None:
    """Raise on every rank if any of them cannot load, since writing may need all of them."""
    mesh_info = wrapper_mesh(wrapper)
    hooks = hooks_of(wrapper)
    assert hooks is not None  # it is a wrapper
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
