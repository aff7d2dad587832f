"""One generation of rank processes: started together, asked together, gone together."""

import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from fullshard.testing.failures import RankSilence
from fullshard.testing.messages import Answer, Birth, Call, Close, Raised, pack, unpack
from fullshard.testing.nursery import current_sys_path, start_rank

POLL_S = 0.2
STACKS_WAIT_S = 2.0
CLOSE_WAIT_S = 15.0
SHOWN_OUTPUT_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers that came, the ranks that gave none, and how long they were waited for."""

    answers: dict[int, Answer]
    silent: dict[int, RankSilence]
    waited_s: float


@dataclass(frozen=True, slots=True)
class World:
    """What a pool asks for: how many ranks, over what, how patient, and how they are started."""

    num_ranks: int
    backend: str
    timeout_s: float
    fresh: bool


class _Member:
    """One rank's process, the parent's end of its connection, and its files."""

    def __init__(self, rank: int, world: World, port: int, folder: Path) -> None:
        self._stacks_path = folder / f"rank{rank}.stacks"
        self._output_path = folder / f"rank{rank}.output"
        self._num_output_bytes_read = 0
        ours, theirs = socket.socketpair()
        birth = Birth(
            rank=rank,
            size=world.num_ranks,
            backend=world.backend,
            store_port=port,
            timeout_s=world.timeout_s,
            connection_fd=theirs.fileno(),
            stacks_path=str(self._stacks_path),
            sys_path=current_sys_path(),
        )
        with theirs, open(self._output_path, "wb") as output:
            self.process = start_rank(birth, output, fresh=world.fresh)
        self.connection: Connection = Connection(ours.detach())

    def new_output(self) -> str:
        """What the rank has written since this was last asked."""
        with open(self._output_path, "rb") as output:
            output.seek(self._num_output_bytes_read)
            found = output.read()
        self._num_output_bytes_read += len(found)
        return found.decode(errors="replace")

    def silence(self) -> RankSilence:
        """Why no answer came: how it died, or where it is."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            self._await_stacks()
        stacks = self._stacks_path.read_text() if self._stacks_path.exists() else ""
        output = self.new_output()[-SHOWN_OUTPUT_CHARS:]
        return RankSilence(self.process.poll(), stacks, output)

    def _await_stacks(self) -> None:
        """Wait for the dump, which has no mark at its end, to stop growing."""
        size, deadline = -1, time.monotonic() + STACKS_WAIT_S
        while time.monotonic() < deadline:
            time.sleep(0.1)
            found = self._stacks_path.stat().st_size if self._stacks_path.exists() else 0
            if found and found == size:
                return
            size = found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Crew:
    """The processes of all ranks of one world.

    Usable until `kill` or `close`. Whoever gets an outcome with silent ranks has to kill it:
    those ranks are out of step.
    """

    def __init__(self, world: World) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fullshard-ranks-")
        # Held here rather than on rank 0: the port is known at once and outlives any rank.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        folder = Path(self._folder.name)
        self._members: list[_Member] = []
        try:
            for rank in range(world.num_ranks):
                self._members.append(_Member(rank, world, self._store.port, folder))
        except BaseException:
            self.kill()
            raise

    def ask(self, call: Call) -> None:
        packed = pack(call)
        for member in self._members:
            try:
                member.connection.send_bytes(packed)
            except OSError:
                pass  # it died since its last answer: `collect` says how

    def collect(self, timeout_s: float, grace_s: float) -> Outcome:
        """One answer from every rank, or the reason why there is none.

        Once a rank has failed the others may be stuck waiting for it: they get `grace_s`.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        answers: dict[int, Answer] = {}
        dead: list[int] = []
        waiting = {member.connection: rank for rank, member in enumerate(self._members)}
        while waiting and time.monotonic() < deadline:
            wait_s = min(POLL_S, max(0.0, deadline - time.monotonic()))
            ready = set(wait(list(waiting), wait_s))
            for connection, rank in list(waiting.items()):
                if connection in ready:
                    try:
                        answers[rank] = unpack(connection.recv_bytes())
                    except (EOFError, OSError):
                        dead.append(rank)
                elif self._members[rank].process.poll() is not None:
                    dead.append(rank)
                else:
                    continue
                del waiting[connection]
                if rank in dead or isinstance(answers[rank], Raised):
                    deadline = min(deadline, time.monotonic() + grace_s)
        waited_s = time.monotonic() - began
        for rank in dead:
            self._members[rank].process.wait()
        silent = {rank: self._members[rank].silence() for rank in (*dead, *waiting.values())}
        return Outcome(dict(sorted(answers.items())), dict(sorted(silent.items())), waited_s)

    def new_output(self) -> dict[int, str]:
        """What each rank has written to stdout and stderr since this was last asked."""
        return {rank: member.new_output() for rank, member in enumerate(self._members)}

    def kill(self) -> None:
        for member in self._members:
            member.end()
        self._folder.cleanup()

    def close(self) -> None:
        """Let every rank leave the world in order; kill those that do not."""
        for member in self._members:
            try:
                member.connection.send_bytes(pack(Close()))
            except OSError:
                pass  # already gone
        deadline = time.monotonic() + CLOSE_WAIT_S
        for member in self._members:
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass  # killed below
        self.kill()
