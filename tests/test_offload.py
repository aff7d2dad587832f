"""CPU offload where the device that computes is the CPU itself: nothing moves, nothing fails."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, Training, assert_same_training, on_ranks

CPU = torch.device("cpu")


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 2))


def make_batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 6, generator=generator)


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_offloaded_units_train_as_in_torch(
    rank: Rank, pin_memory: bool, param_dtype: torch.dtype | None
) -> None:
    mesh = rank.mesh()

    def ours(model: nn.Module) -> None:
        policy = MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32)
        for part in (model[0], model[2], model):
            fully_shard(
                part, mesh=mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory)
            )

    def torchs(model: nn.Module) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

        policy = TorchPolicy(param_dtype, reduce_dtype=torch.float32)
        # torch cannot pin without an accelerator, whatever it is asked for.
        offload = TorchCPUOffloadPolicy(pin_memory=False)
        for part in (model[0], model[2], model):
            torch_fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload)

    assert_same_training(build, ours, Training(make_batch), oracle=torchs)


@pytest.mark.parametrize("pin_memory", [False, True])
@on_ranks(2)
def test_offloaded_units_train_as_unsharded(rank: Rank, pin_memory: bool) -> None:
    def shard(model: nn.Module) -> None:
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=rank.mesh(), offload_policy=CPUOffloadPolicy(pin_memory))

    trained = assert_same_training(build, shard, Training(make_batch))
    model = trained.sharded
    model(torch.ones(4, 6)).sum().backward()
    for name, param in model.named_parameters():
        assert param.to_local().device == param.grad.to_local().device == CPU, name
        assert not param.to_local().is_pinned(), name
    for states in trained.optimizer.state.values():
        assert states["momentum_buffer"].device == CPU


@on_ranks(4)
def test_offloaded_units_accumulate_over_shards_and_replicas(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))

    def shard(model: nn.Module) -> None:
        for part in (model[0], model):
            fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy())

    def sync_last(model: nn.Module, micro_batch: int) -> None:
        model.set_requires_gradient_sync(micro_batch == 1)

    training = Training(make_batch, micro_batches=2, before_forward=sync_last)
    assert_same_training(build, shard, training)


@on_ranks(2)
def test_units_with_and_without_offload_train_side_by_side(rank: Rank) -> None:
    def shard(model: nn.Module) -> None:
        fully_shard(model[0], mesh=rank.mesh(), offload_policy=CPUOffloadPolicy())
        fully_shard(model[2], mesh=rank.mesh(), offload_policy=OffloadPolicy())
        fully_shard(model, mesh=rank.mesh())

    trained = assert_same_training(build, shard, Training(make_batch))
    offloads = [type(hooks_of(part).units[0].offload) for part in trained.sharded[0:3:2]]
    assert offloads == [CPUOffloadPolicy, OffloadPolicy]


@on_ranks(2)
def test_gradients_of_offloaded_units_add_up_where_they_are_not_cleared(rank: Rank) -> None:
    torch.manual_seed(0)
    model = build()
    for part in (model[0], model):
        fully_shard(part, mesh=rank.mesh(), offload_policy=CPUOffloadPolicy())
    model(torch.ones(4, 6)).sum().backward()
    once = [param.grad.to_local().clone() for param in model.parameters()]
    model(torch.ones(4, 6)).sum().backward()
    for param, grad in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(param.grad.to_local(), 2 * grad)
