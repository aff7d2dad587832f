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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, groupby
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
from fullshard.errors import ConfigError
from fullshard.runtime.hooks import hooks_managing
from fullshard.runtime.replaced import replacement_of
from fullshard.unit.flat_param import FlatParameter
from fullshard.unit.param import ShardedParam
from fullshard.unit.reduce_scatter import set_grad

_ATTRIBUTE = "_fullshard_by_unit"
_ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.ASGD, optim.Rprop),
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
    cls: Any = type(optimizer)
    attributes = vars(optimizer) if isinstance(optimizer, Optimizer) else {}
    if _ATTRIBUTE in attributes:
        return optimizer
    problem = None
    if isinstance(optimizer, _NOT_ELEMENTWISE):
        problem = (
            "an optimizer that updates each element by itself is expected, found "
            f"{cls.__name__}, which looks at whole tensors; use it without by_unit"
        )
    elif not attributes or not (elementwise or cls in _ELEMENTWISE):
        known = ", ".join(each.__name__ for each in _ELEMENTWISE)
        problem = (
            f"one of torch's elementwise optimizers ({known}) is expected, found {cls.__name__}; "
            "pass elementwise=True if it is an optimizer that updates each element by itself"
        )
    elif any(each.get("differentiable") for each in (optimizer.defaults, *optimizer.param_groups)):
        problem = (
            f"{cls.__name__} must not be differentiable, found differentiable=True; shards have no "
            "graph to the full parameters: leave it out"
        )
    elif "step" in attributes:
        problem = (
            f"the step of {cls.__name__} must be that of its class, found it replaced, as learning "
            "rate schedulers do; call by_unit right after the optimizer is built"
        )
    if problem is not None:
        raise ConfigError(f"by_unit: {problem}.")
    attributes[_ATTRIBUTE] = None
    optimizer.__class__ = _subclass(cls)
    return optimizer


@functools.cache
def _subclass(cls: Any) -> type[Any]:
    """The subclass of an optimizer's class whose `step` goes by runs; one for each class.

    A `step` on the instance would be a reference cycle, and the memory of a dropped optimizer would
    wait for the garbage collector.
    """
    # Without the wrapper in which torch calls hooks: ours calls them.
    step_of_cls = cls.step.__wrapped__ if getattr(cls.step, "hooked", False) else cls.step

    class ByUnit(cls):  # type: ignore[misc]
        @Optimizer.profile_hook_step
        @functools.wraps(step_of_cls)
        @disable_dynamo
        def step(self, *args: Any, **kwargs: Any) -> Any:
            if args and callable(args[0]):
                args = (_called(args[0]), *args[1:])
            elif callable(kwargs.get("closure")):
                kwargs["closure"] = _called(kwargs["closure"])
            return _step_by_runs(self, functools.partial(step_of_cls, self, *args, **kwargs))

        step.hooked = True  # type: ignore[attr-defined]  # torch wraps every step without this

        def __reduce_ex__(self, protocol: Any) -> Any:
            # Protocol 1, because later ones insist on the class of the object.
            function, args, *rest = super().__reduce_ex__(1)
            return (function, tuple(cls if each is ByUnit else each for each in args), *rest)

    functools.update_wrapper(ByUnit, cls, updated=())
    return ByUnit


