"""Several NCCL ranks share one GPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fullshard.testing import Rank, RanksFailed, Training, assert_same_training, on_ranks, pool


@on_ranks(1, 2, backend="nccl")
def test_nccl_ranks_reach_each_other_on_one_gpu(rank: Rank) -> None:
    total = torch.tensor(float(rank.rank), device=rank.device)
    dist.all_reduce(total)
    assert total.item() == sum(range(rank.size))
    assert rank.mesh().device_type == "cuda"


def fail(rank: Rank) -> None:
    raise ValueError("planted")


def test_nccl_ranks_start_afresh_after_a_failure():
    with pytest.raises(RanksFailed, match="planted"):
        pool(2, "nccl").run(fail)
    test_nccl_ranks_reach_each_other_on_one_gpu(on_num_ranks=2)


def small_batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 8, generator=generator)


@on_ranks(2, backend="nccl")
def test_torchs_fully_shard_trains_like_the_unsharded_model_over_nccl(rank: Rank) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5)).to(rank.device)

    def shard(model: nn.Module) -> None:
        torch_fully_shard(model, mesh=rank.mesh())

    assert_same_training(build, shard, Training(small_batch))
