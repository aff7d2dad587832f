"""What modules see of a unit's parameters, and the gradients that arrive at them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import nn

from fullshard._torch import disable_torch_function, outside_transforms, storage_key, to_local
from fullshard.unit.flat_param import OrigParamSlice
from fullshard.unit.param import ShardedParam
from fullshard.unit.released import FullReferences, ReleasedParam


class Shown(Enum):
    """What is registered at the modules of a unit."""

    SHARDS = "shards"
    FULLS = "full parameters"
    STAND_IN = "a stand-in for the only full parameter"


class Registration:
    """Registers the shards of a unit at their modules, or its full parameters.

    Everything that does not change from step to step is looked up once (rule 7: host time): code
    that changes where parameters are registered, or as what, makes a new `Registration`.
    `num_trainable` is how many full parameters require a gradient, and `is_followed` says that
    these are the ones whose shards do. A large unit has `references`, and a `stand_in` while it is
    released, also while its shards are shown.
    """

    def __init__(self, params: Sequence[ShardedParam], *, is_large: bool) -> None:
        self.fulls: list[nn.Parameter] = [param.full for param in params if param.full is not None]
        self._held = [param.param for param in params]
        self._trainable: list[bool] = []
        self._originals = [
            (param, param.full, storage_key(to_local(param.full).untyped_storage()))
            for param in params
            if isinstance(param, OrigParamSlice) and param.full is not None
        ]
        self._places = [
            (location.registry, location.name, param.shard, full)
            for param, full in zip(params, self.fulls, strict=True)
            for location in param.locations
        ]
        self.num_trainable = 0
        self.is_followed = False
        self.stand_in: ReleasedParam | None = None
        self.show_fulls()
        self.references = FullReferences(self.fulls) if is_large else None

    def follow_requires_grad(self) -> None:
        """Set `requires_grad` of full parameters as on the shards."""
        with disable_torch_function():
            self._trainable = trainable = [param.requires_grad for param in self._held]
        if trainable != [full.requires_grad for full in self.fulls]:
            with outside_transforms():  # inside, `requires_grad_` is an error
                for full, is_trainable in zip(self.fulls, trainable, strict=True):
                    full.requires_grad_(is_trainable)
        self.num_trainable = sum(trainable)
        self.is_followed = True

    def has_shards(self) -> bool:
        """Whether every module sees the shard that was registered there."""
        return all(registry.get(name) is shard for registry, name, shard, _ in self._places)

    def find_replaced(self) -> ShardedParam | None:
        """A wrapper's original parameter that a user replaced since it was registered."""
        is_sharded, stand_in = self.shown is Shown.SHARDS, self.stand_in
        for param, full, memory in self._originals:
            shown = param.shard if is_sharded else full if stand_in is None else stand_in
            is_same = all(location.get() is shown for location in param.locations)
            if is_sharded:
                is_same &= param.shard.numel() == param.local.numel()
            else:
                # Its storage is resized, and stays the same.
                is_same &= storage_key(to_local(full).untyped_storage()) == memory
            if not is_same:
                return param
        return None

    def show_fulls(self) -> None:
        for registry, name, _, full in self._places:
            registry[name] = full
        self.shown = Shown.FULLS
        self.stand_in = None

    def show_stand_in(self, released: ReleasedParam) -> None:
        for registry, name, *_ in self._places:
            registry[name] = released
        self.shown = Shown.STAND_IN
        self.stand_in = released

    def show_shards(self) -> None:
        """Register the shards; take over the `requires_grad` that users set on full parameters."""
        trainable = [full.requires_grad for full in self.fulls]
        if trainable != self._trainable:
            with outside_transforms():
                for param, before, after in zip(
                    self._held, self._trainable, trainable, strict=True
                ):
                    if before != after:
                        param.requires_grad_(after)
            self._trainable = trainable
        for registry, name, shard, _ in self._places:
            registry[name] = shard
        self.shown = Shown.SHARDS


class GradArrivals:
    """Counts the gradients of a unit's parameters as they arrive, once somebody listens.

    Most units need no hooks: when the gradients of their inputs are there, so are those of their
    parameters. A unit whose inputs take no gradient has nothing else to go by.
    """

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.is_listening = False
        self._tell = tell
        self._there: set[ShardedParam] = set()

    def hook(self, params: Sequence[ShardedParam]) -> None:
        """Hook full parameters that are new, or newly trainable, if somebody listens."""
        for param in params if self.is_listening else ():
            full = param.full
            if full is not None and full.requires_grad and not param.is_hooked:
                # Weak references: the garbage collector does not see through a tensor's hooks.
                hook = _arrival_hook(weakref.ref(self), weakref.ref(param))
                full.register_post_accumulate_grad_hook(hook)
                param.is_hooked = True

    def arrived(self, param: ShardedParam) -> None:
        self._there.add(param)
        self._tell(len(self._there))

    def forget(self) -> None:
        """Gradients have been taken, or dropped."""
        self._there.clear()


def _arrival_hook(
    arrivals_ref: weakref.ref[GradArrivals], param_ref: weakref.ref[ShardedParam]
) -> Callable[[torch.Tensor], None]:
    def arrived(_: torch.Tensor) -> None:
        arrivals, param = arrivals_ref(), param_ref()
        if arrivals is not None and param is not None:
            arrivals.arrived(param)

    return arrived
