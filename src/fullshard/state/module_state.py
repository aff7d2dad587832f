"""`state_dict` and `load_state_dict` of wrapped models, in the form that their settings ask for.

Saving: a hook on every wrapper converts the entries that `nn.Module.state_dict` found, which are
slices. Each wrapper is gathered when its turn comes and freed before the next one, so that only
one unit at a time is whole, besides the result.

Loading: the outermost wrapper first lets `nn.Module` do a dry run of the load below it, with
parameters in their full shapes, to find what is missing, unexpected or of another shape. If
everything fits on all ranks, this rank's slices are written. An entry may be a whole tensor, a
DTensor or a ShardedTensor, whatever the settings are. Buffers and ignored parameters stay in the
dict, and `nn.Module` loads them as usual. It finds the parameters of wrappers missing, which is not
reported.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import is_tensor_like

from fullshard._torch import ShardedTensor, to_local
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
    own_value,
)
from fullshard.errors import CheckpointError, LifecycleError, MisuseError
from fullshard.layout.split import Box
from fullshard.runtime.names import WRAPPED, clean_name
from fullshard.state.shards import (
    FlatLane,
    FlatShard,
    borrowed_lanes_of,
    exchange,
    lanes_of,
    tp_groups_of,
    units_of,
    walk,
    wrappers_of,
)
from fullshard.state.summon import is_first_rank
from fullshard.state.values import (
    StateForm,
    StateValue,
    full_tensor_of,
    is_sharded,
    on_meta,
    sharded_tensor,
)
from fullshard.unit.param import ParamLocation

Entries = dict[str, Any]

_SETTINGS = "_fullshard_state_settings"
_STRICT = "_fullshard_loads_strictly"
_LOADED = "_fullshard_loaded_names"
_CHECKPOINTED = "_checkpoint_wrapped_module."
_COMPILED = "_orig_mod"


def install_state_dict_hooks(wrapper: nn.Module) -> None:
    """Let the state dict of a wrapper, and of every module around it, follow its settings."""
    wrapper.register_state_dict_post_hook(_after_saving)
    wrapper.register_load_state_dict_pre_hook(_before_loading)
    wrapper.register_load_state_dict_post_hook(_after_loading)


# Settings

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def _default() -> StateDictSettings:
    return StateDictSettings(
        StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
    )


def settings_of(module: nn.Module) -> StateDictSettings:
    """The settings of all wrappers at or below a module, which must be the same."""
    found = [own_settings(wrapper) for wrapper in wrappers_of(module)] or [_default()]
    if any(each != found[0] for each in found):
        raise MisuseError(
            f"{type(module).__name__}: All FSDP modules must have the same state dict settings, "
            f"not {sorted({str(each) for each in found})}; call set_state_dict_type on the root."
        )
    return found[0]


def own_settings(wrapper: nn.Module) -> StateDictSettings:
    """The settings of one wrapper."""
    settings: StateDictSettings = wrapper.__dict__.setdefault(_SETTINGS, _default())
    return settings


def set_settings(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Change the settings of all wrappers at or below a module; return the previous ones."""
    state_dict_type = own_value(StateDictType, state_dict_type)
    if state_dict_type not in _CONFIGS:
        raise LifecycleError(
            f"state_dict_type must be one of {[str(each) for each in StateDictType]}, not "
            f"{state_dict_type!r}; import StateDictType from fullshard."
        )
    before = settings_of(module)
    given = (state_dict_config, optim_state_dict_config)
    configs: list[Any] = []
    names = ("state_dict_config", "optim_state_dict_config")
    for name, cls, config in zip(names, _CONFIGS[state_dict_type], given, strict=True):
        configs.append(cls() if config is None else own_value(cls, config))
        if type(configs[-1]) is not cls:
            raise LifecycleError(
                f"{state_dict_type}: Expected {name} of type {cls} but got {type(config)}; "
                f"pass a {cls.__name__}."
            )
    is_sharded = state_dict_type is StateDictType.SHARDED_STATE_DICT
    for wrapper in wrappers_of(module):
        if wrapper.__dict__.get("_device_mesh") is not None and is_sharded:
            for each in configs:
                each._use_dtensor = True
        wrapper.__dict__[_SETTINGS] = StateDictSettings(state_dict_type, *configs)
    return before


