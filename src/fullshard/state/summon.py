"""Parameters of wrapped models in full, outside of forward and backward."""

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
from fullshard.state.lanes import StateLane, StatePart, lanes_of, wrappers_of
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
class Summons:
    """What was asked for."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool


def is_summoned(wrapper: nn.Module) -> bool:
    """Whether a wrapper's parameters are shown in full right now."""
    return bool(wrapper.__dict__.get(_SUMMONED))


def is_first_rank(wrapper: nn.Module) -> bool:
    """Whether this rank is the one that `rank0_only` speaks of."""
    hooks = hooks_of(wrapper)
    assert hooks is not None  # it is a wrapper
    mesh_info = hooks.units[0].mesh_info
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
    wrappers = [w for w in wrappers_of(module) if recurse or w is module]
    summons = Summons(writeback, rank0_only, offload_to_cpu, with_grads)
    _require_idle(wrappers)
    lanes = [lane for wrapper in wrappers for lane in _lanes(wrapper)]
    _check(summons, lanes)
    with ExitStack() as stack:
        for wrapper in wrappers:
            stack.enter_context(_flagged(wrapper))
        for lane in lanes:
            stack.enter_context(_shown(lane, summons))
        yield


def _lanes(wrapper: nn.Module) -> list[StateLane]:
    try:
        return lanes_of(wrapper, recurse=False)
    except LifecycleError as error:
        raise MisuseError(str(error)) from error


def _require_idle(wrappers: list[nn.Module]) -> None:
    for wrapper in wrappers:
        if is_summoned(wrapper):
            raise MisuseError(
                f"{_name(wrapper)}: summon_full_params must be called while parameters are "
                "sharded, found them summoned already; leave the outer context first, or pass "
                "recurse=False to it."
            )


def _check(summons: Summons, lanes: list[StateLane]) -> None:
    for lane in lanes:
        if summons.with_grads and (summons.offload_to_cpu or lane.flat_param is not None):
            raise UnsupportedError(
                f"{_name(lane.wrapper)}: with_grads needs use_orig_params=True and "
                f"offload_to_cpu=False, found use_orig_params={lane.flat_param is None} and "
                f"offload_to_cpu={summons.offload_to_cpu}; read .grad outside of the context."
            )
        if summons.offload_to_cpu and lane.num_ranks == 1:
            raise UnsupportedError(
                f"{_name(lane.wrapper)}: offload_to_cpu needs sharded parameters, found them whole "
                "on every rank (NO_SHARD, or one rank); copy them to the host yourself."
            )
    if summons.writeback and summons.rank0_only:
        raise UnsupportedError(
            "summon_full_params: rank0_only goes with writeback=False, found writeback=True; "
            "other ranks would not see what rank 0 wrote."
        )
    if summons.offload_to_cpu and not summons.rank0_only:
        warnings.warn(
            "summon_full_params: offload_to_cpu without rank0_only puts a copy of all parameters "
            "into host memory on every rank; consider rank0_only=True.",
            stacklevel=4,
        )


@contextmanager
def _flagged(wrapper: nn.Module) -> Iterator[None]:
    """Inside, parameters have clean names and the wrapper cannot run."""
    hooks = hooks_of(wrapper)
    assert hooks is not None  # it is a wrapper
    wrapper.__dict__[_SUMMONED] = True
    for unit in hooks.units:
        unit.is_summoned = True
    try:
        yield
    finally:
        for unit in hooks.units:
            unit.is_summoned = False
        wrapper.__dict__[_SUMMONED] = False


@contextmanager
def _shown(lane: StateLane, summons: Summons) -> Iterator[None]:
    show = _Show(lane, summons)
    try:
        with torch.no_grad():
            show.enter()
        yield
    finally:
        with torch.no_grad():
            show.leave()


@dataclass(slots=True)
class _Before:
    """How one parameter was before it was shown in full.

    `seen` is what each module that uses it had in its place.
    """

    part: StatePart
    shown: nn.Parameter
    data: torch.Tensor
    grad: torch.Tensor | None
    seen: list[torch.Tensor | None] = field(default_factory=list)

    def registered(self) -> nn.Parameter:
        """What stands in its place now: a user may have registered another parameter."""
        place = self.part.locations[0]
        found = place.module._parameters.get(place.name)
        return self.shown if found is None else found


