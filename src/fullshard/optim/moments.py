"""Optimizer state of many parameters, laid into few tensors of which each parameter's are views.

Two kinds of state follow a parameter: **moments**, which have an element for each of its elements,
and **counts**, tensors without dims (`step`). What a user finds in `optimizer.state` is always the
truth: everything here only decides in which memory it lies.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from fullshard.comm.placement import as_dtensor, with_dtype
from fullshard.optim.residents import Resident, extent

State = dict[str, Any]


def is_moment(resident: Resident, value: Any) -> bool:
    """Whether a state lies element by element as the shard does."""
    if resident.is_rows:
        param = resident.param
        assert isinstance(param, DTensor)
        if not isinstance(value, DTensor) or value.placements != param.placements:
            return False
        value = value._local_tensor
    return (
        type(value) is torch.Tensor
        and value.shape == resident.local.shape
        and value.device == resident.local.device
    )


def is_count(value: Any) -> bool:
    return type(value) is torch.Tensor and value.ndim == 0


def own_view(base: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor:
    """Elements of a base, as if they were all that there is.

    With a storage object of its own it is saved, copied and shared without its neighbours.
    """
    numel = torch.Size(shape).numel()
    if numel == 0:
        return base.new_empty(shape)
    view: torch.Tensor = from_dlpack(to_dlpack(base[start : start + numel].view(shape)))
    return view


def shown_moment(resident: Resident, base: torch.Tensor, start: int) -> torch.Tensor:
    """A resident's part of a base, as its optimizer would have made it."""
    view = own_view(base, start, resident.local.shape)
    if isinstance(resident.param, DTensor):
        return as_dtensor(view, with_dtype(resident.param._spec, view.dtype))
    return view


def _local(value: torch.Tensor) -> torch.Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value


class Bases:
    """The tensors in which moments lie, each with those of neighbouring residents.

    It keeps them, so an address inside of one is not that of another tensor.
    """

    def __init__(self) -> None:
        self._bases: list[torch.Tensor] = []  # in the order of their addresses

    def add(self, base: torch.Tensor) -> None:
        if base.numel():
            insort(self._bases, base, key=torch.Tensor.data_ptr)

    def keep_only(self, states: Iterable[State]) -> None:
        """Let go of those in which no state lies any more."""
        used = {
            id(base)
            for state in states
            for value in state.values()
            if isinstance(value, torch.Tensor)
            and (base := self._base_of(_local(value))) is not None
        }
        self._bases = [base for base in self._bases if id(base) in used]

    def _base_of(self, local: torch.Tensor) -> torch.Tensor | None:
        """The base around a tensor."""
        if type(local) is not torch.Tensor or local.layout is not torch.strided:
            return None
        address = local.data_ptr()
        index = bisect_right(self._bases, address, key=torch.Tensor.data_ptr) - 1
        if index < 0 or local.numel() == 0:
            return None
        base = self._bases[index]
        return (
            base if address < base.data_ptr() + base.nbytes and base.dtype == local.dtype else None
        )

    def joined(
        self, residents: Sequence[Resident], states: Sequence[State], name: str
    ) -> torch.Tensor:
        """The moments of neighbours as one tensor, arranged as their home is.

        Where they do not lie so yet, they are moved.
        """
        locals_ = [_local(state[name]) for state in states]
        start, numel = extent(residents)
        first = next((n for n, each in enumerate(residents) if each.numel), None)
        if first is None:
            return locals_[0].reshape(-1)
        base = self._base_of(locals_[first])
        if base is not None:
            itemsize = base.itemsize
            address = locals_[first].data_ptr() - (residents[first].start - start) * itemsize
            offset = (address - base.data_ptr()) // itemsize
            fits = 0 <= offset <= base.numel() - numel and all(
                local.is_contiguous()
                and local.data_ptr() == address + (each.start - start) * itemsize
                for each, local in zip(residents, locals_, strict=True)
                if each.numel
            )
            if fits:
                return base[offset : offset + numel]
        base = locals_[first].new_zeros(numel)
        for resident, state, local in zip(residents, states, locals_, strict=True):
            state[name] = shown_moment(resident, base, resident.start - start)
            _local(state[name]).copy_(local)
        self.add(base)
        return base


@dataclass(slots=True, eq=False)
class Column:
    """A count of many parameters, as one tensor with an element for each.

    `leaders` says for each element from which one it is taken after a step: those of a span from
    the one that was given to the optimizer, any other from itself.
    """

    values: torch.Tensor
    views: list[torch.Tensor]
    leaders: torch.Tensor | None = None

    def spread(self) -> None:
        """Give all parameters of a span the count of its first."""
        if self.leaders is not None:
            self.values.copy_(self.values.index_select(0, self.leaders))


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a parameter's count is, and what it says."""

    column: Column
    index: int
    value: float


class Counts:
    """The counts of all residents that have state."""

    def __init__(self) -> None:
        self.columns: list[Column] = []

    def arrange(self, states: Mapping[Resident, State]) -> dict[Resident, dict[str, Entry]]:
        """Lay the counts into columns, and read them: the host waits for a device."""
        by_kind: defaultdict[Hashable, list[tuple[Resident, str]]] = defaultdict(list)
        for resident, state in states.items():
            for name, value in state.items():
                if is_count(value) and not is_moment(resident, value):
                    by_kind[name, value.dtype, value.device].append((resident, name))
        known = {id(column.views[0]): column for column in self.columns}
        self.columns = []
        entries: dict[Resident, dict[str, Entry]] = {resident: {} for resident in states}
        for members in by_kind.values():
            found = [states[resident][name] for resident, name in members]
            column = known.get(id(found[0]))
            if column is None or not _are_same(column.views, found):
                values = torch.stack(found)
                column = Column(values, [own_view(values, n, ()) for n in range(len(found))])
                for (resident, name), view in zip(members, column.views, strict=True):
                    states[resident][name] = view
            self.columns.append(column)
            for index, value in enumerate(column.values.tolist()):
                resident, name = members[index]
                entries[resident][name] = Entry(column, index, value)
        return entries

    def lead(self, entries: Iterable[Sequence[dict[str, Entry]]]) -> None:
        """Say which parameters are stepped together, the first of each leading the others."""
        chosen = {id(column): list(range(len(column.views))) for column in self.columns}
        for members in entries:
            for name, first in members[0].items():
                for each in members:
                    chosen[id(first.column)][each[name].index] = first.index
        for column in self.columns:
            leaders = chosen[id(column)]
            is_alone = leaders == list(range(len(leaders)))
            column.leaders = (
                None if is_alone else torch.tensor(leaders, device=column.values.device)
            )


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