@contextmanager
def settings_scope(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Change the settings inside a scope; each wrapper gets its own back at the end."""
    before = [(wrapper, own_settings(wrapper)) for wrapper in wrappers_of(module)]
    try:
        set_settings(module, state_dict_type, state_dict_config, optim_state_dict_config)
        yield
    finally:
        for wrapper, settings in before:
            wrapper.__dict__[_SETTINGS] = settings


def require_kind(wrapper: nn.Module, name: str) -> None:
    """Raise if a wrapper has no state dicts of the kind that was asked for."""
    is_local = own_settings(wrapper).state_dict_type is StateDictType.LOCAL_STATE_DICT
    if is_local and wrapper.__dict__.get("_device_mesh") is not None:
        raise LifecycleError(
            f"{name}: DeviceMesh is not compatible with LOCAL_STATE_DICT, and this wrapper has "
            "one; use SHARDED_STATE_DICT, which holds DTensors."
        )


# Saving


@torch.no_grad()
def _after_saving(wrapper: nn.Module, state: Entries, prefix: str, local_metadata: Any) -> None:
    settings, name = own_settings(wrapper), clean_name(prefix) or "model"
    kind, config = settings.state_dict_type, settings.state_dict_config
    form, is_local = StateForm.of(config), kind is StateDictType.LOCAL_STATE_DICT
    own = lanes_of(wrapper, recurse=False)
    require_kind(wrapper, name)
    if (is_local or form.is_sharded) and not all(lane.is_sharded for lane in own):
        warnings.warn(
            f"{name}: When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be "
            f"returned; {kind.name} was asked for.",
            stacklevel=2,
        )
    for key in [key for key in state if key.startswith(prefix)]:
        state[prefix + clean_name(key[len(prefix) :])] = state.pop(key)
    rank0_only = isinstance(config, FullStateDictConfig) and config.rank0_only
    is_kept = not rank0_only or is_first_rank(wrapper)
    _convert_buffers(wrapper, state, prefix, is_kept=is_kept, to_cpu=form.to_cpu)
    for lane in [*own, *borrowed_lanes_of(wrapper)]:
        names = {name: shard for shard in lane.shards for name in shard.names}
        values: dict[str, StateValue] = {}
        if lane.unit.is_summoned:  # with what was written; other ranks have entries as they are
            for name in (name for name in names if prefix + name in state):
                found = state[prefix + name]
                is_whole = found.shape == names[name].shape
                whole = full_tensor_of(found)
                values[name] = form.copy(whole, names[name]) if is_whole else whole.clone()
        elif is_local and lane.is_sharded:
            values = {lane.name: _local_value(lane, form.to_cpu)} if lane in own else {}
        else:
            full = lane.gather(lane.shard_buffer())
            for shard in lane.shards if is_kept else ():
                whole = full_tensor_of(shard.view_of(full))
                values |= dict.fromkeys(shard.names, form.copy(whole, shard))
        for name in [lane.name, *names] if lane in own else names:
            if name in values:
                state[prefix + name] = values[name]
            else:
                state.pop(prefix + name, None)
    if WRAPPED not in prefix:
        _arrange(wrapper, state, prefix)


def _convert_buffers(
    wrapper: nn.Module, state: Entries, prefix: str, *, is_kept: bool, to_cpu: bool
) -> None:
    """Give buffers the dtype that they had before `buffer_dtype` took effect."""
    dtypes: dict[str, torch.dtype] = wrapper.__dict__.get("_buffer_dtypes", {})
    # Not wrapper.named_buffers: its names depend on whether parameters are summoned.
    for found, _ in nn.Module.named_buffers(wrapper, remove_duplicate=False):
        name = clean_name(found)
        buffer = state.get(prefix + name)
        if buffer is None:  # not persistent
            continue
        if not is_kept:
            del state[prefix + name]
            continue
        buffer = buffer.to(dtype=dtypes.get(name, buffer.dtype))
        is_moved = to_cpu and not isinstance(buffer, DTensor)
        state[prefix + name] = buffer.cpu() if is_moved else buffer


def _local_value(lane: FlatLane, to_cpu: bool) -> StateValue:
    """This rank's slice as it is in memory, without the padding of the last ranks."""
    starts = range(0, max(lane.numel, 1), max(lane.shard_numel, 1))
    boxes = [Box((start,), (min(lane.shard_numel, lane.numel - start),)) for start in starts]
    axis = lane.mesh_info.shard
    local = lane.shard_buffer()[: boxes[axis.rank].numel if axis.rank < len(boxes) else 0]
    return sharded_tensor(local.cpu() if to_cpu else local, boxes, torch.Size([lane.numel]), axis)


def _arrange(wrapper: nn.Module, state: Entries, prefix: str) -> None:
    """Sort the entries of a model, and name its modules, as if it were not wrapped."""
    names = [name for name, _ in walk(wrapper, [*lanes_of(wrapper), *borrowed_lanes_of(wrapper)])]
    order = {prefix + name: index for index, name in reversed(list(enumerate(names)))}
    places: dict[str, int] = {}
    place = 0
    for key in (key for key in state if key.startswith(prefix)):
        place = places[key] = order.get(key, place)  # an unknown entry stays after its neighbor
    for key in sorted(places, key=places.__getitem__):
        state[key] = state.pop(key)
    metadata: dict[str, Any] = getattr(state, "_metadata", {})
    for key in list(metadata):
        # Keep versions of modules under both names: wrapped models look up one, others the other.
        metadata.setdefault(clean_name(key), metadata[key])


# Loading


@contextmanager
def strict_loading(wrapper: nn.Module, strict: bool) -> Iterator[None]:
    """Make a strict load of this wrapper refuse missing and unexpected entries before it writes.

    `nn.Module` does not tell whether a load is strict until it is over.
    """
    wrapper.__dict__[_STRICT] = strict
    try:
        yield
    finally:
        del wrapper.__dict__[_STRICT]


def _before_loading(
    wrapper: nn.Module, state: Entries, prefix: str, metadata: Any, strict: bool, *lists: list[str]
) -> None:
    _insert(state, prefix, WRAPPED)
    if WRAPPED not in prefix:  # the outermost wrapper loads for all below it
        with torch.no_grad():
            _load_below(wrapper, state, f"{prefix}{WRAPPED}.", lists[0])


def _insert(state: Entries, prefix: str, name: str) -> None:
    """Insert the name of a module into the keys of its entries that do not have it yet."""
    inner = f"{prefix}{name}."
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(inner)]:
        state[inner + key[len(prefix) :]] = state.pop(key)


