"""Steps that all ranks take together, apart from training's collectives."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

from fullshard._torch import lifetime_of, timeout_of
from fullshard.comm import guard
from fullshard.comm.collectives import pause_at_exit
from fullshard.comm.interfaces import require_interfaces
from fullshard.comm.order import enter_call
from fullshard.comm.topology import Topology
from fullshard.errors import CheckpointError, FullshardError, OtherRankError
from fullshard.processes import machine_id

__all__ = ["RankGroup", "init_process_group"]

_T = TypeVar("_T")

# Network file systems may show a new name late.
_SEEN_WITHIN_S, _POLL_S = 5.0, 0.05

# Two groups for each default process group: one that programs wait for, one for writes in the
# background. They are kept as long as the default group lives, to which nothing can be added.
_groups: WeakKeyDictionary[object, tuple[dist.ProcessGroup, dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


# Other ranks may need the store of this process after its group was destroyed.
_stores: dict[str, Any] = {}


def init_process_group(backend: str, *, prefix: str = "default_pg", **more: Any) -> None:
    """Like torch's, with the variables that a launcher sets, if hosts can reach each other.

    A program that makes a default group, destroys it and makes another gives each a `prefix` for
    what its ranks write into their store, so that no rank reads what the other group left there.

    Raises a `TopologyError` on all ranks if `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` names an
    interface that a host does not have, or if gloo would take an address that other hosts cannot
    reach. Without this, ranks wait until a timeout.
    """
    timeout: timedelta = more.get("timeout") or default_pg_timeout
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    on_gpus = "nccl" in backend
    if size > 1 and ("gloo" in backend or on_gpus):
        require_interfaces(store, rank, size, on_gpus=on_gpus, timeout=timeout)
    _stores[prefix] = store
    store = PrefixStore(prefix, store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **more)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks that take steps together; by default this process alone.

    A step that fails on one rank fails on all of them: no rank is left waiting for one that gave
    up. It raises its own error, and the others an `OtherRankError`.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    in_background: bool = False

    @classmethod
    def world(cls, *, in_background: bool = False) -> RankGroup:
        """All ranks, over a gloo group of their own, which the first call makes on all of them.

        The group has the timeout of the default group. A background thread has another group: two
        threads on one group would read each other's messages.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        assert dist.group.WORLD is not None
        lifetime = lifetime_of(dist.group.WORLD)
        if lifetime not in _groups:
            pause_at_exit()
            enter_call(dist.group.WORLD, "first save, load or RankGroup.world")
            new_group = partial(dist.new_group, None, timeout_of(dist.group.WORLD), "gloo")
            _groups[lifetime] = made = (new_group(), new_group())
            for each in made:
                Topology.of(each)  # while all ranks are here
        group = _groups[lifetime][in_background]
        return cls(group, dist.get_rank(), dist.get_world_size(), in_background)

    def named(self, ranks: Iterable[int]) -> str:
        """Name some of the ranks, and their hosts, as in "ranks 0 to 3 (host1)"."""
        return Topology.of(self.group).named(ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather(self, value: _T) -> list[_T]:
        """The values of all ranks, on every rank."""
        if self.group is None:
            return [value]
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(each) for each in self.all_gather_tensor(torch.tensor([own.numel()]))]
        own = torch.nn.functional.pad(own, (0, max(sizes) - own.numel()))
        everyone = zip(self.all_gather_tensor(own), sizes, strict=True)
        return [pickle.loads(each[:size].numpy().tobytes()) for each, size in everyone]

    def gather_to_first(self, value: _T) -> list[_T]:
        """The values of all ranks, on the first one; other ranks get none."""
        if self.group is None:
            return [value]
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(each) for each in self.all_gather_tensor(torch.tensor([own.numel()]))]
        own = torch.nn.functional.pad(own, (0, max(sizes) - own.numel()))
        found = [torch.empty_like(own) for _ in sizes] if self.is_first else None
        guard.wait_for(dist.gather(own, found, group=self.group, async_op=True))
        everyone = zip(found or (), sizes, strict=False)
        return [pickle.loads(each[:size].numpy().tobytes()) for each, size in everyone]

    def all_gather_tensor(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The host tensors of all ranks, which have one shape."""
        if self.group is None:
            return [own]
        found = [torch.empty_like(own) for _ in range(self.size)]
        guard.wait_for(dist.all_gather(found, own, group=self.group, async_op=True))
        return found

    def gather(self, what: str, step: Callable[[], _T], consequence: str = "") -> list[_T]:
        """Take a step on every rank; return the results of all.

        With a `consequence`, an error that is not fullshard's becomes a CheckpointError that names
        the rank and the consequence.
        """
        result: _T | None = None
        error: Exception | None = None
        try:
            result = step()
        except Exception as caught:
            error = caught
            if consequence and not isinstance(caught, FullshardError):
                text = f"{what}: failed on rank {self.rank}: {_describe(caught)}; {consequence}"
                error = CheckpointError(text)
                error.__cause__ = caught
        everyone = self.all_gather((result, _describe(error)))
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(everyone):
            if text:
                topology = Topology.of(self.group)
                machine, host = topology.machines[rank], topology.hosts[rank]
                place = f"rank {rank}" if machine == machine_id() else f"rank {rank} ({host})"
                is_told = text.startswith(what)
                failure = OtherRankError(text if is_told else f"{what}: failed on {place}: {text}")
                failure.machine = machine
                raise failure
        return [each for each, _ in everyone]  # type: ignore[misc]

    def run(self, what: str, step: Callable[[], _T], consequence: str = "") -> _T:
        """Take a step on every rank; return this rank's result, which is not sent to others."""
        results: list[_T] = []
        self.gather(what, lambda: results.append(step()), consequence)
        return results[0]

    def run_first(self, what: str, step: Callable[[], _T]) -> _T:
        """Take a step on the first rank; return its result on all."""
        return self.gather(what, lambda: step() if self.is_first else None)[0]  # type: ignore[return-value]

    def require_seen(self, what: str, path: Path) -> None:
        """Raise on all ranks unless all see a path that the first rank has just made."""
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while not (is_seen := path.exists()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        sight = self.all_gather(is_seen)
        if not all(sight):
            blind = self.named(rank for rank, sees in enumerate(sight) if not sees)
            raise (CheckpointError if self.is_first or not is_seen else OtherRankError)(
                f"{what}: all hosts must share the folder. {blind} cannot see {path.name}, which "
                f"{self.named([0])} has just made in {path.parent}. Choose a folder on a file "
                "system that all hosts mount."
            )


def _describe(error: BaseException | None) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return "" if error is None else f"{type(error).__name__}: {error}"
