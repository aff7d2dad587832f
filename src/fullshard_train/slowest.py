"""Which ranks the others wait for, and what that costs: concluded from how long each one waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slowest:
    """Ranks of one host that all others wait for; without that, a step would take `cost_s` less."""

    ranks: tuple[int, ...]
    cost_s: float


def slowest_ranks(waits_s: Sequence[float], hosts: Sequence[str]) -> Slowest | None:
    """The rank or the host that waits less than all others; None if there is no other.

    Ranks wait for communication, which takes all of them alike, and for the last rank to come. The
    last one itself waits for communication alone. So a slow network makes all ranks wait longer,
    and a slow rank or host all but its own.
    """
    of_host: defaultdict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        of_host[host].append(rank)
    by_wait = sorted(range(len(waits_s)), key=lambda rank: waits_s[rank])
    candidates = [(by_wait[0],), tuple(of_host[hosts[by_wait[0]]])]
    best: Slowest | None = None
    for ranks in candidates:
        others = [waits_s[rank] for rank in by_wait if rank not in ranks]
        if others:
            cost_s = min(others) - max(waits_s[rank] for rank in ranks)
            if cost_s > (0.0 if best is None else best.cost_s):
                best = Slowest(ranks, cost_s)
    return best
