"""Connections between the watchers of several hosts: what kernels say of each other, and news.

The processes of all ranks form a ring, host by host. Each listens, and connects to the next and the
previous one, whatever the number of ranks. Nothing of this needs the store or its host. What a
connection shows is what kernels say, so a thread that is not scheduled shows nothing:

- the other kernel does not answer, neither probes of a connection nor attempts to make a new one:
  the host, or the way to it, is lost for the time being. Each second brings another attempt;
- it answers that nobody listens any more: the process is gone. (The end of a connection alone says
  less: a kernel also ends one that it has heard nothing on.)

News goes round the ring in both directions, from rank to rank. A ring that is broken in two places
is two rows of ranks, each of which knows of a break.
"""

from __future__ import annotations

import errno
import json
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fullshard.comm.guard import Place
from fullshard.resilience.places import LEFT

# A kernel probes a silent connection every second, and gives it up after this time.
_SILENT_S = 4.0
_PERIOD_S = 1.0
# An attempt may take this long, or it has failed; one that this thread looked at too late counts
# for nothing.
_ATTEMPT_S, _LATE_S = 1.5, 4.0
_PAUSE_S = 0.2
_MAX_LINE = 1 << 20
_WELCOME, _GOODBYE = b"welcome", b"goodbye"
_UNANSWERED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


@dataclass(frozen=True, slots=True)
class Peer:
    """The process of a rank, as the others find it. An empty address is that of the store."""

    rank: int
    machine: str
    host: str
    address: str
    port: int
    token: str


class Listener(Protocol):
    """Whom the links tell, from their thread."""

    def on_gone(self, rank: int) -> None:
        """The process of a rank is gone."""

    def on_silent(self, rank: int, since: float) -> None:
        """The host of a rank has not answered since; called with each attempt."""

    def on_news(self, rank: int, news: Mapping[str, Any]) -> None:
        """All that a rank has told all others."""


