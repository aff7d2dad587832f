"""What the kernel knows of this rank's connections to other hosts: how fast each sends.

The kernel counts the bytes of a connection, and for how long there were any to send. Their ratio is
the rate of the link, however long ranks waited for each other before. InfiniBand has none of this.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

_NUM_RECENT = 8  # steps
_ENOUGH_BYTES = 1 << 18  # in these steps: shorter messages say nothing about a rate
# In `struct tcp_info`: bytes_acked, and busy_time and rwnd_limited in microseconds.
_BYTES_ACKED, _BUSY = struct.Struct("120xQ"), struct.Struct("168xQQ")
_INFO_BYTES = 256

# Of an address: two hosts that see the same one give it the same number, which a float can hold.
Address = float


@dataclass(frozen=True, slots=True)
class Sent:
    """What was sent between two addresses in a step, and how long there was something to send."""

    source: Address
    target: Address
    num_bytes: float
    busy_s: float

    @property
    def rate(self) -> float:
        return self.num_bytes / self.busy_s

    def as_floats(self) -> list[float]:
        return [self.source, self.target, self.num_bytes, self.busy_s]


_NOTHING = Sent(0.0, 0.0, 0.0, 0.0)


class Links:
    """The connections of this process, as they were after each of the last steps."""

    def __init__(self) -> None:
        self._seen: deque[dict[int, tuple[Address, Address, int, int]]]
        self._seen = deque(maxlen=_NUM_RECENT + 1)

    def slowest_and_fastest(self) -> list[float]:
        """What this rank has sent to the hosts at both ends of the scale, as eight numbers."""
        self._seen.append(dict(_connections()))
        found = sorted(self._sent(), key=lambda each: each.rate) or [_NOTHING]
        return [*found[0].as_floats(), *found[-1].as_floats()]

    def _sent(self) -> list[Sent]:
        before, now, num_steps = self._seen[0], self._seen[-1], max(len(self._seen) - 1, 1)
        busiest: dict[tuple[Address, Address], Sent] = {}
        for inode, (source, target, num_bytes, busy_us) in now.items():
            *_, bytes_before, busy_before = before.get(inode, (source, target, 0, 0))
            num_bytes, busy_s = num_bytes - bytes_before, (busy_us - busy_before) / 1e6
            # Connections of short messages are busy until late acknowledgments come.
            if num_bytes >= _ENOUGH_BYTES and busy_s > 0:
                found = Sent(source, target, num_bytes / num_steps, busy_s / num_steps)
                known = busiest.setdefault((source, target), found)
                busiest[source, target] = max(known, found, key=lambda each: each.num_bytes)
        return list(busiest.values())


def of_floats(found: list[float]) -> list[Sent]:
    """The connections that a rank has told, as `slowest_and_fastest` says them."""
    both = Sent(*found[:4]), Sent(*found[4:])
    return [each for each in both if each.busy_s > 0]


def _connections() -> Iterator[tuple[int, tuple[Address, Address, int, int]]]:
    """The connections to other hosts: a number for each, addresses, bytes, microseconds."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError, ValueError, struct.error):  # not a connection, or closed meanwhile
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind != "socket":
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
                own, other = sock.getsockname()[0], sock.getpeername()[0]
            if own != other:
                (num_bytes,), (busy_us, limited_us) = (
                    layout.unpack_from(info) for layout in (_BYTES_ACKED, _BUSY)
                )
                # While the receiver had no room, the link was not what it waited for.
                found = _number(own), _number(other), num_bytes, busy_us - limited_us
                yield int(inode.strip("[]")), found


def _number(address: str) -> Address:
    own = address.removeprefix("::ffff:").encode()
    return float(int.from_bytes(hashlib.sha256(own).digest()[:6]))
