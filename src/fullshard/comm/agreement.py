"""Ranks compare what they are about to do, so that a difference is an error and not a hang."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.errors import DisagreementError

_T = TypeVar("_T")

# How long a rank that leaves the usual order waits for the others to do the same.
PATIENCE = "FULLSHARD_PATIENCE_S"
_DEFAULT_PATIENCE_S = 60.0

_num_made: Counter[tuple[int, ...]] = Counter()


class Agreement:
    """Compares values between all ranks of a topology.

    Comparing plans or steps is a collective over both axes: each rank learns the value of every
    other, so a difference is raised on all of them alike. Comparing detours is not: the ranks that
    take none do not notice.
    """

    def __init__(self, mesh_info: MeshInfo, device: torch.device) -> None:
        self._axes = [a for a in (mesh_info.shard, mesh_info.replicate) if not a.is_single]
        self._device = device
        self._ranks: tuple[int, ...] = ()
        self._path = ""
        self._num_detours = 0

    def compare_plans(self, plans: Sequence[tuple[str, str]]) -> None:
        """Compare (unit name, what it holds) pairs; raise where they differ."""
        digest = hashlib.sha256(repr(list(plans)).encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        said = self._exchange_numbers(number)
        self._meet(tuple(sorted(rank for rank, _ in said)))
        if len({number for _, number in said}) <= 1:
            return
        everyone = self._exchange_objects(list(plans))
        raise DisagreementError(_plan_difference(everyone))

    def compare_step(self, number: int, describe: Callable[[int], str]) -> None:
        """Compare the number of the next thing to do; `describe` turns a number into words."""
        everyone = self._exchange_numbers(number)
        if len({said for _, said in everyone}) > 1:
            raise DisagreementError(_step_difference(everyone, describe))

    def _meet(self, ranks: tuple[int, ...]) -> None:
        """Choose a place in the store that the same ranks know and nobody else does."""
        self._ranks = ranks
        _num_made[ranks] += 1
        self._path = f"fullshard/detours/{'-'.join(map(str, ranks))}/{_num_made[ranks]}"

    def compare_detour(self, found: str, expected: str) -> None:
        """Before this rank does something else than in the last pass: do all the others, too?

        Costs nothing where ranks do what they did before. Only those that do not exchange words,
        through the store: a collective would meet another one of the ranks that do.
        """
        self._num_detours += 1
        store = dist.distributed_c10d._get_default_store()
        own = dist.get_rank()
        keys = {rank: f"{self._path}/{self._num_detours}/{rank}" for rank in self._ranks}
        store.set(keys[own], found)
        patience_s = float(os.environ.get(PATIENCE, _DEFAULT_PATIENCE_S))
        deadline = time.monotonic() + patience_s
        for rank, key in keys.items():
            try:
                left_s = max(deadline - time.monotonic(), 0.001)
                store.wait([key], timedelta(seconds=left_s))
                said = store.get(key).decode()
            except dist.DistStoreError:
                said = f"what it did before ({expected}), or nothing, for {patience_s:g} s"
            if said != found:
                raise DisagreementError(
                    f"{found}: all ranks must run units in the same order, found rank {own} about "
                    f"to do this where it did '{expected}' before, while rank {rank} does {said}; "
                    "make the model take the same path on every rank."
                )

    def _exchange_numbers(self, number: int) -> list[tuple[int, int]]:
        """Every rank's (rank, number)."""
        rows = torch.tensor([[dist.get_rank(), number]], dtype=torch.int64, device=self._device)
        for axis in self._axes:
            rows = _gathered_rows(rows, axis)
        return [(int(rank), int(value)) for rank, value in rows.tolist()]

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


def _gathered_rows(rows: torch.Tensor, axis: Axis) -> torch.Tensor:
    if axis.group is None:
        return rows
    all_gather_flat = rows.new_empty(axis.size * rows.size(0), rows.size(1))
    axis.group._allgather_base(all_gather_flat, rows).wait()
    return all_gather_flat


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


def _step_difference(everyone: Sequence[tuple[int, int]], describe: Callable[[int], str]) -> str:
    usual = Counter(number for _, number in everyone).most_common(1)[0][0]
    usual_rank = next(rank for rank, number in everyone if number == usual)
    rank, odd = next((rank, number) for rank, number in everyone if number != usual)
    return (
        f"{describe(odd)}: all ranks must run units in the same order, found rank {rank} about to "
        f"do this while rank {usual_rank} is about to do '{describe(usual)}'; make the model take "
        "the same path on every rank."
    )
