"""CPU offload where the device that computes is the CPU itself: nothing moves, nothing fails."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from fullshard import CPUOffloadPolicy, OffloadPolicy, fully_shard
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from fullshard.unit.store import DeviceStore, HostStore
from tests.engine.test_large_gradients import Ordered
from tests.support.wrapped import layers, make_batch

CPU = torch.device("cpu")


@on_ranks(2)
def test_offloaded_units_that_ask_for_pinned_memory_train_as_unsharded(rank: Rank) -> None:
    def shard(model: nn.Module) -> None:
        for part in (model[0], model[2], model):
            offload = CPUOffloadPolicy(pin_memory=True)
            fully_shard(part, mesh=rank.mesh(), offload_policy=offload)

    trained = assert_same_training(layers, shard, Training(make_batch))
    model = trained.sharded
    model(torch.ones(4, 6)).sum().backward()
    for name, param in model.named_parameters():
        assert param.to_local().device == param.grad.to_local().device == CPU, name
        assert not param.to_local().is_pinned(), name
    for states in trained.optimizer.state.values():
        assert states["momentum_buffer"].device == CPU


@on_ranks(2)
def test_units_with_and_without_offload_train_side_by_side(rank: Rank) -> None:
    def shard(model: nn.Module) -> None:
        fully_shard(model[0], mesh=rank.mesh(), offload_policy=CPUOffloadPolicy())
        fully_shard(model[2], mesh=rank.mesh(), offload_policy=OffloadPolicy())
        fully_shard(model, mesh=rank.mesh())

    trained = assert_same_training(layers, shard, Training(make_batch))
    stores = [type(hooks_of(part).units[0].store) for part in trained.sharded[0:3:2]]
    assert stores == [HostStore, DeviceStore]


@on_ranks(2)
def test_parameters_are_offloaded_by_name_and_others_stay(rank: Rank) -> None:
    offloaded = {"0.weight": CPUOffloadPolicy(), "4.bias": CPUOffloadPolicy(pin_memory=False)}

    def shard(model: nn.Module) -> None:
        fully_shard(model, mesh=rank.mesh(), offload_policy=offloaded)

    # Apart from the host, whose memory is `cpu` without a number.
    with patch("fullshard.runtime.build.device_for", lambda _: Ordered(torch.device("cpu", 0))):
        trained = assert_same_training(layers, shard, Training(make_batch))
    kinds = {
        param.name: type(unit.store)
        for unit in hooks_of(trained.sharded).units
        for param in unit.params
    }
    assert [name for name, kind in kinds.items() if kind is HostStore] == list(offloaded)
    assert len(kinds) == len(list(layers().parameters()))
    with pytest.raises(ValueError, match=r"offload_policy: \['5\.bias'\] are not"):
        fully_shard(layers(), mesh=rank.mesh(), offload_policy={"5.bias": OffloadPolicy()})
