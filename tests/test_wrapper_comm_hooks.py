"""Users' functions that reduce gradients in the place of ours."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import wrap as torch_wrap

import fullshard
from fullshard import wrap as own_wrap
from fullshard.testing import Rank, on_ranks

WIDTH = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def model(package: Any, wrap: Any, strategy: str, **options: Any) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy", FutureWarning)
        return package.FullyShardedDataParallel(
            nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3)),
            sharding_strategy=package.ShardingStrategy[strategy],
            auto_wrap_policy=wrap.ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            **options,
        )


def trained(rank: Rank, wrapped: Any) -> tuple[list[float], list[Tensor]]:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank.rank)
        optimizer.zero_grad()
        loss = wrapped(torch.randn(4, WIDTH, generator=generator)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with type(wrapped).summon_full_params(wrapped, writeback=False):
        return losses, [param.detach().clone() for param in wrapped.parameters()]


DOORS = ((fullshard, own_wrap), (torch_fsdp, torch_wrap))


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_torchs_default_hooks_give_the_mean(rank: Rank, use_orig_params: bool) -> None:
    for strategy, hook in (
        ("FULL_SHARD", default_hooks.reduce_scatter_hook),
        ("SHARD_GRAD_OP", default_hooks.reduce_scatter_hook),
        ("NO_SHARD", default_hooks.allreduce_hook),
    ):
        options = {"use_orig_params": use_orig_params}
        without = trained(rank, model(*DOORS[0], strategy, **options))
        results = []
        for door in DOORS:
            wrapped = model(*door, strategy, **options)
            wrapped.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), hook)
            results.append(trained(rank, wrapped))
        for losses, params in results:
            assert losses == pytest.approx(without[0])
            for param, expected in zip(params, without[1], strict=True):
                torch.testing.assert_close(param, expected)


def compress(state: Any, grad: Tensor, output: Tensor | None = None) -> None:
    """As torch's compressing hooks: other memory, in another dtype, under the same tensors."""
    state["calls"] += 1
    grad.data = grad.data.to(torch.float16) / dist.get_world_size()
    if output is None:
        dist.all_reduce(grad)
        grad.data = grad.data.float()
        return
    output.data = output.data.to(torch.float16)
    dist.reduce_scatter_single(output, grad)
    output.data = output.data.float()


@on_ranks(2)
def test_a_hook_may_give_its_tensors_other_memory(rank: Rank) -> None:
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        without = trained(rank, model(*DOORS[0], strategy))
        for door in DOORS:
            wrapped = model(*door, strategy)
            state = {"calls": 0}
            wrapped.register_comm_hook(state, compress)
            losses, params = trained(rank, wrapped)
            assert state["calls"] == 3 * 3
            assert losses == pytest.approx(without[0], rel=1e-2)
            for param, expected in zip(params, without[1], strict=True):
                torch.testing.assert_close(param, expected, rtol=1e-2, atol=1e-2)


@on_ranks(2)
def test_what_a_hook_does_not_reduce_stays_as_it_was_on_each_rank(rank: Rank) -> None:
    wrapped = model(*DOORS[0], "NO_SHARD")
    wrapped.register_comm_hook(None, lambda state, grad: None)
    x = torch.full((1, WIDTH), float(rank.rank + 1))
    wrapped(x).sum().backward()
    torch.manual_seed(0)
    whole = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))
    whole(x).sum().backward()
    own = torch.cat([p.grad.flatten() for p in whole[2].parameters()])
    torch.testing.assert_close(
        wrapped._flat_param.grad[: own.numel()].sort().values, own.sort().values
    )


@on_ranks(2)
def test_a_hook_that_cannot_be_registered_says_why(rank: Rank) -> None:
    wrapped = model(*DOORS[0], "FULL_SHARD")
    with pytest.raises(ValueError, match="a function is expected"):
        wrapped.register_comm_hook(None, "reduce")
    wrapped.check_is_root()
    with pytest.raises(AssertionError, match="on the root"):
        wrapped[0].register_comm_hook(None, compress)
    wrapped.register_comm_hook(None, compress)
    with pytest.raises(AssertionError, match="one hook"):
        wrapped.register_comm_hook(None, compress)
    mesh = rank.mesh((2, 1), ("replicate", "shard"))
    hybrid = model(*DOORS[0], "HYBRID_SHARD", device_mesh=mesh)
    with pytest.raises(AssertionError, match="one process group"):
        hybrid.register_comm_hook(None, compress)
