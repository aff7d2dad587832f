"""Optimizer state dicts of wrapped models, saved and loaded by the names of parameters.

An optimizer holds this rank's slices, or flat parameters, and numbers them. A saved state dict is
keyed by the names of the original parameters and holds whole tensors or shards of them, so that it
can be loaded into a model that is wrapped in another way, over another number of ranks, or not at
all.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fullshard.api import FullOptimStateDictConfig, OptimStateKeyType, own_value
from fullshard.errors import ConfigError, DisagreementError, UnknownNameError
from fullshard.runtime.names import clean_name
from fullshard.state.module_state import require_kind, settings_of
from fullshard.state.optim_load import Load
from fullshard.state.optim_params import (
    ModelParams,
    OptimInput,
    OptimParam,
    State,
    is_same,
    param_groups,
)
from fullshard.state.optim_values import copied, has_dims
from fullshard.state.shards import (
    FlatLane,
    StateForm,
    exchange,
    full_tensor_of,
    wrappers_of,
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
    is_full = isinstance(config, FullOptimStateDictConfig)
    is_kept = not getattr(config, "rank0_only", False) or dist.get_rank(group) == 0
    form = StateForm(not is_full, getattr(config, "_use_dtensor", False), config.offload_to_cpu)
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    return _save(model, optim, given, form, is_kept=is_kept)


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
    use_dtensor = getattr(settings_of(model).optim_state_dict_config, "_use_dtensor", False)
    form = StateForm(is_sharded=True, use_dtensor=use_dtensor, to_cpu=True)
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
