"""Starts the processes of ranks: forks of a server that has loaded torch, or fresh interpreters.

Loading torch takes seconds, a fork milliseconds. The server has one thread and runs only the loop
in `serve`, so a fork finds nothing half done:

    pool  --spec-->  server  --fork-->  rank
      <--pid file descriptor--'

Everything ends with the pool's process: the server and the ranks read from sockets that close.

`multiprocessing`'s forkserver cannot do this: a process has only one of them, so that all ranks
would share the seed of `hash` and order their sets alike, and its processes either may not have
children (a `DataLoader`'s workers) or keep their parent from exiting until it stops them.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from typing import Any, BinaryIO

import torch

from fullshard.errors import LifecycleError
from fullshard.testing.rank_process import RankSpec, main, pack, unpack

# The parent's path comes first, so that the process finds the same modules as the parent.
_PROGRAM = """
import gc, json, sys
sys.path[:] = json.loads(sys.argv[1])
gc.disable()  # what is imported stays
from fullshard.testing import forkserver
gc.enable()
forkserver.{function}(sys.argv[2])
"""
_MAX_MESSAGE_BYTES = 1 << 20

# Ranks of one server share the seed of `hash`, and with it the order of their sets. With two
# servers, a program that relies on that order fails here as it does elsewhere.
_NUM_SERVERS = 2

# Modules of tests import these. A server loads those that its parent has loaded.
_PRELOADED = (
    "fullshard.auto_shard",
    "fullshard.fully_sharded_data_parallel",
    "fullshard.state.safetensors",
    "hypothesis",
    "pytest",
)


def spawn(spec: RankSpec, output: BinaryIO, *, fresh: bool) -> "RankProcess":
    """Start the process of one rank, with stdout and stderr in `output`.

    The process is a new interpreter if `fresh` is set or if there is an accelerator, whose runtime
    does not survive a fork.
    """
    if fresh or torch.accelerator.is_available():
        return _popen("run_rank", json.dumps(asdict(spec)), spec.connection_fd, output)
    return _ForkedProcess(_server(spec.rank % _NUM_SERVERS), spec, output)


def current_sys_path() -> tuple[str, ...]:
    """This process's module path, with the working directory spelled out."""
    return tuple(entry or os.getcwd() for entry in sys.path)


def run_rank(spec: str) -> None:
    """The program of a fresh rank."""
    main(RankSpec(**json.loads(spec)))


def _popen(
    function: str, argument: str, passed_fd: int, output: BinaryIO | None
) -> "subprocess.Popen[bytes]":
    program = _PROGRAM.format(function=function)
    return subprocess.Popen(
        [sys.executable, "-u", "-c", program, json.dumps(current_sys_path()), argument],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(passed_fd,),
        env=_environment(),
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


class _Server:
    """This process's end of the connection to a server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        preloaded = [name for name in _PRELOADED if name in sys.modules]
        with theirs:
            argument = json.dumps([theirs.fileno(), preloaded])
            self._process = _popen("serve", argument, theirs.fileno(), None)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: object, descriptors: tuple[int, ...] = ()) -> tuple[Any, list[int]]:
        """Return the answer to a request, or None if the server has ended."""
        with self._lock:
            try:
                socket.send_fds(self._socket, [pack(request)], descriptors)
                answer, found, _, _ = socket.recv_fds(self._socket, _MAX_MESSAGE_BYTES, 1)
            except OSError:
                return None, []
        return (unpack(answer) if answer else None), found

    def stop(self) -> None:
        self._socket.close()
        self._process.wait()


_servers: dict[tuple[int, int], _Server] = {}  # by process: a fork must not use its parent's


def _server(number: int) -> _Server:
    """One of this process's servers. All are started together, because each takes time to load."""
    keys = [(os.getpid(), each) for each in range(_NUM_SERVERS)]
    for key in keys:
        if key not in _servers or not _servers[key].is_running:
            _servers[key] = _Server()
            atexit.register(_servers[key].stop)
    return _servers[keys[number]]


class _ForkedProcess:
    """A rank that a server has forked, with the methods of `Popen`. It outlives its server."""

    def __init__(self, server: _Server, spec: RankSpec, output: BinaryIO) -> None:
        self._server = server
        self._returncode: int | None = None
        folder = os.open(".", os.O_RDONLY)
        try:
            descriptors = (spec.connection_fd, output.fileno(), folder)
            self._pid, pid_fds = server.ask((spec, _environment()), descriptors)
        finally:
            os.close(folder)
        if not pid_fds:
            raise LifecycleError(
                "RankPool: the process that ranks are forked from has ended; it says why above. "
                "RankPool(..., fresh=True) does without it."
            )
        (self._pid_fd,) = pid_fds

    def poll(self) -> int | None:
        if self._returncode is None and self._has_ended(0):
            exit_code, _ = self._server.ask(self._pid)
            # Without the server the exit code is unknown: report the rank as killed.
            self._returncode = -signal.SIGKILL if exit_code is None else int(exit_code)
            os.close(self._pid_fd)
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._returncode is None and not self._has_ended(timeout):
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        returncode = self.poll()
        assert returncode is not None
        return returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            try:
                signal.pidfd_send_signal(self._pid_fd, number)
            except ProcessLookupError:
                pass  # it has ended since

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _has_ended(self, timeout_s: float | None) -> bool:
        return bool(select.select([self._pid_fd], [], [], timeout_s)[0])


RankProcess = subprocess.Popen[bytes] | _ForkedProcess


def serve(argument: str) -> None:
    """The program of a server: forks ranks and reports exit codes until the parent is gone."""
    socket_fd, preloaded = json.loads(argument)
    # Ctrl-C in a terminal reaches every process of the group, but only the parent reacts to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer loads many modules
    with torch.device("meta"):
        torch.empty(0)  # looks up torch's functions: transformers replaces some of them for a time
    for name in preloaded:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page that it visits
    parent = socket.socket(fileno=socket_fd)
    while True:
        packed, descriptors, _, _ = socket.recv_fds(parent, _MAX_MESSAGE_BYTES, 3)
        if not packed:
            os._exit(0)
        request = unpack(packed)
        if isinstance(request, int):  # the pid of a rank that has ended
            parent.send(pack(os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])))
            continue
        pid = os.fork()
        if pid == 0:
            parent.close()
            return _become_rank(*request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        pid_fd = os.pidfd_open(pid)
        socket.send_fds(parent, [pack(pid)], [pid_fd])
        os.close(pid_fd)


def _become_rank(
    spec: RankSpec, environment: dict[str, str], connection_fd: int, output_fd: int, folder_fd: int
) -> None:
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.fchdir(folder_fd)
    os.close(output_fd)
    os.close(folder_fd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = spec.sys_path
    main(replace(spec, connection_fd=connection_fd))
