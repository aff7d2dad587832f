"""fullshard.testing: ranks that answer, fail, hang and die; fake worlds; training parity."""

import os
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fullshard.errors import ConfigError, LifecycleError
from fullshard.testing import (
    Rank,
    RankPool,
    RanksFailed,
    Training,
    assert_same_training,
    fake_world,
    on_ranks,
    pool,
)
from fullshard.testing.rank_pool import MAX_SHARED_RANKS
from tests.support.programs import has_ended


def whoami(rank: Rank, *args: object, **kwargs: object) -> tuple[object, ...]:
    return rank.rank, rank.size, args, kwargs


def pid(rank: Rank) -> int:
    return os.getpid()


def fail_on(rank: Rank, failing: int) -> None:
    if rank.rank == failing:
        raise KeyError(f"planted on {failing}")


def fail_alike(rank: Rank) -> None:
    raise ConfigError("layers.3: expected something else.")


def fail_before_a_collective(rank: Rank) -> None:
    if rank.rank == 1:
        raise KeyError("never reached the collective")
    dist.all_reduce(torch.ones(1))


def sleep_in_a_function_with_a_name(rank: Rank, sleeper: int) -> None:
    if rank.rank == sleeper:
        time.sleep(1000)


def die(rank: Rank, dying: int) -> None:
    if rank.rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)


def assert_without_words(rank: Rank) -> None:
    planted_value = 41 + rank.rank
    assert planted_value == 40


def sum_of_ranks(rank: Rank) -> float:
    total = torch.tensor(float(rank.rank))
    dist.all_reduce(total)
    return total.item()


def random_number(rank: Rank) -> float:
    number = torch.rand(()).item()
    torch.set_default_dtype(torch.float64)
    return number


def meshes_are_the_same_object(rank: Rank) -> bool:
    first = rank.mesh((1, rank.size), ("replicate", "shard"))
    again = rank.mesh((1, rank.size), ("replicate", "shard"))
    return first is again and rank.mesh() is rank.mesh(rank.size) and rank.mesh() is not first


def warn(rank: Rank) -> None:
    warnings.warn("a warning from a rank", UserWarning, stacklevel=1)


def say_hello(rank: Rank) -> None:
    print(f"hello from {rank.rank}")


def ancestors(rank: Rank) -> list[int]:
    """The process and its ancestors."""
    found = [os.getpid()]
    while found[-1] > 1:
        status = Path(f"/proc/{found[-1]}/status").read_text()
        found.append(int(status.split("PPid:")[1].split()[0]))
    return found


def hash_of_a_word(rank: Rank) -> int:
    return hash("fullshard")


def surroundings(rank: Rank) -> tuple[str, str | None, str]:
    return os.getcwd(), os.environ.get("PLANTED"), os.environ["OMP_NUM_THREADS"]


def leave(rank: Rank, code: int) -> None:
    os._exit(code)


def echo_tensor(rank: Rank, tensor: torch.Tensor) -> torch.Tensor:
    return tensor + rank.rank


@pytest.fixture
def own_pool():
    with RankPool(2) as own:
        yield own


def test_results_come_back_in_rank_order():
    results = pool(2).run(whoami, 1, key="value")
    assert results == [(0, 2, (1,), {"key": "value"}), (1, 2, (1,), {"key": "value"})]
    tensors = pool(2).run(echo_tensor, torch.arange(3.0))
    assert [tensor.tolist() for tensor in tensors] == [[0, 1, 2], [1, 2, 3]]


def test_processes_and_meshes_are_kept_and_every_call_starts_alike(own_pool):
    assert own_pool.run(pid) == own_pool.run(pid)
    assert own_pool.run(random_number) == own_pool.run(random_number)
    assert own_pool.run(meshes_are_the_same_object) == [True, True]
    first, second = own_pool.run(hash_of_a_word)
    assert first != second  # sets have different orders on different ranks


def open_groups(rank: Rank, num_groups: int) -> int:
    for _ in range(num_groups):
        dist.new_group()
    return os.getpid()


def test_ranks_with_many_groups_are_replaced(own_pool):
    first = own_pool.run(open_groups, 2)
    assert own_pool.run(open_groups, 10) == first
    assert not set(own_pool.run(open_groups, 1)) & set(first)


def test_shared_ranks_end_when_pools_that_were_used_since_have_many() -> None:
    first = pool(3).run(pid)[0]
    pool(1).run(pid)
    assert pool(3).run(pid)[0] == first
    pool(MAX_SHARED_RANKS)
    assert has_ended(first, within_s=20)
    assert pool(3).run(pid)[0] != first


