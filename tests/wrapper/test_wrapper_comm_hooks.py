"""Users' functions that reduce gradients in place of the engine."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks

from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import OURS, TORCH, WIDTH, Block, Package, make_batch


def whole() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))


def model(package: Package, strategy: str, **options: Any) -> Any:
    cpu = torch.device("cpu")
    return package(
        whole(), sharding_strategy=strategy, auto_wrap_policy={Block}, device_id=cpu, **options
    )


def trained(rank: Rank, wrapped: Any) -> tuple[list[float], list[Tensor]]:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank.rank)
        optimizer.zero_grad()
        loss = wrapped(make_batch(generator)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with type(wrapped).summon_full_params(wrapped, writeback=False):
        return losses, [param.detach().clone() for param in wrapped.parameters()]


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_torchs_default_hooks_give_the_mean(rank: Rank, use_orig_params: bool) -> None:
    for strategy, hook in (
        ("FULL_SHARD", default_hooks.reduce_scatter_hook),
        ("SHARD_GRAD_OP", default_hooks.reduce_scatter_hook),
        ("NO_SHARD", default_hooks.allreduce_hook),
    ):
        options = {"use_orig_params": use_orig_params}
        without = trained(rank, model(OURS, strategy, **options))
        results = []
        for package in (OURS, TORCH):
            wrapped = model(package, strategy, **options)
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
        without = trained(rank, model(OURS, strategy))
        for package in (OURS, TORCH):
            wrapped = model(package, strategy)
            state = {"calls": 0}
            wrapped.register_comm_hook(state, compress)
            losses, params = trained(rank, wrapped)
            assert state["calls"] == 3 * 3
            assert losses == pytest.approx(without[0], rel=1e-2)
            for param, expected in zip(params, without[1], strict=True):
                torch.testing.assert_close(param, expected, rtol=1e-2, atol=1e-2)


@on_ranks(2)
def test_what_a_hook_does_not_reduce_stays_as_it_was_on_each_rank(rank: Rank) -> None:
    wrapped = model(OURS, "NO_SHARD")
    wrapped.register_comm_hook(None, lambda state, grad: None)
    x = torch.full((1, WIDTH), float(rank.rank + 1))
    wrapped(x).sum().backward()
    unwrapped = whole()
    unwrapped(x).sum().backward()
    own = torch.cat([p.grad.flatten() for p in unwrapped[2].parameters()])
    torch.testing.assert_close(
        wrapped._flat_param.grad[: own.numel()].sort().values, own.sort().values
    )


@on_ranks(2)
def test_a_hook_that_cannot_be_registered_says_why(rank: Rank) -> None:
    wrapped = model(OURS, "FULL_SHARD")
    with pytest.raises(ValueError, match="must be callable"):
        wrapped.register_comm_hook(None, "reduce")
    wrapped.check_is_root()
    with pytest.raises(AssertionError, match="on a root instance"):
        wrapped[0].register_comm_hook(None, compress)
    wrapped.register_comm_hook(None, compress)
    with pytest.raises(AssertionError, match="already registered"):
        wrapped.register_comm_hook(None, compress)
    mesh = rank.mesh((2, 1), ("replicate", "shard"))
    hybrid = model(OURS, "HYBRID_SHARD", device_mesh=mesh)
    with pytest.raises(AssertionError, match="hybrid strategies"):
        hybrid.register_comm_hook(None, compress)
