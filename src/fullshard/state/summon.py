"""`summon_full_params`: the full parameters of wrapped models, outside of forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard._torch import in_backward
from fullshard.errors import ConfigError, LifecycleError, MisuseError, UnsupportedError
from fullshard.state.shards import (
    FlatLane,
    FlatShard,
    exchange,
    lanes_of,
    units_of,
    wrappers_of,
)
from fullshard.unit.grad_buffer import set_grad
from fullshard.unit.unit import Unit


def is_first_rank(wrapper: nn.Module) -> bool:
    """Whether this rank is the one that `rank0_only` refers to."""
    mesh_info = units_of(wrapper)[0].mesh_info
    return mesh_info.shard.rank == 0 and mesh_info.replicate.rank == 0


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show the full parameters of all wrappers at or below a module.

    Each rank keeps what was written to its own slice, unless `writeback=False`.
    """
    wrappers = [wrapper for wrapper in wrappers_of(module) if recurse or wrapper is module]
    if wrappers and in_backward():
        raise MisuseError(
            f"{type(module).__name__}: Cannot manually unshard parameters during forward/backward, "
            "and a hook of a backward called summon_full_params; call it after backward."
        )
    for unit in (unit for wrapper in wrappers for unit in units_of(wrapper)):
        if unit.is_summoned:
            raise MisuseError(
                f"{unit.name}: Cannot manually unshard parameters when already unsharding "
                "parameters; leave the outer summon_full_params first, or pass recurse=False to it."
            )
    try:
        what = "summon_full_params"
        lanes = [lane for w in wrappers for lane in lanes_of(w, recurse=False, what=what)]
    except LifecycleError as error:
        raise MisuseError(
            f"Cannot manually unshard parameters during forward/backward: {error}"
        ) from error
    for lane in lanes:
        if with_grads and (offload_to_cpu or lane.is_flat):
            raise UnsupportedError(
                f"{lane.unit.name}: {with_grads=}, use_orig_params={not lane.is_flat}, "
                f"{offload_to_cpu=} is not supported yet; read .grad outside of "
                "the context."
            )
        if offload_to_cpu and not lane.is_sharded:
            raise UnsupportedError(
                f"{lane.unit.name}: offload_to_cpu=True and NO_SHARD is not supported yet; "
                "every rank has whole parameters, so copy them to the host yourself."
            )
    if writeback and rank0_only:
        raise UnsupportedError(
            "summon_full_params: writeback=True and rank0_only=True is not supported yet; "
            "pass writeback=False, since other ranks would not see what rank 0 wrote."
        )
    if offload_to_cpu and not rank0_only:
        warnings.warn(
            "summon_full_params: offload_to_cpu without rank0_only puts a copy of all parameters "
            "into host memory on every rank; consider rank0_only=True.",
            stacklevel=3,
        )

    of_units: dict[Unit, SummonedUnit] = {}
    with ExitStack() as stack:
        stack.callback(_end, wrappers)
        for wrapper in wrappers:
            for unit in units_of(wrapper):
                unit.summoned = of_units[unit] = SummonedUnit(unit)
            wrapper.__dict__["_is_summoned"] = True
        for lane in lanes:
            is_shown = not rank0_only or is_first_rank(lane.wrapper)
            summoned = _SummonedLane(
                lane, lane.shards if is_shown else [], writeback, offload_to_cpu, with_grads
            )
            stack.callback(summoned.end)
            summoned.show()
            if not lane.is_flat and not with_grads:
                of_units[lane.unit].lanes.append(summoned)
        yield


def _end(wrappers: Sequence[nn.Module]) -> None:
    """While summoned, parameters have clean names, and most units cannot be trained."""
    for wrapper in wrappers:
        wrapper.__dict__["_is_summoned"] = False
        for unit in units_of(wrapper):
            unit.summoned = None


class SummonedUnit:
    """A unit that is summoned; `lanes` are those that may be trained meanwhile.

    For the time of a forward that takes gradients, and of a backward, modules see what they see
    outside, with the values that were written.
    """

    def __init__(self, unit: Unit) -> None:
        self.lanes: list[_SummonedLane] = []
        self.is_shown = True
        self._unit = unit

    def pause(self) -> None:
        if self.is_shown and self.lanes:
            for lane in self.lanes:
                lane.pause()
            self.is_shown = False

    def resume(self) -> None:
        if not self.is_shown:
            self._unit.keep()
            for lane in self.lanes:
                lane.show()
            self.is_shown = True


