"""Whether the ranks of a group can read each other's memory, found out by all of them alike."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from fullshard._torch import all_gather_single, is_registered, lifetime_of, timeout_of
from fullshard.comm.shm.link import Link, warn_of_gloo
from fullshard.comm.shm.memory import regions

SWITCH = "FULLSHARD_SHARED_MEMORY"

_NAME_BYTES = 16
_ACCEPT_S = 30.0
_CPU = torch.device("cpu")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC)

_log = logging.getLogger(__name__)
# A group cannot have attributes. None for one whose ranks found out together that they use gloo.
_links: weakref.WeakKeyDictionary[dist.ProcessGroup, Link | None] = weakref.WeakKeyDictionary()


def link_of(group: dist.ProcessGroup) -> Link | None:
    """The link between the ranks of a group, None if they use gloo.

    The first call for a group is a collective over it.
    """
    try:
        link = _links[group]
    except KeyError:
        link = _links[group] = _connect(group)
        if link is not None:
            weakref.finalize(lifetime_of(group), _close, link, weakref.ref(group)).atexit = False
    return None if link is None or link.is_abandoned else link


def is_without_link(group: dist.ProcessGroup | None) -> bool:
    """Whether it is known that the ranks of a group use gloo."""
    return group is None or (group in _links and link_of(group) is None)


def _connect(group: dist.ProcessGroup) -> Link | None:
    """Exchange names over the group, connect, and exchange whether that worked."""
    rank, size = group.rank(), group.size()
    ranks = dist.get_process_group_ranks(group) if is_registered(group) else list(range(size))
    sockets, error = _Sockets(rank, size), 0
    is_willing = os.environ.get(SWITCH) != "0" and hasattr(os, "memfd_create")
    link = None
    try:
        if is_willing:
            error = _error_of(sockets.open)
        said = _exchanged(group, bytes([is_willing, error]) + sockets.name)
        unwilling = [other for other, card in enumerate(said) if not card[0]]
        obstacle = f"ranks {unwilling} of the group cannot, or {SWITCH}=0 is set there"
        names = [card[2:] for card in said]
        if not unwilling and not any(card[1] for card in said):
            error = _error_of(lambda: sockets.connect(names))
            said = _exchanged(group, bytes([0, error]))
            obstacle = "its ranks are on several hosts, or of several users"
            if not any(card[1] for card in said):
                link = Link(rank, ranks, sockets.accept(names), timeout_of(group, _CPU), regions)
    finally:
        sockets.close(is_connected=link is not None)
    if link is None:
        _log.debug("process group %s: no shared memory: %s", group.group_name, obstacle)
        errors = {r: card[1] for r, card in zip(ranks, said, strict=True) if card[1] in _EXHAUSTED}
        if errors:
            warn_of_gloo(f"process group {group.group_name}", errors)
    return link


class _Sockets:
    """All descriptors that a link needs: a rank that has opened them will not lack one later."""

    def __init__(self, rank: int, size: int) -> None:
        self.name = secrets.token_bytes(_NAME_BYTES)
        self._rank = rank
        self._size = size
        self._connected: dict[int, socket.socket] = {}
        self._held: list[socket.socket] = []  # in the place of those that are accepted

    def open(self) -> None:
        os.close(os.memfd_create("fullshard"))
        self._listener = _socket()
        self._held.append(self._listener)
        self._listener.bind(_address(self.name))
        self._listener.listen(self._size)
        for other in range(self._rank):
            self._connected[other] = _socket()
        for _ in range(self._rank, self._size):  # one more, which a link keeps free
            self._held.append(_socket())

    def connect(self, names: list[bytes]) -> None:
        """Connect to the ranks before this one. They need not accept for that."""
        for other, connected in self._connected.items():
            connected.connect(_address(names[other]))
            if _user_of(connected) != os.getuid():
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            connected.send(self.name)

    def accept(self, names: list[bytes]) -> dict[int, socket.socket]:
        """Accept the ranks after this one, all of which have connected; all sockets, by rank."""
        missing = {names[other]: other for other in range(self._rank + 1, self._size)}
        self._listener.settimeout(_ACCEPT_S)
        while missing:
            self._held.pop().close()
            accepted, _ = self._listener.accept()
            accepted.settimeout(_ACCEPT_S)
            # Names are random, and went over the group: a rank is who it says it is.
            is_own = _user_of(accepted) == os.getuid()
            rank = missing.pop(accepted.recv(_NAME_BYTES), None) if is_own else None
            if rank is None:
                accepted.close()
                self._held.append(_socket())
            else:
                self._connected[rank] = accepted
        return self._connected

    def close(self, *, is_connected: bool) -> None:
        for each in self._held:
            each.close()
        for each in () if is_connected else self._connected.values():
            each.close()


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(name: bytes) -> bytes:
    """In the abstract namespace: it is no file, and goes with its socket."""
    return b"\0fullshard-" + name.hex().encode()


def _user_of(connected: socket.socket) -> int:
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(packed)[1]
    return user


def _error_of(call: Callable[[], None]) -> int:
    """The number of the error that a call ends with; 0 for none."""
    try:
        call()
    except OSError as error:
        return error.errno if error.errno and error.errno < 256 else errno.EIO
    return 0


def _exchanged(group: dist.ProcessGroup, own: bytes) -> list[bytes]:
    """What all ranks say, over the group itself."""
    sent = torch.tensor(list(own), dtype=torch.uint8, device=_CPU)
    received = torch.empty(group.size(), len(own), dtype=torch.uint8, device=_CPU)
    all_gather_single(group, received.view(-1), sent).wait()
    return [bytes(row) for row in received.tolist()]


def _close(link: Link, group: weakref.ref[dist.ProcessGroup]) -> None:
    link.close()
    destroyed = group()
    if destroyed is not None:
        _links.pop(destroyed, None)
    if not any(other is not None and other is not link for other in list(_links.values())):
        regions.retire_free()


def _after_fork() -> None:
    for link in list(_links.values()):
        if link is not None:
            link.close_sockets()
    _links.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
