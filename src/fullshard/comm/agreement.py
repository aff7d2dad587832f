"""Ranks compare what they are about to do, so that a difference is an error and not a hang."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from fullshard._torch import all_gather_single, default_store
from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.errors import DisagreementError

_T = TypeVar("_T")

# How long a rank that leaves the usual order waits for the others to do the same.
PATIENCE = "FULLSHARD_PATIENCE_S"
_DEFAULT_PATIENCE_S = 60.0

# Keys of the store that two detours in a row have each for itself: what the first rank does, and
# whether all do.
_PER_DETOUR = ("said", "verdict")


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

    def compare_plans(self, plans: Sequence[tuple[str, str]]) -> None:
        """Compare (unit name, what it holds) pairs; raise where they differ."""
        digest = hashlib.sha256(repr(list(plans)).encode()).digest()
        rows = self._exchange(int.from_bytes(digest[:7], "big"), secrets.randbits(62))
        # A place in the store that these ranks know and nobody else does: the first rank's draw.
        self._path = f"fullshard/detours/{int(rows[rows[:, 0].argmin(), 2]):x}"
        self._num_detours = 0
        if _differ(rows):
            raise DisagreementError(_plan_difference(self._exchange_objects(list(plans))))

    def compare_step(self, number: int, describe: Callable[[int], str]) -> None:
        """Compare the number of the next thing to do; `describe` turns a number into words."""
        rows = self._exchange(number)
        if _differ(rows):
            raise DisagreementError(_step_difference(rows.tolist(), describe))

    def compare_detour(self, found: str, expected: str) -> None:
        """Before this rank does something else than in the last pass: do all the others, too?

        Costs nothing where ranks do what they did before. Only those that do not exchange words,
        through the store: a collective would meet another one of the ranks that do.

        The first rank says what it does, the others compare. The last one to come writes the
        verdict, which all wait for. Two detours in a row use different keys, and whoever is last at
        one deletes those of the one before, which nobody reads any more: the store does not grow.
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
            # All before the verdict, after which the others may be at the next detour.
            for each in _PER_DETOUR:
                store.delete_key(f"{self._path}/{each}/{self._num_detours % 2}")
            store.delete_key(odd)
            store.set(verdict, difference)
        patience_s = float(os.environ.get(PATIENCE, _DEFAULT_PATIENCE_S))
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
            raise _detour_difference(own, found, expected, others) from None
        odd_rank, _, other = store.get(verdict).decode().partition(" ")
        if first != found:
            raise _detour_difference(own, found, expected, f"rank {first_rank} does {first}")
        if other:
            raise _detour_difference(own, found, expected, f"rank {odd_rank} does {other}")

    def _exchange(self, *numbers: int) -> torch.Tensor:
        """A row per rank: its rank and its numbers."""
        rows = torch.tensor([[dist.get_rank(), *numbers]], dtype=torch.int64, device=self._device)
        for axis in self._axes:
            rows = _gathered_rows(rows, axis)
        return rows

    @staticmethod
    def exchanged(numbers: Sequence[int], axis: Axis, device: torch.device) -> list[list[int]]:
        """The numbers of every rank of one axis; each rank has equally many."""
        rows = torch.tensor([numbers], dtype=torch.int64, device=device)
        result: list[list[int]] = _gathered_rows(rows, axis).tolist()
        return result

    def _exchange_objects(self, value: _T) -> list[tuple[int, _T]]:
        known = [(dist.get_rank(), value)]
        for axis in self._axes:
            known = [pair for part in _gathered_objects(known, axis) for pair in part]
        return known


def _differ(rows: torch.Tensor) -> bool:
    return bool((rows[:, 1] != rows[0, 1]).any())


def _gathered_rows(rows: torch.Tensor, axis: Axis) -> torch.Tensor:
    if axis.group is None:
        return rows
    gathered = rows.new_empty(axis.size * rows.size(0), rows.size(1))
    all_gather_single(axis.group, gathered, rows).wait()
    return gathered


def _detour_difference(own: int, found: str, expected: str, others: str) -> DisagreementError:
    return DisagreementError(
        f"{found}: all ranks must run units in the same order, found rank {own} about to do this "
        f"where it did '{expected}' before, while {others}; make the model take the same path on "
        "every rank."
    )


def _gathered_objects(value: _T, axis: Axis) -> list[_T]:
    received: list[_T | None] = [None] * axis.size
    dist.all_gather_object(received, value, group=axis.group)
    return [part for part in received if part is not None]


def _plan_difference(everyone: Sequence[tuple[int, Sequence[tuple[str, str]]]]) -> str:
    """Name the first rank and unit that differ from what most ranks have."""
    counts = Counter(repr(plans) for _, plans in everyone)
    common = counts.most_common(1)[0][0]
    usual_rank, usual = next((r, p) for r, p in everyone if repr(p) == common)
    rank, odd = next((r, p) for r, p in everyone if repr(p) != common)
    for (name, held), (odd_name, odd_held) in zip(usual, odd, strict=False):
        if (name, held) != (odd_name, odd_held):
            return (
                f"{odd_name or 'root'}: all ranks must shard the same units, found on rank {rank} "
                f"{odd_name or 'root'} with {odd_held}, but on rank {usual_rank} "
                f"{name or 'root'} with {held}; build the same model on every rank."
            )
    longer = max(usual, odd, key=len)
    name = longer[min(len(usual), len(odd))][0]
    return (
        f"{name or 'root'}: all ranks must shard the same units, found {len(odd)} on rank {rank} "
        f"and {len(usual)} on rank {usual_rank}, of which '{name}' is only on one side; call "
        "fully_shard on the same modules on every rank."
    )


def _step_difference(everyone: Sequence[Sequence[int]], describe: Callable[[int], str]) -> str:
    usual = Counter(number for _, number in everyone).most_common(1)[0][0]
    usual_rank = next(rank for rank, number in everyone if number == usual)
    rank, odd = next((rank, number) for rank, number in everyone if number != usual)
    return (
        f"{describe(odd)}: all ranks must run units in the same order, found rank {rank} about to "
        f"do this while rank {usual_rank} is about to do '{describe(usual)}'; make the model take "
        "the same path on every rank."
    )
