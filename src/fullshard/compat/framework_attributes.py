"""Attributes of torch's FSDP that frameworks use, most of them private, mapped to the engine.

| name | used by |
| --- | --- |
| `_all_handles`, `flat_param_to`, `_local_shard`, `_lazy_init`, `_get_module_fsdp_state` | verl |
| `_has_params`, `_flat_param`, its `data`, `_handle._orig_param_dtype` | accelerate, in bf16 |
| `FlatParameter._fqns`, `_fsdp_wrapped_module` | accelerate, DCP |
| `_fsdp_flattened` of flat and of original parameters | Lightning, of optimizers |
| `_is_root`, `_use_orig_params`, `_state_dict_type` and its configs | programs for torch's FSDP |
| the wrapper's public attributes, such as `process_group`, `params` | programs for torch's FSDP |
| `wrap._or_policy` and `wrap._recursive_wrap` | PEFT, torch's checkpointing |
| `fully_shard.state`, `_state_ctx.all_states`, `_fsdp_param_groups`, `post_backward`, | |
| `_root_post_backward_final_callback`, `_comm_ctx` | pipelining |
| `_get_fsdp_state`, `_fsdp_param_group`, hook handles, `pre_backward` | torch's memory tracker |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullshard.api import CPUOffloadPolicy, OptimStateDictConfig, StateDictConfig, StateDictType
from fullshard.runtime.calls import ModuleCall
from fullshard.runtime.hooks import ModuleHooks, hooks_of, require_hooks
from fullshard.runtime.names import clean_name
from fullshard.state.module_state import own_settings
from fullshard.state.shards import wrappers_of
from fullshard.unit.context import CommContext
from fullshard.unit.flat_param import FlatParameter, ParamForm
from fullshard.unit.unit import Unit


class TrainingState(Enum):
    """What a wrapper is doing."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


def training_state_of(wrapper: Any) -> TrainingState:
    """What a wrapper is doing; it is in backward until the whole backward ends."""
    hooks = require_hooks(wrapper)
    if any(unit.is_summoned for unit in hooks.units):
        return TrainingState.SUMMON_FULL_PARAMS
    is_past = any(unit.grads.was_reduced for unit in hooks.units)
    return TrainingState.FORWARD_BACKWARD if hooks.is_computing or is_past else TrainingState.IDLE


class FlatParamHandle:
    """The flat parameter of a wrapper: its dtype and its device."""

    def __init__(self, flat_param: FlatParameter, hooks: ModuleHooks) -> None:
        self.flat_param = flat_param
        self._offload_params = isinstance(hooks.request.offload, CPUOffloadPolicy)

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move this rank's part, as `Tensor.to` does."""
        self.flat_param.data = self.flat_param.data.to(*args, **kwargs)

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        return self.flat_param.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        self.flat_param.data = self.flat_param.data.to(dtype)


class WrapperAttributes:
    """The private attributes of a wrapper."""

    @property
    def _has_params(self) -> bool:
        return any(unit.params for unit in require_hooks(self).units)

    @property
    def _flat_param(self) -> FlatParameter | None:
        unit = require_hooks(self).units[0]
        flat = None if unit.flat is None else unit.flat.flat_param()
        if flat is not None:
            assert isinstance(self, nn.Module)
            paths = {module: path for path, module in self.named_modules()}
            own = [param for param in unit.params if param.param is flat] or unit.params
            places = [param.locations[0] for param in own]
            flat._fqns = tuple(clean_name(f"{paths[p.module]}.{p.name}") for p in places)
        return flat

    @property
    def _handle(self) -> FlatParamHandle | None:
        flat = self._flat_param
        return None if flat is None else FlatParamHandle(flat, require_hooks(self))

    @property
    def _all_handles(self) -> list[FlatParamHandle]:
        """Those of this wrapper and of all inside, one for each flat parameter."""
        assert isinstance(self, nn.Module)
        found: list[FlatParamHandle] = []
        for wrapper in wrappers_of(self):
            hooks = require_hooks(wrapper)
            for flat in (unit.flat for unit in hooks.units if unit.flat is not None):
                shown = flat.flat_param()
                params = [holder.param for holder in flat.holders]
                params = params or ([] if shown is None else [shown])
                found += (FlatParamHandle(param, hooks) for param in params)
        return found

    @property
    def _is_root(self) -> bool | None:
        """None until the first forward has settled it."""
        hooks = require_hooks(self)
        return None if hooks.scheduler is None else hooks.is_root

    @property
    def _use_orig_params(self) -> bool:
        return require_hooks(self).request.form is ParamForm.ORIG_PARAMS

    @property
    def _state_dict_type(self) -> StateDictType:
        return own_settings(self).state_dict_type  # type: ignore[arg-type]

    @property
    def _state_dict_config(self) -> StateDictConfig:
        return own_settings(self).state_dict_config  # type: ignore[arg-type]

    @property
    def _optim_state_dict_config(self) -> OptimStateDictConfig:
        return own_settings(self).optim_state_dict_config  # type: ignore[arg-type]


