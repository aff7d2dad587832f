"""`--elastic-replicas`: starts a world of ranks for each replica, and a new one if it dies.

The others go on meanwhile (see `fullshard.ReplicaGroup`). This process knows which ranks are dead,
because it is their parent, and it has the store in which replicas agree. If all replicas that have
the state of the run are lost, all start again from the newest checkpoint.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from multiprocessing.process import BaseProcess
from typing import Any

from fullshard.processes import is_stopped
from fullshard_train.config import TrainConfig, mesh_shape
from fullshard_train.control import ReplicaPlace
from fullshard_train.launcher import FAILED, Launch, launch, run_forked_rank
from fullshard_train.output import RunFolder

_POLL_S = 0.05
# How long a rank may be stopped by a signal, and how long replicas may take once one has ended.
_PATIENCE_S = 5.0
_GRACE_S = 20.0


def launch_replicas(config: TrainConfig) -> int:
    """Train on replicas of this machine, and return the exit status."""
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
    """Watches replicas and restarts them until one of them has done the last step."""

    _lost = ("", "")  # the last replica that failed, and how, if none is left

    def _launch(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        folder, is_over, num_left = RunFolder.of(self._config), False, self._config.run.max_restarts
        folder.lock()
        try:
            for attempt in count():
                alive: dict[int, _Replica] = {}
                store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
                try:
                    is_over, num_left = self._attempt(attempt, num_left, alive, store)
                finally:
                    for replica in alive.values():
                        replica.kill()
                if is_over:
                    return
        finally:
            folder.unlock()

    def _attempt(
        self, attempt: int, num_left: int, alive: dict[int, _Replica], store: Any
    ) -> tuple[bool, int]:
        """Watch replicas until the run is over, or until none has its state.

        Returns whether the run is over, and how many restarts are left.
        """
        from fullshard import ReplicaGroup

        num_replicas, _ = mesh_shape(self._config.sharding, self._num_ranks)
        for number in range(num_replicas):
            place = ReplicaPlace(number, 0, num_replicas, store.port)
            alive[number] = self._start(place, attempt)
        deadline = inf
        while alive and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            if self._status.error is not None:
                return True, num_left
            for number, replica in [*alive.items()]:
                status = replica.exit_status
                if status == 0:
                    del alive[number]
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                elif status is not None or replica.is_stuck():
                    replica.kill()
                    ReplicaGroup.mark_dead(store, number, replica.place.start)
                    del alive[number]
                    how = f"signal {-(status or 0)}" if (status or 0) < 0 else f"status {status}"
                    self._lost = f"replica {number}", how if status else "it was stopped"
                    if num_left and deadline == inf:
                        num_left -= 1
                        place = replace(replica.place, start=replica.place.start + 1)
                        alive[number] = self._start(place, attempt)
            is_in = [ReplicaGroup.is_in(store, n, each.place.start) for n, each in alive.items()]
            if not any(is_in):
                break
        if deadline < inf:
            self._lost = ("", "")
        return deadline < inf or not alive, num_left

    def _start(self, place: ReplicaPlace, attempt: int) -> _Replica:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        _, num_shards = mesh_shape(self._config.sharding, self._num_ranks)
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        environment = self._environment() | place.export()
        environment |= {"WORLD_SIZE": str(num_shards), "LOCAL_WORLD_SIZE": str(self._num_ranks)}
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # it is in this process
        environment |= {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
        context, processes = multiprocessing.get_context("forkserver"), []
        for shard in range(num_shards):
            own = {"RANK": str(shard), "LOCAL_RANK": str(place.replica * num_shards + shard)}
            args = (str(self._config_file), environment | own)
            processes.append(context.Process(target=run_forked_rank, args=args))
            processes[-1].start()
        return _Replica(place, processes, store)

    def _end_stuck(self) -> None:
        """Each replica ends alone; `_attempt` sees to it."""

    def _exit_status(self) -> int:
        status = super()._exit_status()
        if status == 0 and self._lost[0]:
            self._say_failed(*self._lost)
            return FAILED
        return status
