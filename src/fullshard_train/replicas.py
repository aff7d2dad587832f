"""`--elastic-replicas`: starts a world of ranks for each replica of this host.

The others go on when one dies (see `fullshard.ReplicaGroup`). The launcher of each host knows which
of its ranks are dead, because it is their parent, and tells the coordinator on the first host,
which decides what runs where. With torchrun, all ranks would be restarted whenever hosts come or
go: the others would lose what they have in memory.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from multiprocessing.process import BaseProcess
from typing import Any

from fullshard.errors import ConfigError
from fullshard.processes import is_stopped
from fullshard_train.config import TrainConfig, parse_mesh
from fullshard_train.control import ReplicaPlace
from fullshard_train.coordinator import Coordinator
from fullshard_train.launcher import FAILED, Launch, launch, run_forked_rank
from fullshard_train.output import RunFolder
from fullshard_train.rendezvous import (
    Connection,
    LostError,
    choose_interface,
    connect,
    is_first_host,
    say,
    split,
)

_POLL_S = 0.05
# How long a rank may be stopped by a signal, and how late a file system may show a new name.
_PATIENCE_S = 5.0
_SEEN_WITHIN_S = 5.0


def launch_replicas(config: TrainConfig) -> int:
    """Train on replicas of this host, and return the exit status."""
    return launch(config, ReplicaLaunch)


@dataclass(slots=True)
class _Replica:
    """The processes of one start of a replica, and the store of their world."""

    place: ReplicaPlace
    processes: Sequence[BaseProcess]
    store: Any
    stopped_since: float = inf

    @property
    def exit_status(self) -> int | None:
        """The exit status of a rank that has failed; 0 once all have ended well, None before."""
        found = [process.exitcode for process in self.processes]
        failed = [status for status in found if status]
        return failed[0] if failed else None if None in found else 0

    def is_stuck(self) -> bool:
        """Return whether a rank has been stopped by a signal for too long."""
        now = time.monotonic()
        is_any = any(is_stopped(process.pid) for process in self.processes)
        self.stopped_since = min(self.stopped_since, now) if is_any else inf
        return now - self.stopped_since > _PATIENCE_S

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


class ReplicaLaunch(Launch):
    """Runs the replicas that the coordinator gives to this host, until the run is over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replicas: dict[int, _Replica] = {}
        self._numbers: list[int] = []  # of replicas of this host; their places are their devices
        self._over: dict[str, Any] = {"error": "", "lost": ("", "")}
        self._lost_coordinator = ""

    def _launch(self) -> None:
        folder, rendezvous = RunFolder.of(self._config), self._config.run.rendezvous
        coordinator, connection = None, None
        try:
            _, port = split(rendezvous)
            if is_first_host(rendezvous):
                folder.lock()
                coordinator = Coordinator(self._config)
                port = coordinator.port
            connection = connect(rendezvous, port, self._is_stopped_early)
            if connection is not None:
                self._follow(connection, folder)
        finally:
            for replica in self._replicas.values():
                replica.kill()
            if connection is not None:
                connection.close()
            if coordinator is not None:
                coordinator.end()
            folder.unlock()

    def _is_stopped_early(self) -> bool:
        return self._num_signals > 0 and not self._replicas

    def _follow(self, connection: Connection, folder: RunFolder) -> None:
        """Do what the coordinator says, until the run is over or the coordinator is lost."""
        if self._config.run.rendezvous:
            choose_interface(connection)
        mesh = parse_mesh(self._config.sharding.mesh)
        assert mesh is not None
        self._num_shards = mesh[1]
        connection.send(hello=socket.gethostname(), room=self._num_ranks // self._num_shards)
        has_failed = False
        while not self._is_stopped_early():
            try:
                messages = connection.receive(_POLL_S)
            except LostError as error:
                self._lost_coordinator = str(error)
                return
            for message in messages:
                if "over" in message:
                    self._over = message["over"]
                    return
                if "lock" in message:
                    self._require_shared(folder, message["lock"])
                elif "run" in message:
                    self._start(ReplicaPlace(**message["run"]))
            # What a rank reports before it ends says more than its end.
            if self._status.error is not None and not has_failed:
                has_failed = True
                connection.send(error=self._status.error)
            for replica in [] if has_failed else [*self._replicas.values()]:
                self._look_at(replica, connection)

    def _look_at(self, replica: _Replica, connection: Connection) -> None:
        """Tell the coordinator if a replica has ended; of one that failed, end the other ranks."""
        status, how = replica.exit_status, ""
        if status or replica.is_stuck():
            replica.kill()
            how = f"signal {-status}" if status and status < 0 else f"status {status}"
            how = how if status else "it was stopped"
        elif status is None:
            return
        del self._replicas[replica.place.replica]
        connection.send(ended=asdict(replica.place), how=how)

    def _require_shared(self, folder: RunFolder, lock: str) -> None:
        """Raise if this host does not see the lock of the first host in the folder of the run."""
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while folder.lock_text != lock:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"--out: all hosts must share the folder. {socket.gethostname()} cannot see "
                    f"the lock that the first host has made in {folder.path}. Choose a folder on "
                    "a file system that all hosts mount."
                )
            time.sleep(_POLL_S)

    def _start(self, place: ReplicaPlace) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if before := self._replicas.pop(place.replica, None):
            before.kill()  # all replicas begin again
        if place.replica not in self._numbers:
            self._numbers.append(place.replica)
        first = self._numbers.index(place.replica) * self._num_shards
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        environment = self._environment() | place.export()
        environment |= {"WORLD_SIZE": str(self._num_shards)}
        environment |= {"LOCAL_WORLD_SIZE": str(self._num_ranks)}
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # it is in this process
        environment |= {"TORCHELASTIC_RESTART_COUNT": str(place.attempt)}
        context, processes = multiprocessing.get_context("forkserver"), []
        for shard in range(self._num_shards):
            own = {"RANK": str(shard), "LOCAL_RANK": str(first + shard)}
            args = (str(self._config_file), environment | own)
            processes.append(context.Process(target=run_forked_rank, args=args))
            processes[-1].start()
        self._replicas[place.replica] = _Replica(place, processes, store)

    def _end_stuck(self) -> None:
        """Each replica ends alone; `_look_at` sees to it."""

    def _exit_status(self) -> int:
        status, (who, how) = super()._exit_status(), self._over["lost"]
        if self._over["error"]:
            raise ConfigError(self._over["error"])
        if self._lost_coordinator:
            say(
                f"the launcher at {self._config.run.rendezvous}, with the store of the run: "
                f"{self._lost_coordinator}. Look whether it runs and its link is up, and start "
                "this launcher again."
            )
            return FAILED
        if status == 0 and who:
            self._say_failed(who, how)
            return FAILED
        return status
