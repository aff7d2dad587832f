"""A rank that runs out of GPU memory: two NCCL ranks on one GPU, one of them with a small share."""

import pytest
import torch
from torch import nn

from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard, oom_guard
from fullshard.testing import Rank, RankPool
from fullshard.wrap import ModuleWrapPolicy

WIDTH = 256
ROWS = 1 << 16  # a step needs several times 64 MiB for each layer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin()


def sharded(rank: Rank, api: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(4)]).to(rank.device)
    if api == "wrapper":
        policy = ModuleWrapPolicy({Layer})
        return FullyShardedDataParallel(model, device_mesh=rank.mesh(), auto_wrap_policy=policy)
    # Sums what was exchanged, so the engine allocates between collectives.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, wire_dtype=torch.bfloat16)
    for module in (*model, model):
        fully_shard(module, mesh=rank.mesh(), mp_policy=policy)
    return model


def trained(rank: Rank, api: str, share_bytes: int | None) -> tuple[list[float], list[int], str]:
    """The losses, the number of parts in which each step fit, and the last error."""
    model = sharded(rank, api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, fitting, error = [], [], ""
    is_short = share_bytes is not None and rank.rank == 1
    try:
        for step in range(4):
            if is_short and step == 2:
                torch.cuda.empty_cache()
                used_bytes = torch.cuda.memory_reserved()
                total_bytes = torch.cuda.mem_get_info()[1]
                torch.cuda.set_per_process_memory_fraction((used_bytes + share_bytes) / total_bytes)
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(ROWS if step >= 2 else 512, WIDTH, generator=generator)
            parts = 1
            while True:
                total = 0.0
                with oom_guard(model, optimizer=optimizer, micro_batches=parts) as guard:
                    for part in batch.to(rank.device).chunk(parts):
                        loss = model(part).square().sum() / len(batch)
                        loss.backward()
                        total += loss.item()
                if not guard.ran_out:
                    break
                assert guard.ranks == (1,)
                error = str(guard.error)
                parts *= 2
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
            fitting.append(parts)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return losses, fitting, error


@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
def test_a_batch_for_which_one_rank_has_no_memory_is_done_in_parts(api: str) -> None:
    # Uses its own processes: others may have memory left that a large batch fits into.
    with RankPool(2, "nccl", timeout_s=120) as ranks:
        ranks.run(run_out, api)


def run_out(rank: Rank, api: str) -> None:
    expected, parts, _ = trained(rank, api, None)
    assert parts == [1, 1, 1, 1]
    found, parts, error = trained(rank, api, 500 << 20)
    assert parts[:2] == [1, 1]
    assert parts[2] > 1
    assert parts[3] > 1
    assert found == pytest.approx(expected, rel=1e-2)
    assert error.startswith("rank 1: a step ran out of memory")
    assert "activations " in error
