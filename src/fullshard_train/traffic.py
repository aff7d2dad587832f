"""What each host sends to others in a step, as the counters of its network interfaces show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COUNTERS = Path("/proc/net/dev")
_RECEIVED, _SENT = 0, 8  # columns


@dataclass(slots=True)
class Traffic:
    """Bytes over all interfaces but the loopback; InfiniBand does not pass through these."""

    received_bytes: int = 0
    sent_bytes: int = 0


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Count what this host receives and sends in the context, whichever process does."""
    before, found = _read(), Traffic()
    yield found
    after = _read()
    found.received_bytes = after.received_bytes - before.received_bytes
    found.sent_bytes = after.sent_bytes - before.sent_bytes


def _read() -> Traffic:
    total = Traffic()
    for line in _COUNTERS.read_text().splitlines() if _COUNTERS.exists() else ():
        name, separator, columns = line.partition(":")
        if separator and name.strip() != "lo":
            numbers = columns.split()
            total.received_bytes += int(numbers[_RECEIVED])
            total.sent_bytes += int(numbers[_SENT])
    return total


def hosts_of(everyone: Sequence[tuple[str, str, Mapping[str, int]]]) -> list[dict[str, Any]]:
    """The hosts of all ranks, from the machine, host name and traffic of each; [] if one."""
    found: dict[str, dict[str, Any]] = {}
    for rank, (machine, name, traffic) in enumerate(everyone):
        host = found.setdefault(machine, {"name": name, "ranks": [], **traffic})
        host["ranks"].append(rank)
    return list(found.values()) if len(found) > 1 else []