def test_what_ranks_print_is_printed_here(capsys):
    pool(2).run(say_hello)
    printed = capsys.readouterr().out
    assert "[rank 0] hello from 0" in printed
    assert "[rank 1] hello from 1" in printed


def test_a_failing_ranks_traceback_is_shown(own_pool):
    with pytest.raises(RanksFailed) as caught:
        own_pool.run(fail_on, 1)
    assert "fail_on: rank 1 of 2 raised" in str(caught.value)
    assert 'raise KeyError(f"planted on {failing}")' in str(caught.value)
    assert caught.value.exceptions.keys() == {1}
    assert isinstance(caught.value.exceptions[1].exception, KeyError)
    with pytest.raises(RanksFailed, match="planted_value = 42"):  # of a bare assert
        own_pool.run(assert_without_words)
    assert own_pool.run(sum_of_ranks) == [1.0, 1.0]


def test_ranks_that_fail_alike_as_expected_are_kept(own_pool):
    before = own_pool.run(pid)
    with pytest.raises(RanksFailed, match=r"ranks 0, 1 raised") as caught:
        own_pool.run(fail_alike, expect_failure=True)
    assert all(isinstance(e.exception, ConfigError) for e in caught.value.exceptions.values())
    assert own_pool.run(pid) == before
    with pytest.raises(RanksFailed):
        own_pool.run(fail_alike)
    assert own_pool.run(pid) != before


def test_a_rank_waiting_for_a_failed_one_is_not_waited_for(own_pool):
    own_pool.run(pid)
    began = time.monotonic()
    with pytest.raises(RanksFailed, match="never reached the collective"):
        own_pool.run(fail_before_a_collective)
    assert time.monotonic() - began < 30
    assert own_pool.run(sum_of_ranks) == [1.0, 1.0]


def test_a_hung_rank_is_reported_with_its_stack_and_the_next_call_works(own_pool):
    own_pool.run(pid)  # so that the second is not spent on loading this module
    with pytest.raises(RanksFailed) as caught:
        own_pool.run(sleep_in_a_function_with_a_name, 1, timeout_s=1)
    assert "rank 1 did not answer" in str(caught.value)
    assert "sleep_in_a_function_with_a_name" in caught.value.silent[1].stacks
    assert own_pool.run(sum_of_ranks) == [1.0, 1.0]


def test_a_rank_that_dies_is_reported_and_the_next_call_works(own_pool):
    own_pool.run(pid)
    with pytest.raises(RanksFailed, match="rank 0 died with exit code -9"):
        own_pool.run(die, 0)
    with pytest.raises(RanksFailed, match="rank 1 died with exit code 7"):
        own_pool.run(leave, 7)
    assert own_pool.run(sum_of_ranks) == [1.0, 1.0]


def test_a_rank_obeys_the_callers_warning_filters(own_pool):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own_pool.run(warn)
        warnings.simplefilter("error")
        with pytest.raises(RanksFailed, match="UserWarning: a warning from a rank"):
            own_pool.run(warn)


def test_a_function_without_a_module_level_name_is_refused():
    with pytest.raises(ConfigError, match="module level"):
        pool(2).run(lambda rank: None)


def start_pools_and_die(rank: Rank, file: Path) -> None:
    """Note the processes of two pools, and be killed."""
    pools = RankPool(2), RankPool(1, fresh=True)
    found = [pids[: pids.index(os.getpid())] for pool in pools for pids in pool.run(ancestors)]
    file.write_text(" ".join(str(pid) for pids in found for pid in pids))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.exhaustive
def test_ranks_and_their_servers_end_with_their_parent(tmp_path: Path):
    with RankPool(1) as parent, pytest.raises(RanksFailed, match="died with exit code -9"):
        parent.run(start_pools_and_die, tmp_path / "pids")
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 5  # two ranks and their servers, a fresh rank
    assert [pid for pid in pids if not has_ended(pid, within_s=20)] == []


