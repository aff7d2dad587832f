"""The hosts of a job, as its watchers know them: names for messages, and which do not answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from fullshard.formatting import listed
from fullshard.resilience.links import Peer


class Hosts:
    """The processes of all ranks by host, and the hosts that others say do not answer."""

    def __init__(self, rank: int, peers: Mapping[int, Peer]) -> None:
        self._peers = peers
        self._own = peers[rank]
        self.is_first_here = rank == min(self._ranks_of(self._own.machine))
        # What each rank says: the machines that do not answer it, and since when.
        self._said: dict[int, Mapping[str, float]] = {}

    def named(self, rank: int) -> str:
        return f"rank {rank} ({self._peers[rank].host})"

    def host_of(self, rank: int) -> str:
        """The host of a rank, with all its ranks."""
        peer = self._peers[rank]
        ranks = self._ranks_of(peer.machine)
        return f"{peer.host} (rank{'s' * (len(ranks) > 1)} {listed(map(str, ranks))})"

    def silent(self) -> dict[str, float]:
        """The machines that do not answer, and since when."""
        found: dict[str, float] = {}
        for said in self._said.values():
            for machine, since in said.items():
                if machine != self._own.machine:
                    found[machine] = min(since, found.get(machine, since))
        return found

    def num_reachable(self) -> int:
        """How many ranks are on hosts that answer."""
        silent = self.silent()
        return sum(peer.machine not in silent for peer in self._peers.values())

    def hear(self, rank: int, said: Mapping[str, float]) -> Iterator[str]:
        """Take in what a rank says, and return what is new, in words."""
        before = self.silent()
        self._said[rank] = said
        now = self.silent()
        for machine in now.keys() - before.keys():
            yield (
                f"{self._described(machine)} has not answered {self.named(rank)} since "
                f"{clock(now[machine])}; waiting for it or the link to it to come back"
            )
        for machine in before.keys() - now.keys():
            lost_s = time.time() - before[machine]
            yield f"{self._described(machine)} answers again, after {lost_s:.0f} s"

    def _described(self, machine: str) -> str:
        return self.host_of(self._ranks_of(machine)[0])

    def _ranks_of(self, machine: str) -> list[int]:
        return [rank for rank, peer in sorted(self._peers.items()) if peer.machine == machine]


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
