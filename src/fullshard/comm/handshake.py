"""Whether the ranks of a group can read each other's memory, found out by all of them alike."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import struct
import time
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm.links import Link
from fullshard.comm.regions import regions

SWITCH = "FULLSHARD_SHARED_MEMORY"

_CONNECT_S = 30.0
_NAME_BYTES = 16
_CPU = torch.device("cpu")
_CREDENTIALS = struct.Struct("3i")  # process, user, group

_log = logging.getLogger(__name__)
# None for a group that cannot: its ranks found out together, and need not ask again.
_links: weakref.WeakKeyDictionary[dist.ProcessGroup, Link | None] = weakref.WeakKeyDictionary()
# Those that torch knows, and so forgets when they are destroyed.
_registered: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def link_of(group: dist.ProcessGroup) -> Link | None:
    """The link between the ranks of a group, None if they have none.

    The first call for a group is a collective over it.
    """
    try:
        return _links[group]
    except KeyError:
        pass
    _close_links_of_destroyed_groups()
    link = _Handshake(group).link()
    _links[group] = link
    if group in dist.distributed_c10d._world.pg_map:
        _registered.add(group)
    if link is not None:
        weakref.finalize(group, _close, link).atexit = False
    return link


def is_without_link(group: dist.ProcessGroup) -> bool:
    """Whether it is known that the ranks of a group cannot read each other's memory."""
    return _links.get(group, group) is None


@dataclass(frozen=True, slots=True)
class _Card:
    """What a rank tells the others of itself: its host, and the name that it listens at."""

    is_willing: bool
    host: bytes
    name: bytes

    def packed(self) -> bytes:
        return bytes([self.is_willing]) + self.host + self.name

    @classmethod
    def unpacked(cls, packed: bytes) -> _Card:
        return cls(bool(packed[0]), packed[1:-_NAME_BYTES], packed[-_NAME_BYTES:])

    @property
    def address(self) -> bytes:
        """In the abstract namespace: it is no file, and goes with its socket."""
        return b"\0fullshard-" + self.name.hex().encode()


class _Handshake:
    """Cards are exchanged over the group, sockets connected, and success exchanged again."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = group.rank()
        self._size = group.size()

    def link(self) -> Link | None:
        listener: socket.socket | None = None
        doors: dict[int, socket.socket] = {}
        is_connected = False
        host, name = _host(), secrets.token_bytes(_NAME_BYTES)
        try:
            if host is not None:
                listener = self._listening(_Card(True, host, name))
            own = _Card(listener is not None, host or bytes(32), name)
            cards = [_Card.unpacked(packed) for packed in self._exchanged(own.packed())]
            obstacle = self._obstacle(cards)
            if listener is not None and not obstacle:
                try:
                    self._connect(listener, cards, doors)
                except OSError as error:
                    obstacle = f"a connection failed ({error})"
                everyone = self._exchanged(bytes([not obstacle]))
                is_connected = all(said == b"\1" for said in everyone)
                obstacle = obstacle or "another rank could not connect"
            if not is_connected:
                _log.debug("process group %s: no shared memory: %s", self._name, obstacle)
                return None
            return Link(self._rank, self._global_ranks(), doors, self._timeout_s(), regions)
        finally:
            if listener is not None:
                listener.close()
            if not is_connected:
                for door in doors.values():
                    door.close()

    @property
    def _name(self) -> str:
        return str(self._group.group_name)

    def _exchanged(self, own: bytes) -> list[bytes]:
        """What all ranks say, over the group itself."""
        sent = torch.tensor(list(own), dtype=torch.uint8, device=_CPU)
        received = torch.empty(self._size * len(own), dtype=torch.uint8, device=_CPU)
        self._group._allgather_base(received, sent).wait()
        joined = bytes(received.tolist())
        return [joined[start : start + len(own)] for start in range(0, len(joined), len(own))]

    def _obstacle(self, cards: list[_Card]) -> str:
        unwilling = [rank for rank, card in enumerate(cards) if not card.is_willing]
        if unwilling:
            return f"ranks {unwilling} of the group cannot, or {SWITCH}=0 is set there"
        if len({card.host for card in cards}) > 1:
            return "its ranks are on several hosts"
        return ""

    def _listening(self, card: _Card) -> socket.socket | None:
        try:
            os.close(os.memfd_create("fullshard"))
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            return None
        try:
            listener.bind(card.address)
            listener.listen(self._size)
        except OSError:
            listener.close()
            return None
        return listener

    def _connect(
        self, listener: socket.socket, cards: list[_Card], doors: dict[int, socket.socket]
    ) -> None:
        """A socket to every other rank: connect to those before this one, accept those after it.

        Connecting does not wait for the other side to accept, so the order cannot block.
        """
        deadline = time.monotonic() + _CONNECT_S
        for other in range(self._rank):
            door = doors[other] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            door.settimeout(_CONNECT_S)
            door.connect(cards[other].address)
            door.sendall(cards[self._rank].name)
        # Names went over the group only: whoever knows one is the rank that has it.
        names = {cards[other].name: other for other in range(self._rank + 1, self._size)}
        while names:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            door, _ = listener.accept()
            door.settimeout(_CONNECT_S)
            said = door.recv(_NAME_BYTES, socket.MSG_WAITALL) if _is_own_user(door) else b""
            known = names.pop(said, None)
            if known is None:
                door.close()
            else:
                doors[known] = door

    def _global_ranks(self) -> list[int]:
        if self._group in dist.distributed_c10d._world.pg_group_ranks:
            return dist.get_process_group_ranks(self._group)
        return list(range(self._size))

    def _timeout_s(self) -> float:
        timeout = self._group._get_backend(_CPU).options._timeout
        return float(timeout.total_seconds())


def _host() -> bytes | None:
    """What processes have in common that can hand each other memory; None if this one cannot."""
    if os.environ.get(SWITCH) == "0" or not hasattr(os, "memfd_create"):
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        # Names of abstract sockets belong to a network namespace.
        network = os.stat("/proc/self/ns/net")
    except OSError:
        return None
    known = (boot, network.st_dev, network.st_ino, os.getuid())
    return hashlib.sha256(repr(known).encode()).digest()


def _is_own_user(door: socket.socket) -> bool:
    packed = door.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(packed)
    return bool(user == os.getuid())


def _close_links_of_destroyed_groups() -> None:
    """A destroyed group may still be referred to; torch does not tell of its end."""
    alive = dist.distributed_c10d._world.pg_map
    for group, link in list(_links.items()):
        if group in _registered and group not in alive:
            del _links[group]
            if link is not None:
                _close(link)


def _close(link: Link) -> None:
    link.close()
    if not any(other is not None and other is not link for other in _links.values()):
        regions.retire_free()


def _after_fork() -> None:
    for link in list(_links.values()):
        if link is not None:
            link.close_sockets()
    _links.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
