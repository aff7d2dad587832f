"""What the memory of a unit holds: after any sequence of calls, nothing reads an older version."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.runtime.hooks import hooks_of, units_below
from fullshard.runtime.step import Scheduler
from fullshard.testing import Rank, on_ranks
from fullshard.unit.param import ShardedParam
from fullshard.unit.state import Absent, Arriving, Kept, Leaving, Present

NUM_PROGRAMS, NUM_ACTIONS = 10, 40


def sharded() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(2)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def wrapped(use_orig_params: bool) -> nn.Module:
    parts = [
        FullyShardedDataParallel(nn.Linear(3, 3), use_orig_params=use_orig_params) for _ in range(2)
    ]
    return FullyShardedDataParallel(nn.Sequential(*parts), use_orig_params=use_orig_params)


class Walk:
    """A random sequence of calls on one unit, which are the same on all ranks."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        model(torch.ones(1, 3)).sum().backward()  # makes the scheduler
        scheduler = hooks_of(model).scheduler
        assert scheduler is not None
        self.scheduler: Scheduler = scheduler
        self.unit, self.other = [unit for unit in units_below(model) if unit.params]
        self.added = 0.0
        self.choose = random.Random(seed)
        self.seen: set[type] = set()
        self.start = self.read()

    def read(self) -> list[Tensor]:
        """The values that a forward finds."""
        self.begin_forward()
        self.unit.unshard()
        self.unit.wait()
        found = [registered(param).detach().clone() for param in self.unit.params]
        self.unit.reshard_now()
        return found

    def run(self) -> None:
        actions: list[Callable[[], None]] = [
            self.forward,
            self.unshard,
            self.unit.wait,
            self.unit.reshard,
            self.reshard_to_subgroup,
            self.unit.reshard_now,
            self.unit.keep,
            self.gather_another,
            self.write,
            self.replay,
            self.scheduler.abort,
        ]
        for _ in range(NUM_ACTIONS):
            self.choose.choice(actions)()
            self.seen.add(type(self.unit.state))
            self.check_what_is_registered()

    def begin_forward(self) -> None:
        self.scheduler.comm_ctx.all_gathers_follow_compute()
        self.scheduler.comm_ctx.forward = object()
        for unit in (self.unit, self.other):
            unit.enter_forward()

    def forward(self) -> None:
        self.begin_forward()
        self.unit.unshard()
        self.unit.wait()
        self.check_values()

    def unshard(self) -> None:
        """As backward does: what was there before a write is what forward has computed with."""
        is_new = not self.unit.is_unsharded and not isinstance(self.unit.state, Arriving)
        self.unit.unshard()
        if is_new and self.choose.random() < 0.5:
            self.unit.wait()
            self.check_values()

    def reshard_to_subgroup(self) -> None:
        self.unit.reshard(self.unit.mesh_info.subgroup_axis(2))

    def gather_another(self) -> None:
        self.other.unshard()
        self.other.wait()
        self.other.reshard_now()
        assert not isinstance(self.unit.state, Leaving)  # an all-gather has been issued since

    def write(self) -> None:
        """Somebody writes to the shards: an optimizer, or a user."""
        with torch.no_grad():
            for param in {each.param for each in self.unit.params}:
                param.add_(1)
        self.added += 1

    def replay(self) -> None:
        """A CUDA graph writes to the shards, which no version counter shows."""
        for buffer in self.unit.shard_buffers.lanes:
            buffer.data.add_(1)
        self.added += 1
        self.scheduler.end_replay()

    def check_values(self) -> None:
        for param, start in zip(self.unit.params, self.start, strict=True):
            torch.testing.assert_close(registered(param).detach(), start + self.added)

    def check_what_is_registered(self) -> None:
        state = self.unit.state
        assert not self.unit.is_unsharded or isinstance(state, Present)
        gather = self.unit.arrangement.all_gather
        assert gather is not None
        if not isinstance(state, Arriving):  # what has to be copied out arrives elsewhere
            has_memory = gather._full_buffer._storage.size() > 0
            assert has_memory == isinstance(state, (Present, Leaving)), state


def registered(param: ShardedParam) -> Tensor:
    found = param.locations[0].get()
    assert found is not None
    return found


@pytest.mark.parametrize("api", ["fully_shard", "wrapper", "flat"])
@on_ranks(2)
def test_no_sequence_of_calls_reads_an_older_version(rank: Rank, api: str) -> None:
    seen: set[type] = set()
    for seed in range(NUM_PROGRAMS):
        torch.manual_seed(seed)
        model = sharded() if api == "fully_shard" else wrapped(api == "wrapper")
        walk = Walk(model, seed)
        walk.run()
        seen |= walk.seen
    assert seen == {Absent, Arriving, Present, Leaving, Kept}