class _Show:
    """The parameters of one lane in full shape, and the way back."""

    def __init__(self, lane: StateLane, summons: Summons) -> None:
        self._lane = lane
        self._summons = summons
        self._is_flat = lane.flat_param is not None
        self._before: list[_Before] = []
        self._hidden: tuple[nn.Module, dict[str, nn.Parameter | None]] | None = None

    def enter(self) -> None:
        lane, summons = self._lane, self._summons
        full = lane.gather(lane.segment())
        grads = _full_grads(lane) if summons.with_grads else [None] * len(lane.parts)
        if summons.rank0_only and not is_first_rank(lane.wrapper):
            return
        if summons.offload_to_cpu:
            full = full.cpu()
        if self._is_flat:
            self._hide_flat_param()
        for part, grad in zip(lane.parts, grads, strict=True):
            self._show(part, part.of_full(full), grad)

    def _show(self, part: StatePart, full: torch.Tensor, grad: torch.Tensor | None) -> None:
        param = part.param
        shown = nn.Parameter(full, requires_grad=param.requires_grad) if self._is_flat else param
        before = _Before(part, shown, param.data, param.grad)
        self._before.append(before)
        if not self._is_flat:
            self._set(param, full, grad)
        for place in part.locations:
            before.seen.append(place.get())
            place.module.__dict__.pop(place.name, None)
            place.module._parameters[place.name] = shown

    def _set(self, param: nn.Parameter, data: torch.Tensor, grad: torch.Tensor | None) -> None:
        if self._summons.with_grads:
            param.grad = None  # of another shape than the data will be
        param.data = data
        if self._summons.with_grads and grad is not None:
            set_grad(param, grad)

    def _hide_flat_param(self) -> None:
        for module in self._lane.wrapper.modules():
            registered = module._parameters
            for name, param in registered.items():
                if param is self._lane.flat_param:
                    self._hidden = (module, dict(registered))
                    del registered[name]
                    return

    def leave(self) -> None:
        """Put everything back, then keep what was written."""
        found = [before.registered() for before in self._before]
        values, grads = [param.data for param in found], [param.grad for param in found]
        for before in reversed(self._before):
            self._put_back(before)
        if self._hidden is not None:
            module, registered = self._hidden
            # In the order that it had, with what was registered meanwhile at the end.
            merged = registered | module._parameters
            module._parameters.clear()
            module._parameters.update(merged)
        if self._summons.writeback:
            self._keep(values, grads)

    def _put_back(self, before: _Before) -> None:
        part = before.part
        if not self._is_flat:
            self._set(part.param, before.data, before.grad)
        for place, seen in zip(part.locations, before.seen, strict=True):
            if self._is_flat:
                place.module._parameters.pop(place.name, None)
            if seen is not None:
                place.put(seen)

    def _keep(self, values: list[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
        segment = self._lane.segment()
        for before, value, grad in zip(self._before, values, grads, strict=True):
            part = before.part
            if value.shape != part.shape:
                raise ConfigError(
                    f"{part.name}: a summoned parameter must keep its shape {list(part.shape)}, "
                    f"found {list(value.shape)}; what was written to it is not kept."
                )
            part.of_segment(segment).copy_(part.cut(value))
            if self._summons.with_grads:
                _keep_grad(part, grad)


def _keep_grad(part: StatePart, grad: torch.Tensor | None) -> None:
    param = part.param
    if grad is None:
        param.grad = None
    elif param.grad is not None:
        param.grad.copy_(part.cut(grad).view(param.grad.shape))
    elif len(part.elements):
        set_grad(param, part.cut(grad).clone().view(param.shape))


def _full_grads(lane: StateLane) -> list[torch.Tensor | None]:
    """The full gradients, where any rank has a part of one; zeros where others have none."""
    locals_ = [part.param.grad for part in lane.parts]
    codes = [0 if grad is None else 1 + _GRAD_DTYPES.index(grad.dtype) for grad in locals_]
    axis = lane.mesh_info.shard
    everyone = Agreement.exchanged(codes, axis, lane.device)
    found = [max(column) for column in zip(*everyone, strict=True)]
    if not any(found):
        return [None] * len(found)
    segment = lane.empty_segment(_GRAD_DTYPES[max(found) - 1])
    for part, grad in zip(lane.parts, locals_, strict=True):
        if grad is not None:
            part.of_segment(segment).copy_(grad.reshape(-1))
    full = lane.gather(segment)
    return [
        part.of_full(full) if code else None for part, code in zip(lane.parts, found, strict=True)
    ]


def _name(wrapper: nn.Module) -> str:
    hooks = hooks_of(wrapper)
    return type(wrapper).__name__ if hooks is None else hooks.name
