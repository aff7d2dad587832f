"""Steps of an optimizer in which neighbouring shards are one tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from fullshard._torch import disable_torch_function as fast_attributes
from fullshard.errors import LifecycleError
from fullshard.optim.moments import Bases, Counts, Entry, State, is_count, is_moment
from fullshard.optim.residents import Neighbourhood, Resident, neighbourhoods_of
from fullshard.optim.span_planning import Tile, plan_spans
from fullshard.optim.spans import Change, Span


class Plan:
    """What an optimizer steps in the place of its parameters, as long as nothing changes.

    `absent` are the residents without a gradient; `given` is what each group gets. A plan that
    does not last is for one step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        spans: Sequence[Span],
        absent: Sequence[torch.Tensor],
        given: Sequence[list[torch.Tensor]],
        lasts: bool,
    ) -> None:
        self.spans = spans
        self.given = given
        spanned = {id(r.param) for span in spans for r in span.residents}
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        self.state.update((p, s) for p, s in optimizer.state.items() if id(p) not in spanned)
        self.state.update((span.param, dict(span.given)) for span in spans if span.has_state)
        self.num_states = len(self.state)
        self.given_spans = {span.param for span in spans}
        self.slices = [r.param for span in spans for r in span.residents if not r.is_rows]
        self._absent = absent
        self._lasts = lasts
        self._params = _params_of(optimizer)
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self.note_state(optimizer)

    def note_state(self, optimizer: Optimizer) -> None:
        """Remember the state as it is now."""
        self._states = list(optimizer.state.values())
        self._span_states = [state for span in self.spans for state in span.states if state]
        self._values = _flattened(self._span_states)

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether groups, state and gradients are as planned; if so spans have their gradients."""
        if not self._lasts:
            return False
        if [len(group["params"]) for group in optimizer.param_groups] != self._sizes:
            return False
        is_same = (
            _are_same(_params_of(optimizer), self._params)
            and _are_same(list(optimizer.state.values()), self._states)
            and _are_same(_flattened(self._span_states), self._values)
        )
        if not is_same:
            return False
        with fast_attributes():
            if any(param.grad is not None for param in self._absent):
                return False
            return all(span.take_gradient() for span in self.spans)

    def drop_gradients(self) -> None:
        for span in self.spans:
            span.param.grad = None


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _flattened(states: Sequence[State]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, states)))


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


class SpanSteps:
    """Steps an optimizer by spans, with `step` as its class defines it.

    Belongs to one optimizer, and does not keep it alive.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self._plan: Plan | None = None
        self._bases = Bases()
        self._counts = Counts()
        self._neighbourhoods: list[Neighbourhood] = []
        self._params: list[torch.Tensor] = []

    def step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the optimizer's own step on spans in the place of the parameters in them."""
        with torch.no_grad():
            plan = self._fitting_plan(optimizer)
        groups, state = optimizer.param_groups, optimizer.state
        held = [group["params"] for group in groups]
        try:
            for group, given in zip(groups, plan.given, strict=True):
                group["params"] = given
            optimizer.state = plan.state
            return self._step(optimizer, *args, **kwargs)
        finally:
            optimizer.state = state
            for group, params in zip(groups, held, strict=True):
                group["params"] = params
            plan.drop_gradients()
            with torch.no_grad():
                self._take_state(plan, optimizer)

    def _fitting_plan(self, optimizer: Optimizer) -> Plan:
        plan, self._plan = self._plan, None
        if plan is not None:
            if plan.fits(optimizer):
                self._plan = plan
                return plan
            plan.drop_gradients()
        self._plan = plan = _Planning(optimizer, self._bases, self._counts).plan(
            self._find_neighbourhoods(optimizer)
        )
        return plan

    def _find_neighbourhoods(self, optimizer: Optimizer) -> list[Neighbourhood]:
        params = _params_of(optimizer)
        is_known = _are_same(params, self._params) and all(
            resident.is_at_home() for each in self._neighbourhoods for resident in each.residents
        )
        if not is_known or not self._neighbourhoods:
            self._neighbourhoods, self._params = neighbourhoods_of(params), params
        return self._neighbourhoods

    def _take_state(self, plan: Plan, optimizer: Optimizer) -> None:
        """Let parameters have what the step did to the state, and units know of it."""
        changes = set()
        new: dict[int, State] = {}
        for span in plan.spans:
            found = plan.state.get(span.param)
            if found is None:
                continue
            change = span.take_state(found, self._bases, type(optimizer).__name__)
            changes.add(change)
            if change is Change.NAMES or not span.has_state:
                pairs = zip(span.residents, span.states, strict=True)
                new.update((id(resident.param), state) for resident, state in pairs)
        for column in self._counts.columns:
            column.spread()
        if len(plan.state) != plan.num_states or Change.NAMES in changes:
            self._plan = None
            others = {
                key: value for key, value in plan.state.items() if key not in plan.given_spans
            }
            # In the order in which the class would have made them.
            for param in _params_of(optimizer):
                if id(param) in new:
                    optimizer.state[param] = new[id(param)]
                elif param in others:
                    optimizer.state[param] = others.pop(param)
            optimizer.state.update(others)  # what is not of a parameter
        elif Change.VALUES in changes:
            plan.note_state(optimizer)
        # Shards that are `DTensor`s count their changes after every step; slices do not see that
        # their home was written to.
        torch.autograd.graph.increment_version(plan.slices)


