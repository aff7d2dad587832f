"""Pools of ranks that start once and run one function after another, and tests that run on them."""

import atexit
import functools
import inspect
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fullshard.errors import ConfigError
from fullshard.testing.failures import RankException, RanksFailed, RankSilence
from fullshard.testing.forkserver import current_sys_path, spawn
from fullshard.testing.rank_process import (
    Answer,
    Call,
    FunctionReference,
    Raised,
    RankSpec,
    Returned,
    pack,
    unpack,
)

START_TIMEOUT_S = 180.0
GRACE_S = 3.0
POLL_S = 0.2
STACKS_WAIT_S = 2.0
CLOSE_WAIT_S = 15.0
SHOWN_OUTPUT_CHARS = 4000
# A gloo process group has three threads, one of which wakes up a hundred times a second.
MAX_GROUPS = 8
MAX_SHARED_RANKS = 8
SIZE_ARGUMENT = "on_num_ranks"


class RankPool:
    """`num_ranks` processes in one process group that run functions.

    The processes start on the first `run` and stay. After a failure that may have left them out of
    step they are killed, and the next `run` starts new ones; likewise when they have opened many
    process groups, whose threads slow everything down. They end with this process. One thread at a
    time may call `run`.

    Ranks are forked from a process that has loaded torch, so that a pool starts in a fraction of a
    second. `fresh` ranks load it themselves, for environment variables that torch reads at import.
    If there is an accelerator, all ranks are fresh.
    """

    def __init__(
        self,
        num_ranks: int,
        backend: str = "gloo",
        timeout_s: float = 300.0,
        *,
        fresh: bool = False,
    ) -> None:
        if num_ranks < 1:
            raise ConfigError(f"RankPool: num_ranks must be at least 1, not {num_ranks}.")
        self.num_ranks = num_ranks
        self.backend = backend
        self.timeout_s = timeout_s
        self.fresh = fresh
        self._processes: _Processes | None = None
        self._busy = threading.Lock()

    def run(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        expect_failure: bool = False,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(rank, *args, **kwargs)` on every rank; returns the results in rank order.

        `function` is defined at module level; arguments and results are pickled. Every call starts
        with `torch.manual_seed(0)`, default dtype float32 and this process's warning filters. This
        process prints the output of the ranks once they have answered.

        Raises `RanksFailed` if any rank raises, dies or does not answer in time. With
        `expect_failure`, the processes are kept if all ranks raise the same type of exception.
        """
        __tracebackhide__ = True
        call = Call(
            function=FunctionReference.of(function),
            arguments=pack((args, kwargs)),
            warning_filters=pack(_warning_filters()),
            sys_path=current_sys_path(),
        )
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self._busy:
            try:
                processes = self._started()
                processes.send(call)
                grace_s = limit_s if expect_failure else GRACE_S
                answers = processes.collect(call.function.qualname, limit_s, grace_s)
            except RanksFailed as failure:
                if not (expect_failure and failure.alike):
                    self._kill()
                raise
            except BaseException:
                self._kill()  # interrupted: the ranks may be anywhere
                raise
            if max(answer.num_groups for answer in answers) > MAX_GROUPS:
                self._kill()
        return [unpack(answer.result) for answer in answers]

    def close(self) -> None:
        """Let the ranks leave their process group and exit; a later `run` starts new ones."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "not started" if self._processes is None else "started"
        return f"RankPool({self.num_ranks} ranks, {self.backend}, {state})"

    def _started(self) -> "_Processes":
        if self._processes is None:
            self._processes = _Processes(self)
            subject = f"start of {self.num_ranks} {self.backend} ranks"
            self._processes.collect(subject, START_TIMEOUT_S, GRACE_S, print_output=False)
        return self._processes

    def kill_idle(self) -> None:
        """End the ranks, if no call is under way; a later `run` starts new ones."""
        if self._busy.acquire(blocking=False):
            try:
                self._kill()
            finally:
                self._busy.release()

    def _kill(self) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.kill()


_shared_pools: dict[tuple[int, str], RankPool] = {}  # of this process, the last used last


def pool(num_ranks: int, backend: str = "gloo") -> RankPool:
    """The shared pool of this size and backend.

    Its ranks end with this process, or once the pools used after it have many ranks.
    """
    key = (num_ranks, backend)
    found = _shared_pools.pop(key, None)
    if found is None:
        found = RankPool(num_ranks, backend)
        atexit.register(found.close)
    _shared_pools[key] = found
    num_shared = 0
    for each in reversed(_shared_pools.values()):
        num_shared += each.num_ranks
        if num_shared > MAX_SHARED_RANKS and each is not found:
            each.kill_idle()
    return found


def on_ranks(
    *sizes: int, backend: str = "gloo", timeout_s: float = 300.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of a pytest test on every rank of a shared pool, for each of these sizes.

    The body's first parameter is its `Rank`; pytest sees the others. Their values (from
    `pytest.mark.parametrize`, or fixtures that can be pickled) are sent to the ranks.

        @pytest.mark.parametrize("dim", [0, 1])
        @on_ranks(2, 4)
        def test_a_shard_keeps_its_rows(rank: Rank, dim: int) -> None: ...
    """
    if not sizes:
        raise ConfigError("on_ranks needs at least one world size; try on_ranks(2).")

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        first, *others = inspect.signature(body).parameters.values()
        if first.name == "self":
            raise ConfigError(
                f"{body.__qualname__} is a method, and on_ranks runs module-level functions; "
                "move it out of its class."
            )

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            num_ranks = arguments.pop(SIZE_ARGUMENT, sizes[0])
            pool(num_ranks, backend).run(body, timeout_s=timeout_s, **arguments)

        test.rank_body = body  # type: ignore[attr-defined]
        if len(sizes) > 1:
            others = [inspect.Parameter(SIZE_ARGUMENT, inspect.Parameter.KEYWORD_ONLY), *others]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others]
        )
        if len(sizes) == 1:
            return test
        import pytest

        ids = [f"{size}ranks" for size in sizes]
        marked: Callable[..., None] = pytest.mark.parametrize(SIZE_ARGUMENT, sizes, ids=ids)(test)
        return marked

    return decorate


class _Process:
    """One rank's process, the parent's end of its connection, and its files."""

    def __init__(self, rank: int, pool: RankPool, store_port: int, folder: Path) -> None:
        self._stacks_path = folder / f"rank{rank}.stacks"
        self._output_path = folder / f"rank{rank}.output"
        self._num_output_bytes_read = 0
        ours, theirs = socket.socketpair()
        spec = RankSpec(
            rank=rank,
            size=pool.num_ranks,
            backend=pool.backend,
            store_port=store_port,
            timeout_s=pool.timeout_s,
            connection_fd=theirs.fileno(),
            stacks_path=str(self._stacks_path),
            sys_path=current_sys_path(),
        )
        with theirs, open(self._output_path, "wb") as output:
            self.process = spawn(spec, output, fresh=pool.fresh)
        self.connection: Connection = Connection(ours.detach())

    def send(self, message: Call | None) -> None:
        try:
            self.connection.send_bytes(pack(message))
        except OSError:
            pass  # it has ended: `collect` reports how

    def new_output(self) -> str:
        """What the rank has written since the last call."""
        with open(self._output_path, "rb") as output:
            output.seek(self._num_output_bytes_read)
            found = output.read()
        self._num_output_bytes_read += len(found)
        return found.decode(errors="replace")

    def silence(self) -> RankSilence:
        """Why there is no answer: the exit code, or the stacks of a process that still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            self._await_stacks()
        stacks = self._stacks_path.read_text() if self._stacks_path.exists() else ""
        output = self.new_output()[-SHOWN_OUTPUT_CHARS:]
        return RankSilence(self.process.poll(), stacks, output)

    def _await_stacks(self) -> None:
        """Wait until the dump, which has no end mark, stops growing."""
        size, deadline = -1, time.monotonic() + STACKS_WAIT_S
        while time.monotonic() < deadline:
            time.sleep(0.1)
            found = self._stacks_path.stat().st_size if self._stacks_path.exists() else 0
            if found and found == size:
                return
            size = found


class _Processes:
    """The processes of all ranks of a pool, from their start until `kill` or `close`."""

    def __init__(self, pool: RankPool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fullshard-ranks-")
        # Here, not on rank 0: the port is known at once, and no rank closes the store when it ends.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        folder = Path(self._folder.name)
        self._ranks: list[_Process] = []
        try:
            for rank in range(pool.num_ranks):
                self._ranks.append(_Process(rank, pool, self._store.port, folder))
        except BaseException:
            self.kill()
            raise

    def send(self, message: Call | None) -> None:
        for rank in self._ranks:
            rank.send(message)

    def collect(
        self, subject: str, timeout_s: float, grace_s: float, *, print_output: bool = True
    ) -> list[Returned]:
        """Return the answer of every rank; raise `RanksFailed` if one raised or gave none.

        Once a rank has failed, the others get only `grace_s`: they may wait for it forever.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        answers: dict[int, Answer] = {}
        ended: list[int] = []
        waiting = {rank.connection: number for number, rank in enumerate(self._ranks)}
        while waiting and time.monotonic() < deadline:
            ready = wait(list(waiting), min(POLL_S, max(0.0, deadline - time.monotonic())))
            for connection, number in list(waiting.items()):
                if connection in ready:
                    try:
                        answers[number] = unpack(connection.recv_bytes())
                    except (EOFError, OSError):
                        ended.append(number)
                elif self._ranks[number].process.poll() is not None:
                    ended.append(number)
                else:
                    continue
                del waiting[connection]
                if number in ended or isinstance(answers[number], Raised):
                    deadline = min(deadline, time.monotonic() + grace_s)
        waited_s = time.monotonic() - began
        for number in ended:
            self._ranks[number].process.wait()
        silent = {each: self._ranks[each].silence() for each in sorted((*ended, *waiting.values()))}
        self._read_output(is_printed=print_output)
        answers = dict(sorted(answers.items()))
        raised = {each: _exception(a) for each, a in answers.items() if isinstance(a, Raised)}
        if raised or silent:
            raise RanksFailed(subject, len(self._ranks), raised, silent, waited_s)
        return [answer for answer in answers.values() if isinstance(answer, Returned)]

    def _read_output(self, *, is_printed: bool) -> None:
        for number, rank in enumerate(self._ranks):
            for line in rank.new_output().splitlines():
                if is_printed:
                    sys.stdout.write(f"[rank {number}] {line}\n")

    def kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.connection.close()
        self._folder.cleanup()

    def close(self) -> None:
        """Let every rank leave the process group; kill those that do not."""
        self.send(None)
        deadline = time.monotonic() + CLOSE_WAIT_S
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass  # killed below
        self.kill()


def _exception(answer: Raised) -> RankException:
    exception = None
    if answer.exception is not None:
        try:
            exception = unpack(answer.exception)
        except Exception:
            pass  # its class exists only on the ranks: keep just the text
    return RankException(answer.type_name, answer.message, answer.traceback, exception)


def _warning_filters() -> list[Any]:
    # pytest's own categories would make every rank import pytest.
    return [entry for entry in warnings.filters if not entry[2].__module__.startswith("_pytest")]
