"""Measures the network between hosts, on the ranks that a launcher started there."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from fullshard._torch import local_group
from fullshard.comm.collectives import collectives_for
from fullshard.comm.interfaces import GLOO
from fullshard.comm.topology import Topology
from fullshard.doctor.bandwidth import SIZES_MB, Speeds, measured, median_seconds
from fullshard.doctor.findings import Finding
from fullshard.plan import DeviceProfile
from fullshard.ranks import RankGroup

_SMALL_BYTES, _LARGE_BYTES = 1 << 20, 64 << 20
_SPENT_S = 0.3  # on each all-gather
_TIMEOUT = timedelta(seconds=120)
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpeeds:
    """What ranks on several hosts reach between them.

    `host_gbs` is what a host receives, in GB/s, while all of its ranks do, and `rank_gbs` what one
    rank receives while the others rest. The smallest all-gather takes `latency_s`.
    """

    num_hosts: int
    ranks_per_host: int
    latency_s: float
    host_gbs: float
    rank_gbs: float

    @property
    def adapters_per_host(self) -> int:
        """The network adapters that these speeds look like: one rank fills one of them."""
        return min(max(1, round(self.host_gbs / self.rank_gbs)), self.ranks_per_host)

    def of_profile(self, profile: DeviceProfile) -> DeviceProfile:
        """The profile of a device on hosts with this network."""
        adapters = self.adapters_per_host
        return replace(
            profile,
            network_gbs=self.host_gbs / adapters / profile.link_efficiency,
            adapters_per_host=adapters,
            network_latency_s=self.latency_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host of a launch: its ranks, the interface that leads to the others, its problems."""

    name: str
    ranks: tuple[int, ...]
    interface: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpeeds:
    """All hosts, the speeds of the ranks of one, and those between hosts if there are several."""

    hosts: tuple[Host, ...]
    speeds: Speeds
    network: NetworkSpeeds | None


def measure_launch(device: torch.device, own: Sequence[Finding]) -> LaunchSpeeds:
    """Measure on all ranks of the default group at once; `own` are the problems of this host."""
    ranks, topology = RankGroup.world(), Topology.of(dist.group.WORLD)
    everyone = ranks.all_gather((interface_in_use(), tuple(own)))
    hosts = tuple(
        Host(
            name=topology.hosts[first],
            ranks=(first, *others),
            interface=everyone[first][0],
            findings=everyone[first][1],
        )
        for first, *others in topology.by_host
    )
    local = next(each for each in topology.by_host if dist.get_rank() in each)
    sizes_mb = SIZES_MB if min(map(len, topology.by_host)) > 1 else ()
    speeds = measured(device, sizes_mb, local_group(local, _TIMEOUT))
    return LaunchSpeeds(hosts=hosts, speeds=speeds, network=measure_network(device))


def measure_network(device: torch.device) -> NetworkSpeeds | None:
    """Measure on all ranks of the default group at once; None if they are on one host.

    Ranks that have the same number on their hosts gather from each other, as in training: all of
    them at once, and then those with the number 0 alone.
    """
    by_host = Topology.of(dist.group.WORLD).by_host
    if len(by_host) == 1:
        return None
    rails = [sorted(rail) for rail in zip(*by_host, strict=False)]
    own = next((rail for rail in rails if dist.get_rank() in rail), None)
    group = None if own is None else local_group(own, _TIMEOUT)
    latency_s = _all_gather_s(1, group, device)
    small_s = _all_gather_s(_SMALL_BYTES, group, device)
    num_bytes = int(min(max(_SMALL_BYTES * _SPENT_S / small_s, _SMALL_BYTES), _LARGE_BYTES))
    together_s = _all_gather_s(num_bytes, group, device)
    alone_s = _all_gather_s(num_bytes, group if own == rails[0] else None, device)
    arriving = num_bytes * (len(by_host) - 1) / 1e9
    return NetworkSpeeds(
        num_hosts=len(by_host),
        ranks_per_host=len(rails),
        latency_s=latency_s,
        host_gbs=arriving * len(rails) / together_s,
        rank_gbs=arriving / alone_s,
    )


def _all_gather_s(num_bytes: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """The median time of an all-gather, on the slowest rank; a rank without a group rests."""
    size = 1 if group is None else group.size()
    own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    full = torch.empty(num_bytes * size, dtype=torch.uint8, device=device)
    collectives = collectives_for(group, device)

    def once() -> None:
        if group is not None:
            collectives.all_gather([full], [own], group).wait()

    return median_seconds(once, device)


def interface_in_use() -> str:
    """The interface of the address that this host has for gloo; empty if none is known."""
    if asked := os.environ.get(GLOO):
        return asked
    try:
        return interface_of(socket.gethostbyname(socket.gethostname()))
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """The network interface of this host that has an IPv4 address; empty if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