@dataclass(slots=True)
class _Planning:
    """Makes a plan from what an optimizer holds right now."""

    optimizer: Optimizer
    bases: Bases
    counts: Counts

    def plan(self, neighbourhoods: Sequence[Neighbourhood]) -> Plan:
        state = self.optimizer.state
        residents = [resident for each in neighbourhoods for resident in each.residents]
        states = {r: state.get(r.param, {}) for r in residents}
        known = {r: s for r, s in states.items() if all(_is_understood(r, v) for v in s.values())}
        entries = self.counts.arrange(known)
        group_of = {
            id(param): index
            for index, group in enumerate(self.optimizer.param_groups)
            for param in group["params"]
        }
        kinds = {
            resident: _kind(
                resident, group_of[id(resident.param)], state.get(resident.param), entries
            )
            for resident in known
        }
        spans = [span for each in neighbourhoods for span in _spans_of(each, kinds, states)]
        for span in spans:
            if span.residents[0].param in state:
                span.give_state(self.bases)
        self.counts.lead([[entries[r] for r in span.residents] for span in spans])
        self.bases.keep_only(states.values())
        absent = [r.param for r in residents if r.param.grad is None]
        spanned = {r for span in spans for r in span.residents}
        is_odd = any(r not in spanned and r.param.grad is not None for r in known)
        # A gradient of another kind, or no memory yet: look again before the next step.
        lasts = not is_odd and not any(param.is_meta for param in _params_of(self.optimizer))
        plan = Plan(self.optimizer, spans, absent, self._given(spans), lasts)
        with fast_attributes():
            if not all(span.take_gradient() for span in spans):
                raise LifecycleError(
                    f"{type(self.optimizer).__name__}: gradients must not change during a step, "
                    "found other ones; let no other thread run backward meanwhile."
                )
        return plan

    def _given(self, spans: Sequence[Span]) -> list[list[torch.Tensor]]:
        """What each group gets: a span where its first parameter was."""
        first = {id(span.residents[0].param): span.param for span in spans}
        others = {id(r.param) for span in spans for r in span.residents[1:]}
        return [
            [first.get(id(param), param) for param in group["params"] if id(param) not in others]
            for group in self.optimizer.param_groups
        ]


def _is_understood(resident: Resident, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return is_moment(resident, value) or is_count(value)
    return isinstance(value, Hashable)


def _kind(
    resident: Resident,
    group: int,
    state: State | None,
    entries: dict[Resident, dict[str, Entry]],
) -> Hashable | None:
    """What residents must have alike to be stepped as one; None if it is not stepped so."""
    grad = resident.usable_gradient()
    if grad is None:
        return None
    said: list[tuple[str, Hashable]] = []
    for name, value in (state or {}).items():
        count = entries[resident].get(name)
        if count is not None:
            said.append((name, (id(count.column), count.value)))
        elif isinstance(value, torch.Tensor):
            said.append((name, value.dtype))
        else:
            said.append((name, (type(value), value)))
    return group, grad.dtype, state is None, frozenset(said)


def _spans_of(
    each: Neighbourhood,
    kinds: dict[Resident, Hashable | None],
    states: dict[Resident, State],
) -> list[Span]:
    tiles = [Tile(r.start, r.numel, kinds.get(r)) for r in each.residents]
    tiles += [Tile(start, numel, None) for start, numel in each.others]
    spans = []
    for indices in plan_spans(tiles):
        residents = [each.residents[index] for index in indices]
        grad = residents[0].usable_gradient()
        assert grad is not None  # what has a kind has one
        spans.append(Span(each.home, residents, [states[r] for r in residents], grad.dtype))
    return spans
