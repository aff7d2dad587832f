"""Decides which replicas run on which hosts; a thread of the launcher of the first host.

The launcher of each host connects to it, runs the replicas that it is told to, and says how they
end. The coordinator also has the store in which replicas agree, and is therefore the only one that
tells them which are dead: those that their launcher says have ended, and those of a launcher that
is lost. A launcher that comes while others train gets the replicas of a lost one; if none is lost,
it waits.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

from fullshard_train.config import TrainConfig, parse_mesh
from fullshard_train.control import ReplicaPlace
from fullshard_train.output import RunFolder
from fullshard_train.rendezvous import Connection, LostError, listen, say, split

_POLL_S = 0.05
_GRACE_S = 20.0  # for the other replicas, once one has ended
_GOODBYE_S = 5.0  # for launchers to hear that the run is over


@dataclass(slots=True, eq=False)
class _Host:
    """The launcher of a host, and the numbers of the replicas that are its own."""

    connection: Connection
    name: str = ""
    room: int = 0
    replicas: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.replicas)) or "none"
        return f"{self.name} (replica{'s' * (len(self.replicas) > 1)} {numbers})"


class Coordinator:
    """Watches replicas and restarts them until one of them has done the last step."""

    def __init__(self, config: TrainConfig) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        mesh = parse_mesh(config.sharding.mesh)
        assert mesh is not None
        self._num_replicas, _ = mesh
        self._host, _ = split(config.run.rendezvous)
        self._are_several = bool(config.run.rendezvous)
        self._num_left = config.run.max_restarts
        self._lock = RunFolder.of(config).lock_text
        self._listening = listen(config.run.rendezvous)
        self.port: int = self._listening.getsockname()[1]
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._hosts: list[_Host] = []
        # Of this attempt: the replicas that run, and the next start of each.
        self._attempt, self._running = 0, dict[int, int]()
        self._starts: dict[int, int] = {}
        self._lost = ("", "")  # the last replica that failed, and how, if none is left
        self._over: dict[str, Any] = {}  # why, if the run cannot be
        self._failure: Exception | None = None
        self._deadline = inf
        self._is_over = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the run on all hosts, if it is not over, and wait until their launchers know."""
        self._is_over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    # The thread

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._hear(_POLL_S)
                self._fill()
                self._judge()
        except Exception as error:
            self._failure = error
        for host in self._hosts:
            host.connection.send(over=self._over or {"error": "", "lost": self._lost})
        deadline = time.monotonic() + _GOODBYE_S
        while self._hosts and time.monotonic() < deadline:
            self._hear(_POLL_S)
        for host in self._hosts:
            host.connection.close()
        self._listening.close()
        self._selector.close()

    def _hear(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                with suppress(OSError):
                    self._accept()
                continue
            try:
                messages = key.data.connection.receive()
            except LostError as error:
                self._lose(key.data, str(error))
                continue
            for message in messages:
                self._on_message(key.data, message)

    def _accept(self) -> None:
        sock, _ = self._listening.accept()
        host = _Host(Connection(sock))
        self._hosts.append(host)
        self._selector.register(sock, selectors.EVENT_READ, host)

    def _on_message(self, host: _Host, message: Mapping[str, Any]) -> None:
        if "hello" in message:
            host.name, host.room = message["hello"], message["room"]
            host.connection.send(lock=self._lock)
        elif "ended" in message:
            self._on_end(host, message["ended"], message["how"])
        elif "error" in message:
            self._on_error(host, message["error"])

    def _on_end(self, host: _Host, place: Mapping[str, int], how: str) -> None:
        replica, start = place["replica"], place["start"]
        if place["attempt"] != self._attempt or self._running.get(replica) != start:
            return
        if not how:
            del self._running[replica]
            self._deadline = min(self._deadline, time.monotonic() + _GRACE_S)
            return
        self._bury(replica)
        self._lost = f"replica {replica}" + f" ({host.name})" * self._are_several, how
        if self._num_left and self._deadline == inf:
            self._num_left -= 1
            self._start(host, replica)

    def _on_error(self, host: _Host, error: str) -> None:
        """A request is invalid: that of the run, or that of a host that has come late."""
        if any(self._is_in(each) for each in host.replicas):
            others = f"{host.name}: {error}" if self._are_several else error
            self._over = {"error": others, "lost": ("", "")}
            self._is_over.set()
        else:
            host.connection.send(over={"error": error, "lost": ("", "")})

    def _lose(self, host: _Host, how: str) -> None:
        self._hosts.remove(host)
        self._selector.unregister(host.connection)
        host.connection.close()
        for replica in host.replicas:
            if replica in self._running:
                self._bury(replica)
        if self._are_several and host.name and not self._is_over.is_set():
            say(f"the launcher of {host}: {how}; the others go on")
            self._lost = str(host), how

    def _bury(self, replica: int) -> None:
        """Tell all replicas that every process of one has ended, or is to end."""
        from fullshard import ReplicaGroup

        start = self._running.pop(replica)
        ReplicaGroup.mark_dead(self._attempt_store(), replica, start)
        self._starts[replica] = start + 1

    def _fill(self) -> None:
        """Give replicas that have no host to launchers that wait for some."""
        for host in self._hosts:
            taken = {replica for each in self._hosts for replica in each.replicas}
            free = [each for each in range(self._num_replicas) if each not in taken]
            is_waiting = host.name and not host.replicas and self._deadline == inf
            if is_waiting and len(free) >= host.room:
                host.replicas = free[: host.room]
                if self._are_several:
                    say(f"the launcher of {host} is here")
                for replica in host.replicas:
                    self._start(host, replica)

    def _start(self, host: _Host, replica: int) -> None:
        start = self._running[replica] = self._starts.get(replica, 0)
        place = ReplicaPlace(
            replica, start, self._num_replicas, self._attempt, self._host, self._store.port
        )
        host.connection.send(run=asdict(place))

    def _judge(self) -> None:
        """End the run if it is done, or no replica is left; begin again if none has its state."""
        if not any(host.replicas for host in self._hosts):
            return  # the first launcher is not here yet
        if not self._running or time.monotonic() > self._deadline:
            if self._deadline < inf:
                self._lost = ("", "")
            self._is_over.set()
        elif not any(map(self._is_in, self._running)):
            self._begin_again()

    def _begin_again(self) -> None:
        """Have all replicas start again from the newest checkpoint; others may join later."""
        self._attempt += 1
        self._starts, self._running = {}, dict.fromkeys(range(self._num_replicas), 0)
        hosts = {replica: host for host in self._hosts for replica in host.replicas}
        for replica in range(self._num_replicas):
            if replica in hosts:
                self._start(hosts[replica], replica)
            else:
                self._bury(replica)

    def _is_in(self, replica: int) -> bool:
        """Whether a replica has the state of the run."""
        from fullshard import ReplicaGroup

        start = self._running.get(replica)
        return start is not None and ReplicaGroup.is_in(self._attempt_store(), replica, start)

    def _attempt_store(self) -> Any:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(f"attempt{self._attempt}", self._store)
