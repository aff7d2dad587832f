"""torch's pipeline schedules run stages of ours: 2 stages by 2 data-parallel ranks.

The schedules look for torch's own class in their modules: the names are redirected as a drop-in
replacement would. Everything is compared with torch's `fully_shard` under the same schedule.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    schedules,
    stage,
)

from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import OURS, TORCH, WIDTH, Block, Package

NUM_MICRO_BATCHES = 4
INTERLEAVED = (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)
NUM_STEPS = 2


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def sharded_stage(package: Package, index: int, reshard_after_forward: bool) -> nn.Sequential:
    torch.manual_seed(index)
    module = nn.Sequential(Block(), nn.Tanh(), Block())
    options: Any = {"mesh": mesh()["dp"], "reshard_after_forward": reshard_after_forward}
    for block in (module[0], module[2]):
        package.package.fully_shard(block, **options)
    package.package.fully_shard(module, **options)
    return module


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(package: Package, kind: Any, reshard_after_forward: bool) -> tuple[list[Any], list[Any]]:
    """The losses, and the gradients and parameters of every step."""
    group, (pp_rank, dp_rank) = mesh().get_group("pp"), mesh().get_coordinate()
    is_interleaved = kind in INTERLEAVED
    indices = [pp_rank, pp_rank + 2] if is_interleaved else [pp_rank]
    if kind is ScheduleZBVZeroBubble:  # down and up again, as a V
        indices = [pp_rank, 3 - pp_rank]
    modules = [sharded_stage(package, index, reshard_after_forward) for index in indices]
    num_stages, device = 2 * len(indices), torch.device("cpu")
    stages = [
        PipelineStage(module, index, num_stages, device, group=group)
        for index, module in zip(indices, modules, strict=True)
    ]
    schedule = kind(stages if is_interleaved else stages[0], NUM_MICRO_BATCHES, loss_fn=loss_of)
    params = [param for module in modules for param in module.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    all_losses: list[Any] = []
    values: list[Any] = []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(10 * step + dp_rank)
        inputs, target = torch.randn(2, 2 * NUM_MICRO_BATCHES, WIDTH, generator=generator)
        losses: list[Tensor] = []
        has_last = 2 * len(indices) - 1 in indices
        given = (inputs,) if 0 in indices else ()
        schedule.step(*given, **({"target": target, "losses": losses} if has_last else {}))
        all_losses += [float(each.detach()) for each in losses]
        values += [param.grad.full_tensor().clone() for param in params]
        optimizer.step()
        values += [param.detach().full_tensor().clone() for param in params]
        optimizer.zero_grad()
    return all_losses, values


# Schedules that split backward look for the gradients of the parameters registered at that time:
# with either library, units have to stay unsharded.
SPLITTING = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind, reshard_after_forward",
    [
        (kind, kind not in (Schedule1F1B, *SPLITTING))
        for kind in (ScheduleGPipe, Schedule1F1B, *INTERLEAVED)
    ],
)
@on_ranks(4)
def test_a_schedule_trains_our_stages_as_torchs(
    rank: Rank, kind: Any, reshard_after_forward: bool
) -> None:
    torchs_losses, torchs = train(TORCH, kind, reshard_after_forward)
    with pytest.MonkeyPatch.context() as redirected:
        for module in (stage, schedules):
            for name in ("FSDPModule", "fully_shard"):
                if hasattr(module, name):
                    redirected.setattr(module, name, getattr(OURS.package, name))
        losses, ours = train(OURS, kind, reshard_after_forward)
    assert losses == pytest.approx(torchs_losses)
    has_last = rank.rank >= 2 if kind is not ScheduleZBVZeroBubble else rank.rank < 2
    assert len(losses) == (NUM_STEPS * NUM_MICRO_BATCHES if has_last else 0)
    assert len(ours) == len(torchs) > 0
    for own, expected in zip(ours, torchs, strict=True):
        torch.testing.assert_close(own, expected)
