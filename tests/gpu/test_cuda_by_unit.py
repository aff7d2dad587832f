"""Steps by unit apply automatically on CUDA, and change no bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from fullshard import by_unit, fully_shard
from fullshard.testing import Rank, on_ranks
from tests.gpu.transformer import Transformer, shard_blocks

STEPS = "_fullshard_by_unit"  # the attribute of an optimizer that is stepped by unit


def sharded(rank: Rank) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(num_blocks=2).to(rank.device)
    shard_blocks(model, fully_shard, mesh=rank.mesh())
    return model


def step(rank: Rank, model: Transformer, optimizer: Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + rank.rank)
    optimizer.zero_grad()
    model(torch.randint(0, 512, (2, 32), generator=generator).to(rank.device)).backward()
    optimizer.step()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
@on_ranks(2, backend="nccl")
def test_steps_are_by_unit_by_themselves_to_the_last_bit(
    rank: Rank, options: dict[str, Any]
) -> None:
    models = [sharded(rank) for _ in range(2)]
    optimizers = [AdamW(model.parameters(), lr=0.01, **options) for model in models]
    by_unit(optimizers[1], enabled=False)
    schedulers = [StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    for number in range(5):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            step(rank, model, optimizer, number)
            scheduler.step()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(local(one), local(other))
            states = [optimizers[0].state[one], optimizers[1].state[other]]
            assert list(states[0]) == list(states[1]) == ["step", "exp_avg", "exp_avg_sq"]
            for name, value in states[1].items():
                assert type(states[0][name]) is type(value)
                assert torch.equal(local(states[0][name]), local(value)), name
        if number == 2:  # each loads what the other has saved
            saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            for optimizer, state in zip(optimizers, reversed(saved), strict=True):
                optimizer.load_state_dict(state)
    assert vars(optimizers[0])[STEPS] is not None
    assert vars(optimizers[1])[STEPS] is None


@on_ranks(1, backend="nccl")
def test_steps_are_by_unit_as_long_as_options_name_a_kernel(rank: Rank) -> None:
    model = sharded(rank)
    plain, optimizer = AdamW(model.parameters()), AdamW(model.parameters(), fused=True)
    step(rank, model, plain, 0)
    step(rank, model, optimizer, 1)
    assert [STEPS in vars(each) for each in (plain, optimizer)] == [False, True]
    optimizer.load_state_dict(plain.state_dict())  # with its options
    step(rank, model, optimizer, 2)
    assert STEPS not in vars(optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
