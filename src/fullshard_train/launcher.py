"""Starts the ranks of a run on this machine with torch's elastic launcher.

The launcher runs in a thread, so that this module handles signals: the launcher would kill ranks
after half a minute, and a checkpoint may take longer. Ranks run in their own sessions and do not
receive the terminal's signals; this process forwards them to the ranks that have reported ready.

Without a GPU, ranks are forks of `multiprocessing`'s server, which has loaded torch for all of
them, including those that replace failed ones. The server starts before this process loads
torch, so that both load it at the same time. With a GPU, each rank is an interpreter of its own.

The kernel kills the server and the ranks when this process ends, however it ends: every fork holds
the pipe from which the server would learn that. When a rank is lost, the others get a few seconds
to say so.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
import uuid
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fullshard.errors import ConfigError, TopologyError
from fullshard.processes import end_with_parent, is_stopped
from fullshard_train.config import TrainConfig, mesh_shape, parse_mesh
from fullshard_train.config_file import config_as_toml, config_of
from fullshard_train.control import (
    PREDICTED,
    Process,
    StatusFolder,
    forget_launcher,
    kill,
    name_launcher,
)

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

STOPPED = 130
FAILED = 1
_POLL_S = 0.1
# How long ranks may take to end once one of them is lost, and how long a rank may be stopped by a
# signal, in looks of this process: it may have been stopped itself.
_MAX_LOOKS = 30
_CPU_RANKS = 2  # so that there is something to shard over
# Drivers of GPUs that torch can use: CUDA, ROCm, CUDA under Windows.
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_LOADED_IN = os.getpid()


def launch(config: TrainConfig, kind: type[Launch] | None = None) -> int:
    """Train on ranks of this machine, and return the exit status."""
    _require_free_port(config.run.port)
    mesh = parse_mesh(config.sharding.mesh) if config.sharding.elastic_replicas else None
    # With a rendezvous, there are other hosts, and replicas on them.
    per_host = (1 if config.run.rendezvous else mesh[0]) * mesh[1] if mesh else 0
    asked = config.run.ranks or per_host
    if config.run.device == "cpu" or not any(Path(each).exists() for each in _DRIVERS):
        num_ranks = asked or _CPU_RANKS
        mesh_shape(config.sharding, _num_everywhere(config, num_ranks))
        prepare_environment(num_ranks, config.run.rendezvous)
        if "torch" not in sys.modules:
            start_server()
    from fullshard_train.output import RunFolder
    from fullshard_train.world import best_device, require_devices

    device_type = best_device(config.run.device)
    is_forked = device_type == "cpu" or mesh is not None
    num_ranks = asked or default_ranks(device_type)
    require_devices(device_type, num_ranks)
    # The folder is fixed here, so that restarted ranks continue in the same one.
    config = replace(config, run=replace(config.run, out=str(RunFolder.of(config).path)))
    _require_possible(config, num_ranks)
    prepare_environment(num_ranks, config.run.rendezvous)
    os.environ[PREDICTED] = json.dumps(_predicted(config, num_ranks, is_forked=is_forked))
    with tempfile.TemporaryDirectory(prefix="fullshard-") as scratch:
        config_file = Path(scratch) / "config.toml"
        config_file.write_text(config_as_toml(config), encoding="utf-8")
        status = StatusFolder(Path(scratch))
        return (kind or Launch)(config, num_ranks, config_file, status, is_forked=is_forked).run()


def _num_everywhere(config: TrainConfig, num_ranks: int) -> int:
    """Return the number of ranks of the run, for that of this host."""
    mesh = parse_mesh(config.sharding.mesh)
    return mesh[0] * mesh[1] if mesh and config.run.rendezvous else num_ranks


def default_ranks(device_type: str) -> int:
    """Return one per GPU, or two on a CPU."""
    if device_type == "cpu":
        return _CPU_RANKS
    import torch

    return torch.cuda.device_count()


def _require_possible(config: TrainConfig, num_ranks: int) -> None:
    """Raise the errors that one process can detect for every rank without a device."""
    from fullshard_train.output import RunFolder
    from fullshard_train.rendezvous import is_first_host
    from fullshard_train.sharding import architecture_for, unit_classes
    from fullshard_train.sources import require_files

    mesh_shape(config.sharding, _num_everywhere(config, num_ranks))
    architecture = architecture_for(config.model, config.data.tokenizer)
    if is_first_host(config.run.rendezvous):
        RunFolder.of(config).require_usable(config)
    require_files(config.data.paths + config.data.eval_paths)
    if config.sharding.units:
        unit_classes(architecture.build(), architecture, config.sharding)


def _predicted(config: TrainConfig, num_ranks: int, *, is_forked: bool) -> dict[str, Any]:
    """Simulate a step; if ranks are forked, in such a fork, which has loaded what it needs."""
    if is_forked:
        start_server()
        context = multiprocessing.get_context("forkserver")
        server = ProcessPoolExecutor(1, context, initializer=_end_with_server)
        with suppress(BrokenProcessPool), server:  # the run can do without, if it is killed
            return server.submit(_predicted, config, num_ranks, is_forked=False).result()
        return {}
    from fullshard_train.planning import predicted

    return predicted(config, _num_everywhere(config, num_ranks), num_ranks)


def start_server() -> None:
    """Start the process that ranks are forked from, which ends with this one.

    It ignores signals that the terminal or a supervisor sends to the whole process group.
    """
    name_launcher()
    multiprocessing.set_forkserver_preload(["fullshard_train.preloaded"])
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_server() -> None:
    is_loaded_in_server = os.getpid() != _LOADED_IN
    end_with_parent(_LOADED_IN if is_loaded_in_server else os.getppid())


def run_forked_rank(config_file: str, environment: dict[str, str]) -> None:
    """Run a rank in a fork of the server."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    _end_with_server()
    from fullshard_train.run import run_rank
    from fullshard_train.world import leave

    try:
        status = run_rank(config_of(Path(config_file), {}))
    except BaseException:
        traceback.print_exc()
        status = FAILED
    if status:
        leave(status)  # otherwise return: torch's launcher waits until all ranks have


