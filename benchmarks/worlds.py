"""Where variants are checked: a real process group of this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fullshard.testing import Rank


def device_of(name: str) -> torch.device:
    """A device with its index: libraries disagree about the meaning of a device without one."""
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


@contextmanager
def one_rank(device: torch.device) -> Iterator[Rank]:
    """One rank, whose collectives return their input, so losses do not depend on the variant."""
    is_cuda = device.type == "cuda"
    options: dict[str, Any] = {"device_id": device} if is_cuda else {}
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", store=HashStore(), rank=0, world_size=1, **options
    )
    try:
        yield Rank(0, 1, device)
    finally:
        dist.destroy_process_group()
