"""What `state_dict` of a wrapped model holds.

Hooks on every wrapper turn the entries that `nn.Module.state_dict` found, which are slices, into
what the wrapper's settings ask for. A wrapper is gathered when its turn comes and let go of
before the next, so that no more than one unit is whole beside the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.api import FullStateDictConfig, ShardedStateDictConfig, StateDictType
from fullshard.errors import LifecycleError
from fullshard.runtime.hooks import hooks_of
from fullshard.runtime.names import WRAPPED, clean_name
from fullshard.state.lanes import StateLane, borrowed_lanes_of, lanes_of
from fullshard.state.settings import own_settings
from fullshard.state.sharded import State, as_sharded, own_copy, sharded_tensor
from fullshard.state.summon import is_first_rank, is_summoned
from fullshard.unit.flat_param import FlatSlice, flat_name

Entries = dict[str, Any]


def install_state_hooks(wrapper: nn.Module) -> None:
    """Let the state dict of a wrapper, and of every module around it, follow its settings."""
    wrapper.register_state_dict_pre_hook(_check_settings)
    wrapper.register_state_dict_post_hook(_convert)


def _check_settings(wrapper: nn.Module, prefix: str, keep_vars: bool) -> None:
    wanted = own_settings(wrapper).state_dict_type
    if wanted is StateDictType.FULL_STATE_DICT:
        return
    lanes = _own_lanes(wrapper)
    if wanted is StateDictType.LOCAL_STATE_DICT and wrapper.__dict__.get("_device_mesh"):
        raise LifecycleError(
            f"{clean_name(prefix) or 'model'}: LOCAL_STATE_DICT needs a wrapper without "
            "device_mesh, found one; use SHARDED_STATE_DICT, which holds DTensors."
        )
    if any(lane.num_ranks == 1 for lane in lanes):
        warnings.warn(
            f"{clean_name(prefix) or 'model'}: parameters are not sharded, so the state dict holds "
            f"them whole and not as {wanted.name} asks.",
            stacklevel=2,
        )


@torch.no_grad()
def _convert(wrapper: nn.Module, state: Entries, prefix: str, local_metadata: Any) -> None:
    settings = own_settings(wrapper)
    config = settings.state_dict_config
    _clean_keys(state, prefix)
    rank0_only = isinstance(config, FullStateDictConfig) and config.rank0_only
    is_kept = not rank0_only or is_first_rank(wrapper)
    _convert_buffers(wrapper, state, prefix, is_kept=is_kept, to_cpu=config.offload_to_cpu)
    before = set(state)
    added: set[str] = set()
    own = _own_lanes(wrapper)
    for lane in [*own, *borrowed_lanes_of(wrapper)]:
        values: Entries = {}
        if is_summoned(lane.wrapper):
            values = _summoned_values(lane, state, prefix)
        elif settings.state_dict_type is StateDictType.LOCAL_STATE_DICT and lane.num_ranks > 1:
            if lane in own:
                values = {flat_name(lane.index): _local_value(lane, config.offload_to_cpu)}
        else:
            values = _gathered_values(lane, wrapper, is_kept=is_kept)
        for name in _names_in_state(lane, with_flat=lane in own):
            if name not in values:
                state.pop(prefix + name, None)
        state.update({prefix + name: value for name, value in values.items()})
        added.update(prefix + name for name in values)
    if not added <= before:
        ranks = {prefix + name: index for index, name in enumerate(_ordered_names(wrapper))}
        _arrange(wrapper, state, prefix, {key: ranks.get(key, 0) for key in added})


def _own_lanes(wrapper: nn.Module) -> list[StateLane]:
    return lanes_of(wrapper, recurse=False)


def _names_in_state(lane: StateLane, *, with_flat: bool) -> Iterator[str]:
    """Everything that a lane may have put into a state dict."""
    if with_flat:
        yield flat_name(lane.index)
    for part in lane.parts:
        yield from part.names


def _ordered_names(wrapper: nn.Module) -> Iterator[str]:
    """Names of a wrapper's parameters in the order in which it found them."""
    hooks = hooks_of(wrapper)
    assert hooks is not None  # it is a wrapper
    parts = {part.member: part for lane in _own_lanes(wrapper) for part in lane.parts}
    for member in hooks.units[0].params:
        if isinstance(member, FlatSlice) and member in parts:
            yield from parts[member].names


