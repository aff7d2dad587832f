"""What all ranks wait for, concluded from how long each one waits, and how fast each sends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard_train.links import Sent
from fullshard_train.slowest import Slowest, SlowLink, slow_link, slowest_ranks

SECONDS = st.integers(1, 100).map(float)


@given(
    num_hosts=st.integers(1, 4),
    num_local=st.integers(1, 4),
    network_s=SECONDS,
    late_s=SECONDS,
    data=st.data(),
)
def test_a_late_rank_or_host_is_named_with_what_it_costs(
    num_hosts: int, num_local: int, network_s: float, late_s: float, data: st.DataObject
) -> None:
    hosts = [f"host{each // num_local}" for each in range(num_hosts * num_local)]
    slow = data.draw(st.sampled_from(hosts))
    of_host = tuple(rank for rank, host in enumerate(hosts) if host == slow)
    ranks = data.draw(st.sampled_from([of_host, of_host[:1]]))
    waits_s = [network_s + late_s * (rank not in ranks) for rank in range(len(hosts))]
    expected = None if len(ranks) == len(hosts) else Slowest(ranks, late_s)
    assert slowest_ranks(waits_s, hosts) == expected


@given(waits_s=st.lists(SECONDS, min_size=1, max_size=6), more_s=SECONDS)
def test_a_slow_network_is_nobodys(waits_s: list[float], more_s: float) -> None:
    hosts = [f"host{rank % 2}" for rank in range(len(waits_s))]
    found = slowest_ranks(waits_s, hosts)
    assert slowest_ranks([each + more_s for each in waits_s], hosts) == found
    assert slowest_ranks([waits_s[0]] * len(waits_s), hosts) is None


def sent_in_ring(rates: list[float]) -> list[Sent]:
    """What each host sends to the next one, over their links, whose rates these are."""
    pairs = [(host, (host + 1) % len(rates)) for host in range(len(rates))]
    return [Sent(a, b, 1.0, 1 / min(rates[a], rates[b])) for a, b in pairs]


@given(num_hosts=st.integers(3, 6), times=st.floats(5, 100), data=st.data())
def test_the_host_whose_link_is_slow_in_both_directions_is_named_with_what_it_costs(
    num_hosts: int, times: float, data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, num_hosts - 1))
    sent = sent_in_ring([1 / times if host == slow else 1.0 for host in range(num_hosts)])
    assert slow_link(sent) == SlowLink((slow,), pytest.approx(times - 1))


def test_a_way_that_is_slow_in_one_direction_has_two_ends() -> None:
    sent = sent_in_ring([1.0, 1.0, 1.0])
    slow = [Sent(0, 1, 1.0, 10.0), *sent[1:]]
    assert slow_link(slow) == SlowLink((0, 1), 9.0)


@given(rate=st.floats(0.01, 100), num_hosts=st.integers(2, 6))
def test_links_that_are_all_slow_are_nobodys(rate: float, num_hosts: int) -> None:
    assert slow_link(sent_in_ring([rate] * num_hosts)) is None
    assert slow_link([]) is None
