"""The network interfaces of hosts, looked at before a wrong one costs a timeout."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from fullshard.errors import TopologyError
from fullshard.formatting import listed
from fullshard.processes import machine_id

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

_KEY = "fullshard/interfaces"
_READ_S, _POLL_S = 5.0, 0.02


def require_interfaces(
    store: Any, rank: int, size: int, *, on_gpus: bool, timeout: timedelta
) -> None:
    """Raise on all ranks if a host has no interface of a given name, or others cannot reach it.

    Without GLOO_SOCKET_IFNAME, gloo takes the address that the host's own name has. Debian gives it
    a loopback address.
    """
    missing, address = _missing(on_gpus=on_gpus), _loopback_of_name()
    own = [rank, machine_id(), socket.gethostname(), missing, address, _names()]
    store.append(f"{_KEY}/said", json.dumps(own) + "\n")
    if store.add(f"{_KEY}/count", 1) == size:
        store.set(f"{_KEY}/done", "")
    store.wait([f"{_KEY}/done"], timeout)
    rows = sorted(map(json.loads, store.get(f"{_KEY}/said").decode().splitlines()))
    are_several = len({machine for _, machine, *_ in rows}) > 1
    for _, _, host, missing, address, names in rows:
        problem = ""
        if missing:
            problem = f"{host} has no network interface {missing}"
        elif address and are_several:
            problem = (
                f"{host}: other hosts cannot reach {address}, which is the address of this name on "
                f"{host} itself. Set {GLOO} to the interface that leads to the other hosts (one of "
                f"{names}), or give the name its address there in /etc/hosts."
            )
        if problem:
            _wait_for_readers(store, size)
            raise TopologyError(problem)


def _wait_for_readers(store: Any, size: int) -> None:
    """The store may end with this process."""
    deadline = time.monotonic() + _READ_S
    num_read = store.add(f"{_KEY}/read", 1)
    while num_read < size and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        num_read = store.add(f"{_KEY}/read", 0)


def _missing(*, on_gpus: bool) -> str:
    """The interface that a variable names and this host does not have, and what to do."""
    here = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(GLOO, "").split(",")):
        if name not in here:
            return f"{name}, which {GLOO} asks for. Set it to one of {_names()}."
    asked = os.environ.get(NCCL, "")
    if on_gpus and asked and not any(_nccl_takes(name, asked) for name in here):
        return f"that {NCCL}={asked} allows. Set it to one of {_names()}."
    return ""


def _nccl_takes(name: str, asked: str) -> bool:
    """NCCL takes names with one of the given beginnings, `=` whole names, and `^` all others."""
    is_other, asked = asked.startswith("^"), asked.removeprefix("^")
    is_whole, asked = asked.startswith("="), asked.removeprefix("=")
    found = any(name == each if is_whole else name.startswith(each) for each in asked.split(","))
    return found != is_other


def _loopback_of_name() -> str:
    """The address that gloo would take for this host, if no other host can reach it."""
    if os.environ.get(GLOO):
        return ""
    found = list(_addresses())
    is_reachable = any(not each.startswith("127.") and each != "::1" for each in found)
    return "" if is_reachable else (found or ["127.0.0.1"])[0]


def _addresses() -> Iterator[str]:
    try:
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield str(address[0])
    except OSError:
        return  # gloo then takes the loopback interface


def _names() -> str:
    return listed(name for _, name in socket.if_nameindex() if name != "lo") or "lo"
