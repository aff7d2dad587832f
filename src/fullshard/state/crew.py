"""What the ranks of a save or load tell each other, apart from training's collectives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fullshard.comm.collectives import pause_at_exit
from fullshard.errors import CheckpointError

_T = TypeVar("_T")

# For each default group: one that programs wait for, one for what is written in the background.
_groups: dict[dist.ProcessGroup, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


class OtherRankError(CheckpointError):
    """Something failed on another rank, which raises what happened to it."""


class Crew:
    """All ranks, over a gloo group of their own; or this process alone.

    The groups are made by the first save or load, on all ranks alike. A thread in the background
    has one of its own: two threads on one group would read each other's messages.
    """

    def __init__(self, *, in_background: bool = False) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if not dist.is_initialized():
            return
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size == 1:
            return
        world = dist.group.WORLD
        assert world is not None
        if world not in _groups:
            _groups.clear()  # of process groups that were destroyed
            pause_at_exit()
            _groups[world] = (dist.new_group(backend="gloo"), dist.new_group(backend="gloo"))
        self.group = _groups[world][in_background]

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def at_work(self, subject: str, consequence: str) -> Iterator[None]:
        """While torch writes or reads, which fails on all ranks if it fails on one."""
        with warnings.catch_warnings():
            if self.size == 1:
                # One process is what was asked for, not an oversight.
                warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
            try:
                yield
            except CheckpointError:
                raise
            except CheckpointException as error:  # torch's, no Exception
                for rank, (reason, _) in error.failures.items():
                    raise CheckpointError(
                        f"{subject}: failed on rank {rank}: {_words(reason)}; {consequence}"
                    ) from error
                raise
            except Exception as error:
                raise CheckpointError(f"{subject}: {_words(error)}; {consequence}") from error

    def told(self, value: _T) -> list[_T]:
        """What every rank says, on every rank."""
        if self.group is None:
            return [value]
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, value, group=self.group)
        return said

    def do(self, what: str, deed: Callable[[], _T]) -> _T:
        """Do something on every rank; if it fails on one, all of them hear of it and raise."""
        result, error = _attempt(deed)
        failed = [(rank, text) for rank, text in enumerate(self.told(_words(error))) if text]
        if error is not None:
            raise error
        if failed:
            rank, text = failed[0]
            raise OtherRankError(f"{what}: failed on rank {rank}: {text}")
        return result  # type: ignore[return-value]

    def first_does(self, what: str, deed: Callable[[], _T]) -> _T:
        """Do something on the first rank; all of them have its result, or raise."""
        result, error = _attempt(deed) if self.is_first else (None, None)
        value, text = self.told((result, _words(error)))[0]
        if error is not None:
            raise error
        if text:
            raise OtherRankError(f"{what}: failed on rank 0: {text}")
        return value  # type: ignore[return-value]


def _attempt(deed: Callable[[], _T]) -> tuple[_T | None, BaseException | None]:
    try:
        return deed(), None
    except Exception as error:
        return None, error


def _words(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"
