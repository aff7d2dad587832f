"""Connections between the launchers of several hosts, which show when one is lost.

What they show comes from the kernel of the other host, so a thread that is not scheduled shows
nothing. When a launcher ends, however it does, its kernel says so at once. When a host is lost, or
the link to it is cut, nothing comes any more, and ours gives up after FULLSHARD_PATIENCE_S.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fullshard.doctor import interface_of
from fullshard.errors import TopologyError
from fullshard.resilience import patience_s

_JOIN_S = 600.0  # as long as torchrun waits for others
_ATTEMPT_S, _PAUSE_S, _SAY_AFTER_S = 2.0, 0.2, 5.0
_UNANSWERED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
_GLOO = "GLOO_SOCKET_IFNAME"


def split(rendezvous: str) -> tuple[str, int]:
    """The host and the port of an address; without one, any port of this host."""
    host, _, port = rendezvous.rpartition(":")
    return host.strip("[]") or "localhost", int(port or 0)


def is_first_host(rendezvous: str) -> bool:
    """Whether an address is one of this host."""
    if not rendezvous:
        return True
    with suppress(OSError):  # a name that nobody knows yet
        for family, kind, protocol, _, address in _addresses(rendezvous):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                probe.bind((address[0], 0, *address[2:]))
                return True
    return False


def listen(rendezvous: str) -> socket.socket:
    """Listen for the launchers of all hosts."""
    host, port = split(rendezvous)
    if not rendezvous:
        return socket.create_server((host, 0))
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise TopologyError(
            f"--rendezvous: port {port} cannot be used ({error.strerror}); end the launcher that "
            "uses it, or pass another one on all hosts."
        ) from None


class LostError(Exception):
    """The other end of a connection is lost; says how, as in "it has ended"."""


class Connection:
    """A connection to another launcher, over which messages go as lines of JSON."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._bytes = sock, b""
        sock.setblocking(False)
        self._patience_s = patience_s()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        limit_ms = int(self._patience_s * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def own_address(self) -> str:
        """The address of this host on the way to the other one."""
        return str(self._sock.getsockname()[0])

    def send(self, **message: Any) -> None:
        with suppress(OSError):  # `receive` says so
            self._sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        """The messages that have come; raises LostError when no more can come."""
        try:
            if not select.select([self._sock], [], [], timeout_s)[0]:
                return []
            received = self._sock.recv(1 << 16)
            *lines, self._bytes = (self._bytes + received).split(b"\n")
            if received:
                return [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _UNANSWERED:
                raise LostError(f"it has not answered for {self._patience_s:g} s") from None
        raise LostError("it has ended")

    def close(self) -> None:
        self._sock.close()


def connect(rendezvous: str, port: int, is_over: Callable[[], bool]) -> Connection | None:
    """Connect to the launcher of the first host, once it is there; None if that is over before."""
    host, _ = split(rendezvous)
    began, is_said = time.monotonic(), False
    while not is_over():
        try:
            return Connection(socket.create_connection((host, port), _ATTEMPT_S))
        except OSError as error:
            waited_s = time.monotonic() - began
            if waited_s > _JOIN_S:
                raise TopologyError(
                    f"--rendezvous: no launcher answers at {rendezvous} ({error.strerror or error})"
                    "; start the same command on that host."
                ) from None
        if waited_s > _SAY_AFTER_S and not is_said:
            say(f"waiting for the launcher at {rendezvous}")
            is_said = True
        time.sleep(_PAUSE_S)
    return None


def choose_interface(connection: Connection) -> None:
    """Have ranks use the interface that leads to the first host, unless another is asked for."""
    address = connection.own_address.removeprefix("::ffff:")
    if os.environ.get(_GLOO):
        return
    if address.startswith("127.") or address == "::1":
        raise TopologyError(
            f"--rendezvous: on the first host, its name stands for {address}, which other hosts "
            f"cannot reach. Pass its address on the network, or set {_GLOO} to the interface "
            "that leads to the other hosts."
        )
    if name := interface_of(address):
        os.environ[_GLOO] = name


def say(text: str) -> None:
    print(f"fullshard: {text}", file=sys.stderr, flush=True)


def _addresses(rendezvous: str) -> list[Any]:
    return socket.getaddrinfo(*split(rendezvous), type=socket.SOCK_STREAM)
