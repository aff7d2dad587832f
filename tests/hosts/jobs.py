"""A run of `fullshard train` on several hosts, each with a launcher of its own, and its faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import soak
from tests.support.hosts import Hosts
from tests.support.tiny_run import TEXT

_POLL_S = 0.02
_START_S = 300.0


class Job:
    """One launcher on each host. Whatever ends it, it is started again, as a cluster does.

    With `min_hosts`, the run goes on without a lost host if that many are left.
    """

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        *,
        num_ranks: int,
        num_steps: int,
        patience_s: float,
        min_hosts: int | None = None,
    ) -> None:
        self._hosts, self._folder = hosts, folder
        self._num_ranks, self._num_steps, self._patience_s = num_ranks, num_steps, patience_s
        self._num_hosts = str(hosts.num) if min_hosts is None else f"{min_hosts}:{hosts.num}"
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._num_starts = 0
        folder.mkdir()
        (folder / "text.txt").write_text(TEXT)
        for host in range(hosts.num):
            self.start(host)

    def start(self, host: int) -> None:
        """Start the launcher of a host."""
        launcher = ["-m", "torch.distributed.run", "--nnodes", self._num_hosts]
        launcher += ["--nproc-per-node", str(self._num_ranks), "--max-restarts", "100"]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-id", "job"]
        launcher += ["--rdzv-conf", "last_call_timeout=1", "--rdzv-endpoint", "host0:29500", "-m"]
        run = soak.command(self._folder / "text.txt", self._folder / "run", self._num_steps)[2:]
        env: dict[str, object] = {"FULLSHARD_PATIENCE_S": self._patience_s, "OMP_NUM_THREADS": 1}
        env |= {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
        self._num_starts += 1
        log = self._folder / f"log{self._num_starts:03}-host{host}"
        self._launchers[host] = self._hosts.run(host, [*launcher, *run], log=log, env=env)

    def log(self, host: int) -> str:
        """What the launchers of a host and their ranks have said."""
        return "".join(path.read_text() for path in sorted(self._folder.glob(f"log*-host{host}")))

    def kill_rank(self, host: int, local_rank: int) -> None:
        (launcher,) = soak.children_of(self._launchers[host].pid)
        os.kill(soak.children_of(launcher)[local_rank], signal.SIGKILL)

    def begin(self) -> float:
        """Wait for the first step, and return how long that took."""
        return self.wait_for_step(5)

    def wait_for_step(self, step: int) -> float:
        return self._wait(lambda: len(self.losses()) >= step, _START_S)

    def trains_again(self, fault: Callable[[], object], timeout_s: float) -> float:
        """Do something to the job, and return how long it was until the next step after it."""
        before = self._num_resumed()
        fault()

        def has_resumed() -> bool:
            self._start_again()
            return self._num_resumed() > before

        waited_s = self._wait(has_resumed, timeout_s)
        step = int(self.log(0).rpartition("resuming from step ")[2].split()[0]) + 1
        return waited_s + self._wait(lambda: self._has_restarted_at(step), timeout_s)

    def ends(self, timeout_s: float) -> set[int]:
        """Wait until all launchers have ended, and return their status."""
        self._wait(lambda: None not in self._statuses(), timeout_s)
        return {status for status in self._statuses() if status is not None}

    def losses(self) -> list[tuple[int, float]]:
        metrics = self._folder / "run" / "metrics.jsonl"
        return soak.losses_of(metrics) if metrics.exists() else []

    def _num_resumed(self) -> int:
        return self.log(0).count("resuming from step ")

    def _statuses(self) -> list[int | None]:
        return [process.poll() for process in self._launchers.values()]

    def _start_again(self) -> None:
        for host, process in list(self._launchers.items()):
            if process.poll() not in (None, 0):
                self.start(host)

    def _has_restarted_at(self, step: int) -> bool:
        lines = (self._folder / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return any(line["step"] == step and line.get("is_restart") for line in found)

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> float:
        began = time.monotonic()
        while not is_done():
            if time.monotonic() > began + timeout_s:
                raise TimeoutError("\n".join(map(self.log, range(self._hosts.num))))
            time.sleep(_POLL_S)
        return time.monotonic() - began
