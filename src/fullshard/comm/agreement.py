"""Ranks compare what they are about to do, so that a difference is an error and not a hang."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain, zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist

from fullshard._torch import all_gather_single, default_store
from fullshard.comm import watcher
from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.errors import DisagreementError

# Keys of the store of which two detours in a row use different ones: what the first rank does, and
# whether all do the same.
_PER_DETOUR = ("said", "verdict")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """What a unit holds, for ranks to compare, and its name, for messages only."""

    name: str = field(compare=False, repr=False)
    held: str


class Agreement:
    """Compares values between all ranks of a mesh.

    Comparing plans or steps is a collective over both axes: each rank learns the value of every
    other, so a difference is raised on all of them alike. Comparing detours is not: the ranks that
    take none do not notice.
    """

    def __init__(self, mesh_info: MeshInfo, device: torch.device) -> None:
        self._axes = [a for a in (mesh_info.shard, mesh_info.replicate) if not a.is_single]
        self._num_ranks = mesh_info.num_ranks
        self._device = device
        self._path = ""
        self._num_detours = 0

    def compare_plans(self, plans: Sequence[UnitPlan]) -> None:
        """Compare what units hold; raise where that differs."""
        digest = hashlib.sha256(repr(list(plans)).encode()).digest()
        rows = self.exchange(int.from_bytes(digest[:7], "big"), secrets.randbits(62))
        # A place in the store that these ranks know and nobody else does: the first rank's draw.
        self._path = f"fullshard/detours/{min(rows)[2]:x}"
        self._num_detours = 0
        if len({row[1] for row in rows}) == 1:
            return
        known = [(dist.get_rank(), list(plans))]
        for axis in self._axes:
            received: list[list[tuple[int, list[UnitPlan]]]] = [[]] * axis.size
            dist.all_gather_object(received, known, group=axis.group)
            known = [pair for part in received for pair in part]
        (usual_rank, usual), (rank, odd) = _usual_and_odd(known)
        mine, theirs = next(pair for pair in zip_longest(usual, odd) if pair[0] != pair[1])
        raise DisagreementError(
            f"{(theirs or mine).name or 'root'}: all ranks must shard the same units, found "
            f"{_described(theirs)} on rank {rank}, but {_described(mine)} on rank {usual_rank}; "
            "build the same model, and call fully_shard on the same modules, on every rank."
        )

    def compare_step(self, number: int, describe: Callable[[int], str]) -> None:
        """Compare the number of the next thing to do; `describe` turns a number into words."""
        rows = self.exchange(number)
        if len({row[1] for row in rows}) == 1:
            return
        (usual_rank, usual), (rank, odd) = _usual_and_odd([(row[0], row[1]) for row in rows])
        raise DisagreementError(
            f"{describe(odd)}: all ranks must run units in the same order, found rank {rank} about "
            f"to do this while rank {usual_rank} is about to do '{describe(usual)}'; make the "
            "model take the same path on every rank."
        )

    def compare_detour(self, found: str, expected: str) -> None:
        """Before this rank leaves the order of the last pass, check that all ranks leave it alike.

        Costs nothing while ranks do what they did before. Only ranks that do not communicate, and
        through the store: a collective would match another one of the ranks that do.

        The first rank to arrive says what it does, the others compare. The last one writes the
        verdict, which all wait for. Two detours in a row use different keys, and the last rank at
        one deletes those of the one before, which nothing reads any more: the store does not grow.
        """
        store, own = default_store(), dist.get_rank()
        said, verdict = (f"{self._path}/{each}/{self._num_detours % 2}" for each in _PER_DETOUR)
        odd, arrived = f"{self._path}/odd", f"{self._path}/arrived"
        self._num_detours += 1
        first_rank, first = store.compare_set(said, "", f"{own} {found}").decode().split(" ", 1)
        if first != found:
            store.set(odd, f"{own} {found}")
        if store.add(arrived, 1) == self._num_detours * self._num_ranks:
            difference = store.get(odd).decode() if store.check([odd]) else ""
            # All this before the verdict: after it, the others may be at the next detour.
            for each in _PER_DETOUR:
                store.delete_key(f"{self._path}/{each}/{self._num_detours % 2}")
            store.delete_key(odd)
            store.set(verdict, difference)
        patience_s = watcher.patience_s()
        try:
            store.wait([verdict], timedelta(seconds=patience_s))
        except dist.DistStoreError:
            num_here = store.add(arrived, -1) - (self._num_detours - 1) * self._num_ranks + 1
            self._num_detours -= 1  # as if it had not happened: the others know nothing of it
            store.delete_key(said)
            others = (
                f"only {num_here} of {self._num_ranks} ranks do, and the others what they did "
                f"before, or nothing, for {patience_s:g} s"
            )
        else:
            odd_rank, _, other = store.get(verdict).decode().partition(" ")
            if first != found:
                odd_rank, other = first_rank, first
            if not other:
                return
            others = f"rank {odd_rank} does {other}"
        raise DisagreementError(
            f"{found}: all ranks must run units in the same order, found rank {own} about to do "
            f"this where it did '{expected}' before, while {others}; make the model take the same "
            "path on every rank."
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
        if axis.group is None:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.int64, device=device)
        gathered = own.new_empty(axis.size, len(numbers))
        try:
            work = all_gather_single(axis.group, gathered.view(-1), own)
            if own.is_cpu:
                watcher.wait_for(work)
            else:
                work.wait()
            result: list[list[int]] = gathered.tolist()
        except dist.DistError as error:
            watcher.raise_explained(error)
        return result


def _usual_and_odd(everyone: Sequence[tuple[int, _T]]) -> tuple[tuple[int, _T], tuple[int, _T]]:
    """The first rank with the most common value, and the first with another one."""
    usual = Counter(repr(value) for _, value in everyone).most_common(1)[0][0]
    first = next(pair for pair in everyone if repr(pair[1]) == usual)
    return first, next(pair for pair in everyone if repr(pair[1]) != usual)


def _described(plan: UnitPlan | None) -> str:
    return f"{plan.name or 'root'} with {plan.held}" if plan else "no such unit"
