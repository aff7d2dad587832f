"""Saves that die: `python -m tests.support.killed` forks a process for each way to die.

Runs in its own process, so that only a single thread is forked.
"""

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.stored import write

# Python's names for calls that change a disk, or have it changed.
CALLS = {
    "write", "flush", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "open", "close",
}  # fmt: skip
# Bytes that a file may have: from none at all to enough for all but a rank's file or the manifest.
LIMITS = (0, 1, 100, 500, 1000, 1600, 3000, 7000)


class Countdown:
    """Kills its process before the n-th call that touches the disk."""

    def __init__(self, calls_left: int) -> None:
        self.num_calls = 0
        self._calls_left = calls_left

    def __call__(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__name__", None) in CALLS:
            self.num_calls += 1
            if self.num_calls == self._calls_left:
                os.kill(os.getpid(), signal.SIGKILL)


def forked(action: Callable[[], None]) -> int:
    """How a process ended that did this: 0, an exit status, or minus a signal."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr)
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def saved_until(path: Path, num_calls: int) -> None:
    sys.setprofile(Countdown(num_calls))
    write(path, seed=-2, step=2, num_files=1)
    sys.setprofile(None)


def saved_within(path: Path, num_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    write(path, seed=-2, step=2, num_files=1, padding=8000)


def ends_of(folder: Path, name: str) -> dict[str, int]:
    """Save `name` beside or over step_1 in a folder per way to die, and return how each ended."""
    write(folder / "before" / "step_1", seed=-1, step=1, num_files=1)
    ends: dict[str, int] = {}

    def tried(case: str, action: Callable[[Path], None]) -> int:
        shutil.copytree(folder / "before", folder / case)
        ends[case] = forked(lambda: action(folder / case / name))
        return ends[case]

    for limit in LIMITS:
        tried(f"limit_{limit}", lambda path, limit=limit: saved_within(path, limit))
    num_calls = 1
    while tried(f"call_{num_calls}", lambda path, n=num_calls: saved_until(path, n)):
        num_calls += 1
    return ends


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: ends_of(Path(sys.argv[1]) / name, name) for name in sys.argv[2:]}))
