"""One process plays one rank of a world whose collectives cost nothing.

torch's `fake` backend copies every message once per rank, which is most of what a step of a small
model in a played world takes. The group here is Python's own subclass of `ProcessGroup`: callers
reach its methods without passing through torch's dispatcher, and these return a finished `Work`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore

from fullshard.testing.played import playing
from fullshard.testing.rank import Rank

QUIET = "quiet"

# What ranks compare (numbers, pickled objects) is small and of integers. It is delivered as if
# every rank had said the same; parameters and gradients are not delivered at all.
_SAID_BYTES = 1 << 16


def _finished_work() -> dist.Work:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([])
    work: dist.Work = c10d._create_work_from_future(future)  # type: ignore[attr-defined]
    return work


def _is_said(tensor: torch.Tensor) -> bool:
    return not tensor.dtype.is_floating_point and tensor.nbytes <= _SAID_BYTES


class _QuietGroup(dist.ProcessGroup):
    """Every collective is done when it is called, launches nothing and waits for nothing."""

    def __init__(self, rank: int, size: int) -> None:
        # The one constructor that a subclass may call; torch's stubs lack it.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._done = _finished_work()

    def getBackendName(self) -> str:  # noqa: N802 - the name that C++ looks for
        return QUIET

    def _quiet(self, *_: object, **__: object) -> dist.Work:
        return self._done

    def _gather_one(
        self, out: torch.Tensor, own: torch.Tensor, options: object = None
    ) -> dist.Work:
        if _is_said(own):
            out.view(self.size(), -1).copy_(own.reshape(1, -1))
        return self._done

    def _gather_several(
        self, outs: Sequence[torch.Tensor], owns: Sequence[torch.Tensor], options: object = None
    ) -> dist.Work:
        for out, own in zip(outs, owns, strict=True):
            self._gather_one(out, own)
        return self._done

    def _gather_lists(
        self, outs: Sequence[Sequence[torch.Tensor]], owns: Sequence[torch.Tensor], *_: object
    ) -> dist.Work:
        for parts, own in zip(outs, owns, strict=True):
            for part in parts:
                if _is_said(own):
                    part.copy_(own)
        return self._done

    # Of two names for one collective, torch 2.11 knows the first and 2.13 calls the second.
    _allgather_base: Any = _gather_one
    all_gather_single: Any = _gather_one
    allgather_into_tensor_coalesced: Any = _gather_several
    all_gather_single_coalesced: Any = _gather_several
    allgather: Any = _gather_lists
    allgather_coalesced: Any = _gather_lists
    _reduce_scatter_base: Any = _quiet
    reduce_scatter_single: Any = _quiet
    reduce_scatter_tensor_coalesced: Any = _quiet
    reduce_scatter_single_coalesced: Any = _quiet
    reduce_scatter: Any = _quiet
    alltoall_base: Any = _quiet
    all_to_all_single: Any = _quiet
    alltoall: Any = _quiet
    allreduce: Any = _quiet
    allreduce_coalesced: Any = _quiet
    reduce: Any = _quiet
    broadcast: Any = _quiet
    scatter: Any = _quiet
    gather: Any = _quiet
    send: Any = _quiet
    recv: Any = _quiet
    recv_anysource: Any = _quiet
    barrier: Any = _quiet
    monitored_barrier: Any = _quiet


def _make_group(common: Any, options: Any) -> _QuietGroup:
    # Importing this module is what registers the `fake` backend (torch 2.11 to 2.13). It answers
    # what is asked of a backend rather than of its group, and the few calls that C++ makes past
    # the methods above.
    from torch.testing._internal.distributed.fake_pg import _create_fake_pg

    group = _QuietGroup(common.group_rank, common.group_size)
    backend = _create_fake_pg(common, options)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    return group


@contextmanager
def quiet_world(size: int, rank: int = 0, device: torch.device | str = "cpu") -> Iterator[Rank]:
    """Play `rank` of `size` ranks: collectives return at once, copy nothing and launch nothing.

    For measuring what a library does around its collectives. What a gather delivers is whatever was
    in the memory before; only small messages of integers, by which ranks compare their plans,
    arrive, as if all ranks had said the same.
    """
    if QUIET not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            QUIET, _make_group, extended_api=True, devices=["cpu", "cuda"]
        )
    place = Rank(rank, size, torch.device(device))
    with playing("quiet_world", QUIET, HashStore(), place) as played:
        yield played
