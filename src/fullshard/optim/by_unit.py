"""`by_unit`: an optimizer that steps the shards of a unit as a few tensors.

A unit keeps this rank's shards of a lane in one shard buffer, and their gradients in another tensor
that is arranged alike. A **run** is a series of neighboring shards in such a buffer that the
optimizer treats alike: a view of the buffer takes their place in `step`.

A hook before every step makes it run on a **stand-in**: an object with the attributes of the
optimizer, but groups and state of runs. A hook after the step gives its results to the optimizer.

`optimizer.state` has an entry for each parameter. Two kinds of state are understood: **moments**,
with an element for each element of the parameter, and **counts**, tensors without dims (`step`).
The moments of a run lie in one tensor, and so do the counts of all parameters; the entries of
`optimizer.state` are views of these.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import is_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard._torch import (
    disable_torch_function,
    foreach_copy_,
    local_tensor,
    new_dtensor,
    spec_of,
    step_post_hooks,
    to_local,
)
from fullshard.comm.placement import with_dtype
from fullshard.device import with_own_storage
from fullshard.errors import ConfigError
from fullshard.runtime.hooks import hooks_managing
from fullshard.runtime.replaced import replacement_of
from fullshard.unit.flat_param import FlatParameter
from fullshard.unit.grad_buffer import set_grad
from fullshard.unit.param import ShardedParam

_ATTRIBUTE = "_fullshard_by_unit"
_ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.ASGD, optim.Rprop),
)
_INEXACT_ON = {"cpu", "meta"}
# A plan takes longer to make than it saves: if every step needs another, because other parameters
# have gradients, steps are by unit only on request. The first three steps need one anyway.
_MAX_PLANS = 6
_NOT_ELEMENTWISE = (optim.LBFGS, optim.SparseAdam, optim.Adafactor, optim.Muon)

O = TypeVar("O", bound=Optimizer)  # noqa: E741
State = dict[str, Any]
States = dict[Any, State]


def by_unit(optimizer: O, *, elementwise: bool = False, enabled: bool = True) -> O:
    """Let an optimizer step the contiguous shards of each unit as a few tensors.

        optimizer = by_unit(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))

    Returns the same object. Parameters and state get the values that they would get without this,
    and `param_groups` and `state` still have an entry for each parameter: schedulers, scalers,
    hooks, state dicts and checkpoints work as before. Parameters that belong to no unit are stepped
    as they are. Copies and pickles of the optimizer do not have this setting.

    Where results are equal to the last bit, this applies by itself: for the classes of torch, with
    `fused` or `foreach` set in every group, and shards of `fully_shard` on an accelerator.

    Args:
        optimizer: One of torch's elementwise optimizers, over parameters that are sharded by
            either API, or will be.
        elementwise: Promises that an optimizer of another class updates each element by itself,
            from its gradient, its state and the options of its group.
        enabled: False lets the optimizer step each parameter by itself, until another call.

    Raises:
        ConfigError: If the optimizer is not elementwise, or is differentiable.
    """
    cls: Any = type(optimizer)
    attributes = vars(optimizer) if isinstance(optimizer, Optimizer) else {}
    if attributes and not enabled:
        attributes[_ATTRIBUTE] = None
        return optimizer
    problem = None
    if isinstance(optimizer, _NOT_ELEMENTWISE):
        problem = (
            f"{cls.__name__} looks at whole tensors, so it cannot step units; use it without "
            "by_unit"
        )
    elif not attributes or not (elementwise or cls in _ELEMENTWISE):
        known = ", ".join(each.__name__ for each in _ELEMENTWISE)
        problem = (
            f"{cls.__name__} is not one of torch's elementwise optimizers ({known}); pass "
            "elementwise=True if it updates each element by itself"
        )
    elif any(each.get("differentiable") for each in (optimizer.defaults, *optimizer.param_groups)):
        problem = (
            f"{cls.__name__} has differentiable=True, but shards have no graph to the full "
            "parameters; leave it out"
        )
    if problem is not None:
        raise ConfigError(f"by_unit: {problem}.")
    _attach(optimizer, is_automatic=False)
    watch_optimizers()
    return optimizer


@functools.cache
def watch_optimizers() -> None:
    """Step optimizers by unit on which `by_unit` was called, and those for which it is exact."""
    register_optimizer_step_pre_hook(_before_step)


def is_exact(kind: type, groups: Iterable[State], shard_devices: Iterator[str]) -> bool:
    """Whether an optimizer is faster by unit, and its results are equal to the last bit.

    With `fused` or `foreach` set, the same elementwise kernels run over runs as over `DTensor`s;
    with neither, torch steps `DTensor`s one by one, but plain tensors with foreach kernels. On a
    CPU, kernels may round differently at the end of a tensor. `shard_devices` has the device types
    of shards that are `DTensor`s: stepping slices by unit gains nothing.
    """
    if kind not in _ELEMENTWISE or not _are_kernels_set(groups):
        return False
    return next(shard_devices, "cpu") not in _INEXACT_ON and _INEXACT_ON.isdisjoint(shard_devices)


def _are_kernels_set(groups: Iterable[State]) -> bool:
    are_set = ((g.get("fused") or g.get("foreach")) and not g.get("differentiable") for g in groups)
    return all(are_set)


def _shard_devices(groups: Iterable[State]) -> Iterator[str]:
    for param in chain.from_iterable(group["params"] for group in groups):
        if isinstance(param, DTensor) and replacement_of(param) is not None:
            yield param.device.type


def _attach(optimizer: Optimizer, *, is_automatic: bool) -> None:
    steps = vars(optimizer)[_ATTRIBUTE] = vars(optimizer).get(_ATTRIBUTE) or _Steps()
    steps.is_automatic = is_automatic
    hooks = step_post_hooks(optimizer)
    if _after_step not in hooks.values():
        handle = optimizer.register_step_post_hook(_after_step)
        hooks.move_to_end(handle.id, last=False)  # the others see the state of parameters


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Step a stand-in in place of its optimizer, also in steps that the optimizer's step calls."""
    if torch.compiler.is_compiling() or args[0] is not optimizer or isinstance(optimizer, _StandIn):
        return None
    kind: Any = type(optimizer)
    attributes = vars(optimizer)
    groups = attributes.get("param_groups", ())
    if _ATTRIBUTE not in attributes and is_exact(kind, groups, _shard_devices(groups)):
        _attach(optimizer, is_automatic=True)
    steps: _Steps | None = attributes.get(_ATTRIBUTE)
    if steps is None:
        return None
    if steps.is_automatic and not _are_kernels_set(groups):  # a state dict has changed options
        del attributes[_ATTRIBUTE]
        return None
    if steps.is_automatic and steps.num_plans > _MAX_PLANS:
        attributes[_ATTRIBUTE] = None
        return None
    closure = next(filter(callable, (*args[1:2], kwargs.get("closure"))), None)
    once = steps.begin(closure)
    stand_in = object.__new__(_stand_in_class(kind))
    stand_in.__dict__, stand_in._fullshard_steps = attributes, steps
    args = (once if each is closure else each for each in args[1:])
    return (stand_in, *args), {k: once if each is closure else each for k, each in kwargs.items()}


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if args[0] is not optimizer and isinstance(args[0], _StandIn):
        args[0]._fullshard_steps.finish(optimizer)


