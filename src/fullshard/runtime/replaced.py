"""Which sharded parameter replaced which original.

A shard cannot be the same object as the parameter that it replaces, and nothing trains the original
any more. So replacements are remembered while there are references to the original, and those that
can be found are updated: optimizers before their next step, and modules that are sharded later and
turn out to share the parameter.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from fullshard._torch import copy_hooks, local_tensor
from fullshard.comm import guard
from fullshard.comm.order import ModelPasses
from fullshard.comm.placement import as_dtensor, with_dtype
from fullshard.errors import LifecycleError
from fullshard.unit.flat_param import FlatParamSlice
from fullshard.unit.param import DTensorParam, ShardedParam

# From originals to (sharded parameter, rank of its shard). Not attributes of the tensors: an
# original that is a non-leaf or a subclass may refuse them.
_originals = WeakIdKeyDictionary()
# The passes of the models of parameters, and for each optimizer the lengths of its groups and the
# passes of the models that it steps.
_passes: weakref.WeakKeyDictionary[ShardedParam, weakref.ref[ModelPasses]]
_passes = weakref.WeakKeyDictionary()
_followed: weakref.WeakKeyDictionary[
    Optimizer, tuple[tuple[int, ...], list[weakref.ref[ModelPasses]]]
]
_followed = weakref.WeakKeyDictionary()
_by_shard: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()


def record_replacement(original: nn.Parameter, sharded: ShardedParam, rank: int) -> None:
    """Record that a shard replaces `original`, and give it the original's attributes and hooks."""
    shard = sharded.shard
    if shard is not original or isinstance(sharded, FlatParamSlice):
        _originals[original] = sharded, rank
        _watch_optimizers()
    if not isinstance(sharded, FlatParamSlice):
        _by_shard[id(shard)] = sharded
    if shard is not original and not isinstance(sharded, FlatParamSlice):
        for name, value in vars(original).items():
            setattr(shard, name, value)
        copy_hooks(original, shard)


def replacement_of(param: torch.Tensor) -> ShardedParam | None:
    """The sharded parameter that replaced an original, or whose shard `param` is."""
    found: tuple[ShardedParam, int] | None = _originals.get(param)
    if found is not None:
        return found[0]
    sharded = _by_shard.get(id(param))
    return sharded if sharded is not None and sharded.shard is param else None


def repoint_living_optimizers() -> None:
    """Make every optimizer that still holds an original hold its shard instead.

    The hook before its next step would be early enough for the step, but not for `zero_grad`, a
    gradient scaler's `unscale_`, or the memory of the originals.
    """
    _watch_optimizers()
    for candidate in gc.get_objects() if _originals else ():
        if issubclass(type(candidate), Optimizer):
            repoint(candidate)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    guard.check()  # before gradients are used that no rank may have
    if _originals:
        repoint(optimizer, with_gradients=True)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count versions so that units see changed shards: foreach and fused DTensor updates do not."""
    for passes in _passes_of(optimizer):
        passes.count_step(optimizer)
    for group in optimizer.param_groups:
        changed = [param for param in group["params"] if isinstance(param, DTensor)]
        torch.autograd.graph.increment_version(changed)


def record_passes(passes: ModelPasses, params: Iterable[ShardedParam]) -> None:
    """Let optimizers of these parameters count their steps for a model."""
    for each in params:
        _passes[each] = weakref.ref(passes)
    _followed.clear()


def _passes_of(optimizer: Optimizer) -> list[ModelPasses]:
    """The models that an optimizer writes to; looked up again when its parameters change."""
    lengths = tuple(len(group["params"]) for group in optimizer.param_groups)
    known = _followed.get(optimizer)
    if known is None or known[0] != lengths:
        # By what a model has now: a parameter that was assigned may have the id of one before it.
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        found = dict.fromkeys(passes for own, passes in _passes.items() if id(own.param) in stepped)
        known = _followed[optimizer] = lengths, list(found)
    return [passes for passes in (each() for each in known[1]) if passes is not None]


def repoint(optimizer: Optimizer, *, with_gradients: bool = False) -> None:
    """Replace originals by their shards in parameter groups and in the state.

    With `with_gradients`, the `.grad` of an original goes to its shard: a step that comes before
    any forward uses these gradients.
    """
    for group in getattr(optimizer, "param_groups", ()):
        params = group["params"]
        for index, param in enumerate(params):
            sharded, rank = _originals.get(param, (None, 0))
            if sharded is None:
                continue
            shard = sharded.param
            if param in optimizer.state:
                state = _sharded_state(optimizer, param, sharded, rank)
                del optimizer.state[param]
                optimizer.state[shard] = state
            params[index] = shard  # after what may raise: a second attempt must raise, too
            takes_grad = isinstance(sharded, DTensorParam) and shard.grad is None
            if with_gradients and takes_grad and param.grad is not None:
                shard.grad = _shard_of(sharded, param.grad, rank)
        # One flat parameter stands for several originals.
        params[:] = dict.fromkeys(params)


def _sharded_state(
    optimizer: Optimizer, param: torch.Tensor, sharded: ShardedParam, rank: int
) -> dict[str, Any]:
    state = dict(optimizer.state[param])
    for name, value in state.items():
        # All state of a 0-dim parameter is 0-dim; only the step count is not shaped like it.
        is_count = name == "step" or not isinstance(value, torch.Tensor)
        if is_count or (value.ndim == 0 and param.ndim > 0):
            continue
        if value.shape != param.shape or not isinstance(sharded, DTensorParam):
            raise LifecycleError(
                f"{sharded.name}: {type(optimizer).__name__} has state from before sharding, and "
                f"{name!r} of shape {tuple(value.shape)} cannot be sharded as the parameter of "
                f"shape {tuple(param.shape)} is; build the optimizer after sharding."
            )
        state[name] = _shard_of(sharded, value, rank)
    return state


def _shard_of(sharded: DTensorParam, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """This rank's part of a tensor shaped and placed like the original."""
    if isinstance(whole, DTensor):
        if whole.placements == sharded.shard_spec.placements:
            return whole  # it is a shard already
        whole = local_tensor(whole)
    part = sharded.shard_of(whole, rank)
    return as_dtensor(part.clone(), with_dtype(sharded.shard_spec, part.dtype))
