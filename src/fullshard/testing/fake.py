"""One process plays one rank of a world of any size."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fullshard.testing.played import playing
from fullshard.testing.rank import Rank


@contextmanager
def fake_world(size: int, rank: int = 0, device: torch.device | str = "cpu") -> Iterator[Rank]:
    """Play `rank` of `size` ranks: collectives return at once and move nothing between ranks.

    For shapes, layouts, memory and order of calls; the values that collectives deliver are
    meaningless.
    """
    # Importing this module is what registers the `fake` backend (torch 2.11 to 2.13).
    from torch.testing._internal.distributed.fake_pg import FakeStore

    place = Rank(rank, size, torch.device(device))
    with playing("fake_world", "fake", FakeStore(), place) as played:
        yield played
