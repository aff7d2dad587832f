"""Which sharded parameter replaced which original.

A shard cannot be the same object as the parameter that it replaces, and whoever holds the original
holds something that nothing trains any more. So replacements are remembered while anyone holds the
original, and those who can be found follow: optimizers before their next step, and modules that
are sharded later and turn out to share the parameter.
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

from fullshard._torch import copy_hooks, local_tensor
from fullshard.comm.placement import as_dtensor, with_dtype
from fullshard.errors import LifecycleError
from fullshard.unit.flat_param import FlatParamSlice, FlatSlice
from fullshard.unit.param import DTensorParam, ShardedParam


@dataclass(frozen=True, slots=True)
class Replacement:
    """The sharded parameter that replaced an original, and the rank of its shard."""

    sharded: ShardedParam
    rank: int

    def shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor shaped and placed like the original."""
        sharded = self.sharded
        assert isinstance(sharded, DTensorParam)
        spec = sharded.shard_spec
        if isinstance(whole, DTensor):
            if whole.placements == spec.placements:
                return whole  # it is a shard already
            whole = local_tensor(whole)
        part = sharded.shard_of(whole, self.rank)
        return as_dtensor(part.clone(), with_dtype(spec, part.dtype))


class _Replacements:
    """Replacements by the identity of a tensor that is held weakly.

    Not attributes of the tensors: an original that is a non-leaf or a subclass may refuse them, and
    a weak dictionary would compare DTensors by value.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[torch.Tensor], Replacement]] = {}
        self._is_watching = False

    def add(self, tensor: torch.Tensor, replacement: Replacement) -> None:
        key = id(tensor)

        def forget(_: object) -> None:
            self._by_id.pop(key, None)

        self._by_id[key] = (weakref.ref(tensor, forget), replacement)
        if not self._is_watching:
            self._is_watching = True
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)

    def get(self, tensor: torch.Tensor) -> Replacement | None:
        entry = self._by_id.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def __bool__(self) -> bool:
        return bool(self._by_id)


_originals = _Replacements()
_by_shard: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()


def record_replacement(original: nn.Parameter, sharded: ShardedParam, rank: int) -> None:
    """Record that a shard replaces `original`, and give it the original's attributes and hooks."""
    shard = sharded.shard
    if isinstance(sharded, FlatSlice):
        if shard is not original or isinstance(sharded, FlatParamSlice):
            _originals.add(original, Replacement(sharded, rank))
        else:
            _by_shard[id(shard)] = sharded
        return
    for name, value in vars(original).items():
        setattr(shard, name, value)
    copy_hooks(original, shard)
    _originals.add(original, Replacement(sharded, rank))
    _by_shard[id(shard)] = sharded


def replacement_of(param: torch.Tensor) -> ShardedParam | None:
    """The sharded parameter that replaced an original, or whose shard `param` is."""
    found = _originals.get(param)
    if found is not None:
        return found.sharded
    sharded = _by_shard.get(id(param))
    return sharded if sharded is not None and sharded.shard is param else None


def repoint_living_optimizers() -> None:
    """Let every optimizer that still holds an original hold its shard.

    Before its next step would be early enough for the step, but not for `zero_grad`, a gradient
    scaler's `unscale_`, or the memory of the originals.
    """
    if not _originals:
        return
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Optimizer):
            repoint(candidate)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _originals:
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
            found = _originals.get(param)
            if found is None:
                continue
            shard = found.sharded.param
            if param in optimizer.state:
                state = dict(_sharded_state(optimizer, param, found))
                del optimizer.state[param]
                optimizer.state[shard] = state
            params[index] = shard  # after what may raise: a second attempt must raise, too
            is_flat = isinstance(found.sharded, FlatSlice)
            if with_gradients and not is_flat and param.grad is not None and shard.grad is None:
                shard.grad = found.shard_of(param.grad)
        if len({id(param) for param in params}) < len(params):
            params[:] = dict.fromkeys(params)  # one flat parameter stands for several originals


def _sharded_state(
    optimizer: Optimizer, param: torch.Tensor, found: Replacement
) -> Iterator[tuple[str, Any]]:
    for name, value in optimizer.state[param].items():
        # All state of a 0-dim parameter is 0-dim; only the step count is not shaped like it.
        is_count = name == "step" or not isinstance(value, torch.Tensor)
        if is_count or (value.ndim == 0 and param.ndim > 0):
            yield name, value
        elif value.shape == param.shape and not isinstance(found.sharded, FlatSlice):
            yield name, found.shard_of(value)
        else:
            kind = type(optimizer).__name__
            raise LifecycleError(
                f"{found.sharded.name}: {kind} has state from before sharding; it "
                f"must have the parameter's shape {tuple(param.shape)} and be sharded by itself, "
                f"found {name!r} of shape {tuple(value.shape)}; build the optimizer after sharding."
            )
