"""Processes of this machine: what the kernel says about them, and how one ends with its parent."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import uuid
from functools import cache
from pathlib import Path

__all__ = ["end_with_parent", "is_stopped", "machine_id", "start_of"]


@cache
def machine_id() -> str:
    """Identify one boot and one namespace of a machine: process ids mean nothing beyond these."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        known = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return uuid.uuid4().hex[:16]  # matches that of no other process
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def start_of(pid: object) -> str | None:
    """When a process started, in the kernel's clock; None if there is none."""
    fields = _status(pid)
    is_running = fields[0] not in ("Z", "X", "")  # dead, but not reaped yet
    return fields[19] if is_running else None


def is_stopped(pid: object) -> bool:
    """Whether a process was stopped by a signal; a debugger that looks at it does not count."""
    return _status(pid)[0] == "T"


def end_with_parent(parent: int | None = None) -> None:
    """On Linux, let the kernel kill this process as soon as its parent ends, however that ends.

    `parent` is the id of the expected parent, if that is known from before this process started.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        # No signal comes for a parent that ended while this process imported its modules.
        if parent is not None and parent != os.getppid():
            os._exit(128 + signal.SIGKILL)


def _status(pid: object) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return [""]
