"""Parameters of an optimizer that lie in the homes of units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from fullshard.runtime.hooks import hooks_managing
from fullshard.runtime.replaced import replacement_of
from fullshard.unit.flat_param import OrigParamSlice
from fullshard.unit.param import DTensorParam, ShardedParam
from fullshard.unit.unit import Unit


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """A parameter whose shard is the elements of a home from `start` on.

    `local` is the shard as a plain tensor: of a `DTensor`, the very one that it must be made of.
    """

    param: torch.Tensor
    local: torch.Tensor
    start: int
    numel: int
    address: int

    @property
    def is_rows(self) -> bool:
        return isinstance(self.param, DTensor)

    def is_at_home(self) -> bool:
        """Whether the parameter still looks at the same memory."""
        if isinstance(self.param, DTensor):
            return self.param._local_tensor is self.local
        return self.param.data_ptr() == self.address and self.param.shape == self.local.shape

    def usable_gradient(self) -> torch.Tensor | None:
        """Its gradient as a plain tensor that lies element by element as the shard does."""
        grad = self.param.grad
        if isinstance(self.param, DTensor):
            if not isinstance(grad, DTensor) or not _is_placed_alike(grad, self.param):
                return None
            grad = grad._local_tensor
        is_usable = (
            type(grad) is torch.Tensor
            and grad.layout is torch.strided
            and grad.shape == self.local.shape
            and grad.device == self.local.device
        )
        return grad if is_usable else None


def _is_placed_alike(one: DTensor, other: DTensor) -> bool:
    if one._spec is other._spec:
        return True
    return one.placements == other.placements and one.device_mesh == other.device_mesh


def extent(residents: Sequence[Resident]) -> tuple[int, int]:
    """Where neighbours begin in their home, and how many elements they are with their padding."""
    start = residents[0].start
    return start, max((r.start + r.numel - start for r in residents if r.numel), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class Neighbourhood:
    """A home, the residents that the optimizer holds, and what lies between them.

    `others` are (start, numel) of the shards that it does not hold.
    """

    home: torch.Tensor
    residents: tuple[Resident, ...]
    others: tuple[tuple[int, int], ...]


def neighbourhoods_of(params: Sequence[torch.Tensor]) -> list[Neighbourhood]:
    """The homes in which some of these parameters lie.

    What has no home is not in there: plain parameters, those with a gather of their own, and the
    flat parameter of a wrapper, which is a whole home by itself.
    """
    held = {id(param) for param in params}
    found: list[Neighbourhood] = []
    for unit in _units_of(params):
        if any(member.local.is_meta for member in unit.params):
            continue
        found += [
            Neighbourhood(home, residents, tuple(others))
            for home, residents, others in _by_home(unit, held)
            if residents
        ]
    return found


def _units_of(params: Iterable[torch.Tensor]) -> list[Unit]:
    units: dict[Unit, None] = {}
    for param in params:
        member = replacement_of(param)
        if member is None:
            continue
        for location in member.locations:
            hooks = hooks_managing(location.module)
            if hooks is not None:
                units.update(dict.fromkeys(hooks.reads))  # also those that lend it a parameter
    return list(units)


def _by_home(
    unit: Unit, held: set[int]
) -> Iterator[tuple[torch.Tensor, tuple[Resident, ...], list[tuple[int, int]]]]:
    members = [m for m in unit.params if m.extension is None]
    placed: set[ShardedParam] = set()
    for home in unit.shard_buffers.lanes:
        first = home.data_ptr()
        residents: list[Resident] = []
        others: list[tuple[int, int]] = []
        for member in members:
            local = member.local
            if member in placed or local.dtype != home.dtype:
                continue
            address, numel = local.data_ptr(), local.numel()
            # What is empty lies nowhere, and so as well at the end of any home of its dtype.
            offset = (address - first) // home.itemsize if numel else home.numel()
            if not 0 <= offset <= home.numel() - numel:
                continue
            placed.add(member)
            resident = Resident(member.param, local, offset, numel, address)
            if id(member.param) in held and _is_kept_apart(member) and resident.is_at_home():
                residents.append(resident)
            else:
                others.append((offset, numel))
        yield home, tuple(residents), others


def _is_kept_apart(member: ShardedParam) -> bool:
    """Whether the optimizer holds a parameter of its own for the member, and can tell its state.

    Of a slice without dims everything is without dims: moments and counts look alike.
    """
    if isinstance(member, OrigParamSlice):
        return member.local.ndim > 0
    return isinstance(member, DTensorParam)
