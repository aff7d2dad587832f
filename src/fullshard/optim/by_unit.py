"""`by_unit`: an optimizer that steps the shards of a unit as a few tensors.

A unit keeps this rank's shards of a lane in one shard buffer, and their gradients in another tensor
that is arranged alike. A **run** is a series of neighbouring shards in such a buffer that the
optimizer treats alike: a view of the buffer takes their place in `step`.

`optimizer.state` still has an entry for each parameter. Two kinds of state are understood:
**moments**, with an element for each element of the parameter, and **counts**, tensors without
dims (`step`). The moments of a run lie in one tensor, and so do the counts of all parameters; what
a parameter has in `optimizer.state` are views of these.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from fullshard._torch import (
    disable_dynamo,
    disable_torch_function,
    foreach_copy_,
    local_tensor,
    new_dtensor,
    spec_of,
    to_local,
)
from fullshard.comm.placement import with_dtype
from fullshard.errors import ConfigError, LifecycleError
from fullshard.runtime.hooks import hooks_managing
from fullshard.runtime.replaced import replacement_of
from fullshard.unit.flat_param import OrigParamSlice
from fullshard.unit.param import DTensorParam, ShardedParam
from fullshard.unit.reduce_scatter import set_grad

_ATTRIBUTE = "_fullshard_by_unit"
_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.ASGD,
    optim.Rprop,
)
_NOT_ELEMENTWISE = (optim.LBFGS, optim.SparseAdam, optim.Adafactor, optim.Muon)

O = TypeVar("O", bound=Optimizer)  # noqa: E741
State = dict[str, Any]


def by_unit(optimizer: O, *, elementwise: bool = False) -> O:
    """Let an optimizer step the contiguous shards of each unit as a few tensors.

        optimizer = by_unit(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))

    Returns the same object. Parameters and state get the values that they would get without this,
    and `param_groups` and `state` still have an entry for each parameter: schedulers, scalers,
    hooks, state dicts and checkpoints work as before. Only `step` changes. The optimizer's class
    becomes a subclass with the same name; copies and pickles have the original class.

    Parameters that belong to no unit are stepped as they are.

    Args:
        optimizer: One of torch's elementwise optimizers, over parameters that are sharded by
            either API, or will be. Call this before a scheduler is built.
        elementwise: Promises that an optimizer of another class updates each element by itself,
            from its gradient, its state and the options of its group.

    Raises:
        ConfigError: If the optimizer is not elementwise, or its `step` was replaced.
    """
    _require_elementwise(optimizer, elementwise)
    if _ATTRIBUTE in optimizer.__dict__:
        return optimizer
    cls: type[Optimizer] = type(optimizer)
    if "step" in optimizer.__dict__:
        raise ConfigError(
            f"by_unit: the step of {cls.__name__} must be that of its class, found it replaced, as "
            "learning rate schedulers do; call by_unit right after the optimizer is built."
        )
    optimizer.__dict__[_ATTRIBUTE] = _Stepper()
    optimizer.__class__ = _subclass(cls)  # type: ignore[arg-type]  # mypy takes it for an instance
    return optimizer


def _require_elementwise(optimizer: Any, is_promised: bool) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"by_unit: an optimizer is expected, found {name}; pass one that was built over "
            "model.parameters()."
        )
    if isinstance(optimizer, _NOT_ELEMENTWISE):
        raise ConfigError(
            f"by_unit: an optimizer that updates each element by itself is expected, found {name}, "
            "which looks at whole tensors; use it without by_unit."
        )
    is_known = _ATTRIBUTE in optimizer.__dict__ or type(optimizer) in _ELEMENTWISE
    if not is_known and not is_promised:
        known = ", ".join(each.__name__ for each in _ELEMENTWISE)
        raise ConfigError(
            f"by_unit: one of torch's elementwise optimizers ({known}) is expected, found {name}; "
            "pass elementwise=True if it updates each element by itself."
        )
    options = [optimizer.defaults, *optimizer.param_groups]
    if any(each.get("differentiable", False) for each in options):
        raise ConfigError(
            f"by_unit: {name} must not be differentiable, found differentiable=True; shards have "
            "no graph to the full parameters: leave it out."
        )


@functools.cache
def _subclass(cls: type[Any]) -> type[Any]:
    """The subclass of an optimizer's class whose `step` goes by runs; one for each class.

    A `step` on the instance would be a reference cycle, and the memory of a dropped optimizer would
    wait for the garbage collector.
    """

    # Without the wrapper in which torch calls hooks: ours calls them.
    step_of_cls = cls.step.__wrapped__ if getattr(cls.step, "hooked", False) else cls.step

    @functools.wraps(step_of_cls)
    @disable_dynamo
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        stepper: _Stepper = self.__dict__[_ATTRIBUTE]
        closure = args[0] if args else kwargs.get("closure")
        if not callable(closure):
            return stepper.step(step_of_cls, self, args, kwargs)
        # It reads and writes the parameters, so it runs before runs take their place.
        with torch.enable_grad():
            loss = closure()
        if args:
            args = (None, *args[1:])
        else:
            kwargs["closure"] = None
        stepper.step(step_of_cls, self, args, kwargs)
        return loss

    def reduce_ex(self: Any, protocol: Any) -> Any:
        # Protocol 1, because later ones insist on the class of the object.
        in_full: Callable[..., Any] = cls.__reduce_ex__
        function, args, *rest = in_full(self, 1)
        return (function, tuple(cls if each is made else each for each in args), *rest)

    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True  # torch wraps every step that lacks this mark
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    made: type[Any] = type(
        cls.__name__, (cls,), {**names, "step": hooked, "__reduce_ex__": reduce_ex}
    )
    return made


# Shards


class _Place(NamedTuple):
    """Where a moment lies: in `base`, from the element `offset` on."""

    base: torch.Tensor
    offset: int

    def has(self, moment: torch.Tensor | None) -> bool:
        """Whether a moment is still there. `base` is held: nothing else has its addresses."""
        return (
            moment is not None
            and moment.dtype == self.base.dtype
            and moment.is_contiguous()
            and moment.data_ptr() == self.base.data_ptr() + self.offset * self.base.itemsize
        )


@dataclass(slots=True, eq=False)
class _Shard:
    """A parameter of the optimizer, whose shard is a part of a shard buffer from `start` on.

    `local` is the shard as a plain tensor. `moments` says where its moments lie, by their names.
    """

    param: torch.Tensor
    local: torch.Tensor
    start: int
    numel: int
    moments: dict[str, _Place] = field(default_factory=dict)

    def is_current(self) -> bool:
        """Whether the parameter still is a view of the shard buffer."""
        if isinstance(self.param, DTensor):
            return local_tensor(self.param) is self.local
        param, local = self.param, self.local
        return param.data_ptr() == local.data_ptr() and param.shape == local.shape

    def local_of(self, value: Any) -> torch.Tensor | None:
        """A gradient or a state as a plain tensor, if it is arranged as the shard is."""
        param, local = self.param, self.local
        if isinstance(param, DTensor):
            if not isinstance(value, DTensor) or value.placements != param.placements:
                return None
            value = local_tensor(value) if value.device_mesh == param.device_mesh else None
        is_alike = (
            type(value) is torch.Tensor
            and value.layout is torch.strided
            and (value.shape, value.device) == (local.shape, local.device)
        )
        return value if is_alike else None

    def usable_grad(self) -> torch.Tensor | None:
        return self.local_of(self.param.grad)

    def understands(self, value: Any) -> bool:
        """Whether a state can be that of a run."""
        if isinstance(value, torch.Tensor):
            return _is_count(value) or self.local_of(value) is not None
        return isinstance(value, Hashable)


def _is_count(value: Any) -> bool:
    return type(value) is torch.Tensor and value.ndim == 0


class Tile(NamedTuple):
    """A part of a shard buffer. Neighbours of one kind are one run; None belongs to no run."""

    start: int
    numel: int
    kind: Hashable | None


def plan_runs(tiles: Sequence[Tile]) -> list[list[int]]:
    """The longest runs of neighbouring tiles of one kind, as indices, in the order of the buffer.

    Tiles must not overlap. Nothing but padding lies between neighbours, and it is stepped with
    them. An empty tile without a kind separates nothing.
    """
    runs: list[list[int]] = []
    open_kind: Hashable | None = None
    for index in sorted(range(len(tiles)), key=lambda index: tiles[index][:2]):
        tile = tiles[index]
        if tile.kind is None:
            open_kind = open_kind if tile.numel == 0 else None
        elif open_kind is not None and tile.kind == open_kind:
            runs[-1].append(index)
        else:
            runs.append([index])
            open_kind = tile.kind
    return runs


class _Buffer(NamedTuple):
    """A shard buffer, the shards in it that the optimizer holds, and all others."""

    data: torch.Tensor
    shards: list[_Shard]
    others: list[Tile]

    @classmethod
    def of(
        cls, data: torch.Tensor, params: Sequence[ShardedParam], held: set[torch.Tensor]
    ) -> _Buffer:
        buffer = cls(data, [], [])
        for each in params:
            local = each.local
            # An empty shard lies nowhere. At the end it separates no others.
            start = data.numel()
            if local.numel():
                start = (local.data_ptr() - data.data_ptr()) // data.itemsize
            is_inside = local.dtype == data.dtype and 0 <= start <= data.numel() - local.numel()
            shard = _Shard(each.param, local, start, local.numel())
            # All state of a slice without dims has none: moments would be taken for counts.
            can_step = isinstance(each, DTensorParam) or (
                isinstance(each, OrigParamSlice) and local.ndim > 0
            )
            if can_step and is_inside and each.param in held and shard.is_current():
                buffer.shards.append(shard)
            else:
                buffer.others.append(Tile(start, shard.numel, None))
        return buffer


def _find_buffers(params: Sequence[torch.Tensor]) -> list[_Buffer]:
    """The shard buffers that some of these parameters lie in.

    Plain parameters, those with an all-gather extension, and flat parameters, which are whole
    buffers, lie in none.
    """
    units = dict.fromkeys(
        unit
        for param in params
        if (sharded_param := replacement_of(param)) is not None
        for location in sharded_param.locations
        if (hooks := hooks_managing(location.module)) is not None
        for unit in hooks.reads  # with those that own tied parameters
    )
    held, buffers = set(params), []
    for unit in units:
        if any(sharded_param.local.is_meta for sharded_param in unit.params):
            continue
        in_buffers = [each for each in unit.params if each.extension is None]
        for lane, data in zip(unit.layout.lanes, unit.shard_buffers.lanes, strict=True):
            slots = chain.from_iterable(bucket.slots for bucket in lane.buckets)
            lane_params = [in_buffers[slot.param_index] for slot in slots]
            buffers.append(_Buffer.of(data, lane_params, held))
    return [buffer for buffer in buffers if buffer.shards]


# Runs


class _Run:
    """Neighbouring shards of a buffer, and the tensor that takes their place in a step.

    `states` are the states of the shards' parameters. `given` is the state that the optimizer is
    given for `param`; it is None while the optimizer has no state for these parameters.
    """

    def __init__(
        self, buffer: torch.Tensor, shards: Sequence[_Shard], states: Sequence[State]
    ) -> None:
        self.shards = shards
        self.states = states
        self.given: State | None = None
        self._start = shards[0].start
        # Empty shards come last.
        self._filled = [shard for shard in shards if shard.numel]
        last = self._filled[-1] if self._filled else shards[0]
        self._numel = last.start + last.numel - self._start
        part = buffer[self._start : self._start + self._numel]
        self.param = nn.Parameter(part, requires_grad=part.is_floating_point())
        grad = shards[0].usable_grad()
        assert grad is not None  # a shard without one is in no run
        self._grad_dtype = grad.dtype
        # For take_grad, which looks at every parameter in every step (rule 7).
        self._params = [shard.param for shard in shards]
        self._locals = [shard.local for shard in shards]
        self._addresses = [shard.local.data_ptr() for shard in shards]
        self._specs = [spec_of(param) for param in self._params if isinstance(param, DTensor)]
        self._grad_types = {DTensor if self._specs else torch.Tensor}
        itemsize = grad.itemsize
        self._grad_offsets = [(shard.start - self._start) * itemsize for shard in self._filled]

    # Gradients

    def take_grad(self) -> bool:
        """Give the run all gradients as one tensor; False if they are not as planned."""
        if self._specs:
            is_current = all(map(is_, map(local_tensor, self._params), self._locals))
        else:
            is_current = list(map(torch.Tensor.data_ptr, self._params)) == self._addresses
        if not is_current:
            return False
        grad = self._grad_view()
        if grad is None:
            grad = self._grad_copy()
        if grad is None:
            return False
        set_grad(self.param, grad)
        return True

    def _grad_view(self) -> torch.Tensor | None:
        """A view of all gradients, if they lie in one tensor as the shards do in the buffer."""
        grads: list[Any] = [param.grad for param in self._params]
        if not self._filled or not self._grad_types.issuperset(map(type, grads)):
            return None
        if self._specs:
            # The engine gives a gradient the very spec of its parameter.
            if not all(map(is_, map(spec_of, grads), self._specs)):
                return None
            grads = list(map(local_tensor, grads))
        grads = grads[: len(self._filled)]
        first: torch.Tensor = grads[0]
        # A sparse tensor is not contiguous, and has no address.
        if first.dtype != self._grad_dtype or not all(map(torch.Tensor.is_contiguous, grads)):
            return None
        address = first.data_ptr()
        if [each - address for each in map(torch.Tensor.data_ptr, grads)] != self._grad_offsets:
            return None
        offset = int(first.storage_offset())
        # Separate tensors may lie side by side by chance, but not within one storage.
        if (offset + self._numel) * first.itemsize > first.untyped_storage().nbytes():
            return None
        return first.as_strided((self._numel,), (1,), offset)

    def _grad_copy(self) -> torch.Tensor | None:
        """A copy of all gradients, for a user who has replaced some."""
        found = [shard.usable_grad() for shard in self.shards]
        grads = [grad for grad in found if grad is not None and grad.dtype == self._grad_dtype]
        if len(grads) < len(found):
            return None
        joined = torch.zeros(self._numel, dtype=self._grad_dtype, device=self.param.device)
        if self._filled:
            foreach_copy_(self._parts_of(joined), grads[: len(self._filled)])
        return joined

    def _parts_of(self, joined: torch.Tensor) -> list[torch.Tensor]:
        """The parts of the shards that are not empty in a tensor that is arranged as the run is."""
        starts = [shard.start - self._start for shard in self._filled]
        return [
            joined[start : start + shard.numel].view(shard.local.shape)
            for start, shard in zip(starts, self._filled, strict=True)
        ]

    # State

    def give_state(self) -> None:
        """Make `given` from the states of the shards, which are alike."""
        shard = self.shards[0]
        self.given = {
            name: value if shard.local_of(value) is None else self._joined(name)
            for name, value in self.states[0].items()
        }

    def _joined(self, name: str) -> torch.Tensor:
        """A moment of all shards as one tensor. It is copied if it does not lie in one yet."""
        if not self._filled:
            return to_local(self.states[0][name]).reshape(-1)
        places = [shard.moments.get(name) for shard in self._filled]
        first = places[0]
        if first is not None:
            is_joined = all(
                place is not None
                and place.base is first.base
                and place.offset - first.offset == shard.start - self._start
                for place, shard in zip(places, self._filled, strict=True)
            )
            if is_joined:
                return first.base[first.offset : first.offset + self._numel]
        moments = [to_local(state[name]) for state in self.states[: len(self._filled)]]
        base = moments[0].new_zeros(self._numel)
        foreach_copy_(self._parts_of(base), moments)
        self._share_moment(name, base)
        return base

    def _share_moment(self, name: str, base: torch.Tensor) -> None:
        """Let the moments of the shards be parts of a tensor."""
        for shard, state in zip(self.shards, self.states, strict=True):
            shard.moments[name] = place = _Place(base, shard.start - self._start)
            state[name] = view = _own_view(base, place.offset, shard.local.shape)
            if isinstance(shard.param, DTensor):
                state[name] = new_dtensor(view, with_dtype(spec_of(shard.param), view.dtype))

    def take_state(self, found: State, optimizer: str) -> bool:
        """Let the parameters have the state that the optimizer left for the run.

        Returns whether its tensors are those that were given.
        """
        given = self.given or {}
        is_same = found.keys() == given.keys()
        for name in given.keys() - found.keys():
            for state in self.states:
                del state[name]
        for name, value in found.items():
            before = given.get(name)
            if value is before and name in given:
                continue
            if _can_hold(before, value):
                found[name] = before.copy_(value)  # type: ignore[union-attr]
            elif not isinstance(value, torch.Tensor):
                for state in self.states:
                    state[name] = value
            else:
                is_same = False
                self._share(name, value, optimizer)
        self.given = dict(found)
        return is_same

    def _share(self, name: str, value: torch.Tensor, optimizer: str) -> None:
        """Give each parameter its part of a new tensor."""
        if _is_count(value):
            for state in self.states:
                state[name] = value.clone()
        elif value.shape == self.param.shape:
            self._share_moment(name, value.contiguous())
        else:
            raise ConfigError(
                f"by_unit: state of {optimizer} must have the shape of its parameter or no dims, "
                f"found {name!r} of shape {tuple(value.shape)} for a parameter of "
                f"{tuple(self.param.shape)}; an optimizer with such state is not elementwise: use "
                "it without by_unit."
            )


def _can_hold(before: Any, value: Any) -> bool:
    """Whether a tensor can be written into the one that was there before."""
    if not isinstance(before, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    return (before.shape, before.dtype, before.device) == (value.shape, value.dtype, value.device)


def _own_view(base: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor:
    """A part of a tensor with a storage object of its own: it is saved and copied by itself."""
    numel = torch.Size(shape).numel()
    if numel == 0:
        return base.new_empty(shape)
    view: torch.Tensor = from_dlpack(to_dlpack(base[start : start + numel].view(shape)))
    return view


@dataclass(slots=True, eq=False)
class _Counts:
    """A count of many parameters in one tensor.

    `views` are its elements, as they are in `optimizer.state`, and `numbers` what they were when
    the plan was made. After a step, each element takes the value of the one that `leaders` says:
    the count that the optimizer was given for the run.
    """

    values: torch.Tensor
    views: list[torch.Tensor]
    numbers: list[float] = field(default_factory=list)
    leaders: list[int] = field(default_factory=list)
    order: torch.Tensor | None = None

    def set_order(self) -> None:
        is_alone = self.leaders == list(range(len(self.leaders)))
        device = self.values.device
        self.order = None if is_alone else torch.tensor(self.leaders, device=device)

    def follow_leaders(self) -> None:
        if self.order is not None:
            self.values.copy_(self.values.index_select(0, self.order))


# Steps


class _Plan:
    """What an optimizer steps in place of its parameters, as long as nothing changes.

    `params` are the parameters of each group, `given` what stands in their place, and `state` the
    state for that. `absent` are parameters without a gradient. A plan that does not last is for
    one step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        runs: Sequence[_Run],
        absent: Sequence[torch.Tensor],
        lasts: bool,
    ) -> None:
        self.runs = runs
        self.absent = absent
        self.lasts = lasts
        self.params = [list(group["params"]) for group in optimizer.param_groups]
        # A run stands where its first parameter was.
        first = {run.shards[0].param: run.param for run in runs}
        later = {shard.param for run in runs for shard in run.shards[1:]}
        self.given = [[first.get(p, p) for p in params if p not in later] for params in self.params]
        in_runs = first.keys() | later
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        self.state.update((p, s) for p, s in optimizer.state.items() if p not in in_runs)
        self.state.update((r.param, dict(r.given)) for r in runs if r.given is not None)
        self.num_states = len(self.state)
        self.slices = [param for param in in_runs if not isinstance(param, DTensor)]
        self.note_state(optimizer)

    def note_state(self, optimizer: Optimizer) -> None:
        """Remember the state as it is now."""
        self._states = list(optimizer.state.values())
        self._run_states = [state for run in self.runs for state in run.states if state]
        self._values = _flattened(self._run_states)

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether groups, state and gradients are as planned; if so, runs have their gradients."""
        groups = optimizer.param_groups
        is_same = (
            len(groups) == len(self.params)
            and all(_are_same(g["params"], p) for g, p in zip(groups, self.params, strict=True))
            and _are_same(list(optimizer.state.values()), self._states)
            and _are_same(_flattened(self._run_states), self._values)
        )
        if not is_same:
            return False
        with disable_torch_function():
            if any(param.grad is not None for param in self.absent):
                return False
            return all(run.take_grad() for run in self.runs)

    def take_state(self, optimizer: Optimizer) -> None:
        """Let parameters have the state that a step left."""
        made: dict[Any, State] = {}
        is_noted = True
        for run in self.runs:
            found = self.state.get(run.param)
            if found is None:
                continue
            given = run.given
            if given is None:
                made.update(
                    (s.param, state) for s, state in zip(run.shards, run.states, strict=True)
                )
            elif len(found) == len(given) and all(map(is_, found.values(), given.values())):
                continue
            is_noted = False
            self.lasts = run.take_state(found, type(optimizer).__name__) and self.lasts
        if made or len(self.state) != self.num_states:
            self.lasts = False
            in_runs = {run.param for run in self.runs}
            made.update((key, value) for key, value in self.state.items() if key not in in_runs)
            # In the order in which the class would have made them.
            for param in _params_of(optimizer):
                if param in made:
                    optimizer.state[param] = made.pop(param)
            optimizer.state.update(made)  # what belongs to no parameter
        elif not is_noted:
            self.note_state(optimizer)

    def drop_grads(self) -> None:
        for run in self.runs:
            run.param.grad = None


def _flattened(states: Sequence[State]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, states)))


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


class _Stepper:
    """Steps one optimizer by runs, and does not keep it alive."""

    def __init__(self) -> None:
        self._plan: _Plan | None = None
        self._counts: dict[Hashable, _Counts] = {}
        self._buffers: list[_Buffer] = []
        self._params: list[torch.Tensor] = []

    def step(
        self, step: Callable[..., Any], optimizer: Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Call the step of the optimizer's class with runs in place of their parameters."""
        plan = self._plan
        with torch.no_grad():
            if plan is None or not plan.fits(optimizer):
                if plan is not None:
                    plan.drop_grads()
                self._plan = None
                plan = self._make_plan(optimizer)
        groups, state = optimizer.param_groups, optimizer.state
        held = [group["params"] for group in groups]
        try:
            for group, given in zip(groups, plan.given, strict=True):
                group["params"] = given
            optimizer.state = plan.state
            return step(optimizer, *args, **kwargs)
        finally:
            optimizer.state = state
            for group, params in zip(groups, held, strict=True):
                group["params"] = params
            plan.drop_grads()
            with torch.no_grad():
                plan.take_state(optimizer)
                for counts in self._counts.values():
                    counts.follow_leaders()
            self._plan = plan if plan.lasts else None
            # A hook after every step counts versions for DTensors. Slices are plain tensors, and
            # their versions do not change with the buffer.
            torch.autograd.graph.increment_version(plan.slices)

    def _make_plan(self, optimizer: Optimizer) -> _Plan:
        params, state = _params_of(optimizer), optimizer.state
        is_current = _are_same(params, self._params) and all(
            shard.is_current() for buffer in self._buffers for shard in buffer.shards
        )
        if not is_current or not self._buffers:
            self._buffers, self._params = _find_buffers(params), params
        shards = [shard for buffer in self._buffers for shard in buffer.shards]
        states = {shard: state.get(shard.param, {}) for shard in shards}
        for shard, own in states.items():
            places = shard.moments.items()
            shard.moments = {n: p for n, p in places if p.has(shard.local_of(own.get(n)))}
        known = {s: own for s, own in states.items() if all(map(s.understands, own.values()))}
        counts_of = self._arrange_counts(known)
        group_of = {
            param: n for n, group in enumerate(optimizer.param_groups) for param in group["params"]
        }
        kinds = {
            shard: _kind(shard, group_of[shard.param], state.get(shard.param), counts_of[shard])
            for shard in known
        }
        runs = []
        for buffer in self._buffers:
            tiles = [Tile(s.start, s.numel, kinds.get(s)) for s in buffer.shards] + buffer.others
            for indices in plan_runs(tiles):
                members = [buffer.shards[index] for index in indices]
                runs.append(_Run(buffer.data, members, [states[shard] for shard in members]))
        for run in runs:
            if run.shards[0].param in state:
                run.give_state()
            for name, (counts, leader) in counts_of[run.shards[0]].items():
                for shard in run.shards:
                    counts.leaders[counts_of[shard][name][1]] = leader
        for counts in self._counts.values():
            counts.set_order()
        absent = [shard.param for shard in shards if shard.param.grad is None]
        in_runs = {shard for run in runs for shard in run.shards}
        is_odd = any(s not in in_runs and s.param.grad is not None for s in known)
        # After an unusual gradient, and while there is no memory yet, every step needs a new plan.
        lasts = not is_odd and not any(param.is_meta for param in params)
        plan = _Plan(optimizer, runs, absent, lasts)
        with disable_torch_function():
            if not all(run.take_grad() for run in runs):
                raise LifecycleError(
                    f"{type(optimizer).__name__}: gradients must not change during a step, found "
                    "others; let no other thread run backward meanwhile."
                )
        return plan

    def _arrange_counts(
        self, states: dict[_Shard, State]
    ) -> dict[_Shard, dict[str, tuple[_Counts, int]]]:
        """Put counts into one tensor for each name, and read them: the host waits for a device.

        Returns the tensor and the index of each count.
        """
        alike: defaultdict[Hashable, list[tuple[_Shard, str]]] = defaultdict(list)
        for shard, state in states.items():
            for name, value in state.items():
                if _is_count(value) and shard.local_of(value) is None:
                    alike[name, value.dtype, value.device].append((shard, name))
        before, self._counts = self._counts, {}
        found: dict[_Shard, dict[str, tuple[_Counts, int]]] = {shard: {} for shard in states}
        for key, members in alike.items():
            views = [states[shard][name] for shard, name in members]
            counts = before.get(key)
            if counts is None or not _are_same(counts.views, views):
                values = torch.stack(views)
                counts = _Counts(values, [_own_view(values, n, ()) for n in range(len(views))])
            counts.numbers = counts.values.tolist()
            counts.leaders = list(range(len(views)))
            self._counts[key] = counts
            for index, (shard, name) in enumerate(members):
                states[shard][name] = counts.views[index]
                found[shard][name] = counts, index
        return found


def _kind(
    shard: _Shard, group: int, state: State | None, counts: dict[str, tuple[_Counts, int]]
) -> Hashable | None:
    """What the shards of a run have in common; None for a shard that is not stepped in a run."""
    grad = shard.usable_grad()
    if grad is None:
        return None
    values: list[Hashable] = []
    for name, value in (state or {}).items():
        if name in counts:
            alike, index = counts[name]
            values.append((name, value.dtype, value.device, alike.numbers[index]))
        elif isinstance(value, torch.Tensor):
            values.append((name, value.dtype))
        else:
            values.append((name, type(value), value))
    return group, grad.dtype, state is None, frozenset(values)