def _after_loading(wrapper: nn.Module, incompatible: Any) -> None:
    loaded: set[str] | None = wrapper.__dict__.pop(_LOADED, None)
    if loaded is not None:
        for names in (incompatible.missing_keys, incompatible.unexpected_keys):
            names[:] = [clean_name(name) for name in names if name not in loaded]


def _load_below(wrapper: nn.Module, state: Entries, prefix: str, missing: list[str]) -> None:
    """Write the parameters of all wrappers at or below one, and leave the rest to `nn.Module`."""
    lanes = [*lanes_of(wrapper), *borrowed_lanes_of(wrapper)]
    outer = clean_name(prefix)
    flat = {
        outer + n for n, found in walk(wrapper, lanes) if isinstance(found, FlatLane | FlatShard)
    }
    stand_ins: dict[Any, Any] = {}
    for key, value in state.items():
        # A ShardedTensor warns when nn.Module asks for its shape, and a lazy value would be loaded.
        is_lazy = is_tensor_like(value) and not isinstance(value, torch.Tensor)
        if is_lazy or isinstance(value, ShardedTensor):
            state[key] = nn.Parameter(on_meta(value), requires_grad=False)
            stand_ins[state[key]] = value
        elif isinstance(value, nn.Parameter):
            state[key] = value.detach()  # or nn.Module would change its requires_grad
    dry_run = _DryRun(wrapper, state, prefix, lanes)
    values = {k: stand_ins.get(v, v) for k, v in dry_run.values.items()}
    lost = [
        outer + name
        for lane in lanes
        for shard in lane.shards
        for name in shard.names
        if lane not in values and shard not in values
    ]
    others = [name for name in map(clean_name, dry_run.missing) if name not in flat]
    _raise_together(wrapper, lanes, lost + others, dry_run)
    for lane in lanes:
        _write(lane, values)
    missing += lost
    inside = wrapper.get_submodule(WRAPPED)
    targets: Entries = dict(nn.Module.named_parameters(inside, prefix[:-1], remove_duplicate=False))
    wrapper.__dict__[_LOADED] = {name for name in targets if clean_name(name) in flat}
    targets |= nn.Module.named_buffers(inside, prefix[:-1], remove_duplicate=False)
    for key in sorted(key for key in state if key.startswith(prefix)):
        value = state.pop(key)
        if clean_name(key) in flat:
            continue
        value = stand_ins.get(value, value) if isinstance(value, nn.Parameter) else value
        if is_sharded(value) and key in targets and not isinstance(targets[key], DTensor):
            value = full_tensor_of(value)
        # Checkpoint wrappers put their names into the keys when their turn comes.
        state[prefix + key[len(prefix) :].replace(_CHECKPOINTED, "")] = value


