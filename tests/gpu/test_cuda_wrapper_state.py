"""State dicts and summoned parameters of wrapped models on CUDA: devices, offload, both ways."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from fullshard import (
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictType,
)
from fullshard.testing import Rank, on_ranks

WIDTH = 33


def built(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))


def wrapped(rank: Rank, seed: int = 0, **options: Any) -> Any:
    model = built(seed).to(rank.device)
    model[0] = FullyShardedDataParallel(model[0], **options)
    return FullyShardedDataParallel(model, **options)


def forms(rank: Rank) -> list[dict[str, Any]]:
    return [
        {"use_orig_params": use_orig_params, **more}
        for use_orig_params in (False, True)
        for more in (
            {},
            {"device_mesh": rank.mesh()},
            {"cpu_offload": CPUOffload(offload_params=True)},
        )
    ]


def state_of(model: Any, config: StateDictConfig) -> dict[str, Any]:
    kinds = {
        FullStateDictConfig: StateDictType.FULL_STATE_DICT,
        ShardedStateDictConfig: StateDictType.SHARDED_STATE_DICT,
        LocalStateDictConfig: StateDictType.LOCAL_STATE_DICT,
    }
    with FullyShardedDataParallel.state_dict_type(model, kinds[type(config)], config):
        return dict(model.state_dict())


def assert_holds(model: Any, seed: int) -> None:
    expected = built(seed).state_dict()
    found = state_of(model, FullStateDictConfig(offload_to_cpu=True))
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def double_on_the_host(model: Any) -> None:
    summons = FullyShardedDataParallel.summon_full_params(model, offload_to_cpu=True)
    with summons, torch.no_grad():
        for param in model.parameters():
            assert param.device.type == "cpu"
            param.mul_(2)


def device_types(state: dict[str, Any]) -> set[str]:
    found = set()
    for value in state.values():
        if isinstance(value, ShardedTensor):
            found.update(shard.tensor.device.type for shard in value.local_shards())
        else:
            found.add(
                value.to_local().device.type if isinstance(value, DTensor) else value.device.type
            )
    return found


@on_ranks(2, backend="nccl")
def test_every_kind_is_saved_where_it_was_asked_for_and_loads_again(rank: Rank) -> None:
    for options in forms(rank):
        model = wrapped(rank, 1, **options)
        configs = [FullStateDictConfig, ShardedStateDictConfig]
        if "device_mesh" not in options:
            configs.append(LocalStateDictConfig)
        for kind in configs:
            for to_cpu in (False, True):
                state = state_of(model, kind(offload_to_cpu=to_cpu))
                is_local_offloaded = kind is LocalStateDictConfig and "cpu_offload" in options
                if to_cpu:
                    assert device_types(state) == {"cpu"}
                elif not is_local_offloaded:
                    assert device_types(state) == {"cuda"}
                other = wrapped(rank, 0, **options)
                other.load_state_dict(state)
                assert_holds(other, 1)
                other(torch.ones(4, WIDTH, device=rank.device)).sum().backward()


@on_ranks(2, backend="nccl")
def test_a_state_dict_on_the_host_loads_into_every_form(rank: Rank) -> None:
    for options in forms(rank):
        model = wrapped(rank, 0, **options)
        model.load_state_dict(built(1).state_dict())
        assert_holds(model, 1)


@on_ranks(2, backend="nccl")
def test_summoned_parameters_are_on_the_device_or_on_the_host(rank: Rank) -> None:
    for options in forms(rank):
        model = wrapped(rank, 0, **options)
        with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            for name, param in model.named_parameters():
                assert param.device == rank.device, name
                param.copy_(built(1).get_parameter(name))
        with FullyShardedDataParallel.summon_full_params(
            model, rank0_only=True, writeback=False, offload_to_cpu=True
        ):
            if rank.rank == 0:
                for name, param in model.named_parameters():
                    assert torch.equal(param, built(1).get_parameter(name)), name
        with pytest.warns(UserWarning, match="rank0_only"):
            double_on_the_host(model)
        assert torch.equal(
            state_of(model, FullStateDictConfig(offload_to_cpu=True))["2.weight"],
            2 * built(1).state_dict()["2.weight"],
        )
        model(torch.ones(4, WIDTH, device=rank.device)).sum().backward()
        if options["use_orig_params"] and "cpu_offload" not in options:
            with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                assert all(
                    p.grad is not None and p.grad.shape == p.shape for p in model.parameters()
                )
