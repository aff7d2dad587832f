"""How a pool reports ranks that fail."""

from collections.abc import Mapping
from dataclasses import dataclass

from fullshard.errors import FullshardError


@dataclass(frozen=True, slots=True)
class RankException:
    """What one rank raised; `exception` is the object itself if it could be pickled."""

    type_name: str
    message: str
    traceback: str
    exception: BaseException | None


@dataclass(frozen=True, slots=True)
class RankSilence:
    """A rank that did not answer: it died (`exit_code`) or was still running (None)."""

    exit_code: int | None
    stacks: str
    output: str


class RanksFailed(FullshardError):  # noqa: N818 - reads as what happened
    """Ranks raised, died or did not answer.

    `exceptions` holds what was raised, by rank; `silent` the ranks that did not answer.
    """

    def __init__(
        self,
        subject: str,
        num_ranks: int,
        exceptions: Mapping[int, RankException],
        silent: Mapping[int, RankSilence],
        waited_s: float,
    ) -> None:
        self.exceptions = dict(exceptions)
        self.silent = dict(silent)
        self.num_ranks = num_ranks
        super().__init__(_describe(subject, num_ranks, self.exceptions, self.silent, waited_s))

    @property
    def alike(self) -> bool:
        """Whether every rank answered with the same type of exception."""
        types = {exception.type_name for exception in self.exceptions.values()}
        return len(self.exceptions) == self.num_ranks and len(types) == 1


def _describe(
    subject: str,
    num_ranks: int,
    exceptions: dict[int, RankException],
    silent: dict[int, RankSilence],
    waited_s: float,
) -> str:
    dead = {rank: found for rank, found in silent.items() if found.exit_code is not None}
    running = {rank: found for rank, found in silent.items() if found.exit_code is None}
    facts = []
    if exceptions:
        facts.append(f"{_name(exceptions)} of {num_ranks} raised")
    if dead:
        facts.append(f"{_name(dead)} died")
    if running:
        facts.append(f"{_name(running)} did not answer in {waited_s:.1f} s")
    parts = [f"{subject}: {', '.join(facts)}."]

    by_traceback: dict[str, list[int]] = {}
    for rank, raised in exceptions.items():
        by_traceback.setdefault(raised.traceback, []).append(rank)
    for traceback, ranks in by_traceback.items():
        parts.append(f"--- {_name(ranks)} raised ---\n{traceback.rstrip()}")
    for rank, found in dead.items():
        parts.append(
            f"--- rank {rank} died with exit code {found.exit_code} ---\n"
            f"{found.stacks}{found.output}".rstrip()
        )
    for rank, found in running.items():
        stacks = found.stacks or "(no stack: the rank did not react to a signal)"
        parts.append(f"--- rank {rank} did not answer; it was at ---\n{stacks}".rstrip())
    return "\n\n".join(parts)


def _name(ranks: Mapping[int, object] | list[int]) -> str:
    numbers = sorted(ranks)
    listed = ", ".join(str(rank) for rank in numbers)
    return f"rank{'s' if len(numbers) > 1 else ''} {listed}"
