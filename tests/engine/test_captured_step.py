"""`capture` where there is nothing to capture with; tests/gpu has what it does on a GPU."""

import pytest
import torch
from torch import nn

from fullshard import capture, fully_shard
from fullshard.device import with_own_storage
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.runtime.hooks import require_hooks
from fullshard.testing import Rank, on_ranks


def counted(calls: list[float]) -> torch.Tensor:
    calls.append(1.0)
    return torch.tensor(float(len(calls)))


def test_a_step_without_a_gpu_is_refused_before_it_runs() -> None:
    calls: list[float] = []
    step = capture(counted)
    with pytest.raises(UnsupportedError, match=r"there is no CUDA device.*fallback"):
        step(calls)
    assert not calls


@on_ranks(2)
def test_with_fallback_steps_are_eager_after_one_warning(rank: Rank) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=rank.mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = capture(train_step, fallback=True)
    batch = torch.ones(2, 4)
    with pytest.warns(UserWarning, match="there is no CUDA device"):
        first = step(batch)
    assert step(batch) < first  # without another warning, which would be an error
    assert step.num_graphs == 0


@on_ranks(2)
def test_a_forward_after_a_replay_reads_what_the_graph_has_written(rank: Rank) -> None:
    for reshards in (True, False):
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=rank.mesh(), reshard_after_forward=reshards)
        hooks, batch = require_hooks(model), torch.ones(1, 4)
        for _ in range(2):  # the second follows what the first recorded
            model(batch).sum().backward()
        assert model(batch).any()  # keeps what its backward would begin with
        for param in hooks.units[0].params:
            with_own_storage(param.current_local.detach()).zero_()  # no version tells of it
        hooks.ensure_scheduler().end_replay()
        assert not model(batch).any(), reshards


@pytest.mark.parametrize("wrong", [{"warmup": 0}, {"max_graphs": 0}])
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must both be 1 or more"):
        capture(counted, **wrong)