class _DryRun:
    """A load below a wrapper that changes nothing and keeps only what it found.

    `values` holds the entries that it found, each for one parameter or for a whole lane.
    """

    def __init__(
        self, wrapper: nn.Module, state: Entries, prefix: str, lanes: Sequence[FlatLane]
    ) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.errors: list[str] = []
        self.values: dict[FlatLane | FlatShard, torch.Tensor] = {}
        self._state = state
        self._metadata: dict[str, Any] = getattr(state, "_metadata", None) or {}
        inside = wrapper.get_submodule(WRAPPED)
        places: dict[FlatLane | FlatShard, Sequence[ParamLocation]] = {}
        for lane in lanes:
            owner = lane.wrapper.get_submodule(WRAPPED)
            places[lane] = [ParamLocation(owner, lane.name)]
            places |= {shard: shard.param.locations for shard in lane.shards}
        modules = [*inside.modules(), *(p.module for each in places.values() for p in each)]
        with _unchanged(modules):
            shown: dict[FlatLane | FlatShard, nn.Parameter] = {}
            for found, where in places.items():
                shape = found.shape if isinstance(found, FlatShard) else (found.numel,)
                shown[found] = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
                for place in where:
                    place.module._parameters[place.name] = shown[found]
            self._load(inside, prefix)
            for found, where in places.items():
                for place in where:
                    value = place.module._parameters[place.name]
                    if value is not None and value is not shown[found]:
                        self.values.setdefault(found, value)

    def _load(self, module: nn.Module, path: str) -> None:
        """Do what `nn.Module.load_state_dict` does, by assigning entries."""
        if _COMPILED in module._modules:
            _insert(self._state, path, _COMPILED)
        metadata = self._metadata
        known = metadata.get(path[:-1], metadata.get(clean_name(path[:-1]), {}))
        module._load_from_state_dict(
            self._state,
            path,
            {**known, "assign_to_params_buffers": True},
            True,
            self.missing,
            self.unexpected,
            self.errors,
        )
        for name, child in module._modules.items():
            if child is not None:
                self._load(child, f"{path}{name}.")


@contextmanager
def _unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo, at the end of the scope, all changes to the tensors and attributes of modules."""
    kept = [
        (live, dict(live))
        for module in dict.fromkeys(modules)
        for live in (module.__dict__, module._parameters, module._buffers)
    ]
    is_swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(is_swapping)
        for live, before in kept:
            live.clear()
            live.update(before)


def _raise_together(
    wrapper: nn.Module, lanes: Sequence[FlatLane], missing: list[str], found: _DryRun
) -> None:
    """Raise on every rank if any of them cannot load, since writing may need all of them."""
    lines = [clean_name(line) for line in found.errors]
    if wrapper.__dict__.get(_STRICT, False):
        for kind, names in (("Missing", missing), ("Unexpected", found.unexpected)):
            quoted = ", ".join(f'"{clean_name(name)}"' for name in dict.fromkeys(names))
            lines += [f"{kind} key(s) in state_dict: {quoted}."] if names else []
    problem = None
    if lines:
        text = "\n\t".join(lines)
        problem = CheckpointError(
            f"Error(s) in loading state_dict for {type(wrapper).__name__}; nothing was loaded:"
            f"\n\t{text}\nLoad the state dict of this model, or with strict=False what fits of it."
        )
    mesh_info = units_of(wrapper)[0].mesh_info
    axes = [axis for axis in (mesh_info.shard, mesh_info.replicate) if not axis.is_single]
    groups = dict.fromkeys([axis.group for axis in axes] + tp_groups_of(lanes))
    exchange(list(groups), None, problem)


def _write(lane: FlatLane, values: dict[FlatLane | FlatShard, Any]) -> None:
    """Write this rank's slices of one lane; a collective where entries are sharded."""
    buffer = lane.shard_buffer()
    full = full_tensor_of(values[lane]).reshape(-1) if lane in values else None
    for shard in lane.shards:
        if full is None and shard not in values:
            continue
        value = full_tensor_of(values[shard]) if full is None else shard.view_of(full)
        place = shard.param.locations[0]
        registered = place.module._parameters.get(place.name)
        if lane.unit.is_summoned and registered is not None and registered.shape == shard.shape:
            to_local(registered).copy_(shard.local_of(value))  # it is written back from there
        else:
            shard.slice_of(buffer).copy_(shard.cut(value))
