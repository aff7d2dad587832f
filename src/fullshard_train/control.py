"""How a launcher and its ranks communicate: by signals, files and environment variables."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fullshard.processes import end_with_parent, is_stopped, start_of

# The prediction of a plan for the run, as JSON, from the launcher to the ranks.
PREDICTED = "FULLSHARD_PREDICTED"

_STATUS_FOLDER = "FULLSHARD_STATUS_FOLDER"
_LAUNCHER = "FULLSHARD_LAUNCHER"
_REPLICA = "FULLSHARD_REPLICA"
_ERROR, _STOPPED, _READY, _LEFT = "error-", "stopped-", "ready-", "left-"
# How long a rank may take to answer SIGTERM, and to raise its own error once a neighbor has ended.
_GRACE_S, _SHORT_GRACE_S = 20.0, 1.0
_POLL_S = 0.1

# A process id, and when the process started: another one may get the id later.
Process = tuple[int, str | None]


def num_restarts() -> int:
    """Return how often the launcher has restarted the ranks of this host."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def name_launcher() -> dict[str, str]:
    """Let processes that this one starts know their launcher; returns the variable that it sets."""
    os.environ[_LAUNCHER] = str(os.getpid())
    return {_LAUNCHER: os.environ[_LAUNCHER]}


def forget_launcher() -> None:
    """Processes that this one starts from now on are no ranks of a launch."""
    for name in (_LAUNCHER, _STATUS_FOLDER):
        os.environ.pop(name, None)


def end_with_launcher() -> None:
    """Let the kernel kill this process as soon as the launcher ends, which is its parent."""
    expected = os.environ.get(_LAUNCHER)
    end_with_parent(None if expected is None else int(expected))


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """The replica of this rank, how often the replica was started before, and a store.

    Replicas agree in the store, which is on the first host. If all of them are lost, all start
    again from a checkpoint in another `attempt`.
    """

    replica: int
    start: int
    num_replicas: int
    attempt: int
    host: str
    port: int

    @classmethod
    def of_launcher(cls) -> ReplicaPlace | None:
        """Return the place that the launcher set; None if all ranks are one world."""
        found = os.environ.get(_REPLICA)
        return None if found is None else cls(**json.loads(found))

    def store(self) -> Any:
        """Connect to the store of this attempt."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        return PrefixStore(f"attempt{self.attempt}", TCPStore(self.host, self.port))

    def export(self) -> dict[str, str]:
        """Return the environment variable that passes this to a rank."""
        return {_REPLICA: json.dumps(asdict(self))}


class StopRequest:
    """Whether Ctrl-C asked this rank to stop. A context manager, for the main thread.

    The first signal lets the current step finish and saves; the second exits immediately, unless
    both are SIGTERM: Slurm sends it to all processes of a job, and torchrun sends it on. Python
    runs signal handlers between bytecode instructions, but a rank that waits for another rank is
    in native code. A thread therefore reads the signals from the file descriptor to which Python's
    C handler writes them.

    `neighbors` are the other ranks of this machine, once they are known. Before, there is nothing
    to save, and SIGTERM ends the rank. When one of them has ended, there is nobody to save with.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.neighbors: Sequence[Process] | None = None
        self._is_acknowledged = threading.Event()
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._writable, False)
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, _ignore)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(-1)
        os.close(self._writable)  # ends the thread

    def _listen(self) -> None:
        first = 0
        while received := os.read(self._readable, 1):
            number = received[0]
            if number not in (signal.SIGINT, signal.SIGTERM) or number == first == signal.SIGTERM:
                continue
            if self.is_requested:
                os._exit(128 + number)
            first, self.is_requested = number, True
            if number == signal.SIGTERM:
                threading.Thread(target=self._exit_after_grace, name="grace", daemon=True).start()
        os.close(self._readable)

    def acknowledge(self) -> None:
        """Note that the ranks have agreed to stop after this step: saving may outlast the grace."""
        self._is_acknowledged.set()

    def _exit_after_grace(self) -> None:
        deadline = time.monotonic() + (0 if self.neighbors is None else _GRACE_S)
        while not self._is_acknowledged.wait(_POLL_S):
            if any(start_of(pid) != start for pid, start in self.neighbors or ()):
                deadline = min(deadline, time.monotonic() + _SHORT_GRACE_S)
            if time.monotonic() > deadline:
                os._exit(128 + signal.SIGTERM)

    def kill_stopped_neighbors(self) -> None:
        """End ranks that were stopped by a signal: they do not answer the launcher's."""
        for pid, start in self.neighbors or ():
            if is_stopped(pid):
                kill((pid, start))


def kill(process: Process) -> None:
    """End a process, unless it has ended before."""
    pid, start = process
    if start_of(pid) == start:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _own_name() -> str:
    return f"{num_restarts()}-{os.getpid()}-{start_of(os.getpid()) or ''}"


def _ignore(number: int, frame: FrameType | None) -> None:
    """The thread handles the signal; this handler keeps Python's own from raising."""


@dataclass(frozen=True, slots=True)
class StatusFolder:
    """A folder of the launcher in which its ranks report their status as small files.

    File names contain the number of restarts of the ranks: reports from before the last restart do
    not count.
    """

    path: Path

    @classmethod
    def of_launcher(cls) -> StatusFolder | None:
        """Return the folder of the launcher that started this rank; None under torchrun."""
        found = os.environ.get(_STATUS_FOLDER)
        return None if found is None else cls(Path(found))

    def export(self) -> dict[str, str]:
        """Let ranks that this process starts find the folder and know their launcher.

        Returns the environment variables that it sets.
        """
        os.environ[_STATUS_FOLDER] = str(self.path)
        return {_STATUS_FOLDER: str(self.path)} | name_launcher()

    # Written by ranks

    def report_ready(self) -> None:
        """Report that this rank handles signals from now on."""
        (self.path / f"{_READY}{_own_name()}").touch()

    def report_left(self) -> None:
        """Report that this rank has done its part, and may end."""
        (self.path / f"{_LEFT}{_own_name()}").touch()

    def report_error(self, message: str) -> None:
        """Report that the request is invalid, so that a restart would not help."""
        self._write(_ERROR, message)

    def report_stopped(self) -> None:
        """Report that the run was stopped before its last step, and saved."""
        self._write(_STOPPED, "")

    # Read by the launcher

    def ready(self) -> Iterator[Process]:
        """Return the ranks that have reported ready since the last restart."""
        for path in self.path.glob(f"{_READY}{self._num_restarts()}-*"):
            _, _, pid, start = path.name.split("-")
            yield int(pid), start or None

    def is_lost(self, process: Process) -> bool:
        """Return whether a rank that has reported ready has ended before it has done its part."""
        pid, start = process
        has_left = (self.path / f"{_LEFT}{self._num_restarts()}-{pid}-{start or ''}").exists()
        return start_of(pid) != start and not has_left

    @property
    def error(self) -> str | None:
        path = self.path / f"{_ERROR}{self._num_restarts()}"
        return path.read_text(encoding="utf-8") if path.exists() else None

    @property
    def was_stopped(self) -> bool:
        return (self.path / f"{_STOPPED}{self._num_restarts()}").exists()

    def _num_restarts(self) -> int:
        """Return the largest number that a rank has reported."""
        return max((int(p.name.split("-")[1]) for p in self.path.glob(f"{_READY}*")), default=0)

    def _write(self, kind: str, text: str) -> None:
        name = f"{kind}{num_restarts()}"
        incoming = self.path / f".{name}.{os.getpid()}"
        incoming.write_text(text, encoding="utf-8")
        incoming.replace(self.path / name)
