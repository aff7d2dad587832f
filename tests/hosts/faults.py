"""Rounds of training on several hosts, in each of which something fails."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts import fault_ranks
from tests.support.hosts import Hosts

_POLL_S = 0.02
_START_S = 120.0
_STEPS_BEFORE = 40  # so that all ranks know each other before something fails


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank ended: what it raised, and when, and when its process had ended, in seconds."""

    kind: str
    text: str
    raised_s: float
    ended_s: float
    status: int | None


@dataclass
class Round:
    """One round: ranks that have begun to train, and what is done to them."""

    folder: Path
    num_ranks: int

    def __post_init__(self) -> None:
        self.began = time.time()

    def send(self, rank: int, number: int) -> None:
        """Let a rank send itself a signal at the end of its step."""
        self.began = time.time()
        self._put(f"signal{rank}", str(int(number)))

    def log(self, rank: int) -> str:
        return (self.folder / f"log{rank}").read_text()

    def step(self, rank: int) -> int:
        return int(self._read(f"step{rank}")["step"])

    def loss(self, rank: int) -> str:
        return str(self._read(f"step{rank}")["loss"])

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> float:
        """Wait, and return how long after the fault that was."""
        deadline = time.monotonic() + timeout_s
        while not is_done():
            if time.monotonic() > deadline:
                paths = [*self.folder.parent.glob("host*.log"), *self.folder.glob("log*")]
                logs = [path.read_text() for path in sorted(paths)]
                raise TimeoutError("\n".join(logs))
            time.sleep(_POLL_S)
        return time.time() - self.began

    def wait_for(self, seconds: float) -> None:
        """Wait until this long after the fault."""
        time.sleep(max(0.0, self.began + seconds - time.time()))

    def ends(self, ranks: Sequence[int], timeout_s: float) -> dict[int, Ending]:
        """Wait until ranks have ended, and say how."""
        self.wait_until(lambda: all(self._has(f"ended{rank}") for rank in ranks), timeout_s)
        found = {}
        for rank in ranks:
            ended = self._read(f"ended{rank}")
            raised = {"kind": "", "text": "", "at": self.began}
            if self._has(f"raised{rank}"):
                raised = self._read(f"raised{rank}")
            found[rank] = Ending(
                raised["kind"],
                raised["text"],
                raised["at"] - self.began,
                ended["at"] - self.began,
                ended["status"],
            )
        return found

    def _has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def _read(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.folder / name).read_text()))

    def _put(self, name: str, text: str) -> None:
        beside = self.folder / f".{name}"
        beside.write_text(text)
        beside.replace(self.folder / name)


class Rounds:
    """Hosts whose ranks train again in each round."""

    def __init__(self, hosts: Hosts, folder: Path, *, num_ranks: int, patience_s: float) -> None:
        self.hosts, self._folder, self._number = hosts, folder, 0
        self._num_ranks = hosts.num * num_ranks
        path = os.environ.get("PYTHONPATH", "")
        world = {"WORLD_SIZE": self._num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        world |= {"MASTER_ADDR": "host0", "FULLSHARD_PATIENCE_S": patience_s, "PYTHONPATH": path}
        # Otherwise a process that asks whether there is a GPU has no children that can use it.
        world |= {"PYTORCH_NVML_BASED_CUDA_CHECK": 1}
        for host in range(hosts.num):
            program = [str(Path(fault_ranks.__file__)), str(folder)]
            hosts.run(host, program, log=folder / f"host{host}.log", env=world | {"HOST": host})

    @contextmanager
    def round(self, *, num_steps: int = 1_000_000, own: bool = False) -> Iterator[Round]:
        """Have all ranks train; at the end, ranks that are left are killed."""
        folder = self._folder / str(self._number)
        self._number += 1
        folder.mkdir()
        found = Round(folder, self._num_ranks)
        found._put("go", json.dumps({"num_steps": num_steps, "own": own}))
        ranks = range(self._num_ranks)
        found.wait_until(lambda: all(found._has(f"step{rank}") for rank in ranks), _START_S)
        found.wait_until(lambda: found.step(0) > _STEPS_BEFORE, _START_S)
        found.began = time.time()
        try:
            yield found
        finally:
            (folder / "over").touch()
