"""What every kind of collective offers, and what is under way of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.api import AllGather, ReduceScatter


class CollectiveWork:
    """A collective under way. Dropping it lets go of its buffers (rule 5)."""

    def __init__(self, works: Sequence[dist.Work | None] = ()) -> None:
        self._works = [work for work in works if work is not None]

    @property
    def futures(self) -> list[torch.futures.Future[object]]:
        """Done when the bytes have arrived; on a backend with streams, when that is enqueued."""
        return [work.get_future() for work in self._works]

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()


class Collectives(ABC):
    """Gathers and reduces over one kind of process group."""

    averages: bool = False
    """Whether `reduce` can be asked for the mean instead of the sum."""

    custom_all_gather: AllGather | None = None
    custom_reduce_scatter: ReduceScatter | None = None
    """What a user brought in the place of ours, with memory of its own."""

    @abstractmethod
    def all_gather(
        self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> CollectiveWork:
        """Fill each output with the inputs of all ranks, in the order of ranks."""

    @abstractmethod
    def reduce_scatter(
        self,
        outs: Sequence[torch.Tensor],
        ins: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        *,
        average: bool,
    ) -> CollectiveWork:
        """Fill each output with the sum (or mean) over ranks of this rank's segment.

        Outputs may all have a wider dtype than inputs: then values are added up in that (rule 6).
        """

    def allocate_bucket(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Where to lay the input of a reduce, without values: memory that need not be copied."""
        return torch.empty(numel, dtype=dtype, device=device)
