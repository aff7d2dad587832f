"""Elastic replicas on three hosts: random kills, losses and cuts, and how long the others wait.

    python benchmarks/bench_host_replicas.py --faults 100

A rank or a launcher is killed, a host is lost, or a link is cut, for longer than ranks are patient
or shorter, one after another. In the end no step may be missing or counted twice, and each loss
must be that of one process that computes what the replicas of that step had. Hosts are network
namespaces of this machine, so it needs root on Linux, and `ip` of iproute2.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from measuring import Result, Table, parser_for, result_for

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.hosts.replica_job import ReplicaJob
from tests.support.hosts import Hosts

NUM_HOSTS, NUM_STEPS = 3, 10_000_000
RATE = "200mbit"  # one process has to repeat the steps: most of their time is communication
SHORTEST_CUT_S, LONGEST_CUT_S = 1.0, 0.6  # of the patience
LONGEST_S = 3.0  # from the return of all replicas to the next fault
MORE_S = 60.0  # for steps to go on, before a fault counts as never survived

KILLED, ENDED, LOST = "a rank is killed", "a launcher is killed", "a host is lost"
CUT, MENDED = "a link is cut, and its launcher started again", "a link is cut, and mended in time"


class Faults:
    """What is done to a job, and how long the others waited after each fault."""

    def __init__(self, job: ReplicaJob, patience_s: float, seed: int) -> None:
        self._job, self._patience_s, self._moments = job, patience_s, random.Random(seed)
        self.waited_s: defaultdict[str, list[float]] = defaultdict(list)
        self.back_s: defaultdict[str, list[float]] = defaultdict(list)
        self._do: dict[str, Callable[[int], None]] = {
            KILLED: self._kill_rank,
            ENDED: self._kill_launcher,
            LOST: self._lose,
            CUT: self._cut,
            MENDED: self._cut_shortly,
        }

    def one(self) -> None:
        """Do something, wait until all replicas are back, and note how long the others waited."""
        time.sleep(self._moments.uniform(0, LONGEST_S))
        what = self._moments.choice([*self._do])
        # The first host has the store.
        host = self._moments.randrange(0 if what == KILLED else 1, NUM_HOSTS)
        self._job.lines  # noqa: B018  notes when steps were first seen
        since_s = time.monotonic()
        self._do[what](host)
        self._job.wait_for_replicas(NUM_HOSTS)
        self.waited_s[what].append(self._job.longest_wait_s(since_s) - self._cut_s)
        self.back_s[what].append(time.monotonic() - since_s)
        print(f"host{host}: {what}; others wait {self.waited_s[what][-1]:.1f} s", flush=True)

    _cut_s = 0.0  # how long the last fault was a cut that all have to wait for

    def _kill_rank(self, host: int) -> None:
        self._cut_s = 0.0
        self._job.kill_rank(host)
        self._job.wait_for_replicas(NUM_HOSTS - 1, MORE_S)

    def _kill_launcher(self, host: int) -> None:
        self._cut_s = 0.0
        self._job.kill_launcher(host)
        self._job.wait_for_replicas(NUM_HOSTS - 1, MORE_S)
        self._job.start(host)

    def _lose(self, host: int) -> None:
        self._cut_s = self._patience_s
        self._job.lose(host)
        self._job.wait_for_replicas(NUM_HOSTS - 1, self._patience_s + MORE_S)
        self._job.back(host)

    def _cut(self, host: int) -> None:
        self._cut_s = self._patience_s
        self._job.hosts.cut(host)
        self._job.wait_for_replicas(NUM_HOSTS - 1, self._patience_s + MORE_S)
        self._job.hosts.mend(host)
        self._job.wait(lambda: self._job.status(host) is not None)
        self._job.start(host)

    def _cut_shortly(self, host: int) -> None:
        self._cut_s = self._moments.uniform(SHORTEST_CUT_S, LONGEST_CUT_S * self._patience_s)
        self._job.hosts.cut(host)
        time.sleep(self._cut_s)
        self._job.hosts.mend(host)


def soak(result: Result, folder: Path, num_faults: int, patience_s: float, seed: int) -> None:
    with Hosts(NUM_HOSTS, RATE) as hosts:
        job = ReplicaJob(hosts, folder, num_shards=1, patience_s=patience_s, num_steps=NUM_STEPS)
        for host in range(NUM_HOSTS):
            job.start(host)
        job.wait_for_replicas(NUM_HOSTS)
        faults = Faults(job, patience_s, seed)
        for _ in range(num_faults):
            faults.one()
        job.interrupt(1)
        statuses = job.ends()
    assert statuses == [130] * NUM_HOSTS, statuses
    torch.set_num_threads(1)  # for a small model, and beside other programs, the fastest
    job.require_right_steps()
    rows: list[list[str | float | None]] = []
    for what in (KILLED, ENDED, LOST, CUT, MENDED):
        waited_s, back_s = faults.waited_s[what], faults.back_s[what]
        if waited_s:
            times = [statistics.median(waited_s), max(waited_s), statistics.median(back_s)]
            rows.append([what, len(waited_s), *times])
    columns = ["fault", "times", "others wait, s", "longest, s", "replica is back after, s"]
    title = (
        f"{num_faults} faults in {len(job.lines):,} steps of three replicas on three hosts, with "
        f"links of {RATE}. No step is missing, none is counted twice, and none has another loss "
        "than that of the replicas in it. Waits are those beyond the cut itself, or "
        f"FULLSHARD_PATIENCE_S={patience_s:g}"
    )
    result.add(Table(title, columns, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--patience", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    result = result_for("host_replicas", arguments)
    with tempfile.TemporaryDirectory() as folder:
        soak(result, Path(folder), options.faults, options.patience, options.seed)
    result.write(options.json)


if __name__ == "__main__":
    main()
