"""Which shard replaced which original parameter.

A shard cannot be the same object as the parameter it replaces. Whoever held the original, holds
something that nothing trains any more. So it is remembered, as long as anyone holds the original,
and those who can be found are told: optimizers before their next step, and modules that are
sharded later and turn out to share the parameter.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fullshard.comm.placement import as_dtensor, with_dtype
from fullshard.errors import LifecycleError
from fullshard.unit.flat_param import FlatParamSlice, FlatSlice
from fullshard.unit.param import DTensorParam, ShardedParam


@dataclass(frozen=True, slots=True)
class Replacement:
    """An original parameter's shard, and the piece of the original that it is."""

    sharded_param: ShardedParam
    rank: int

    def shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor shaped and placed like the original."""
        sharded_param = self.sharded_param
        assert isinstance(sharded_param, DTensorParam)
        spec = sharded_param.shard_spec
        if isinstance(whole, DTensor):
            if whole.placements == spec.placements:
                return whole  # it is a shard already
            whole = whole._local_tensor
        cut = sharded_param.cut(whole, self.rank)
        return as_dtensor(cut.clone(), with_dtype(spec, cut.dtype))


class _Registry:
    """Originals by identity, forgotten when the original is."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[torch.Tensor], Replacement]] = {}
        self._is_watching = False

    def add(self, original: nn.Parameter, succession: Replacement) -> None:
        key = id(original)

        def forget(_: object) -> None:
            self._by_id.pop(key, None)

        self._by_id[key] = (weakref.ref(original, forget), succession)
        if not self._is_watching:
            self._is_watching = True
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)

    def get(self, tensor: torch.Tensor) -> Replacement | None:
        entry = self._by_id.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def __bool__(self) -> bool:
        return bool(self._by_id)


_registry = _Registry()
_members_by_shard: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()


def record_replacement(original: nn.Parameter, sharded_param: ShardedParam, rank: int) -> None:
    """Record that a member's shard replaces `original`, and give it what hung on the original."""
    shard = sharded_param.shard
    if isinstance(sharded_param, FlatSlice):
        if shard is not original or isinstance(sharded_param, FlatParamSlice):
            _registry.add(original, Replacement(sharded_param, rank))
        else:
            _members_by_shard[id(shard)] = sharded_param
        return
    for name, value in vars(original).items():
        setattr(shard, name, value)
    if original._backward_hooks:
        shard._backward_hooks = original._backward_hooks
    hooks = getattr(original, "_post_accumulate_grad_hooks", None)
    if hooks:
        shard._post_accumulate_grad_hooks = hooks
    _registry.add(original, Replacement(sharded_param, rank))
    _members_by_shard[id(shard)] = sharded_param


def replacement_of(param: torch.Tensor) -> ShardedParam | None:
    """The member that a parameter belongs to: as the original that it replaced, or as its shard."""
    found = _registry.get(param)
    if found is not None:
        return found.sharded_param
    sharded_param = _members_by_shard.get(id(param))
    return sharded_param if sharded_param is not None and sharded_param.shard is param else None


def repoint_living_optimizers() -> None:
    """Re-point every optimizer that still holds an original.

    Before a step would be early enough for the step, but not for `zero_grad`, a gradient scaler's
    `unscale_`, or the memory of the originals.
    """
    if not _registry:
        return
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Optimizer):
            repoint(candidate)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _registry:
        repoint(optimizer, with_gradients=True)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Let units see that their shards changed: foreach and fused updates of DTensors do not say."""
    for group in optimizer.param_groups:
        changed = [param for param in group["params"] if isinstance(param, DTensor)]
        torch.autograd.graph.increment_version(changed)


def repoint(optimizer: Optimizer, *, with_gradients: bool = False) -> None:
    """Replace originals by their shards in parameter groups and in the state.

    With `with_gradients`, what was put into an original's `.grad` goes to its shard: a step that
    comes before any forward is about those.
    """
    for group in getattr(optimizer, "param_groups", ()):
        params = group["params"]
        for index, param in enumerate(params):
            found = _registry.get(param)
            if found is None:
                continue
            shard = found.sharded_param.param
            if param in optimizer.state:
                sharded = dict(_sharded_state(optimizer, param, found))
                del optimizer.state[param]
                optimizer.state[shard] = sharded
            params[index] = shard  # after what may refuse: a second attempt must refuse, too
            is_flat = isinstance(found.sharded_param, FlatSlice)
            if with_gradients and not is_flat and param.grad is not None and shard.grad is None:
                shard.grad = found.shard_of(param.grad)
        if len({id(param) for param in params}) < len(params):
            params[:] = dict.fromkeys(params)  # one flat parameter stands for several originals


def _sharded_state(
    optimizer: Optimizer, param: torch.Tensor, found: Replacement
) -> Iterator[tuple[str, Any]]:
    sharded_param = found.sharded_param
    for name, value in optimizer.state[param].items():
        # Of a 0-dim parameter everything is 0-dim; only the count of steps is not its like.
        is_count = name == "step" or not isinstance(value, torch.Tensor)
        if is_count or (value.ndim == 0 and param.ndim > 0):
            yield name, value
        elif value.shape == param.shape and not isinstance(sharded_param, FlatSlice):
            yield name, found.shard_of(value)
        else:
            raise LifecycleError(
                f"{sharded_param.name}: {type(optimizer).__name__} has state from before sharding; it "
                f"must have the parameter's shape {tuple(param.shape)} and be sharded by itself, "
                f"found {name!r} of shape {tuple(value.shape)}; build the optimizer after sharding."
            )
