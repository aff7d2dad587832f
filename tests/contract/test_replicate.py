"""torch's `replicate` around modules that are sharded."""

import torch
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.optim import SGD

from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import OURS, TORCH, Package, each_backward


def losses(package: Package, rank: Rank) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 2))
    package.package.fully_shard(model[1], mesh=rank.mesh())
    replicate(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    generator, found = torch.Generator().manual_seed(rank.rank), []
    for _ in range(3):
        found.append(each_backward(model, [torch.randn(2, 6, generator=generator)], 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return found


@on_ranks(2)
def test_replicate_leaves_the_parameters_of_fully_shard_alone(rank: Rank) -> None:
    torch.testing.assert_close(losses(OURS, rank), losses(TORCH, rank))
