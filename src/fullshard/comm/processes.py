"""Processes of this machine, by what the kernel says of them."""

from __future__ import annotations

import hashlib
import uuid
from functools import cache
from pathlib import Path


@cache
def machine_id() -> str:
    """Process ids mean something within one boot and one namespace of a machine only."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        known = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return uuid.uuid4().hex[:16]  # none that anybody could ask about
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def start_of(pid: object) -> str | None:
    """When a process started, in the kernel's clock; None if there is none."""
    fields = _status(pid)
    is_running = fields[0] not in ("Z", "X", "")  # dead, though nobody has asked for its status yet
    return fields[19] if is_running else None


def is_stopped(pid: object) -> bool:
    """Whether a process was stopped by a signal; a debugger that looks at it does not count."""
    return _status(pid)[0] == "T"


def _status(pid: object) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return [""]