class _SummonedLane:
    """The full parameters of one lane, and what was registered before.

    `_kept` are this rank's values before a pause, which has written others.
    """

    def __init__(
        self,
        lane: FlatLane,
        shards: list[FlatShard],
        writeback: bool,
        offload_to_cpu: bool,
        with_grads: bool,
    ) -> None:
        self._lane, self._shards = lane, shards
        self._writeback, self._with_grads = writeback, with_grads
        with torch.no_grad():
            full = lane.gather(lane.shard_buffer())
            self._grads = _full_grads(lane) if with_grads else {}
        self._full = full.cpu() if offload_to_cpu else full
        self._kept: torch.Tensor | None = None
        self._shown: dict[FlatShard, Any] = {}
        self._is_shown = False

    def show(self) -> None:
        """Register the full parameters."""
        lane, shards = self._lane, self._shards
        self._is_shown = True
        self._before = [(shard, shard.tensor.data, shard.tensor.grad) for shard in shards]
        places = [place for shard in shards for place in shard.param.locations]
        self._places = [(place, place.get()) for place in places]
        modules = {place.module for place in places}
        if lane.holder is not None and shards:
            modules.add(lane.holder.location.module)
        self._registered = {module: dict(module._parameters) for module in modules}
        if lane.holder is not None and shards:
            lane.holder.unregister()
        for shard in shards:
            view, self._shown[shard] = shard.view_of(self._full), shard.tensor
            if lane.is_flat or isinstance(view, DTensor):
                shown = nn.Parameter(view, requires_grad=shard.is_trainable)
                self._shown[shard] = shown
                if shard in self._grads:
                    set_grad(shown, self._grads[shard])
            else:
                _set(shard.tensor, view, self._grads.get(shard), self._with_grads)
            for place in shard.param.locations:
                place.module.__dict__.pop(place.name, None)
                place.module._parameters[place.name] = self._shown[shard]

    def _hide(self) -> dict[FlatShard, tuple[torch.Tensor, torch.Tensor | None]]:
        """Register what was there before; return the values and gradients that were written."""
        self._is_shown = False
        for shard in self._shown:  # a user may have registered another parameter
            place = shard.param.locations[0]
            found = place.module._parameters.get(place.name)
            if found is not None:
                self._shown[shard] = found
        written = {shard: (param.detach(), param.grad) for shard, param in self._shown.items()}
        for shard, data, grad in self._before if not self._lane.is_flat else ():
            _set(shard.tensor, data, grad, self._with_grads)
        for place, _ in self._places:
            place.module._parameters.pop(place.name, None)
        for module, params in self._registered.items():
            # In the previous order, with what was registered meanwhile at the end.
            merged = params | module._parameters
            module._parameters.clear()
            module._parameters.update(merged)
        for place, seen in self._places:
            if seen is not None:
                place.put(seen)
        return written

    def pause(self) -> None:
        """Hide the full parameters, and let the unit have the values that were written."""
        if self._kept is None and not self._writeback:
            self._kept = self._lane.shard_buffer().clone()
        for shard, (value, _) in self._hide().items():
            _write_back(shard, value, None, with_grads=False)

    def end(self) -> None:
        written = self._hide() if self._is_shown else {}
        for shard, (value, grad) in written.items() if self._writeback else ():
            _write_back(shard, value, grad, self._with_grads)
        if self._kept is not None:
            with torch.no_grad():
                self._lane.shard_buffer().copy_(self._kept)


def _set(
    param: torch.Tensor, data: torch.Tensor, grad: torch.Tensor | None, with_grads: bool
) -> None:
    if with_grads:
        param.grad = None  # its shape differs from that of the new data
    param.data = data
    if with_grads and grad is not None:
        set_grad(param, grad)


@torch.no_grad()
def _write_back(
    shard: FlatShard, value: torch.Tensor, grad: torch.Tensor | None, with_grads: bool
) -> None:
    if value.shape != shard.shape:
        raise ConfigError(
            f"{shard.name}: a summoned parameter was given the shape {list(value.shape)} instead "
            f"of {list(shard.shape)}; what was written to it is not kept."
        )
    shard.slice_of(shard.lane.shard_buffer()).copy_(shard.cut(value))
    param = shard.tensor
    if not with_grads:
        return
    if grad is None:
        param.grad = None
    elif param.grad is not None:
        param.grad.copy_(shard.cut(grad).view(param.grad.shape))
    elif len(shard.elements):
        set_grad(param, shard.cut(grad).clone().view(param.shape))


def _full_grads(lane: FlatLane) -> dict[FlatShard, torch.Tensor]:
    """The full gradients, where any rank has a part of one; zeros where others have none."""
    grads = [shard.tensor.grad for shard in lane.shards]
    own = [None if grad is None else grad.dtype for grad in grads]
    everyone = exchange([lane.mesh_info.shard.group], own)[0] if lane.is_sharded else [own]
    columns = zip(*everyone, strict=True)
    found = [next((dtype for dtype in column if dtype is not None), None) for column in columns]
    buffer = lane.zeros(next((dtype for dtype in found if dtype is not None), torch.float32))
    for shard, grad in zip(lane.shards, grads, strict=True):
        if grad is not None:
            shard.slice_of(buffer).copy_(grad.reshape(-1))
    full = lane.gather(buffer)
    pairs = zip(lane.shards, found, strict=True)
    return {shard: shard.view_of(full) for shard, dtype in pairs if dtype is not None}