class _StandIn:
    """An optimizer during its step: shares the optimizer's attributes, but has groups of runs."""

    __slots__ = ("_fullshard_steps",)
    _fullshard_steps: _Steps
    param_groups = property(lambda self: self._fullshard_steps.given(vars(self))[0])
    state = property(lambda self: self._fullshard_steps.given(vars(self))[1])

    def __del__(self) -> None:
        """Replaces that of the optimizer's class: the optimizer lives on."""


@functools.cache
def _stand_in_class(cls: type) -> Any:
    names = ("__module__", "__qualname__", "__doc__")
    return type(cls.__name__, (_StandIn, cls), {name: getattr(cls, name) for name in names})


class _Steps:
    """The steps of an optimizer by unit: their plan, and what the current step is given.

    `num_plans` counts steps in a row that needed a plan of their own.
    """

    is_automatic = False
    num_plans = 0
    _plan: _Plan | None = None
    _closure: Callable[[], Any] | None = None
    _given: tuple[list[State], States] | None = None

    def begin(self, closure: Any) -> Any:
        """Return a closure for the step that is called once, before gradients are looked at."""
        self._given = None
        self._closure = closure and functools.cache(torch.enable_grad()(closure))
        return self._closure

    def given(self, attributes: State) -> tuple[list[State], States]:
        """The groups and the state for a step, made when it reads them: all hooks have run then."""
        if self._given is None:
            if self._closure is not None:
                self._closure()
            groups, states = self._given = attributes["param_groups"], attributes["state"]
            with torch.no_grad():
                if self._plan is not None and self._plan.fits(groups, states):
                    self.num_plans = 0
                else:
                    self.num_plans += 1
                    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                        self._plan = None  # to make one, the host would wait for the device
                        return self._given
                    self._plan = _Plan(groups, states, self._plan)
            pairs = zip(groups, self._plan.given, strict=True)
            self._given = [{**group, "params": p} for group, p in pairs], self._plan.state
        return self._given

    def finish(self, optimizer: Optimizer) -> None:
        """Give the optimizer the options and the state that a step left."""
        groups, states = optimizer.param_groups, optimizer.state
        given, _ = self._given or (groups, states)
        self._given, self._closure = (groups, states), None
        if self._plan is not None and given is not groups:
            for group, left in zip(groups, given, strict=True):
                group.update({**left, "params": group["params"]})
            with torch.no_grad():
                self._plan.finish(groups, states, type(optimizer).__name__)