class _Reader:
    """The lines that come over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._bytes = b""

    def lines(self) -> list[bytes]:
        """The lines that have come; raises EOFError after the last one."""
        received = self.sock.recv(1 << 16)
        if not received:
            raise EOFError
        *lines, self._bytes = (self._bytes + received).split(b"\n")
        if len(self._bytes) > _MAX_LINE:
            raise EOFError
        return lines


class _Link:
    """The connection that this process makes to another one, again and again.

    `silent_since` is when the other kernel was last known to answer, if it does not; `is_over` if
    there is nothing more to learn: the process has left, or is gone.
    """

    def __init__(self, links: Links, peer: Peer) -> None:
        self.peer = peer
        self.is_over = self.was_up = self.is_up = False
        self.silent_since: float | None = None
        self.place: Place | None = None
        self._num_unanswered = 0
        self._links = links
        self._reader: _Reader | None = None
        self._is_connected = False
        self._began = 0.0
        self._next = 0.0
        self._outgoing = b""

    def look(self, now: float) -> None:
        """Begin an attempt, or see that one has taken too long."""
        if self.is_over:
            return
        if self._reader is None and now >= self._next:
            self._begin(now)
        elif self._reader is not None and not self._is_connected:
            took_s = now - self._began
            if took_s > _ATTEMPT_S:
                self._end(errno.ETIMEDOUT)

    def _begin(self, now: float) -> None:
        host = self.peer.address or self._links.store_address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        _watch_closely(sock)
        self._reader = _Reader(sock)
        self._began, self._is_connected = now, False
        result = sock.connect_ex((host, self.peer.port))
        if result in (0, errno.EINPROGRESS):
            self._links.selector.register(sock, selectors.EVENT_WRITE, self._on_event)
        else:
            self._end(result)

    def _on_event(self, events: int) -> None:
        assert self._reader is not None
        sock = self._reader.sock
        try:
            if not self._is_connected:
                if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._end(error)
                    return
                self._is_connected = True
                self.silent_since, self._num_unanswered = None, 0
                self._outgoing = self._links.hello_to(self.peer)
            if events & selectors.EVENT_READ:
                for line in self._reader.lines():
                    self._hear(line)
                if self.is_over:
                    return
            self._send()
        except EOFError:
            self._end(errno.ECONNRESET)
        except OSError as error:
            self._end(error.errno or errno.ECONNRESET)

    def _hear(self, line: bytes) -> None:
        if line == _WELCOME:
            self.was_up = self.is_up = True
            self._outgoing += self._links.all_news()
        elif line == _GOODBYE:
            self.is_over = True
            self.place = replace(self.place or Place(), ended=LEFT)
            self.close()
        elif self.was_up:
            self._gone()  # another process has its port

    def say(self, message: bytes) -> None:
        if self.is_up:
            self._outgoing += message
            with suppress(OSError):  # of which an event follows
                self._send()

    def _send(self) -> None:
        assert self._reader is not None
        with suppress(BlockingIOError):
            while self._outgoing:
                self._outgoing = self._outgoing[self._reader.sock.send(self._outgoing) :]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._links.selector.modify(self._reader.sock, events, self._on_event)

    def _end(self, error: int) -> None:
        """This attempt, or this connection, has ended."""
        is_attempt, now = not self._is_connected, time.monotonic()
        is_late = is_attempt and now - self._began > _LATE_S
        self._next = now + (_PERIOD_S if is_attempt else 0 if self.is_up else _PAUSE_S)
        self.close()
        if is_late or not self.was_up:
            return
        if error in _UNANSWERED:
            if self.silent_since is None:
                self.silent_since = now - _SILENT_S
            # One side alone may have given a connection up: only attempts show what is true now.
            self._num_unanswered += is_attempt
            if self._num_unanswered:
                self._links.is_silent(self)
        elif error == errno.ECONNREFUSED and is_attempt:
            self._gone()

    def _gone(self) -> None:
        self.is_over = True
        self.close()
        self._links.listener.on_gone(self.peer.rank)

    def close(self) -> None:
        if self._reader is not None:
            with suppress(KeyError):
                self._links.selector.unregister(self._reader.sock)
            self._reader.sock.close()
            self._reader, self._outgoing, self.is_up = None, b"", False


class Links:
    """The links of this process, and the thread that looks after them.

    `_news` is what each rank has told all, with a number that grows.
    """

    def __init__(self, rank: int, store_host: str, store_port: int) -> None:
        self.rank = rank
        self.token = secrets.token_hex(8)
        self.store_address, self.address = _addresses(store_host, store_port)
        self.selector = selectors.DefaultSelector()
        both = socket.has_dualstack_ipv6()
        self._listening = socket.create_server(
            ("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        )
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._links: dict[int, _Link] = {}
        self._welcomed: set[socket.socket] = set()
        self._news: dict[int, tuple[int, dict[str, Any]]] = {}
        self._jobs: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._woken, self._waking = socket.socketpair()
        self._woken.setblocking(False)
        self._waking.setblocking(False)
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self, everyone: Mapping[int, Peer], listener: Listener) -> None:
        """Connect to the next and the previous rank of the ring."""
        self.listener = listener
        for peer in neighbors_in_ring(self.rank, everyone):
            self._links[peer.rank] = _Link(self, peer)
        self.selector.register(self._listening, selectors.EVENT_READ, self._accept)
        self.selector.register(self._woken, selectors.EVENT_READ, self._wake)
        self._thread = threading.Thread(target=self._run, name="watcher-links", daemon=True)
        self._thread.start()

    # From any thread

    def tell(self, **news: Any) -> None:
        """Tell all ranks; what this rank has told before stays true, or is overwritten."""
        self._do(lambda: self._tell(news))

    def send_place(self, place: Mapping[str, Any]) -> None:
        """Tell both neighbors where this rank is."""
        message = _line({"place": place, "rank": self.rank})
        self._do(lambda: self._say(message))

    def has(self, rank: int) -> bool:
        """Whether there is a link to a rank."""
        return rank in self._links

    def place_of(self, rank: int) -> Place | None:
        """The last place that a rank has sent, if it has."""
        return self._links[rank].place if rank in self._links else None

    def close(self, timeout_s: float = 1.0) -> None:
        """Say goodbye; without it, others take the end of this process for a failure."""
        if self._thread is None:
            for each in (self._listening, self._woken, self._waking, self.selector):
                each.close()
            return
        self._do(self._leave)
        self._thread.join(timeout_s)

    def _do(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.append(job)
        with suppress(OSError):
            self._waking.send(b"\0")

    # The thread

    def _run(self) -> None:
        while not self._is_closed:
            now = time.monotonic()
            for link in self._links.values():
                link.look(now)
            self._note_answers()
            for key, events in self.selector.select(_PERIOD_S / 4):
                # An earlier event of this round may have closed it.
                if key in self.selector.get_map().values():
                    key.data(events)
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._waking.close()
        self.selector.close()

    def is_silent(self, link: _Link) -> None:
        """The kernel of another host does not answer."""
        known, machine = self._silent(), link.peer.machine
        assert link.silent_since is not None
        if machine not in known:
            since = time.time() - (time.monotonic() - link.silent_since)
            self._tell({"silent": {**known, machine: since}})
        self.listener.on_silent(link.peer.rank, link.silent_since)

    def _note_answers(self) -> None:
        silent = {link.peer.machine for link in self._links.values() if link.silent_since}
        known = self._silent()
        if known.keys() - silent:
            self._tell({"silent": {each: at for each, at in known.items() if each in silent}})

    def _silent(self) -> dict[str, float]:
        """The machines that this rank has told do not answer, and since when."""
        found: dict[str, float] = self._news.get(self.rank, (0, {}))[1].get("silent", {})
        return found

    def _wake(self, _: int) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(1 << 12)
        with self._lock:
            jobs, self._jobs = self._jobs, []
        for job in jobs:
            job()

    def _accept(self, _: int) -> None:
        with suppress(OSError):
            sock, _address = self._listening.accept()
            _watch_closely(sock)
            reader = _Reader(sock)
            self.selector.register(sock, selectors.EVENT_READ, lambda _events: self._read(reader))

    def _read(self, reader: _Reader) -> None:
        try:
            for line in reader.lines():
                self._hear(json.loads(line), reader.sock)
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            self.selector.unregister(reader.sock)
            self._welcomed.discard(reader.sock)
            reader.sock.close()

    def _hear(self, message: dict[str, Any], sock: socket.socket) -> None:
        if "hello" in message:
            if message["hello"] != self.token:
                sock.send(b"another process\n")
                raise EOFError
            sock.send(_WELCOME + b"\n")
            self._welcomed.add(sock)
        elif sock not in self._welcomed:
            raise EOFError
        elif "place" in message and message["rank"] in self._links:
            self._links[message["rank"]].place = Place(**message["place"])
        elif "news" in message:
            rank, number, news = message["rank"], message["number"], message["news"]
            if rank != self.rank and number > self._news.get(rank, (0, {}))[0]:
                self._news[rank] = number, news
                self._say(_line(message))
                self.listener.on_news(rank, news)

    def _tell(self, news: Mapping[str, Any]) -> None:
        number, before = self._news.get(self.rank, (0, {}))
        self._news[self.rank] = number + 1, {**before, **news}
        self._say(self._told_by(self.rank))
        self.listener.on_news(self.rank, self._news[self.rank][1])

    def _told_by(self, rank: int) -> bytes:
        number, news = self._news[rank]
        return _line({"rank": rank, "number": number, "news": news})

    def all_news(self) -> bytes:
        return b"".join(self._told_by(rank) for rank in self._news)

    def hello_to(self, peer: Peer) -> bytes:
        return _line({"hello": peer.token})

    def _say(self, message: bytes) -> None:
        for link in self._links.values():
            link.say(message)

    def _leave(self) -> None:
        for sock in self._welcomed:
            with suppress(OSError):
                sock.send(_GOODBYE + b"\n")
        for link in self._links.values():
            link.close()
        self._is_closed = True


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _watch_closely(sock: socket.socket) -> None:
    """Have the kernel find out within seconds that the other one does not answer."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(_SILENT_S))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_SILENT_S * 1000))


def _addresses(store_host: str, store_port: int) -> tuple[str, str]:
    """The address of the store's host, and that of this host on the way there.

    The second one is empty on the host of the store: others know that by the first one.
    """
    towards = socket.getaddrinfo(store_host, store_port, type=socket.SOCK_DGRAM)[0]
    family, kind, protocol, _, address = towards
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
    is_here = own == address[0] or own.startswith("127.") or own == "::1"
    return str(address[0]), "" if is_here else own


def neighbors_in_ring(rank: int, everyone: Mapping[int, Peer]) -> list[Peer]:
    """The previous and the next rank, in a ring of all ranks in which hosts stay together."""
    first: dict[str, int] = {}
    for number in sorted(everyone):
        first.setdefault(everyone[number].machine, number)
    ring = sorted(everyone, key=lambda number: (first[everyone[number].machine], number))
    at = ring.index(rank)
    both = dict.fromkeys((ring[at - 1], ring[(at + 1) % len(ring)]))
    return [everyone[each] for each in both if each != rank]
