"""`summon_full_params`: the full parameters of wrapped models, outside of forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from fullshard.comm.agreement import Agreement
from fullshard.errors import ConfigError, LifecycleError, MisuseError, UnsupportedError
from fullshard.runtime.hooks import hooks_of
from fullshard.state.shards import FlatLane, FlatShard, lanes_of, wrapper_mesh, wrappers_of
from fullshard.unit.reduce_scatter import set_grad

_SUMMONED = "_is_summoned"
_GRAD_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True, slots=True)
class _Options:
    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool


def is_summoned(wrapper: nn.Module) -> bool:
    """Whether a wrapper's parameters are in their full shape right now."""
    return bool(wrapper.__dict__.get(_SUMMONED))


def is_first_rank(wrapper: nn.Module) -> bool:
    """Whether this rank is the one that `rank0_only` means."""
    mesh_info = wrapper_mesh(wrapper)
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
    for wrapper in wrappers:
        if is_summoned(wrapper):
            raise MisuseError(
                f"{_name(wrapper)}: summon_full_params must be called while parameters are "
                "sharded, found them summoned already; leave the outer context first, or pass "
                "recurse=False to it."
            )
    try:
        lanes = [lane for wrapper in wrappers for lane in lanes_of(wrapper, recurse=False)]
    except LifecycleError as error:
        raise MisuseError(str(error)) from error
    options = _Options(writeback, rank0_only, offload_to_cpu, with_grads)
    _check(options, lanes)
    with ExitStack() as stack:
        for wrapper in wrappers:
            stack.enter_context(_marked(wrapper))
        for lane in lanes:
            stack.enter_context(_summoned(lane, options))
        yield


def _check(options: _Options, lanes: list[FlatLane]) -> None:
    for lane in lanes:
        if options.with_grads and (options.offload_to_cpu or lane.flat_param is not None):
            raise UnsupportedError(
                f"{_name(lane.wrapper)}: with_grads needs use_orig_params=True and "
                f"offload_to_cpu=False, found use_orig_params={lane.flat_param is None} and "
                f"offload_to_cpu={options.offload_to_cpu}; read .grad outside of the context."
            )
        if options.offload_to_cpu and not lane.is_sharded:
            raise UnsupportedError(
                f"{_name(lane.wrapper)}: offload_to_cpu needs sharded parameters, found them whole "
                "on every rank (NO_SHARD, or one rank); copy them to the host yourself."
            )
    if options.writeback and options.rank0_only:
        raise UnsupportedError(
            "summon_full_params: rank0_only goes with writeback=False, found writeback=True; "
            "other ranks would not see what rank 0 wrote."
        )
    if options.offload_to_cpu and not options.rank0_only:
        warnings.warn(
            "summon_full_params: offload_to_cpu without rank0_only puts a copy of all parameters "
            "into host memory on every rank; consider rank0_only=True.",
            stacklevel=4,
        )


def _name(wrapper: nn.Module) -> str:
    hooks = hooks_of(wrapper)
    return type(wrapper).__name__ if hooks is None else hooks.name


@contextmanager
def _marked(wrapper: nn.Module) -> Iterator[None]:
    """Inside, parameters have clean names and the wrapper cannot run."""
    hooks = hooks_of(wrapper)
    assert hooks is not None  # it is a wrapper

    def mark(value: bool) -> None:
        wrapper.__dict__[_SUMMONED] = value
        for unit in hooks.units:
            unit.is_summoned = value

    mark(True)
    try:
        yield
    finally:
        mark(False)


@contextmanager
def _summoned(lane: FlatLane, options: _Options) -> Iterator[None]:
    summoned = _SummonedLane(lane, options)
    try:
        with torch.no_grad():
            summoned.enter()
        yield
    finally:
        with torch.no_grad():
            summoned.leave()


@dataclass(slots=True)
class _SummonedParam:
    """One parameter in full, and what it was before.

    `seen` is what each module that uses it had in its place.
    """

    shard: FlatShard
    full: nn.Parameter
    data: torch.Tensor
    grad: torch.Tensor | None
    seen: list[torch.Tensor | None] = field(default_factory=list)

    def registered(self) -> nn.Parameter:
        """What is in its place now: a user may have registered another parameter."""
        location = self.shard.locations[0]
        found = location.module._parameters.get(location.name)
        return self.full if found is None else found


