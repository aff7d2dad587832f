"""The process group of a run and the device of each rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from fullshard.errors import TopologyError
from fullshard.ranks import RankGroup, init_process_group
from fullshard.resilience import report_exit


@dataclass(frozen=True, slots=True)
class World:
    """This rank, the number of ranks, and this rank's device."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of every rank; uses host memory, so that no device waits."""
        own = torch.tensor(values, dtype=torch.float64)
        return [each.tolist() for each in RankGroup.world().all_gather_tensor(own)]


def best_device(asked: str) -> str:
    """Return the device type; `auto` is a GPU if there is one."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise TopologyError(
            "--device cuda: torch finds no GPU; pass --device cpu, or run `fullshard "
            "doctor` to see why."
        )
    return asked


def require_devices(device_type: str, num_local_ranks: int) -> None:
    """Raise unless every rank of this machine has its own device."""
    found = torch.cuda.device_count() if device_type == "cuda" else num_local_ranks
    if num_local_ranks > found:
        raise TopologyError(
            f"--ranks: each of the {num_local_ranks} ranks needs a GPU to itself, and there are "
            f"{found}; pass --ranks {found}, or --device cpu."
        )


@contextmanager
def joined(asked_device: str, prefix: str = "default_pg") -> Iterator[World]:
    """Initialize the process group of the launcher that started this process.

    One that is made for a while before the run's has another prefix.
    """
    device_type = best_device(asked_device)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    require_devices(device_type, local_size)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    # With offload, gradient norms are reduced in host memory.
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    # After a failed collective torch would end the process, before it can say which rank failed.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    init_process_group(backend, prefix=prefix, device_id=device if device_type == "cuda" else None)
    yield World(dist.get_rank(), dist.get_world_size(), local_rank, local_size, device)
    # Skipped after an error: the rank exits, and must not wait for ranks that wait for it.
    dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End a process that has nothing left to do, whatever its threads do."""
    report_exit()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
