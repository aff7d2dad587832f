"""A switch in user space, for links with a delay and losses: not every kernel has netem.

`python switch.py DELAY_MS LOSS NAMESPACE...` makes a device `eth0` in each namespace, says `ready`,
and takes `cut N` and `mend N` as lines.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import selectors
import struct
import sys
import time
from contextlib import suppress

_TUNSETIFF, _TAP, _NO_PI = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_MAX_FRAME = 1 << 16


def device_in(namespace: str) -> int:
    """A tap device in a network namespace, as a file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    for entered in (there, own):
        if entered == own:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP | _NO_PI))
        if libc.setns(entered, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(entered)
    return device


def pass_on(devices: list[int], delay_s: float, loss: float) -> None:
    """Pass frames on until the input ends."""
    waiting: list[tuple[float, int, int, bytes]] = []  # when, number, to whom, what
    owner: dict[bytes, int] = {}
    cut: set[int] = set()
    chance, number = random.Random(0), 0
    selector = selectors.DefaultSelector()
    for place, device in enumerate(devices):
        selector.register(device, selectors.EVENT_READ, place)
    selector.register(sys.stdin, selectors.EVENT_READ, None)
    while True:
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(pause_s):
            if key.data is None:
                command, _, host = (sys.stdin.readline() or "end").partition(" ")
                if command == "end":
                    return
                (cut.add if command == "cut" else cut.discard)(int(host))
                continue
            frame = os.read(key.fd, _MAX_FRAME)
            owner[frame[6:12]] = key.data
            known = owner.get(frame[:6])
            for to in range(len(devices)) if known is None else (known,):
                if to != key.data and not cut & {to, key.data} and chance.random() >= loss:
                    number += 1
                    heapq.heappush(waiting, (time.monotonic() + delay_s, number, to, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(waiting)
            if to not in cut:
                with suppress(OSError):  # of a device that is not up
                    os.write(devices[to], frame)


if __name__ == "__main__":
    found = [device_in(namespace) for namespace in sys.argv[3:]]
    print("ready", flush=True)
    pass_on(found, float(sys.argv[1]) / 1000, float(sys.argv[2]))