class _SummonedLane:
    """The parameters of one lane in full shape, and the way back."""

    def __init__(self, lane: FlatLane, options: _Options) -> None:
        self._lane = lane
        self._options = options
        self._is_flat = lane.flat_param is not None
        self._params: list[_SummonedParam] = []
        self._unregistered: tuple[nn.Module, dict[str, nn.Parameter | None]] | None = None

    def enter(self) -> None:
        lane, options = self._lane, self._options
        full = lane.gather(lane.shard_buffer())
        grads = _full_grads(lane) if options.with_grads else [None] * len(lane.shards)
        if options.rank0_only and not is_first_rank(lane.wrapper):
            return
        if options.offload_to_cpu:
            full = full.cpu()
        if self._is_flat:
            self._unregister_flat_param()
        for shard, grad in zip(lane.shards, grads, strict=True):
            self._show(shard, shard.view_of(full), grad)

    def _show(self, shard: FlatShard, full: torch.Tensor, grad: torch.Tensor | None) -> None:
        param = shard.param
        shown = nn.Parameter(full, requires_grad=param.requires_grad) if self._is_flat else param
        summoned = _SummonedParam(shard, shown, param.data, param.grad)
        self._params.append(summoned)
        if not self._is_flat:
            self._set(param, full, grad)
        for location in shard.locations:
            summoned.seen.append(location.get())
            location.module.__dict__.pop(location.name, None)
            location.module._parameters[location.name] = shown

    def _set(self, param: nn.Parameter, data: torch.Tensor, grad: torch.Tensor | None) -> None:
        if self._options.with_grads:
            param.grad = None  # of another shape than the data will be
        param.data = data
        if self._options.with_grads and grad is not None:
            set_grad(param, grad)

    def _unregister_flat_param(self) -> None:
        for module in self._lane.wrapper.modules():
            registered = module._parameters
            for name, param in registered.items():
                if param is self._lane.flat_param:
                    self._unregistered = (module, dict(registered))
                    del registered[name]
                    return

    def leave(self) -> None:
        """Restore everything, then write back."""
        found = [summoned.registered() for summoned in self._params]
        values, grads = [param.data for param in found], [param.grad for param in found]
        for summoned in reversed(self._params):
            self._restore(summoned)
        if self._unregistered is not None:
            module, registered = self._unregistered
            # In the order before, with what was registered meanwhile at the end.
            merged = registered | module._parameters
            module._parameters.clear()
            module._parameters.update(merged)
        if self._options.writeback:
            for summoned, value, grad in zip(self._params, values, grads, strict=True):
                self._write_back(summoned.shard, value, grad)

    def _restore(self, summoned: _SummonedParam) -> None:
        shard = summoned.shard
        if not self._is_flat:
            self._set(shard.param, summoned.data, summoned.grad)
        for location, seen in zip(shard.locations, summoned.seen, strict=True):
            if self._is_flat:
                location.module._parameters.pop(location.name, None)
            if seen is not None:
                location.put(seen)

    def _write_back(self, shard: FlatShard, value: torch.Tensor, grad: torch.Tensor | None) -> None:
        if value.shape != shard.shape:
            raise ConfigError(
                f"{shard.name}: a summoned parameter must keep its shape {list(shard.shape)}, "
                f"found {list(value.shape)}; what was written to it is not kept."
            )
        shard.slice_of(self._lane.shard_buffer()).copy_(shard.cut(value))
        param = shard.param
        if not self._options.with_grads:
            return
        if grad is None:
            param.grad = None
        elif param.grad is not None:
            param.grad.copy_(shard.cut(grad).view(param.grad.shape))
        elif len(shard.elements):
            set_grad(param, shard.cut(grad).clone().view(param.shape))


def _full_grads(lane: FlatLane) -> list[torch.Tensor | None]:
    """The full gradients, where any rank has a part of one; zeros where others have none."""
    grads = [shard.param.grad for shard in lane.shards]
    codes = [0 if grad is None else 1 + _GRAD_DTYPES.index(grad.dtype) for grad in grads]
    everyone = Agreement.exchanged(codes, lane.mesh_info.shard, lane.device)
    found = [max(column) for column in zip(*everyone, strict=True)]
    if not any(found):
        return [None] * len(found)
    buffer = lane.zeros(_GRAD_DTYPES[max(found) - 1])
    for shard, grad in zip(lane.shards, grads, strict=True):
        if grad is not None:
            shard.slice_of(buffer).copy_(grad.reshape(-1))
    full = lane.gather(buffer)
    pairs = zip(lane.shards, found, strict=True)
    return [shard.view_of(full) if code else None for shard, code in pairs]
