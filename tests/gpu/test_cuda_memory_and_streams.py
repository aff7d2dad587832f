"""The cost of the engine on CUDA: memory beside torch's API, streams, overlap."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile

from fullshard import FSDPModule, MixedPrecisionPolicy, fully_shard
from fullshard.testing import Rank, fake_world, on_ranks
from tests.gpu.overlap import busy_intervals, overlap_us, total_us
from tests.gpu.transformer import Transformer, shard_blocks

PRECISION = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def peak_bytes(shard: Callable[[Transformer], None], world: int) -> int:
    """The most memory that three steps of a 16-block transformer hold at once."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with fake_world(world, device="cuda"):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = Transformer(num_blocks=16, width=1024, vocabulary=8192)
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batch = torch.randint(0, 8192, (1, 512), device="cuda")
        for step in range(4):
            if step == 1:
                torch.cuda.reset_peak_memory_stats()
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    return peak - before


@pytest.mark.parametrize("precision", [True, False], ids=["bf16", "float32"])
def test_peak_memory_is_not_above_that_of_torchs_door(precision: bool) -> None:
    ours = MixedPrecisionPolicy(**PRECISION) if precision else MixedPrecisionPolicy()
    theirs = TorchPrecision(**PRECISION) if precision else TorchPrecision()
    # Warm up: the first model also pays for the libraries' own memory.
    peaks = [
        peak_bytes(partial(shard_blocks, fully_shard=api, mp_policy=policy), world=8)
        for api, policy in ((fully_shard, ours), (torch_fully_shard, theirs), (fully_shard, ours))
    ]
    _, torch_peak, own_peak = peaks
    print(f"{own_peak / 2**20:.0f} MiB, torch {torch_peak / 2**20:.0f} MiB")
    assert own_peak <= torch_peak


class Overlap:
    """How much of the gathers and reduces that could overlap with compute does so in a step."""

    def __init__(self, rank: Rank, model: Transformer) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.batch = torch.randint(0, 1024, (32, 1024), device=rank.device)
        for _ in range(3):
            self.step()

    def step(self) -> None:
        self.model(self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def of_a_step(self) -> list[float]:
        torch.cuda.synchronize()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, acc_events=True) as profiled:
            self.step()
            torch.cuda.synchronize()
        if isinstance(self.model, FSDPModule):
            names = {event.key for event in profiled.key_averages()}
            assert "aten::record_stream" not in names
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiled.export_chrome_trace(str(path))
            compute, gathers, reduces = busy_intervals(path)
        # At most the shorter of the two can overlap: over sockets, that is compute.
        return [
            overlap_us(kernels, compute) / min(total_us(kernels), total_us(compute))
            for kernels in (gathers, reduces)
        ]


@on_ranks(2, backend="nccl")
def test_gathers_and_reduces_overlap_with_compute_and_record_no_stream(rank: Rank) -> None:
    apis = {
        torch_fully_shard: TorchPrecision(**PRECISION),
        fully_shard: MixedPrecisionPolicy(**PRECISION),
    }
    overlaps = []
    for api, policy in apis.items():
        torch.manual_seed(0)
        model = Transformer(num_blocks=8, width=1024, vocabulary=1024).to(rank.device)
        shard_blocks(model, api, mesh=rank.mesh(), mp_policy=policy)
        overlaps.append(Overlap(rank, model))
    shares = torch.tensor(
        [[overlap.of_a_step() for overlap in overlaps] for _ in range(5)], device=rank.device
    )
    # The ranks share the device with each other and with others, not always equally: take the mean
    # over ranks, then the median step. Where streams wait for each other, nothing overlaps.
    dist.all_reduce(shares, dist.ReduceOp.AVG)
    torchs, ours = shares.median(0).values
    assert (ours > 0.15).all(), shares
    assert (ours > 0.6 * torchs).all(), shares


def test_a_long_run_on_a_busy_gpu_reads_no_memory_that_was_given_away() -> None:
    """Gathers reuse memory that compute has just released; a missing wait would show here."""

    def losses(shard: bool) -> list[float]:
        with fake_world(1, device="cuda"):
            torch.manual_seed(0)
            model = Transformer(num_blocks=12, width=512, vocabulary=1024).cuda()
            if shard:
                shard_blocks(model, fully_shard)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            batch = torch.randint(0, 1024, (8, 256), device="cuda")
            found = []
            for _ in range(20):
                loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
            return torch.stack(found).tolist()

    torch.testing.assert_close(losses(True), losses(False), rtol=1e-4, atol=1e-5)
