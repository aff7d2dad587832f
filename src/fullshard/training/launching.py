"""Starts the ranks of a run on this machine, through torch's elastic launcher.

The launcher runs in a thread, so that signals are ours: it would give ranks half a minute to leave,
and a checkpoint may take longer. Ranks are in sessions of their own and do not hear the terminal;
they are told once they listen (`Signs`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.errors import ConfigError, TopologyError
from fullshard.training.config import TrainConfig
from fullshard.training.config_file import config_as_toml
from fullshard.training.run_folder import folder_for
from fullshard.training.signs import Signs
from fullshard.training.world import best_device, require_devices

LEFT = 130
FAILED = 1
_POLL_S = 0.1


def launch(config: TrainConfig) -> int:
    """Train on ranks of this machine; the status to exit with."""
    device_type = best_device(config.run.device)
    num_ranks = config.run.ranks or default_ranks(device_type)
    require_devices(device_type, num_ranks)
    _require_free_port(config.run.port)
    with tempfile.TemporaryDirectory(prefix="fullshard-") as scratch:
        signs = Signs(Path(scratch))
        signs.announce()
        asked = Path(scratch) / "config.toml"
        asked.write_text(config_as_toml(_with_folder(config)), encoding="utf-8")
        ranks = local_launch(num_ranks, port=config.run.port, max_restarts=config.run.max_restarts)
        return _Launch(ranks, asked, signs).run()


def default_ranks(device_type: str) -> int:
    """One per GPU; two on a CPU, so that there is something to shard over."""
    if device_type == "cpu":
        return 2
    import torch

    return torch.cuda.device_count()


def _with_folder(config: TrainConfig) -> TrainConfig:
    """Ranks that are started again go on in the same folder."""
    return replace(config, run=replace(config.run, out=str(folder_for(config).path)))


def _require_free_port(port: int) -> None:
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", port))
        except OSError as error:
            raise TopologyError(
                f"--port: a port that is free is expected, found {port} in use ({error.strerror}); "
                "leave it out to have one chosen."
            ) from None


def local_launch(num_ranks: int, *, port: int = 0, max_restarts: int = 0) -> LaunchConfig:
    """How torch's launcher starts ranks on this machine alone."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        max_restarts=max_restarts,
        monitor_interval=_POLL_S,
        local_addr="localhost",
    )


def prepare_environment(num_ranks: int) -> None:
    """What ranks inherit: their share of the cores, and a network that is always there."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A store that outlives a restart would tell new ranks the addresses of those that died.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # It speaks of its own affairs at every failure; what matters is said here.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


class _Launch:
    """One run of the launcher, and the signals that come meanwhile."""

    def __init__(self, launch_config: LaunchConfig, config_file: Path, signs: Signs) -> None:
        self._launch_config = launch_config
        self._config_file = config_file
        self._signs = signs
        self._failure: BaseException | None = None
        self._num_signals = 0
        self._told: set[int] = set()

    def run(self) -> int:
        prepare_environment(self._launch_config.nproc_per_node)
        thread = threading.Thread(target=self._launch, name="launcher", daemon=True)
        before = {
            number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            thread.start()
            while thread.is_alive():
                thread.join(_POLL_S)
                self._pass_on()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._status()

    def _launch(self) -> None:
        command = ["-m", "fullshard.training.worker", str(self._config_file)]
        try:
            elastic_launch(self._launch_config, sys.executable)(*command)
        except BaseException as error:
            self._failure = error

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            self._kill()
            os._exit(LEFT)
        print("\nleaving after this step; once more to leave at once", file=sys.stderr, flush=True)

    def _pass_on(self) -> None:
        """Ask every rank that listens to leave, once."""
        if not self._num_signals:
            return
        for pid in self._signs.ready_pids():
            if pid not in self._told:
                self._told.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)

    def _kill(self) -> None:
        for pid in self._signs.ready_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _status(self) -> int:
        refusal = self._signs.refusal
        if refusal is not None:
            raise ConfigError(refusal)
        if self._num_signals or self._signs.was_left:
            return LEFT
        if isinstance(self._failure, ChildFailedError):
            print(_in_words(self._failure, self._launch_config), file=sys.stderr, flush=True)
            return FAILED
        if self._failure is not None:
            raise self._failure
        return 0


def _in_words(error: ChildFailedError, launch_config: LaunchConfig) -> str:
    """Which rank failed first, and what its end was."""
    rank, failure = error.get_first_failure()
    how = failure.signal_name() if failure.exitcode < 0 else f"exit status {failure.exitcode}"
    restarts = launch_config.max_restarts
    after = f" after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""
    return (
        f"fullshard: rank {rank} failed ({how}){after}; what it said is above. The newest "
        "checkpoint is whole: go on from it with --resume."
    )