class _Shard(NamedTuple):
    """A parameter whose shard, `local` as a plain tensor, is in a shard buffer from `start` on."""

    param: torch.Tensor
    local: torch.Tensor
    start: int

    @classmethod
    def of(cls, sharded: ShardedParam, buffer: torch.Tensor) -> _Shard | None:
        """None if the shard is not in the buffer, or is not stepped as a shard of its own."""
        param, local = sharded.param, to_local(sharded.param)
        # An empty shard lies nowhere.
        offset = local.data_ptr() - buffer.data_ptr() if local.numel() else 0
        start = offset // buffer.itemsize
        is_inside = local.dtype == buffer.dtype and 0 <= start <= buffer.numel() - local.numel()
        if isinstance(param, DTensor):
            is_inside = is_inside and local is sharded.local
        elif local.ndim == 0 or isinstance(param, FlatParameter):
            # All state of a 0-dim slice is 0-dim: moments would be taken for counts.
            return None
        return cls(param, local, start) if is_inside else None

    def local_of(self, value: Any) -> torch.Tensor | None:
        """A gradient or a moment as a plain tensor, if it is arranged as the shard is."""
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

    def kind(self, group: int, state: State | None, counts: dict[Any, float]) -> Any:
        """What the shards of a run have in common; None for a shard that is in no run."""
        grad = self.local_of(self.param.grad)
        if grad is None:
            return None
        facts: State = {}
        for name, value in (state or {}).items():
            if not isinstance(value, torch.Tensor):
                facts[name] = type(value), value
            elif _is_count(value):
                facts[name] = value.dtype, value.device, counts[self.param, name]
            elif self.local_of(value) is None:
                return None
            else:
                facts[name] = value.dtype
        return grad.dtype, group, state is None, facts