def _require_free_port(port: int) -> None:
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", port))
        except OSError as error:
            raise TopologyError(
                f"--port: port {port} cannot be used ({error.strerror}); leave out the option to "
                "use any free port."
            ) from None


def local_launch(num_ranks: int, *, port: int = 0, max_restarts: int = 0) -> LaunchConfig:
    """Configure torch's launcher for ranks on this machine only."""
    from torch.distributed.launcher.api import LaunchConfig

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
        start_method="forkserver",
    )


def prepare_environment(num_ranks: int, rendezvous: str = "") -> None:
    """Set variables for the ranks: their share of the cores, and the interface of one host."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    if not rendezvous and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A store that outlives a restart would give new ranks the addresses of dead ones.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # The launcher logs details at every failure; this module reports what matters.
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


class Launch:
    """One run of the launcher, and the signals that arrive during it."""

    def __init__(
        self,
        config: TrainConfig,
        num_ranks: int,
        config_file: Path,
        status: StatusFolder,
        *,
        is_forked: bool,
    ) -> None:
        self._config = config
        self._num_ranks = num_ranks
        self._config_file = config_file
        self._status = status
        self._is_forked = is_forked
        self._failure: BaseException | None = None
        self._num_signals = 0
        self._signaled: set[int] = set()
        self._num_looks: Counter[Process] = Counter()

    def run(self) -> int:
        if self._is_forked:
            start_server()
        thread = threading.Thread(target=self._caught, name="launcher", daemon=True)
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            thread.start()
            while thread.is_alive():
                thread.join(_POLL_S)
                self._forward_signal()
                self._end_stuck()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            forget_launcher()
        return self._exit_status()

    def _caught(self) -> None:
        try:
            self._launch()
        except BaseException as error:
            self._failure = error

    def _launch(self) -> None:
        from torch.distributed.launcher.api import elastic_launch

        environment = self._environment()
        entry: Any = sys.executable
        arguments: tuple[Any, ...] = ("-m", "fullshard_train.run", str(self._config_file))
        if self._is_forked:
            entry, arguments = run_forked_rank, (str(self._config_file), environment)
        run = self._config.run
        ranks = local_launch(self._num_ranks, port=run.port, max_restarts=run.max_restarts)
        elastic_launch(ranks, entry)(*arguments)

    def _environment(self) -> dict[str, str]:
        """Return the variables that a fork of the server needs from this process."""
        names = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name in names or name.startswith("FULLSHARD_")
        }
        return inherited | self._status.export()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            for each in self._status.ready():
                kill(each)
            os._exit(STOPPED)
        print(
            "\nstopping after this step; interrupt again to stop immediately",
            file=sys.stderr,
            flush=True,
        )

    def _forward_signal(self) -> None:
        """Ask every rank that has reported ready to stop, once."""
        if not self._num_signals:
            return
        for pid, _ in self._status.ready():
            if pid not in self._signaled:
                self._signaled.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)

    def _end_stuck(self) -> None:
        """Kill ranks that are stopped, and all that have not ended some time after one was lost.

        The launcher's thread only asks them to end, and waits for half a minute: one that is
        stopped, or connects to the lost one, or writes files of its own does not answer.
        """
        ranks = list(self._status.ready())
        for each in ranks:
            is_lost, is_now = self._status.is_lost(each), is_stopped(each[0])
            self._num_looks[each] = self._num_looks[each] + 1 if is_lost or is_now else 0
            if self._num_looks[each] > _MAX_LOOKS:
                for stuck in ranks if is_lost else [each]:
                    kill(stuck)

    def _exit_status(self) -> int:
        error = self._status.error
        if error is not None:
            raise ConfigError(error)
        if self._num_signals or self._status.was_stopped:
            return STOPPED
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        if isinstance(self._failure, ChildFailedError):
            rank, failure = self._failure.get_first_failure()
            how = failure.signal_name() if failure.exitcode < 0 else None
            self._say_failed(f"rank {rank}", how or f"exit status {failure.exitcode}")
            return FAILED
        if self._failure is not None:
            raise self._failure
        return 0

    def _say_failed(self, who: str, how: str) -> None:
        restarts = self._config.run.max_restarts
        after = f" after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""
        print(
            f"fullshard: {who} failed ({how}){after}; its output is above. Pass --resume to "
            "continue from the newest checkpoint.",
            file=sys.stderr,
            flush=True,
        )
