"""Which ranks of a process group share a host, known once per group by whoever asks."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fullshard._torch import is_registered, lifetime_of
from fullshard.comm.agreement import exchanged_in_store
from fullshard.comm.order import is_simulated
from fullshard.device import simulation
from fullshard.processes import machine_id

_SHOWN_HOSTS = 4


@dataclass(frozen=True, slots=True)
class Topology:
    """The hosts of the ranks of a group, in the order of the group.

    `machines` identify what shares processes and memory; `hosts` are the names for messages.
    """

    machines: tuple[str, ...]
    hosts: tuple[str, ...]

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Topology:
        """That of a group; the first call is one that all its ranks make, through the store."""
        simulated = simulation()
        if simulated is not None and group is not None:
            ranks = dist.get_process_group_ranks(group)
            played = tuple(f"host{simulated.host_of(rank)}" for rank in ranks)
            return cls(played, played)
        if group is None or not is_registered(group) or is_simulated():
            size = 1 if group is None else group.size()
            return cls((machine_id(),) * size, (socket.gethostname(),) * size)
        known = _topologies.get(lifetime_of(group))
        if known is None:
            everyone = exchanged_in_store([machine_id(), socket.gethostname()], group)
            machines, hosts = zip(*everyone, strict=True)
            known = _topologies[lifetime_of(group)] = cls(machines, hosts)
        return known

    @property
    def is_one_host(self) -> bool:
        return self.num_hosts == 1

    @property
    def num_hosts(self) -> int:
        return len(set(self.machines))

    @property
    def by_host(self) -> list[list[int]]:
        """The ranks of each host, as numbers in the group; hosts in the order of their first."""
        found: dict[str, list[int]] = {}
        for rank, machine in enumerate(self.machines):
            found.setdefault(machine, []).append(rank)
        return list(found.values())

    def named(self, ranks: Iterable[int]) -> str:
        """Name some of the ranks, and the hosts of these, as in "ranks 0 to 3 (host1)"."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.hosts[rank], []).append(rank)
        parts = []
        for host, own in by_host.items():
            is_span = len(own) > 2 and own == list(range(own[0], own[-1] + 1))
            numbers = f"{own[0]} to {own[-1]}" if is_span else ", ".join(map(str, own))
            parts.append(f"rank{'s' * (len(own) > 1)} {numbers} ({host})")
        more = len(parts) - _SHOWN_HOSTS
        shown = ", ".join(parts[:_SHOWN_HOSTS])
        return shown if more <= 0 else f"{shown}, and those of {more} more hosts"


_topologies: WeakKeyDictionary[object, Topology] = WeakKeyDictionary()