def _called(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Call a closure, which reads and writes parameters, before runs take their place."""
    with torch.enable_grad():
        loss = closure()
    return lambda: loss


def _step_by_runs(optimizer: Optimizer, step: Callable[[], Any]) -> Any:
    """Call the step of the optimizer's class with runs in place of their parameters."""
    plan: _Plan | None = vars(optimizer)[_ATTRIBUTE]
    with torch.no_grad():
        if plan is None or not plan.fits(optimizer):
            vars(optimizer)[_ATTRIBUTE] = plan = _Plan(optimizer, plan)
    groups, state = optimizer.param_groups, optimizer.state
    held = [group["params"] for group in groups]
    try:
        for group, given in zip(groups, plan.given, strict=True):
            group["params"] = given
        optimizer.state = plan.state
        return step()
    finally:
        optimizer.state = state
        for group, params in zip(groups, held, strict=True):
            group["params"] = params
        with torch.no_grad():
            plan.finish(optimizer)


class _Shard(NamedTuple):
    """A parameter of the optimizer, whose shard is a part of a shard buffer from `start` on.

    `local` is the shard as a plain tensor.
    """

    param: torch.Tensor
    local: torch.Tensor
    start: int

    @classmethod
    def of(cls, sharded: ShardedParam, buffer: torch.Tensor) -> _Shard | None:
        """None if the shard is not in the buffer, or is not stepped as a shard of its own."""
        param = sharded.param
        local = to_local(param)
        # An empty shard lies nowhere.
        offset = local.data_ptr() - buffer.data_ptr() if local.numel() else 0
        start = offset // buffer.itemsize
        is_inside = local.dtype == buffer.dtype and 0 <= start <= buffer.numel() - local.numel()
        if isinstance(param, DTensor):
            is_inside = is_inside and local is sharded.local
        elif local.ndim == 0 or isinstance(param, FlatParameter):
            # All state of a slice without dims has none: moments would be taken for counts.
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


def _flattened(states: Sequence[State]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, states)))


def _own_view(base: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor:
    """A part of a tensor with a storage object of its own: it is saved and copied by itself."""
    numel = torch.Size(shape).numel()
    if numel == 0:
        return base.new_empty(shape)
    view: torch.Tensor = from_dlpack(to_dlpack(base[start : start + numel].view(shape)))
    return view


def _find_lanes(
    params: Collection[torch.Tensor],
) -> Iterator[tuple[torch.Tensor, list[_Shard | None]]]:
    """The shard buffers of the units that have some of these parameters, with all their shards.

    None stands for a shard that is not one of these parameters, or that of a flat parameter, which
    is a whole buffer. Plain parameters and those with an all-gather extension lie in none.
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
    """Neighbouring shards of a buffer, and the tensor that takes their place in a step.

    `params` are their parameters and `states` the states of these. `given` is the state that the
    optimizer is given for `param`; it is None while the optimizer has no state for these
    parameters. `moments` has each moment of the run and the views of it that the parameters have.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        shards: Iterable[_Shard],
        grad_dtype: torch.dtype,
        all_states: dict[Any, State],
    ) -> None:
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
        # For take_grad, which looks at every parameter in every step (rule 7).
        self._addresses = [shard.local.data_ptr() for shard in self._shards]
        self._specs = [spec_of(param) for param in self.params if isinstance(param, DTensor)]
        self._grad_types = {DTensor if self._specs else torch.Tensor}
        self._grad_dtype, itemsize = grad_dtype, grad_dtype.itemsize
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
            # The engine gives a gradient the very spec of its parameter.
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
        """Make `given` from the states, which are alike. Moments that lie in one tensor stay."""
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
        """Let the moments of the parameters be parts of a tensor."""
        views = []
        for shard, state in zip(self._shards, self.states, strict=True):
            view = _own_view(base, shard.start - self._start, shard.local.shape)
            if isinstance(shard.param, DTensor):
                view = new_dtensor(view, with_dtype(spec_of(shard.param), view.dtype))
            state[name] = view
            views.append(view)
        self.moments[name] = base, views

    def take_state(self, found: State, optimizer: str) -> bool:
        """Let the parameters have the state that the optimizer left for the run.

        Returns whether its tensors are those that were given.
        """
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
                    f"by_unit: state of {optimizer} must have the shape of its parameter or no "
                    f"dims, found {name!r} of shape {tuple(value.shape)} for a parameter of "
                    f"{tuple(self.param.shape)}; an optimizer with such state is not elementwise: "
                    "use it without by_unit."
                )
        for state in self.states:
            for name in state.keys() - found.keys():
                del state[name]
        return is_same


