"""A run of neighbouring shards, as one tensor that an optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.errors import ConfigError
from fullshard.optim.moments import Bases, State, is_count, is_moment, shown_moment
from fullshard.optim.residents import Resident, extent
from fullshard.unit.reduce_scatter import set_grad

_LOCAL, _SPEC = attrgetter("_local_tensor"), attrgetter("_spec")
_ARE_ROWS = frozenset([DTensor])
_ARE_SLICES = frozenset([torch.Tensor])


class Change(Enum):
    """What a step did to the state of a span, beside writing to its tensors."""

    NONE = "nothing"
    VALUES = "values were replaced"
    NAMES = "states came or went"


class Span:
    """Neighbouring residents of one home, and the tensor that stands for them in a step.

    `given` is the state that the optimizer is given for it, and `states` those of the residents,
    which the optimizer knows only if `has_state`.
    """

    def __init__(
        self,
        home: torch.Tensor,
        residents: Sequence[Resident],
        states: Sequence[State],
        grad_dtype: torch.dtype,
    ) -> None:
        self.residents = residents
        self.states = states
        self.given: State = {}
        self.has_state = False
        self._grad_dtype = grad_dtype
        self._start, self._numel = extent(residents)
        part = home[self._start : self._start + self._numel]
        self.param = nn.Parameter(part, requires_grad=part.is_floating_point())
        itemsize = grad_dtype.itemsize
        # For take_gradient, which looks at every parameter in every step (rule 7).
        self._params = [r.param for r in residents]
        self._locals = [r.local for r in residents]
        self._addresses = [r.address for r in residents]
        self._specs = [r.param._spec for r in residents if isinstance(r.param, DTensor)]
        self._filled = [n for n, r in enumerate(residents) if r.numel]
        self._offsets = [(residents[n].start - self._start) * itemsize for n in self._filled]

    def take_gradient(self) -> bool:
        """Give the span's tensor all gradients as one; whether they are as they were planned for.

        They are not copied where they lie in one tensor as their shards do in the home.
        """
        grads = [param.grad for param in self._params]
        locals_ = self._row_gradients(grads) if self._specs else self._slice_gradients(grads)
        if locals_ is None:
            return False
        grad = self._view_of(locals_)
        if grad is None:
            grad = self._copy_of()
        if grad is None:
            return False
        set_grad(self.param, grad)
        return True

    def _row_gradients(self, grads: Sequence[Any]) -> list[torch.Tensor] | None:
        if not _ARE_ROWS.issuperset(map(type, grads)):
            return None
        if not all(map(is_, map(_LOCAL, self._params), self._locals)):
            return None
        is_placed_alike = all(map(is_, map(_SPEC, grads), self._specs))
        if not is_placed_alike and any(r.usable_gradient() is None for r in self.residents):
            return None
        return list(map(_LOCAL, grads))

    def _slice_gradients(self, grads: Sequence[Any]) -> list[torch.Tensor] | None:
        if not _ARE_SLICES.issuperset(map(type, grads)):
            return None
        if list(map(torch.Tensor.data_ptr, self._params)) != self._addresses:
            return None
        return list(grads)

    def _view_of(self, locals_: list[torch.Tensor]) -> torch.Tensor | None:
        if len(self._filled) < len(locals_):
            locals_ = [locals_[n] for n in self._filled]
        if not locals_:
            return None
        first = locals_[0]
        # Contiguous first: what is sparse has no address.
        if first.dtype != self._grad_dtype or not all(map(torch.Tensor.is_contiguous, locals_)):
            return None
        address = first.data_ptr()
        if [each - address for each in map(torch.Tensor.data_ptr, locals_)] != self._offsets:
            return None
        offset = int(first.storage_offset())
        # Tensors of their own may lie side by side by chance; one storage around all is no chance.
        if (offset + self._numel) * first.itemsize > first.untyped_storage().nbytes():
            return None
        return first.as_strided((self._numel,), (1,), offset)

    def _copy_of(self) -> torch.Tensor | None:
        """For gradients that lie elsewhere: a user has replaced some."""
        joined = torch.zeros(self._numel, dtype=self._grad_dtype, device=self.param.device)
        places, grads = [], []
        for resident in self.residents:
            grad = resident.usable_gradient()
            if grad is None or grad.dtype != self._grad_dtype:
                return None
            start = resident.start - self._start
            if resident.numel:
                places.append(joined[start : start + resident.numel].view(grad.shape))
                grads.append(grad)
        if places:  # of what is empty there is nothing to copy
            torch._foreach_copy_(places, grads)
        return joined

    # State

    def give_state(self, bases: Bases) -> None:
        """Make `given` of the residents' states, which are alike."""
        self.has_state = True
        for name, value in self.states[0].items():
            if is_moment(self.residents[0], value):
                value = bases.joined(self.residents, self.states, name)
            self.given[name] = value

    def take_state(self, found: State, bases: Bases, optimizer: str) -> Change:
        """Let residents have what the optimizer has made of the state that it was given."""
        if len(found) == len(self.given) and all(map(is_, found.values(), self.given.values())):
            return Change.NONE
        change = Change.VALUES
        for name in self.given.keys() - found.keys():
            change = Change.NAMES
            for state in self.states:
                del state[name]
        for name, value in found.items():
            own: Any = self.given.get(name)
            if value is own and name in self.given:
                continue
            if _can_hold(own, value):
                own.copy_(value)
                found[name] = own
            elif isinstance(value, torch.Tensor) or name not in self.given:
                change = Change.NAMES
                self._share_out(name, value, bases, optimizer)
            else:
                for state in self.states:
                    state[name] = value
        self.given = dict(found)
        return change

    def _share_out(self, name: str, value: Any, bases: Bases, optimizer: str) -> None:
        """Give residents their parts of a state that is new."""
        if not isinstance(value, torch.Tensor):
            for state in self.states:
                state[name] = value
        elif is_count(value):
            for state in self.states:
                state[name] = value.clone()
        elif value.shape == self.param.shape:
            base = value.contiguous()
            bases.add(base)
            for resident, state in zip(self.residents, self.states, strict=True):
                state[name] = shown_moment(resident, base, resident.start - self._start)
        else:
            raise ConfigError(
                f"by_unit: state of {optimizer} must have the shape of its parameter or no dims, "
                f"found {name!r} of shape {tuple(value.shape)} for a parameter of "
                f"{tuple(self.param.shape)}; what keeps such state is not elementwise: use the "
                "optimizer without by_unit."
            )


def _can_hold(own: Any, value: Any) -> bool:
    return (
        isinstance(own, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and (own.shape, own.dtype, own.device) == (value.shape, value.dtype, value.device)
    )
