"""A run of `fullshard train --elastic-replicas` on several hosts, and its faults."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import soak
from fullshard_train.config_file import config_of
from tests.support.elastic_losses import expected_losses
from tests.support.hosts import Hosts
from tests.support.tiny_run import TEXT

_POLL_S = 0.02
_START_S = 300.0
_TOLERANCE = 2e-3


class ReplicaJob:
    """A launcher on each host, which has one replica. `at_s` is when each step was first seen."""

    def __init__(
        self, hosts: Hosts, folder: Path, *, num_shards: int, patience_s: float, num_steps: int
    ) -> None:
        self.hosts, self._folder, self._num_shards = hosts, folder, num_shards
        self._patience_s, self._num_steps = patience_s, num_steps
        self.run = folder / "run"
        self.at_s: dict[int, float] = {}
        self._lines: list[dict[str, Any]] = []
        self._num_read = 0  # bytes
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._num_starts = 0
        (folder / "text.txt").write_text(TEXT)

    def start(self, host: int, *more: str, setup: str = ":") -> subprocess.Popen[bytes]:
        """Start the launcher of a host."""
        asked = ["--model", "tiny", "--sequence", "32", "--batch", "2", "--lr", "1e-4"]
        asked += ["--steps", str(self._num_steps), "--save-every", "100", "--sample-tokens", "0"]
        asked += ["--no-report", "--device", "cpu", "--data", str(self._folder / "text.txt")]
        asked += ["--mesh", f"{self.hosts.num}x{self._num_shards}", "--elastic-replicas"]
        asked += ["--rendezvous", "host0:29500", "--max-restarts", "1000", "--out", str(self.run)]
        env: dict[str, object] = {"FULLSHARD_PATIENCE_S": self._patience_s, "OMP_NUM_THREADS": 1}
        env |= {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "GLOO_SOCKET_IFNAME": ""}
        self._num_starts += 1
        log = self._folder / f"log{self._num_starts:03}-host{host}"
        program = ["-m", "fullshard", "train", *asked, *more]
        self._launchers[host] = self.hosts.run(host, program, log=log, env=env, setup=setup)
        return self._launchers[host]

    def log(self, host: int) -> str:
        """What the launchers of a host and their ranks have said."""
        return "".join(path.read_text() for path in sorted(self._folder.glob(f"log*-host{host}")))

    # Faults

    def kill_rank(self, host: int, local_rank: int = 0) -> None:
        os.kill(soak.ranks_of(self._launcher(host))[local_rank], signal.SIGKILL)

    def kill_launcher(self, host: int) -> None:
        os.kill(self._launcher(host), signal.SIGKILL)
        self._launchers[host].wait()

    def lose(self, host: int) -> None:
        self.hosts.lose(host)

    def back(self, host: int) -> None:
        self.hosts.back(host)
        self.start(host)

    def interrupt(self, host: int) -> None:
        """Do what Ctrl-C does on a host."""
        os.kill(self._launcher(host), signal.SIGINT)

    def _launcher(self, host: int) -> int:
        (launcher,) = soak.children_of(self._launchers[host].pid)
        return launcher

    # Steps

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The metrics that are there; the last line may not be complete yet."""
        path = self.run / "metrics.jsonl"
        if path.exists():
            with path.open("rb") as metrics:
                metrics.seek(self._num_read)
                whole, end, _ = metrics.read().rpartition(b"\n")
            self._num_read += len(whole + end)
            for line in map(json.loads, whole.splitlines()):
                self.at_s.setdefault(line["step"], time.monotonic())
                self._lines.append(line)
        return self._lines

    @property
    def step(self) -> int:
        return self.lines[-1]["step"] if self.lines else 0

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: self.step >= step)

    def wait_for_replicas(self, number: int, timeout_s: float = _START_S) -> None:
        """Wait for a step from now on in which this many replicas take part."""
        after = self.step

        def is_one() -> bool:
            last = (self.lines or [{"step": 0, "replicas": []}])[-1]
            return last["step"] > after and sum(r is not None for r in last["replicas"]) == number

        self.wait(is_one, timeout_s)

    def wait(self, is_done: Callable[[], bool], timeout_s: float = _START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_done():
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(map(self.log, range(self.hosts.num))))
            time.sleep(_POLL_S)

    def longest_wait_s(self, since_s: float) -> float:
        """The longest time without a step since then."""
        times = [since_s, *(at for at in self.at_s.values() if at > since_s)]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def status(self, host: int) -> int | None:
        """The exit status of the launcher of a host; None while it runs."""
        return self._launchers[host].poll()

    def ends(self, timeout_s: float = _START_S) -> list[int | None]:
        """Wait until all launchers have ended, and return their status."""
        processes = self._launchers.values()
        self.wait(lambda: all(each.poll() is not None for each in processes), timeout_s)
        return [each.poll() for each in processes]

    def require_right_steps(self) -> None:
        """Raise if a step is missing, or there twice, or has another loss than it must have."""
        lines = self.lines
        assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
        assert not any(line["is_restart"] for line in lines)
        config = config_of(self.run / "config.toml", {})
        expected = expected_losses(config, lines, self._folder / "tokens", self._num_shards)
        found = [line["loss"] for line in lines]
        torch.testing.assert_close(found, expected, rtol=0, atol=_TOLERANCE)
