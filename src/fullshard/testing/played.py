"""The default process group of one process that plays a rank."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fullshard.errors import ConfigError, LifecycleError
from fullshard.testing.rank import Rank


@contextmanager
def playing(subject: str, backend: str, store: Store, rank: Rank) -> Iterator[Rank]:
    """Hold a default process group of `backend` in which this process is `rank`."""
    if not 0 <= rank.rank < rank.size:
        raise ConfigError(f"{subject}: rank must lie in 0..{rank.size - 1}, found {rank.rank}.")
    if dist.is_initialized():
        raise LifecycleError(
            f"{subject}: needs a process without a default process group, found one; "
            "call torch.distributed.destroy_process_group() first."
        )
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.size)
    try:
        yield rank
    finally:
        dist.destroy_process_group()
