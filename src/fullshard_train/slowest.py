"""What all ranks wait for: a rank, a host or a link, concluded from what each of them has seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fullshard_train.links import Address, Sent

# A link is slow if another one is this much faster.
_TIMES_SLOWER = 4.0


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


@dataclass(frozen=True, slots=True)
class SlowLink:
    """The link of a host, or the way from one to another; at the rate of others, a step would take
    `cost_s` less.
    """

    ends: tuple[Address, ...]
    cost_s: float


def slow_link(sent: Collection[Sent]) -> SlowLink | None:
    """The link that is slower than others, if there are others to compare it with.

    A host with a slow link sends and receives slowly, whoever is at the other end. If only one way
    between two hosts is slow, there is no telling which end it is.
    """
    busiest_s = max((each.busy_s for each in sent), default=0.0)
    slow = [each for each in sent if each.busy_s * 2 > busiest_s]
    others = [each.rate for each in sent if each not in slow]
    if not others or min(others) < _TIMES_SLOWER * max(each.rate for each in slow):
        return None
    ends = set.intersection(*({each.source, each.target} for each in slow))
    if not ends:
        return None
    # Ranks of one host share its link: each of them has waited that long.
    cost_s = max(each.busy_s - each.num_bytes / min(others) for each in slow)
    first = slow[0]
    return SlowLink(tuple(end for end in (first.source, first.target) if end in ends), cost_s)
