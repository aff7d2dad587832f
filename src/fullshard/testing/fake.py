"""One process plays one rank of a world of any size."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fullshard.errors import ConfigError, LifecycleError
from fullshard.testing.rank import Rank


@contextmanager
def fake_world(size: int, rank: int = 0, device: torch.device | str = "cpu") -> Iterator[Rank]:
    """Play `rank` of `size` ranks: collectives return at once and move nothing.

    For shapes, layouts, memory and order of calls; the values that collectives deliver are
    meaningless.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"fake_world: rank must lie in 0..{size - 1}, found {rank}.")
    if dist.is_initialized():
        raise LifecycleError(
            "fake_world: needs a process without a default process group, found one; "
            "call torch.distributed.destroy_process_group() first."
        )
    # Importing this module is what registers the `fake` backend (torch 2.11 to 2.13).
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield Rank(rank, size, torch.device(device))
    finally:
        dist.destroy_process_group()
