"""Several NCCL ranks share one GPU."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fullshard import MixedPrecisionPolicy, fully_shard
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


@on_ranks(2, backend="nccl")
def test_gradients_that_travel_in_bf16_are_added_up_in_float32(rank: Rank) -> None:
    # Added up in bf16, 256 and 1 are 256.
    rows = torch.tensor([256.0, 1.0 + 2**-12])[rank.rank].expand(64, 8).to(rank.device)
    model = nn.Linear(8, 64, bias=False, device=rank.device)
    fully_shard(model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(wire_dtype=torch.bfloat16))
    for _ in range(3):
        model.zero_grad()
        model(rows).mean(0).sum().backward()  # each gradient is a row
        assert model.weight.grad.to_local().eq(257 / 2).all()
    policies = [
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, wire_dtype=wire)
        for wire in (None, torch.bfloat16)
    ]

    def shard_with(policy: MixedPrecisionPolicy) -> Callable[[nn.Module], None]:
        def shard(model: nn.Module) -> None:
            fully_shard(model[0], mesh=rank.mesh(), mp_policy=policy)
            fully_shard(model, mesh=rank.mesh(), mp_policy=policy)

        return shard

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5)).to(rank.device)

    without, narrow = map(shard_with, policies)
    assert_same_training(build, narrow, Training(small_batch), oracle=without, rtol=0.0, atol=0.0)
