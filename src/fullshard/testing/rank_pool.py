"""Pools of ranks that start once and run one function after another."""

import atexit
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

from fullshard.errors import ConfigError
from fullshard.testing.crew import Crew, Outcome, World
from fullshard.testing.failures import RankException, RanksFailed
from fullshard.testing.messages import Call, FunctionReference, Raised, Returned, pack, unpack
from fullshard.testing.nursery import current_sys_path

START_TIMEOUT_S = 180.0
GRACE_S = 5.0
MAX_GROUPS = 8


class RankPool:
    """`num_ranks` processes in one process group, to run functions on.

    The processes start on the first `run` and stay; after a failure that may have left them out
    of step they are killed, and the next `run` starts new ones; so it does when they have opened
    many process groups, because gloo has threads for each that wake up a hundred times a second.
    They die with this process. One thread at a time may call `run`.

    Ranks are forked from a process that has loaded torch, so that a pool starts in a fraction of a
    second. `fresh` ranks load it themselves: for variables that torch reads as it loads. Where
    there is an accelerator all ranks are fresh.
    """

    def __init__(
        self,
        num_ranks: int,
        backend: str = "gloo",
        timeout_s: float = 120.0,
        *,
        fresh: bool = False,
    ) -> None:
        if num_ranks < 1:
            raise ConfigError(f"RankPool: num_ranks must be at least 1, found {num_ranks}.")
        self.num_ranks = num_ranks
        self.backend = backend
        self.timeout_s = timeout_s
        self.fresh = fresh
        self._crew: Crew | None = None
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
        """Call `function(rank, *args, **kwargs)` on every rank; the results, in rank order.

        `function` is defined at module level; arguments and results are pickled. Every call
        starts with `torch.manual_seed(0)`, default dtype float32 and this process's warning
        filters. What ranks print is printed here when they have answered.

        Raises `RanksFailed` if any rank raises, dies or gives no answer in time. With
        `expect_failure`, ranks that all raise the same type of exception are kept.
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
                crew = self._started()
                crew.ask(call)
                outcome = crew.collect(limit_s, limit_s if expect_failure else GRACE_S)
                _print_output(crew)
                answers = self._answers(call.function.qualname, outcome)
            except RanksFailed as failure:
                if not (expect_failure and failure.alike):
                    self._kill()
                raise
            except BaseException:
                self._kill()  # interrupted half way: the ranks are in an unknown place
                raise
            if max(answer.num_groups for answer in answers) > MAX_GROUPS:
                self._kill()
        return [unpack(answer.result) for answer in answers]

    def close(self) -> None:
        """Let the ranks leave their process group and exit; a later `run` starts new ones."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "not started" if self._crew is None else "started"
        return f"RankPool({self.num_ranks} ranks, {self.backend}, {state})"

    def _started(self) -> Crew:
        if self._crew is None:
            world = World(self.num_ranks, self.backend, self.timeout_s, self.fresh)
            self._crew = Crew(world)
            outcome = self._crew.collect(START_TIMEOUT_S, GRACE_S)
            self._answers(f"start of {self.num_ranks} {self.backend} ranks", outcome)
            self._crew.new_output()  # what backends say while they start is of no interest
        return self._crew

    def _kill(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.kill()

    def _answers(self, subject: str, outcome: Outcome) -> list[Returned]:
        raised = {
            rank: _exception(answer)
            for rank, answer in outcome.answers.items()
            if isinstance(answer, Raised)
        }
        if raised or outcome.silent:
            raise RanksFailed(subject, self.num_ranks, raised, outcome.silent, outcome.waited_s)
        return [answer for answer in outcome.answers.values() if isinstance(answer, Returned)]


_shared_pools: dict[tuple[int, str], RankPool] = {}


def pool(num_ranks: int, backend: str = "gloo") -> RankPool:
    """The pool of this size and backend that everything in this process shares.

    Closed when the process exits.
    """
    key = (num_ranks, backend)
    if key not in _shared_pools:
        _shared_pools[key] = RankPool(num_ranks, backend)
        atexit.register(_shared_pools[key].close)
    return _shared_pools[key]


def _exception(answer: Raised) -> RankException:
    exception = None
    if answer.exception is not None:
        try:
            exception = unpack(answer.exception)
        except Exception:
            pass  # of a class that only the ranks have loaded: the text has to do
    return RankException(answer.type_name, answer.message, answer.traceback, exception)


def _warning_filters() -> list[Any]:
    # pytest's own categories would make every rank import pytest.
    return [entry for entry in warnings.filters if not entry[2].__module__.startswith("_pytest")]


def _print_output(crew: Crew) -> None:
    for rank, text in crew.new_output().items():
        for line in text.splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")