def _is_count(value: Any) -> bool:
    return type(value) is torch.Tensor and value.ndim == 0


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _own_view(base: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor:
    """A part of a tensor with a storage object of its own: it is saved and copied by itself."""
    numel = torch.Size(shape).numel()
    view = base[start : start + numel].view(shape)
    return with_own_storage(view) if numel else torch.empty_like(view)


def _find_lanes(params: Collection[torch.Tensor]) -> Iterator[tuple[Any, list[_Shard | None]]]:
    """The shard buffers of the units that have some of these parameters, with all their shards.

    None stands for a shard that is not one of these parameters, or for that of a flat parameter,
    which is a whole buffer. Plain parameters and those with an all-gather extension are in none.
    """
    units = dict.fromkeys(
        unit
        for param in params
        if (sharded_param := replacement_of(param)) is not None
        for location in sharded_param.locations
        if (hooks := hooks_managing(location.module)) is not None
        for unit in hooks.reads  # with those that own tied parameters
    )
    for unit in units:
        if any(sharded_param.local.is_meta for sharded_param in unit.params):
            continue
        in_buffers = [each for each in unit.params if each.extension is None]
        for lane, buffer in zip(unit.layout.lanes, unit.shard_buffers.lanes, strict=True):
            slots = chain.from_iterable(bucket.slots for bucket in lane.buckets)
            found = [in_buffers[slot.param_index] for slot in slots]
            yield buffer, [_Shard.of(e, buffer) if e.param in params else None for e in found]


class _Run:
    """Neighboring shards of a buffer, and the tensor that takes their place in a step.

    `params` are their parameters and `states` the states of these. `given` is the state that the
    optimizer is given for `param`; it is None while the optimizer has no state for these
    parameters. `moments` has each moment of the run and the views of it that the parameters have.
    """

    def __init__(self, buffer: torch.Tensor, shards: Iterable[Any], all_states: States) -> None:
        # Empty shards come last.
        self._shards = sorted(shards, key=lambda shard: shard.local.numel() == 0)
        self._filled = [shard for shard in self._shards if shard.local.numel()]
        first, last = (self._filled or self._shards)[0], (self._filled or self._shards)[-1]
        self._start = first.start
        part = buffer[first.start : last.start + last.local.numel()]
        self.param = nn.Parameter(part, requires_grad=part.is_floating_point())
        self.params = [shard.param for shard in self._shards]
        self.states = [all_states.get(param, {}) for param in self.params]
        self.given: State | None = None
        self.moments: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        # For take_grad, which looks at every parameter in every step (rule 7: host time).
        self._addresses = [shard.local.data_ptr() for shard in self._shards]
        self._specs = [spec_of(param) for param in self.params if isinstance(param, DTensor)]
        self._grad_types = {DTensor if self._specs else torch.Tensor}
        self._grad_dtype: torch.dtype = first.param.grad.dtype
        itemsize = self._grad_dtype.itemsize
        self._grad_offsets = [(shard.start - self._start) * itemsize for shard in self._filled]

    def take_grad(self) -> bool:
        """Give the run all gradients as one tensor; False if they are not as planned."""
        shards = map(local_tensor, self.params) if self._specs else self.params
        if list(map(torch.Tensor.data_ptr, shards)) != self._addresses:
            return False
        grad = self._grad_view()
        if grad is None:  # a user has replaced some
            found = [shard.local_of(shard.param.grad) for shard in self._shards]
            grads = [each for each in found if each is not None and each.dtype == self._grad_dtype]
            if len(grads) < len(found):
                return False
            grad = self._joined(grads)
        set_grad(self.param, grad)
        return True

    def _grad_view(self) -> torch.Tensor | None:
        """A view of all gradients, if they lie in one tensor as the shards do in the buffer."""
        grads: list[Any] = [param.grad for param in self.params]
        if not self._filled or not self._grad_types.issuperset(map(type, grads)):
            return None
        if self._specs:
            # The engine gives a gradient the same spec object as its parameter.
            if not all(map(is_, map(spec_of, grads), self._specs)):
                return None
            grads = list(map(local_tensor, grads))
        grads = grads[: len(self._filled)]
        first: torch.Tensor = grads[0]
        # A sparse tensor is not contiguous, and has no address.
        if first.dtype != self._grad_dtype or not all(map(torch.Tensor.is_contiguous, grads)):
            return None
        address, offset, numel = first.data_ptr(), int(first.storage_offset()), self.param.numel()
        if [each - address for each in map(torch.Tensor.data_ptr, grads)] != self._grad_offsets:
            return None
        # Separate tensors may lie side by side by chance, but not within one storage.
        if (offset + numel) * first.itemsize > first.untyped_storage().nbytes():
            return None
        return first.as_strided((numel,), (1,), offset)

    def _joined(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor that is arranged as the run is, with a value for each shard."""
        joined = values[0].new_zeros(self.param.numel())
        parts = [
            joined[shard.start - self._start :][: shard.local.numel()].view(shard.local.shape)
            for shard in self._filled
        ]
        if parts:
            foreach_copy_(parts, list(values[: len(parts)]))
        return joined

    def give_state(self, before: _Run | None) -> None:
        """Make `given` from the states, which are alike. Moments already in one tensor stay."""
        self.given = dict(self.states[0])
        for name, value in self.given.items():
            if not isinstance(value, torch.Tensor) or _is_count(value):
                continue
            moments = [state[name] for state in self.states]
            if before is not None and _are_same(before.moments.get(name, (None, []))[1], moments):
                self.moments[name] = before.moments[name]
            else:
                self._share_moment(name, self._joined([to_local(moment) for moment in moments]))
            self.given[name] = self.moments[name][0]

    def _share_moment(self, name: str, base: torch.Tensor) -> None:
        """Make the moments of the parameters views of one tensor."""
        views = []
        for shard, state in zip(self._shards, self.states, strict=True):
            view = _own_view(base, shard.start - self._start, shard.local.shape)
            if isinstance(shard.param, DTensor):
                view = new_dtensor(view, with_dtype(spec_of(shard.param), view.dtype))
            state[name] = view
            views.append(view)
        self.moments[name] = base, views

    def take_state(self, found: State, optimizer: str) -> bool:
        """Give the parameters the state of the run; return whether its tensors are the same."""
        given, self.given = self.given or {}, dict(found)
        is_same = found.keys() == given.keys()
        for name, value in found.items():
            if value is given.get(name, self):
                continue
            is_same = is_same and not isinstance(value, torch.Tensor)
            if not isinstance(value, torch.Tensor) or _is_count(value):
                for state in self.states:
                    state[name] = value.clone() if isinstance(value, torch.Tensor) else value
            elif value.shape == self.param.shape:
                self._share_moment(name, value.contiguous())
            else:
                raise ConfigError(
                    f"by_unit: {optimizer} has a state {name!r} of shape {tuple(value.shape)} "
                    f"for a parameter of {tuple(self.param.shape)}, so it is not elementwise; "
                    "use it without by_unit."
                )
        for state in self.states:
            for name in state.keys() - found.keys():
                del state[name]
        return is_same


class _Plan:
    """What an optimizer steps in place of its parameters, as long as nothing changes.

    `given` replaces the parameters of each group, and `state` is the state for what it has. A plan
    that does not last is for one step.
    """

    def __init__(self, groups: list[State], states: States, before: _Plan | None) -> None:
        numbers = {param: n for n, group in enumerate(groups) for param in group["params"]}
        self._counts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._runs = self._find_runs(numbers, states)
        self._is_under_way = True  # its step
        # While there is no memory yet, every step needs a new plan.
        self._lasts = not any(param.is_meta for param in numbers)
        known = {} if before is None else {run.params[0]: run for run in before._runs}
        for run in self._runs:
            if run.params[0] in states:
                run.give_state(known.get(run.params[0]))
        # A run stands where its first parameter was.
        first = {run.params[0]: run.param for run in self._runs}
        later = {param for run in self._runs for param in run.params[1:]}
        self.given = [[first.get(p, p) for p in g["params"] if p not in later] for g in groups]
        in_runs = first.keys() | later
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        self.state.update((p, s) for p, s in states.items() if p not in in_runs)
        self.state.update((r.param, dict(r.given)) for r in self._runs if r.given is not None)
        self._num_states = len(self.state)
        self._slices = [param for param in in_runs if not isinstance(param, DTensor)]
        self._noted = self._facts(groups, states)
        with disable_torch_function():
            for run in self._runs:
                run.take_grad()

    def _find_runs(self, groups: dict[torch.Tensor, int], states: States) -> list[_Run]:
        lanes = list(_find_lanes(groups))
        params = [shard.param for _, shards in lanes for shard in shards if shard is not None]
        self._absent = [param for param in params if param.grad is None]
        # All counts of a name lie in one tensor. Reading them makes the host wait for the device.
        alike: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
        for param in params:
            for name, value in states.get(param, {}).items():
                if _is_count(value):
                    alike[name, value.dtype, value.device].append(param)
        counts: dict[Any, float] = {}
        joined = []
        for (name, *_), members in alike.items():
            values = torch.stack([states[param][name] for param in members])
            for index, number in enumerate(values.tolist()):
                counts[members[index], name] = number
                states[members[index]][name] = _own_view(values, index, ())
            joined.append((values, members))

        def kind(shard: _Shard | None) -> Any:
            return shard and shard.kind(groups[shard.param], states.get(shard.param), counts)

        runs = [
            _Run(buffer, members, states)
            for buffer, shards in lanes
            for common, members in groupby(shards, kind)
            if common is not None
        ]
        # After a step, every count takes the value of the one that the optimizer was given.
        leaders = {param: run.params[0] for run in runs for param in run.params}
        for values, members in joined:
            numbers = {param: index for index, param in enumerate(members)}
            order = [numbers[leaders.get(param, param)] for param in members]
            self._counts.append((values, torch.tensor(order, device=values.device)))
        return runs

    def _facts(self, groups: list[State], states: States) -> list[Any]:
        """The parameters of groups and the state, which have to stay the same objects."""
        params = chain.from_iterable((*group["params"], None) for group in groups)
        run_states = chain.from_iterable(run.states for run in self._runs)
        return [*params, *states.values(), *chain.from_iterable(map(dict.values, run_states))]

    def fits(self, groups: list[State], states: States) -> bool:
        """Whether groups, state and gradients are as planned; if so, runs have their gradients."""
        if self._is_under_way:  # its step has failed
            self._settle()
            return False
        is_same = self._lasts and _are_same(self._facts(groups, states), self._noted)
        self._is_under_way = is_same
        with disable_torch_function():
            is_same = is_same and all(param.grad is None for param in self._absent)
            return is_same and all(run.take_grad() for run in self._runs)

    def finish(self, groups: list[State], states: States, optimizer: str) -> None:
        """Give parameters the state that a step left, and drop what the step was given."""
        made: States = {}
        is_noted = True
        for run in self._runs:
            found, given = self.state.get(run.param), run.given
            if found is None or (given and _are_same([*found.values()], [*given.values()])):
                continue
            if given is None:
                made.update(zip(run.params, run.states, strict=True))
            is_noted = False
            self._lasts = run.take_state(found, optimizer) and self._lasts
        if made or len(self.state) != self._num_states:
            self._lasts = False
            in_runs = {run.param for run in self._runs}
            made.update((key, value) for key, value in self.state.items() if key not in in_runs)
            # In the order in which the class would have made them.
            for param in chain.from_iterable(group["params"] for group in groups):
                if param in made:
                    states[param] = made.pop(param)
            states.update(made)  # what belongs to no parameter
        elif not is_noted:
            self._noted = self._facts(groups, states)
        self._settle()
        # A hook after every step increments the versions of DTensors. Slices are plain tensors,
        # whose versions do not change with the buffer.
        torch.autograd.graph.increment_version(self._slices)

    def _settle(self) -> None:
        self._is_under_way = False
        for run in self._runs:
            run.param.grad = None
        for values, order in self._counts:
            values.copy_(values.index_select(0, order))
