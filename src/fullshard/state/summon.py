"""`summon_full_params`: the full parameters of wrapped models, outside of forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
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
    wrapper_unit,
    wrappers_of,
)
from fullshard.unit.grad_buffer import set_grad


def is_first_rank(wrapper: nn.Module) -> bool:
    """Whether this rank is the one that `rank0_only` refers to."""
    mesh_info = wrapper_unit(wrapper).mesh_info
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
            "found summon_full_params in a hook of a backward; call it after backward."
        )
    for unit in map(wrapper_unit, wrappers):
        if unit.is_summoned:
            raise MisuseError(
                f"{unit.name}: Cannot manually unshard parameters when already unsharding "
                "parameters, found summon_full_params inside another one; leave the outer context "
                "first, or pass recurse=False to it."
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
                f"{lane.unit.name}: offload_to_cpu=True and NO_SHARD is not supported yet, found "
                "parameters whole on every rank; copy them to the host yourself."
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

    def mark(is_summoned: bool) -> None:
        """Mark wrappers: while summoned, they cannot run, and parameters have clean names."""
        for wrapper in wrappers:
            wrapper.__dict__["_is_summoned"] = wrapper_unit(wrapper).is_summoned = is_summoned

    with ExitStack() as stack:
        stack.callback(mark, False)
        mark(True)
        for lane in lanes:
            is_shown = not rank0_only or is_first_rank(lane.wrapper)
            shards = lane.shards if is_shown else []
            stack.enter_context(_summoned(lane, shards, writeback, offload_to_cpu, with_grads))
        yield


@contextmanager
def _summoned(
    lane: FlatLane, shards: list[FlatShard], writeback: bool, offload_to_cpu: bool, with_grads: bool
) -> Iterator[None]:
    """Register the full parameters of one lane, and restore everything afterwards."""
    with torch.no_grad():
        full = lane.gather(lane.shard_buffer())
        grads = _full_grads(lane) if with_grads else {}
    full = full.cpu() if offload_to_cpu else full
    before = [(shard, shard.tensor.data, shard.tensor.grad) for shard in shards]
    places = [(place, place.get()) for shard in shards for place in shard.param.locations]
    modules = {place.module for place, _ in places}
    if lane.holder is not None and shards:
        modules.add(lane.holder.location.module)
    registered = {module: dict(module._parameters) for module in modules}
    shown: dict[FlatShard, Any] = {}
    try:
        if lane.holder is not None and shards:
            lane.holder.unregister()
        for shard in shards:
            view, shown[shard] = shard.view_of(full), shard.tensor
            if lane.is_flat or isinstance(view, DTensor):
                shown[shard] = nn.Parameter(view, requires_grad=shard.is_trainable)
                if shard in grads:
                    set_grad(shown[shard], grads[shard])
            else:
                _set(shard.tensor, view, grads.get(shard), with_grads)
            for place in shard.param.locations:
                place.module.__dict__.pop(place.name, None)
                place.module._parameters[place.name] = shown[shard]
        yield
    finally:
        for shard, param in shown.items():  # a user may have registered another parameter
            place = shard.param.locations[0]
            found = place.module._parameters.get(place.name)
            shown[shard] = param if found is None else found
        written = {shard: (param.detach(), param.grad) for shard, param in shown.items()}
        for shard, data, grad in before if not lane.is_flat else ():
            _set(shard.tensor, data, grad, with_grads)
        for place, _ in places:
            place.module._parameters.pop(place.name, None)
        for module, params in registered.items():
            # In the previous order, with what was registered meanwhile at the end.
            merged = params | module._parameters
            module._parameters.clear()
            module._parameters.update(merged)
        for place, seen in places:
            if seen is not None:
                place.put(seen)
        for shard, (value, grad) in written.items() if writeback else ():
            _write_back(shard, value, grad, with_grads)


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
