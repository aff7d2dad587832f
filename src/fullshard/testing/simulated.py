"""Simulates one rank of a large world in a single process, without communication.

`fake_world` uses torch's `fake` backend, which copies every message once per rank. In a step of a
small model these copies take most of the time, so `quiet_world` has its own process group. It is a
Python subclass of `ProcessGroup`, whose methods are called without torch's dispatcher and return a
finished `Work`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from fullshard import _torch
from fullshard.errors import ConfigError, LifecycleError
from fullshard.testing.rank_process import Rank

QUIET = "quiet"

# Ranks compare small integer tensors (numbers, pickled objects). These are delivered as if every
# rank had sent the same; parameters and gradients are not delivered at all.
_MAX_DELIVERED_BYTES = 1 << 16


@contextmanager
def fake_world(size: int, rank: int = 0, device: torch.device | str = "cpu") -> Iterator[Rank]:
    """Simulate `rank` of `size` ranks: collectives return at once and send nothing.

    For shapes, layouts, memory and order of calls; the values that collectives deliver are
    meaningless.
    """
    with _simulated("fake_world", "fake", _torch.FakeStore(), rank, size, device) as simulated:
        yield simulated


@contextmanager
def quiet_world(size: int, rank: int = 0, device: torch.device | str = "cpu") -> Iterator[Rank]:
    """Simulate `rank` of `size` ranks: collectives return at once, copy and launch nothing.

    For measuring what a library does around its collectives. An all-gather delivers whatever was in
    the memory before. Only small integer messages, with which ranks compare their plans, arrive, as
    if all ranks had sent the same.
    """
    if QUIET not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            QUIET, _make_quiet_group, extended_api=True, devices=["cpu", "cuda"]
        )
    with _simulated("quiet_world", QUIET, HashStore(), rank, size, device) as simulated:
        yield simulated


@contextmanager
def _simulated(
    subject: str,
    backend: str,
    store: Store,
    rank: int,
    size: int,
    device: torch.device | str,
) -> Iterator[Rank]:
    """A default process group of `backend` in which this process is `rank`."""
    if not 0 <= rank < size:
        raise ConfigError(f"{subject}: rank must be from 0 to {size - 1}, not {rank}.")
    if dist.is_initialized():
        raise LifecycleError(
            f"{subject}: this process already has a default process group; call "
            "torch.distributed.destroy_process_group() first."
        )
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield Rank(rank, size, torch.device(device))
    finally:
        dist.destroy_process_group()


class _QuietGroup(dist.ProcessGroup):
    """A process group whose collectives complete when they are called.

    `gathered_bytes` counts what all-gathers would have delivered.
    """

    def __init__(self, rank: int, size: int) -> None:
        # The one constructor that a subclass may call; torch's stubs lack it.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._finished = _torch.finished_work()
        self.gathered_bytes = 0

    def getBackendName(self) -> str:  # noqa: N802 - the name that C++ looks for
        return QUIET

    def _deliver_nothing(self, *_: object, **__: object) -> dist.Work:
        return self._finished

    def _all_gather(
        self, out: torch.Tensor, own: torch.Tensor, options: object = None
    ) -> dist.Work:
        self.gathered_bytes += out.nbytes
        if _is_delivered(own):
            out.view(self.size(), -1).copy_(own.reshape(1, -1))
        return self._finished

    def _all_gather_several(
        self, outs: Sequence[torch.Tensor], owns: Sequence[torch.Tensor], options: object = None
    ) -> dist.Work:
        for out, own in zip(outs, owns, strict=True):
            self._all_gather(out, own)
        return self._finished

    def _all_gather_lists(
        self, outs: Sequence[Sequence[torch.Tensor]], owns: Sequence[torch.Tensor], *_: object
    ) -> dist.Work:
        for parts, own in zip(outs, owns, strict=True):
            for part in parts:
                if _is_delivered(own):
                    part.copy_(own)
        return self._finished


# torch's names for each collective; where there are two, the second is from torch 2.13.
_METHODS = {
    "_all_gather": ("_allgather_base", "all_gather_single"),
    "_all_gather_several": ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    "_all_gather_lists": ("allgather", "allgather_coalesced"),
    "_deliver_nothing": (
        *("_reduce_scatter_base", "reduce_scatter_single"),
        *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        *("alltoall_base", "all_to_all_single"),
        *("reduce_scatter", "alltoall", "allreduce", "allreduce_coalesced", "reduce", "broadcast"),
        *("scatter", "gather", "send", "recv", "recv_anysource", "barrier", "monitored_barrier"),
    ),
}
for _own, _names in _METHODS.items():
    for _name in _names:
        setattr(_QuietGroup, _name, getattr(_QuietGroup, _own))


def _is_delivered(tensor: torch.Tensor) -> bool:
    return not tensor.dtype.is_floating_point and tensor.nbytes <= _MAX_DELIVERED_BYTES


def _make_quiet_group(common: Any, options: Any) -> _QuietGroup:
    group = _QuietGroup(common.group_rank, common.group_size)
    # Serves queries to a backend instead of its group, and the few calls from C++ that bypass the
    # methods above.
    backend = _torch.create_fake_group(common, options)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group
