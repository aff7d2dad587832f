"""Where ranks come from: a process that has loaded torch, and forks a rank whenever one is wanted.

Loading torch takes seconds of processor time, a fork milliseconds. A nursery runs nothing but the
loop in `tend`, so it has one thread and no state that a fork would tear. Between it and a rank
stands a minder, which waits for the rank and tells the pool how it ended:

    pool  --request-->  nursery  --fork-->  minder  --fork-->  rank
      <------------ pid, exit code -----------'

All of them go when the pool's process does: nurseries and ranks read from a socket that closes,
and a minder leaves after its rank.
"""

import atexit
import base64
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import BinaryIO, Protocol

import torch

from fullshard.errors import LifecycleError
from fullshard.testing.messages import Birth, pack, unpack

# The parent's path comes first, so that the rank finds the same modules as the parent.
_LOAD = """
import base64, pickle, sys
sys.path[:] = pickle.loads(base64.b64decode(sys.argv[1]))
from fullshard.testing.messages import unpack
from fullshard.testing.rank_process import main
"""
_RANK_PROGRAM = _LOAD + "main(unpack(base64.b64decode(sys.argv[2])))"
# The first optimizer of a process loads dynamo.
_NURSERY_PROGRAM = f"""{_LOAD}
import torch._dynamo
from fullshard.testing.nursery import tend
main(tend(int(sys.argv[2])))
"""

_MAX_REQUEST_BYTES = 1 << 20
_WORD = struct.Struct("i")

# Ranks of one nursery would share the seed of `hash`, and with it the order of their sets: a
# program that relies on that order must fail here as it does elsewhere.
_NUM_NURSERIES = 2


class RankProcess(Protocol):
    """What a pool wants of a rank's process: the part of `subprocess.Popen` that it uses."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, signal: int) -> None: ...
    def kill(self) -> None: ...


def start_rank(birth: Birth, output: BinaryIO, *, fresh: bool) -> RankProcess:
    """Start the process of one rank, which writes to `output`.

    `fresh` ranks are interpreters of their own. So are all where there is an accelerator, whose
    runtime does not survive a fork.
    """
    if not fresh and not torch.accelerator.is_available():
        return _nursery(birth.rank % _NUM_NURSERIES).bear(birth, output)
    return subprocess.Popen(
        _command(_RANK_PROGRAM, birth.sys_path, _as_text(birth)),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(birth.connection_fd,),
        env=_environment(),
    )


@dataclass(frozen=True, slots=True)
class _Request:
    """A rank to fork; its connection, its output, its minder's line and its folder come along."""

    birth: Birth
    environment: dict[str, str]


class _Nursery:
    """The pool's end of a nursery."""

    def __init__(self, sys_path: tuple[str, ...]) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                _command(_NURSERY_PROGRAM, sys_path, str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=_environment(),
            )

    @property
    def is_open(self) -> bool:
        return self._process.poll() is None

    def bear(self, birth: Birth, output: BinaryIO) -> "_Forked":
        ours, minders = socket.socketpair()
        folder = os.open(".", os.O_RDONLY)
        try:
            with minders:
                descriptors = [birth.connection_fd, output.fileno(), minders.fileno(), folder]
                request = pack(_Request(birth, _environment()))
                socket.send_fds(self._line, [request], descriptors)
            return _Forked(ours)
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(folder)

    def close(self) -> None:
        self._line.close()
        self._process.wait()


class _Forked:
    """A rank that a nursery has forked, by what its minder says of it."""

    def __init__(self, minder: socket.socket) -> None:
        self._minder = minder
        self._returncode: int | None = None
        pid = self._next_word()
        if pid is None:
            raise LifecycleError(
                "RankPool: expected a process that has loaded torch to fork ranks from, found that "
                "it has ended; it says why above. RankPool(..., fresh=True) does without it."
            )
        self._pid = pid

    def poll(self) -> int | None:
        if self._returncode is None and select.select([self._minder], [], [], 0)[0]:
            said = self._next_word()
            self._minder.close()
            # If the minder is gone without a word, nobody knows: as if the rank had been killed.
            self._returncode = -signal.SIGKILL if said is None else said
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._returncode is None:
            select.select([self._minder], [], [], timeout)
        returncode = self.poll()
        if returncode is None:
            raise subprocess.TimeoutExpired(f"rank with pid {self._pid}", timeout or 0.0)
        return returncode

    def send_signal(self, signal: int) -> None:
        if self.poll() is None:
            try:
                os.kill(self._pid, signal)
            except ProcessLookupError:
                pass  # it ended since

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _next_word(self) -> int | None:
        found = self._minder.recv(_WORD.size)
        return int(_WORD.unpack(found)[0]) if found else None


_nurseries: dict[tuple[int, int], _Nursery] = {}


def _nursery(number: int) -> _Nursery:
    """One of this process's nurseries; a fork of this process has its own."""
    keys = [(os.getpid(), each) for each in range(_NUM_NURSERIES)]
    for key in keys:  # all at once: each takes its time to load
        if key not in _nurseries or not _nurseries[key].is_open:
            _nurseries[key] = _Nursery(current_sys_path())
            atexit.register(_nurseries[key].close)
    return _nurseries[keys[number]]


def tend(line_fd: int) -> Birth:
    """Fork a rank for every request. Returns in the ranks; the nursery leaves with its parent."""
    # Ctrl-C in a terminal reaches every process of the group: the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for minders
    gc.freeze()  # a collection in a rank would copy every page that it looks at
    line = socket.socket(fileno=line_fd)
    while True:
        request, descriptors, _, _ = socket.recv_fds(line, _MAX_REQUEST_BYTES, 4)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            line.close()
            return _mind(unpack(request), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _mind(request: _Request, connection: int, output: int, pool: int, folder: int) -> Birth:
    """Fork the rank, and tell the pool of it; returns in the rank only."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    pid = os.fork()
    if pid == 0:
        os.fchdir(folder)
        os.close(folder)
        os.close(pool)
        os.environ.clear()
        os.environ.update(request.environment)
        sys.path[:] = request.birth.sys_path
        return replace(request.birth, connection_fd=connection)
    os.close(connection)
    os.close(folder)
    try:
        os.write(pool, _WORD.pack(pid))
        _, status = os.waitpid(pid, 0)
        os.write(pool, _WORD.pack(os.waitstatus_to_exitcode(status)))
    finally:
        os._exit(0)


def _command(program: str, sys_path: tuple[str, ...], argument: str) -> list[str]:
    return [sys.executable, "-u", "-c", program, _as_text(sys_path), argument]


def _as_text(value: object) -> str:
    return base64.b64encode(pack(value)).decode()


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def current_sys_path() -> tuple[str, ...]:
    """This process's module path, with the working directory spelled out."""
    return tuple(entry or os.getcwd() for entry in sys.path)
