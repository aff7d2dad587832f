"""Which ranks the others wait for, concluded from how long each one waits."""

from hypothesis import given
from hypothesis import strategies as st

from fullshard_train.slowest import Slowest, slowest_ranks

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
