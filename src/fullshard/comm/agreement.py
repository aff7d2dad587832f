"""Ranks compare what they are about to do, so that a difference is an error and not a hang."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard._torch import all_gather_single, is_registered, store_of, timeout_of
from fullshard.comm import guard, redirected
from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.comm.order import ModelPasses, difference, is_simulated, order_of, wait_until
from fullshard.errors import DisagreementError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """What a unit holds and its settings, for ranks to compare; its name is for messages only."""

    name: str = field(compare=False, repr=False)
    held: str
    settings: Mapping[str, str] = field(default_factory=dict)


class Agreement:
    """Compares values between all ranks of a mesh.

    A comparison needs all ranks of both axes: each learns the value of every other, so a difference
    is raised on all of them alike.
    """

    def __init__(self, mesh_info: MeshInfo, device: torch.device) -> None:
        self._axes = [a for a in (mesh_info.shard, mesh_info.replicate) if not a.is_single]
        self._mesh_info = mesh_info
        self._device = device

    def compare_plans(self, plans: Sequence[UnitPlan]) -> None:
        """Compare what units hold; raise where that differs."""
        digest = hashlib.sha256(repr(list(plans)).encode()).digest()
        rows = self.exchange(int.from_bytes(digest[:7], "big"), secrets.randbits(62))
        if len({row[1] for row in rows}) == 1:
            # The first rank draws a name for keys in the store that nobody else uses.
            first, _, draw = min(rows)
            self._order = order_of(self._mesh_info)
            is_first = first == dist.get_rank()
            self._model = self._order.begin(f"fullshard/detours/{draw:x}", is_first=is_first)
            return
        known = [(dist.get_rank(), socket.gethostname(), list(plans))]
        for axis in self._axes:
            received: list[list[tuple[int, str, list[UnitPlan]]]] = [[]] * axis.size
            dist.all_gather_object(received, known, group=axis.group)
            known = [each for part in received for each in part]
        hosts = {rank: f"rank {rank} ({host})" for rank, host, _ in known}
        found = _usual_and_odd([(rank, plans) for rank, _, plans in known])
        (usual_rank, usual), (rank, odd) = found
        mine, theirs = next(pair for pair in zip_longest(usual, odd) if pair[0] != pair[1])
        name = (theirs or mine).name or "root"
        if mine is not None and theirs is not None and mine.held == theirs.held:
            key, value, other = difference(theirs.settings, mine.settings)
            raise DisagreementError(
                f"{name}: {key} is {value} on {hosts[rank]}, but {other} on {hosts[usual_rank]}; "
                "all ranks must have the same settings."
            )
        raise DisagreementError(
            f"{name}: {hosts[rank]} has {_described(theirs)}, but {hosts[usual_rank]} has "
            f"{_described(mine)}; all ranks must shard the same units. Build the same model, and "
            "call fully_shard on the same modules, on every rank."
        )

    def passes(self) -> ModelPasses:
        """The passes of the model whose plans were compared."""
        return ModelPasses(self._order, self._model)

    def compare_step(self, number: int, describe: Callable[[int], str]) -> None:
        """Compare the number of the next thing to do; `describe` turns a number into words."""
        rows = self.exchange(number)
        if len({row[1] for row in rows}) == 1:
            return
        (usual_rank, usual), (rank, odd) = _usual_and_odd([(row[0], row[1]) for row in rows])
        raise DisagreementError(
            f"{describe(odd)}: rank {rank} is about to do this, while rank {usual_rank} is about "
            f"to do '{describe(usual)}'; all ranks must run units in the same order. Make the "
            "model take the same path on every rank."
        )

    def exchange(self, *numbers: int) -> list[list[int]]:
        """A row per rank: its rank and its numbers."""
        flat = [dist.get_rank(), *numbers]
        width = len(flat)
        for axis in self._axes:
            flat = list(chain.from_iterable(self.exchanged(flat, axis, self._device)))
        return [flat[start : start + width] for start in range(0, len(flat), width)]

    @staticmethod
    def exchanged(numbers: Sequence[int], axis: Axis, device: torch.device) -> list[list[int]]:
        """The numbers of every rank of one axis; each rank has equally many."""
        group = axis.group
        if group is None:
            return [list(numbers)]
        if is_simulated():
            return [list(numbers)] * axis.size
        if is_registered(group):
            return exchanged_in_store(numbers, group)
        own = torch.tensor(numbers, dtype=torch.int64, device=device)
        gathered = own.new_empty(axis.size, len(numbers))
        try:
            work = all_gather_single(group, gathered.view(-1), own)
            if own.is_cpu:
                guard.wait_for(work)
            else:
                work.wait()
            result: list[list[int]] = gathered.tolist()
        except dist.DistError as error:
            guard.raise_explained(error)
        return result


# How often the ranks of a group have exchanged numbers, by the store of the group.
_num_exchanges: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def exchanged_in_store(values: Sequence[_T], group: dist.ProcessGroup) -> list[list[_T]]:
    """The numbers or strings of every rank, through the group's store, without a collective.

    Programs that count collectives see none, and none of the program's own can match one. `count`
    grows with each rank that comes and with each that has read. The last one deletes both keys.
    """
    store, rank, size = store_of(group), group.rank(), group.size()
    number = _num_exchanges.get(store, 0)
    said, count = (f"fullshard/exchange/{number}/{end}" for end in ("said", "count"))
    store.append(said, json.dumps([rank, *values]) + "\n")
    num_come, limit_s = store.add(count, 1), timeout_of(group).total_seconds()
    since, ranks = time.monotonic(), dist.get_process_group_ranks(group)

    def have_come() -> bool:
        redirected.require_all(ranks, since)
        return bool(store.add(count, 0) >= size)

    try:
        have_all_come = num_come >= size or wait_until(have_come, limit_s=limit_s)
    except BaseException:
        _withdraw(store, said, count, size)
        raise
    rows = {row[0]: row[1:] for row in map(json.loads, store.get(said).splitlines())}
    if not have_all_come and not _withdraw(store, said, count, size):
        missing = [ranks[each] for each in range(size) if each not in rows]
        raise DisagreementError(
            f"process group {group.group_name}: ranks {missing} of {size} did not come to compare "
            f"what they run within {limit_s:g} s, the timeout of the group; look at their output, "
            "and make the program take the same path on every rank."
        )
    _num_exchanges[store] = number + 1
    if store.add(count, 1) == 2 * size:
        store.delete_key(said)
        store.delete_key(count)
    return [rows[each] for each in range(size)]


def _withdraw(store: Any, said: str, count: str, size: int) -> bool:
    """Act as if this rank had not come, unless all have meanwhile; return whether they have."""
    num_left = store.add(count, -1)
    if num_left >= size - 1:
        store.add(count, 1)
        return True
    if num_left == 0:
        store.delete_key(said)
        store.delete_key(count)
    return False


def _usual_and_odd(everyone: Sequence[tuple[int, _T]]) -> tuple[tuple[int, _T], tuple[int, _T]]:
    """The first rank with the most common value, and the first with another one."""
    usual = Counter(repr(value) for _, value in everyone).most_common(1)[0][0]
    first = next(pair for pair in everyone if repr(pair[1]) == usual)
    return first, next(pair for pair in everyone if repr(pair[1]) != usual)


def _described(plan: UnitPlan | None) -> str:
    return f"{plan.name or 'root'} with {plan.held}" if plan else "no such unit"
