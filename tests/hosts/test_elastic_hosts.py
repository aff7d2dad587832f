"""Replicas on several hosts: ranks, launchers, hosts and links that fail while others train."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.replica_job import ReplicaJob
from tests.support.hosts import Hosts

pytestmark = pytest.mark.long

PATIENCE_S = 6.0
# Limits for a busy machine: the benchmark of these faults has the times that are promised.
WITHIN_S = 30.0
NUM_STEPS = 1_000_000


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ReplicaJob]:
    with Hosts(3) as hosts:
        yield ReplicaJob(hosts, tmp_path, num_shards=1, patience_s=PATIENCE_S, num_steps=NUM_STEPS)


def start(job: ReplicaJob) -> None:
    for host in range(3):
        job.start(host)
    job.wait_for_replicas(3)


@pytest.mark.soak
def test_a_run_goes_on_when_ranks_launchers_hosts_and_links_are_lost_and_come_back(
    job: ReplicaJob,
) -> None:
    start(job)
    job.kill_rank(1)
    job.wait_for_replicas(2, WITHIN_S)
    job.wait_for_replicas(3)
    job.kill_launcher(2)
    job.wait_for_replicas(2, WITHIN_S)
    job.start(2)
    job.wait_for_replicas(3)
    job.lose(1)
    job.wait_for_replicas(2, PATIENCE_S + WITHIN_S)
    job.back(1)
    job.wait_for_replicas(3)
    job.hosts.cut(2)
    job.wait_for_replicas(2, PATIENCE_S + WITHIN_S)
    job.hosts.mend(2)
    job.wait(lambda: job.status(2) is not None, WITHIN_S)
    assert "has not answered for 6 s. Look whether it runs" in job.log(2)
    job.start(2)
    job.wait_for_replicas(3)
    job.interrupt(1)
    assert job.ends() == [130, 130, 130]
    job.require_right_steps()
    said = job.log(0)
    ended, silent = "it has ended", "it has not answered for 6 s"
    for host, how in (("host2", ended), ("host1", silent), ("host2", silent)):
        assert re.search(rf"launcher of {host} \(replica \d\): {how}; the others go on", said)


@pytest.mark.soak
def test_the_loss_of_the_host_with_the_store_ends_the_run_with_one_message(
    job: ReplicaJob,
) -> None:
    start(job)
    job.lose(0)
    job.wait(lambda: None not in (job.status(1), job.status(2)), PATIENCE_S + WITHIN_S)
    for host in (1, 2):
        assert job.status(host) == 1
        said = job.log(host)
        assert said.count("the launcher at host0:29500, with the store of the run: ") == 1
        assert "it has not answered for 6 s" in said
        assert "Traceback" not in said


@pytest.mark.soak
def test_a_launcher_with_other_settings_is_refused(job: ReplicaJob) -> None:
    for host, rate in enumerate(["1e-4", "1e-4", "2e-4"]):
        job.start(host, "--lr", rate)
    job.wait(lambda: job.status(2) is not None)  # the others may have begun without it
    assert job.status(2) == 2
    assert "optimizer.lr (--lr): 0.0001 on this run (host0); 0.0002 on this" in job.log(2)
    for host in (0, 1):
        job.interrupt(host)
        job.interrupt(host)


@pytest.mark.soak
def test_a_host_that_does_not_see_the_folder_is_refused(job: ReplicaJob) -> None:
    job.start(0)
    job.start(1, setup=f"mkdir -p {job.run} && mount -t tmpfs none {job.run}")
    job.wait(lambda: job.status(1) is not None)
    assert job.status(1) == 2
    assert "--out: all hosts must share the folder. host1 cannot see" in job.log(1)
    job.interrupt(0)
    job.interrupt(0)
