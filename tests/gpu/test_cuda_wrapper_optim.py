"""Optimizer state dicts of wrapped models on CUDA: devices, offload, memory, both ways."""

import gc
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from fullshard import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    StateDictType,
)
from fullshard.testing import Rank, on_ranks

WIDTH = 33


def wrapped(rank: Rank, width: int = WIDTH, num_blocks: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    blocks = [nn.Linear(width, width) for _ in range(num_blocks)]
    model = nn.Sequential(*(FullyShardedDataParallel(b.to(rank.device), **options) for b in blocks))
    return FullyShardedDataParallel(model, **options)


def trained(rank: Rank, **options: Any) -> tuple[Any, Any]:
    model = wrapped(rank, **options)
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    generator = torch.Generator().manual_seed(rank.rank)
    for _ in range(2):
        batch = torch.randn(4, WIDTH, generator=generator).to(rank.device)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def set_form(model: Any, config: Any) -> None:
    is_full = isinstance(config, FullOptimStateDictConfig)
    kind = StateDictType.FULL_STATE_DICT if is_full else StateDictType.SHARDED_STATE_DICT
    FullyShardedDataParallel.set_state_dict_type(model, kind, None, config)


def saved(model: Any, optimizer: Any, config: Any) -> dict[str, Any]:
    set_form(model, config)
    return FullyShardedDataParallel.optim_state_dict(model, optimizer)


def assert_holds(model: Any, optimizer: Any, expected: dict[str, Any]) -> None:
    found = saved(model, optimizer, FullOptimStateDictConfig())["state"]
    assert sorted(found) == sorted(expected)
    for name, state in expected.items():
        assert sorted(found[name]) == sorted(state)
        for key, value in state.items():
            torch.testing.assert_close(found[name][key], value, rtol=0, atol=0)


@on_ranks(2, backend="nccl")
def test_every_form_is_saved_where_it_was_asked_for_and_loads_into_every_wrapping(
    rank: Rank,
) -> None:
    wrappings: list[dict[str, Any]] = [
        {"use_orig_params": use_orig_params, **more}
        for use_orig_params in (False, True)
        for more in (
            {},
            {"device_mesh": rank.mesh()},
            {"cpu_offload": CPUOffload(offload_params=True)},
        )
    ]
    for number, options in enumerate(wrappings):
        source, source_optim = trained(rank, **wrappings[number - 1])
        expected = saved(source, source_optim, FullOptimStateDictConfig())["state"]
        for to_cpu in (True, False):
            for config in (
                FullOptimStateDictConfig(offload_to_cpu=to_cpu),
                FullOptimStateDictConfig(offload_to_cpu=to_cpu, rank0_only=True),
                ShardedOptimStateDictConfig(offload_to_cpu=to_cpu),
            ):
                state = saved(source, source_optim, config)
                is_full = isinstance(config, FullOptimStateDictConfig)
                if is_full and state:
                    moment = state["state"]["0.weight"]["exp_avg"]
                    assert moment.device.type == ("cpu" if to_cpu else "cuda")
                target = wrapped(rank, **options)
                target_optim = AdamW(target.parameters(), fused=True)
                set_form(target, config)
                FullyShardedDataParallel.optim_state_dict_to_load(
                    target, target_optim, state, load_directly=True
                )
                assert_holds(target, target_optim, expected)


@on_ranks(2, backend="nccl")
def test_one_state_of_one_unit_is_on_the_device_at_a_time(rank: Rank) -> None:
    width = 1024
    for use_orig_params in (False, True):
        model = wrapped(rank, width, num_blocks=6, use_orig_params=use_orig_params)
        optimizer = AdamW(model.parameters(), lr=0.01)
        model(torch.randn(2, width, device=rank.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        unit_bytes = 4 * (width * width + width)
        for config in (FullOptimStateDictConfig(rank0_only=True), ShardedOptimStateDictConfig()):
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            state = saved(model, optimizer, config)
            # What a rank sends and what all ranks sent.
            assert torch.cuda.max_memory_allocated() - before < 1.75 * unit_bytes
            assert torch.cuda.memory_allocated() == before
            set_form(model, config)
            torch.cuda.reset_peak_memory_stats()
            result = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
            own_bytes = sum(
                value.untyped_storage().nbytes()
                for each in result["state"].values()
                for value in each.values()
                if value.is_cuda
            )
            peak = torch.cuda.max_memory_allocated() - before - own_bytes
            assert peak < 2.75 * unit_bytes
            del state, result