class _Plan:
    """What an optimizer steps in place of its parameters, as long as nothing changes.

    `given` is what stands in the place of the parameters of each group, and `state` the state for
    that. A plan that does not last is for one step.
    """

    def __init__(self, optimizer: Optimizer, before: _Plan | None) -> None:
        self._params = [list(group["params"]) for group in optimizer.param_groups]
        self._counts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._runs = self._find_runs(optimizer.state)
        # While there is no memory yet, every step needs a new plan.
        self._lasts = not any(param.is_meta for params in self._params for param in params)
        known = {} if before is None else {run.params[0]: run for run in before._runs}
        for run in self._runs:
            if run.params[0] in optimizer.state:
                run.give_state(known.get(run.params[0]))
        # A run stands where its first parameter was.
        first = {run.params[0]: run.param for run in self._runs}
        later = {param for run in self._runs for param in run.params[1:]}
        self.given = [[first.get(p, p) for p in some if p not in later] for some in self._params]
        in_runs = first.keys() | later
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        self.state.update((p, s) for p, s in optimizer.state.items() if p not in in_runs)
        self.state.update((r.param, dict(r.given)) for r in self._runs if r.given is not None)
        self._num_states = len(self.state)
        self._slices = [param for param in in_runs if not isinstance(param, DTensor)]
        self._note_state(optimizer)
        with disable_torch_function():
            for run in self._runs:
                run.take_grad()

    def _find_runs(self, states: dict[Any, State]) -> list[_Run]:
        groups = {param: n for n, params in enumerate(self._params) for param in params}
        lanes = list(_find_lanes(groups))
        params = [shard.param for _, shards in lanes for shard in shards if shard is not None]
        self._absent = [param for param in params if param.grad is None]
        # All counts of a name lie in one tensor. The host waits for the device to read them.
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
            if shard is None:
                return None
            return shard.kind(groups[shard.param], states.get(shard.param), counts)

        runs = [
            _Run(buffer, (shard for shard in members if shard is not None), common[0], states)
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

    def _note_state(self, optimizer: Optimizer) -> None:
        """Remember the state as it is now."""
        self._states = list(optimizer.state.values())
        self._run_states = [state for run in self._runs for state in run.states if state]
        self._noted = _flattened(self._run_states)

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether groups, state and gradients are as planned; if so, runs have their gradients."""
        groups = optimizer.param_groups
        is_same = (
            self._lasts
            and len(groups) == len(self._params)
            and all(_are_same(g["params"], p) for g, p in zip(groups, self._params, strict=True))
            and _are_same(list(optimizer.state.values()), self._states)
            and _are_same(_flattened(self._run_states), self._noted)
        )
        if not is_same:
            return False
        with disable_torch_function():
            if any(param.grad is not None for param in self._absent):
                return False
            return all(run.take_grad() for run in self._runs)

    def finish(self, optimizer: Optimizer) -> None:
        """Let parameters have the state that a step left, and drop what it was given."""
        for run in self._runs:
            run.param.grad = None
        made: dict[Any, State] = {}
        is_noted = True
        for run in self._runs:
            found, given = self.state.get(run.param), run.given
            if found is None:
                continue
            if given is None:
                made.update(zip(run.params, run.states, strict=True))
            elif _are_same([*found.values()], [*given.values()]):
                continue
            is_noted = False
            self._lasts = run.take_state(found, type(optimizer).__name__) and self._lasts
        if made or len(self.state) != self._num_states:
            self._lasts = False
            in_runs = {run.param for run in self._runs}
            made.update((key, value) for key, value in self.state.items() if key not in in_runs)
            # In the order in which the class would have made them.
            for param in chain.from_iterable(self._params):
                if param in made:
                    optimizer.state[param] = made.pop(param)
            optimizer.state.update(made)  # what belongs to no parameter
        elif not is_noted:
            self._note_state(optimizer)
        for values, order in self._counts:
            values.copy_(values.index_select(0, order))
        # A hook after every step counts versions for DTensors. Slices are plain tensors, and
        # their versions do not change with the buffer.
        torch.autograd.graph.increment_version(self._slices)