def test_a_rank_has_the_environment_and_the_folder_of_its_pool(
    own_pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PLANTED", "here")
    monkeypatch.chdir(tmp_path)
    assert own_pool.run(surroundings) == 2 * [(str(tmp_path), "here", "1")]


@pytest.mark.exhaustive
def test_a_server_that_was_killed_is_replaced_and_its_ranks_live_on(own_pool):
    (_, server, *_), _ = own_pool.run(ancestors)
    os.kill(server, signal.SIGKILL)
    assert has_ended(server, within_s=20)
    assert own_pool.run(sum_of_ranks) == [1.0, 1.0]
    with pytest.raises(RanksFailed, match="rank 0 died with exit code -9"):
        own_pool.run(leave, 7)  # nobody is left to tell the code
    assert own_pool.run(sum_of_ranks) == [1.0, 1.0]


def test_a_closed_pool_leaves_no_process_behind():
    with RankPool(2) as own:
        pids = own.run(pid)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("letter", ["a", "b"])
@pytest.mark.parametrize("number", [1, 2])
@on_ranks(1, 2)
def test_a_body_runs_on_every_rank_with_parameters_and_fixtures(
    rank: Rank, letter: str, number: int, tmp_path: Path
) -> None:
    assert (dist.get_world_size(), dist.get_rank()) == (rank.size, rank.rank)
    assert (letter, number) in {(a, b) for a in "ab" for b in (1, 2)}
    (tmp_path / str(rank.rank)).write_text("here")


def test_a_fake_world_simulates_one_rank_of_many():
    with fake_world(64, rank=3) as rank:
        assert (dist.get_rank(), dist.get_world_size()) == (3, 64)
        model = nn.Linear(8, 128)
        torch_fully_shard(model, mesh=rank.mesh())
        assert isinstance(model.weight, DTensor)
        assert model.weight.to_local().shape == (2, 8)
        with pytest.raises(LifecycleError), fake_world(2):
            pass
    assert not dist.is_initialized()


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 5))


def small_batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 8, generator=generator)


@on_ranks(1, 2)
def test_torchs_fully_shard_trains_like_the_unsharded_model(rank: Rank) -> None:
    def shard(model: nn.Module) -> None:
        torch_fully_shard(model[0], mesh=rank.mesh())
        torch_fully_shard(model, mesh=rank.mesh())

    trained = assert_same_training(small_model, shard, Training(small_batch, micro_batches=2))
    assert trained.losses[0] > trained.losses[-1]
    assert_same_training(small_model, shard, Training(small_batch), oracle=shard, rtol=0, atol=0)


@on_ranks(2)
def test_a_data_mesh_limits_who_gets_a_batch_of_its_own(rank: Rank) -> None:
    mesh = rank.mesh((2, 1), ("tensor", "data"))
    training = Training(small_batch, data_mesh=mesh["data"])
    assert_same_training(small_model, lambda model: None, training)


@on_ranks(2)
def test_a_model_that_is_not_sharded_differs_between_ranks(rank: Rank) -> None:
    with pytest.raises(AssertionError, match=r"step 0: gradient of '0.weight' differs"):
        assert_same_training(small_model, lambda model: None, Training(small_batch))


class Drifting(torch.optim.SGD):
    """Moves one parameter by a little in its second step."""

    steps_done = 0

    def step(self, closure=None):
        super().step()
        self.steps_done += 1
        planted = self.param_groups[0]["params"][2]
        if self.steps_done == 2 and isinstance(planted, DTensor):
            planted.detach().to_local().add_(0.01)


@on_ranks(2)
def test_a_planted_difference_is_named_with_parameter_and_step(rank: Rank) -> None:
    def drifting(parameters):
        return Drifting(parameters, lr=0.1)

    def shard(model: nn.Module) -> None:
        torch_fully_shard(model, mesh=rank.mesh())

    with pytest.raises(AssertionError, match=r"after step 1: parameter '3.weight' differs") as it:
        assert_same_training(small_model, shard, Training(small_batch, optimizer=drifting))
    assert "Greatest absolute difference: 0.01" in str(it.value)


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 4)
        self.unused = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@on_ranks(1)
def test_gradients_that_are_none_on_both_sides_are_equal(rank: Rank) -> None:
    assert_same_training(WithUnused, lambda model: None, Training(small_batch))

    def give_one(model: nn.Module, micro_batch: int) -> None:
        model.unused.bias.grad = torch.zeros(4)

    training = Training(small_batch, before_forward=give_one)
    with pytest.raises(AssertionError, match=r"'unused.bias' is a tensor .* reference None"):
        assert_same_training(WithUnused, lambda model: None, training)


@on_ranks(1)
def test_a_model_without_gradients_proves_nothing(rank: Rank) -> None:
    training = Training(small_batch, loss=lambda model, batch: batch.sum().requires_grad_())
    with pytest.raises(AssertionError, match="no parameter took a gradient"):
        assert_same_training(small_model, lambda model: None, training)