# torch's functions that take a wrapper; `theirs` is for modules that are not ours


def lazy_init(theirs: Callable[..., Any], state: Any, root: nn.Module) -> Any:
    """Settle which wrapper is the root, as the first forward does."""
    hooks = hooks_of(root)
    if hooks is None:
        return theirs(state, root)
    hooks.ensure_scheduler()
    return state


def wrapper_state_of(theirs: Callable[..., Any], module: nn.Module) -> Any:
    """A wrapper itself. A module that `fully_shard` was called on is none."""
    hooks = hooks_of(module)
    if hooks is None:
        return theirs(module)
    return None if hooks.request.form is ParamForm.DTENSOR else module


def module_state_of(theirs: Callable[..., Any], module: nn.Module) -> Any:
    """The state of a module that `fully_shard` was called on; a wrapper itself."""
    return theirs(module) if hooks_of(module) is None else state_of(module) or module


# What `fully_shard` leaves at a module


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of a module that `fully_shard` was called on; None for others."""
    hooks = hooks_of(module)
    if hooks is None or hooks.request.form is not ParamForm.DTENSOR:
        return None
    return cast(FSDPState, vars(hooks).setdefault("_state", FSDPState(hooks)))


class FSDPState:
    """The hooks of a `fully_shard` call, under torch's names."""

    def __init__(self, hooks: ModuleHooks) -> None:
        self._hooks = hooks
        self._fsdp_param_groups = [FSDPParamGroup(hooks, unit) for unit in hooks.units]
        self._pre_forward, self._post_forward = hooks.pre_forward, hooks.post_forward
        self._pre_forward_hook_handle = HookHandles(hooks.handles[0::2])
        self._post_forward_hook_handle = HookHandles(hooks.handles[1::2])

    @property
    def _fsdp_param_group(self) -> FSDPParamGroup | None:
        return next((each for each in self._fsdp_param_groups if each.fsdp_params), None)

    @property
    def _is_root(self) -> bool | None:
        return None if self._hooks.scheduler is None else self._hooks.is_root

    @property
    def _comm_ctx(self) -> CommContext:
        return self._hooks.units[0].comm_ctx

    @property
    def _state_ctx(self) -> SimpleNamespace:
        members = self._hooks.ensure_scheduler().members
        states = [state_of(module) for member in members for module in member.modules[:1]]
        return SimpleNamespace(all_states=[state for state in states if state is not None])

    def _root_post_backward_final_callback(self) -> None:
        """Settle what backward left open, and wait for all gradients if it was the last one."""
        self._hooks.ensure_scheduler().end_backward()


class FSDPParamGroup:
    """A unit, under torch's names.

    The engine calls what is assigned to `pre_backward` and `post_backward` from then on.
    """

    def __init__(self, hooks: ModuleHooks, unit: Unit) -> None:
        self._hooks = hooks
        self._unit = unit

    @property
    def fsdp_params(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(sharded_param=p.shard, unsharded_param=p.full, _unsharded_param=p.full)
            for p in self._unit.params
        ]

    @property
    def pre_backward(self) -> Callable[..., None]:
        return self._hooks.pre_backward

    @pre_backward.setter
    def pre_backward(self, function: Callable[..., None]) -> None:
        self._hooks.pre_backward = function  # type: ignore[method-assign]

    @property
    def post_backward(self) -> Callable[..., None]:
        own: Callable[..., None] = vars(self._hooks).get("finish_backward", self._post_backward)
        return own

    @post_backward.setter
    def post_backward(self, function: Callable[..., None]) -> None:
        self._hooks.finish_backward = function  # type: ignore[method-assign]

    def _post_backward(self, calls: Sequence[ModuleCall] | None = None) -> None:
        """End the backward of calls; without any, reduce the gradients that backwards have kept."""
        hooks, unit = self._hooks, self._unit
        if calls is not None:
            ModuleHooks.finish_backward(hooks, calls)
            return
        scheduler = hooks.ensure_scheduler()
        scheduler.is_in_backward = True  # until the final callback
        if unit.has_full_grads or unit.owes_kept_grads:
            hooks.turnstile.reduce(hooks, unit, scheduler.phase)


class HookHandles(tuple[RemovableHandle, ...]):
    """The hooks of all modules of a call, to be removed together."""

    def remove(self) -> None:
        for handle in self:
            handle.remove()