def _gathered_values(lane: StateLane, wrapper: nn.Module, *, is_kept: bool) -> Entries:
    full = lane.gather(lane.segment())
    if not is_kept:
        return {}
    values: Entries = {}
    for part in lane.parts:
        value = _stored(part.of_full(full), lane, wrapper)
        values.update(dict.fromkeys(part.names, value))
    return values


def _summoned_values(lane: StateLane, state: Entries, prefix: str) -> Entries:
    """Parameters that are shown whole, with what was written to them, or else as they are."""
    values: Entries = {}
    for part in lane.parts:
        for name in part.names:
            found = state.get(prefix + name)
            if isinstance(found, torch.Tensor):
                is_whole = found.shape == part.shape
                value = _stored(found, lane, lane.wrapper) if is_whole else found.clone()
                values[name] = value
    return values


def _stored(full: torch.Tensor, lane: StateLane, wrapper: nn.Module) -> State:
    """A full parameter as its wrapper's settings want it, in memory of its own."""
    settings = own_settings(wrapper)
    config = settings.state_dict_config
    if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT and lane.num_ranks > 1:
        use_dtensor = isinstance(config, ShardedStateDictConfig) and config._use_dtensor
        return as_sharded(full, lane, use_dtensor=use_dtensor, to_cpu=config.offload_to_cpu)
    return own_copy(full, to_cpu=config.offload_to_cpu)


def _local_value(lane: StateLane, to_cpu: bool) -> State:
    """This rank's slice as it lies in memory, without what pads the last ranks."""
    numel = max((part.start + part.numel for part in lane.parts), default=0)
    starts = range(0, max(numel, 1), max(lane.segment_numel, 1))
    shapes = [(min(lane.segment_numel, numel - start),) for start in starts]
    rank = lane.mesh_info.shard.rank
    segment = lane.segment()
    local = segment[: shapes[rank][0]] if rank < len(shapes) else segment[:0]
    local = local.cpu() if to_cpu else local
    return sharded_tensor(local, shapes, starts, torch.Size([numel]), lane.mesh_info.shard)


def _convert_buffers(
    wrapper: nn.Module, state: Entries, prefix: str, *, is_kept: bool, to_cpu: bool
) -> None:
    """Buffers in the dtype that they had before `buffer_dtype` took effect."""
    dtypes: dict[str, torch.dtype] = wrapper.__dict__.get("_buffer_dtypes", {})
    # Not wrapper.named_buffers: its names depend on whether parameters are summoned.
    for found, _ in nn.Module.named_buffers(wrapper, remove_duplicate=False):
        name = clean_name(found)
        key = prefix + name
        if key not in state:
            continue  # not persistent
        if not is_kept:
            del state[key]
            continue
        buffer = state[key]
        buffer = buffer.to(dtype=dtypes.get(name, buffer.dtype))
        state[key] = buffer.cpu() if to_cpu and not isinstance(buffer, DTensor) else buffer


def _clean_keys(state: Entries, prefix: str) -> None:
    """Take the names of wrappers out of the keys; the order stays."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[prefix + clean_name(key[len(prefix) :])] = state.pop(key)
    if WRAPPED in prefix:
        return  # the rest is for the outermost wrapper to do
    metadata: dict[str, Any] = getattr(state, "_metadata", {})
    for key in list(metadata):
        # Versions of modules are found under both names: by wrapped models and by others.
        metadata.setdefault(clean_name(key), metadata[key])


def _arrange(wrapper: nn.Module, state: Entries, prefix: str, added: dict[str, int]) -> None:
    """Bring the entries into the order that they have in a model that is not wrapped.

    In each module those that were `added`, by their numbers, come before the others.
    """
    owners: dict[str, int] = {}
    for index, (name, _) in enumerate(nn.Module.named_modules(wrapper, remove_duplicate=False)):
        owners.setdefault(clean_name(name), index)

    def place(key: str) -> tuple[int, bool, int]:
        owner = key[len(prefix) :]
        while True:
            owner = owner.rpartition(".")[0]
            if owner in owners or not owner:
                return owners.get(owner, 0), key not in added, added.get(key, 0)

    keys = [key for key in state if key.startswith(prefix)]
    for key in sorted(keys, key=place):
        state[key] = state.pop(key)
