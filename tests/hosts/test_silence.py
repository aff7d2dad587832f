"""What ranks of other hosts learn when one is lost: who, where, and soon."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.hosts.faults import Ending, Round, Rounds
from tests.support.hosts import DEVICE, Hosts

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

NUM_RANKS = 2  # of each host
PATIENCE_S = 6.0
# Limits for a busy machine: the benchmark of these faults has the times that are promised.
WITHIN_S = 20.0


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rounds]:
    folder = tmp_path_factory.mktemp("rounds")
    with Hosts(2) as hosts:
        yield Rounds(hosts, folder, num_ranks=NUM_RANKS, patience_s=PATIENCE_S)


def require_told(found: dict[int, Ending], said: str, within_s: float = WITHIN_S) -> None:
    """All of these ranks raise an error that says this, and end."""
    for ending in found.values():
        assert ending.kind == "RankFailedError", ending
        assert said in ending.text, ending
        assert ending.raised_s < within_s, ending
        assert ending.ended_s < ending.raised_s + WITHIN_S, ending


def require_one_message(trained: Round, ranks: list[int], num_traces: int = 0) -> None:
    """Each rank says once what has happened, and c10d prints no more traces than this.

    The watchdog of NCCL prints those of all errors that it finds.
    """
    for rank in ranks:
        log = trained.log(rank)
        told = log.count("look at its own output") + log.count("look whether it runs")
        assert told == 1, log
        assert DEVICE == "cuda" or log.count("Exception raised from") <= num_traces, log


def test_a_killed_rank_is_named_on_other_hosts_with_its_place(rounds: Rounds) -> None:
    with rounds.round() as trained:
        trained.send(3, signal.SIGKILL)
        found = trained.ends([0, 1, 2], 60)
        require_told(found, "rank 3 (host1): failed at step ")
        assert all("its process is gone" in ending.text for ending in found.values())
        require_one_message(trained, [0, 1, 2])


def test_the_rank_that_has_the_store_is_named_when_it_is_killed(rounds: Rounds) -> None:
    with rounds.round(own=True) as trained:
        trained.send(0, signal.SIGKILL)
        found = trained.ends([1, 2, 3], 60)
        require_told(found, "rank 0 (host0): failed at step ")
        assert all("failed at step 0, " not in ending.text for ending in found.values())
        # A rank may be asking the store when that ends.
        require_one_message(trained, [1, 2, 3], num_traces=1)


def test_a_stopped_rank_is_named_on_other_hosts(rounds: Rounds) -> None:
    with rounds.round() as trained:
        trained.send(2, signal.SIGSTOP)
        found = trained.ends([0, 1, 3], 60)
        require_told(found, "its process is stopped")
        assert all(ending.text.startswith("rank 2 (host1): ") for ending in found.values())


@pytest.mark.soak
def test_a_cut_that_is_mended_costs_only_time(rounds: Rounds) -> None:
    with rounds.round(num_steps=100) as trained:
        rounds.hosts.cut(1)
        trained.wait_until(lambda: "has not answered" in trained.log(0), WITHIN_S)
        rounds.hosts.mend(1)
        found = trained.ends([0, 1, 2, 3], 90)
        assert [ending.status for ending in found.values()] == [0] * 4
        assert "fullshard: host1 (ranks 2, 3) has not answered rank " in trained.log(0)
        assert "fullshard: host1 (ranks 2, 3) answers again" in trained.log(0)
        assert "fullshard: host0 (ranks 0, 1) has not answered rank " in trained.log(2)
        assert "not answered" not in trained.log(1) + trained.log(3)


def test_a_lost_host_is_named_also_if_it_has_the_store(rounds: Rounds) -> None:
    with rounds.round() as trained:
        rounds.hosts.lose(0)
        said = "fullshard: host0 (ranks 0, 1) has not answered rank "
        trained.wait_until(lambda: said in trained.log(2), WITHIN_S)
        found = trained.ends([2, 3], 60)
        require_told(found, "host0 (ranks 0, 1): this host has not answered", PATIENCE_S + WITHIN_S)
        assert all(ending.raised_s > PATIENCE_S for ending in found.values())
        require_one_message(trained, [2, 3])
