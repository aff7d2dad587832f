"""Runs that are saved and resumed: state beside tensors, parts, names, the background."""

import gc
import os
import random
import resource
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fullshard import ConfigError, FullyShardedDataParallel, fully_shard
from fullshard._torch import timeout_of
from fullshard.errors import CheckpointError
from fullshard.ranks import RankGroup, _groups
from fullshard.state import latest, load, save, save_async, verify
from fullshard.state.checkpoint.manifest import read_manifest
from fullshard.state.checkpoint.reader import open_checkpoint
from fullshard.testing import Rank, RankPool, RanksFailed, on_ranks

WIDTH = 6


class Loader:
    """A source of batches that knows where it is."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def next(self) -> Tensor:
        self.position += 1
        seed = 100 * self.position + self.rank
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


class Run:
    """A model with dropout, and everything that changes while it trains."""

    def __init__(self, rank: Rank, form: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.Dropout(0.3), nn.Linear(2 * WIDTH, WIDTH)
        )
        if form == "fully_shard":
            fully_shard(model, mesh=rank.mesh())
        else:
            model = FullyShardedDataParallel(model, use_orig_params=form == "slices")
        self.model = model
        torch.manual_seed(1000 * seed + rank.rank)
        random.seed(1000 * seed + rank.rank)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.loader = Loader(rank.rank)

    @property
    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "scaler": self.scaler, "loader": self.loader}

    def train(self, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            noise = random.random()
            loss = self.model(self.loader.next()).square().mean() * (1 + noise)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


FORMS = ("fully_shard", "flat", "slices")


@on_ranks(1, 2)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(rank: Rank, tmp_path: Path) -> None:
    for form in FORMS:
        path = tmp_path / form / "step_3"
        run = Run(rank, form)
        run.train(3)
        save(path, run.model, run.optimizer, extra={**run.extra, "note": "hello"}, step=3)
        expected = run.train(3)
        resumed = Run(rank, form, seed=5)
        resumed.train(1)
        loaded = load(path, resumed.model, resumed.optimizer, extra=resumed.extra)
        assert loaded.extra["note"] == "hello"
        assert loaded.step == 3
        assert resumed.train(3) == expected, form


@on_ranks(2)
def test_several_files_per_rank_hold_the_same_and_checks_can_be_left_out(
    rank: Rank, tmp_path: Path
) -> None:
    run = Run(rank, "flat")
    run.train(2)
    save(tmp_path / "one", run.model, run.optimizer)
    save(tmp_path / "three", run.model, run.optimizer, shards=3)
    one, three = read_manifest(tmp_path / "one"), read_manifest(tmp_path / "three")
    assert one.tensors == three.tensors
    assert len([name for name in one.files if name.endswith(".distcp")]) == 2
    assert len([name for name in three.files if name.endswith(".distcp")]) == 6
    expected = full_params(run.model)
    run.train(1)
    state = torch.get_rng_state()
    load(tmp_path / "three", run.model, run.optimizer, verified=False, random_state=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, full_params(run.model), expected))
    for wrong in (0, -1, 1.5):
        with pytest.raises(ConfigError, match="shards must be a number of at least 1"):
            save(tmp_path / "none", run.model, shards=wrong)


@on_ranks(2)
def test_what_cannot_be_restored_is_refused_before_anything_is_loaded(
    rank: Rank, tmp_path: Path
) -> None:
    run = Run(rank, "flat")
    save(tmp_path / "a", run.model, run.optimizer, extra={"loader": run.loader})
    other = Run(rank, "flat", seed=1)
    before = other.model._flat_param.detach().clone()
    with pytest.raises(CheckpointError, match="scheduler"):
        load(tmp_path / "a", other.model, extra=other.extra)
    with pytest.raises(ConfigError, match="load_state_dict"):
        load(tmp_path / "a", other.model, extra={"loader": 3})
    assert torch.equal(other.model._flat_param, before)


@on_ranks(2)
def test_a_save_in_the_background_holds_what_was_there_when_it_began(
    rank: Rank, tmp_path: Path
) -> None:
    run = Run(rank, "flat")
    run.train(2)
    handle = save_async(tmp_path / "a", run.model, run.optimizer, extra=run.extra, step=2)
    expected = run.train(2)
    second = save_async(tmp_path / "b", run.model, run.optimizer, extra=run.extra, step=4)
    further = run.train(2)
    assert second.wait() == tmp_path / "b"
    assert handle.done()
    assert handle.wait() == tmp_path / "a"
    resumed = Run(rank, "slices", seed=3)
    load(tmp_path / "a", resumed.model, resumed.optimizer, extra=resumed.extra)
    assert resumed.train(2) == pytest.approx(expected)
    load(tmp_path / "b", resumed.model, resumed.optimizer, extra=resumed.extra)
    assert resumed.train(2) == pytest.approx(further)
    save(tmp_path / "c", run.model, step=9)
    assert latest(tmp_path) == tmp_path / "c"


class Broken:
    """Fails while it is packed, on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"value": threading.Lock() if self.rank == 1 else 0}


def test_a_program_may_end_while_several_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(8, 8)
    # The interpreter does this before it waits for threads: it takes no new ones from here on.
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    save_async(tmp_path / "last", model, shards=3).wait()
    assert verify(tmp_path / "last") == []


@on_ranks(2)
def test_an_error_in_the_background_comes_out_at_the_handle_and_at_the_next_save(
    rank: Rank, tmp_path: Path
) -> None:
    run = Run(rank, "flat")
    run.train(1)
    save(tmp_path / "a", run.model, run.optimizer, step=1)
    (tmp_path / "file").write_text("in the way")
    handle = save_async(tmp_path / "file" / "b", run.model, step=2)
    with pytest.raises((CheckpointError, OSError)):
        handle.wait()
    with pytest.raises(CheckpointError, match="the save before this one failed"):
        save(tmp_path / "c", run.model, step=3)
    assert latest(tmp_path) == tmp_path / "a"
    save(tmp_path / "d", run.model, step=4)
    assert latest(tmp_path) == tmp_path / "d"


@on_ranks(2)
def test_a_failure_that_one_rank_knows_first_is_raised_on_all(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(rank, "flat")
    (tmp_path / "file").write_text("in the way")
    slow = threading.Event()
    if rank.rank == 1:
        # This rank's thread learns later than the other's that the save failed.
        actual = RankGroup.run_first

        def run_first(self: RankGroup, *args: Any) -> Any:
            try:
                return actual(self, *args)
            finally:
                if threading.current_thread().name == "fullshard-save":
                    slow.wait(2)

        monkeypatch.setattr(RankGroup, "run_first", run_first)
    handle = save_async(tmp_path / "file" / "a", run.model, step=1)
    if rank.rank == 0:
        with pytest.raises((CheckpointError, OSError)):
            handle.wait()
    else:
        assert not handle.done()
    with pytest.raises(CheckpointError, match="the save before this one failed"):
        save_async(tmp_path / "b", run.model, step=2)
    assert handle.done()
    assert save_async(tmp_path / "c", run.model, step=3).wait() == tmp_path / "c"


def save_and_leave(rank: Rank, folder: str) -> tuple[int, list[str]]:
    model = FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH))
    save_async(Path(folder) / "a", model).wait()
    dist.destroy_process_group()
    gc.collect()
    left = len(_groups), [each.name for each in threading.enumerate()]
    with pytest.raises(CheckpointError, match="and before the process group is destroyed"):
        save(Path(folder) / f"late_{rank.rank}", model)
    return left


def test_nothing_of_a_save_outlives_the_process_group(tmp_path: Path) -> None:
    with RankPool(2) as ranks:
        for num_groups, threads in ranks.run(save_and_leave, str(tmp_path)):
            assert num_groups == 0
            assert "fullshard-save" not in threads


def save_alone(rank: Rank, folder: str) -> str:
    """What a rank that saves alone gets, in a world whose collectives may take three seconds."""
    dist.destroy_process_group()
    where, limit = f"file://{folder}/store", timedelta(seconds=3)
    dist.init_process_group("gloo", where, timeout=limit, world_size=rank.size, rank=rank.rank)
    model = fully_shard(nn.Linear(WIDTH, WIDTH))
    save(Path(folder) / "a", model)
    in_background = RankGroup.world(in_background=True).group
    assert in_background is not None
    assert timeout_of(in_background) == limit
    if rank.rank == 0:
        with pytest.raises(RuntimeError) as raised:
            save(Path(folder) / "b", model)
        return str(raised.value)
    return ""


def test_a_save_waits_for_other_ranks_as_long_as_the_default_group(tmp_path: Path) -> None:
    with RankPool(2) as ranks:
        message, _ = ranks.run(save_alone, str(tmp_path), timeout_s=60)
    assert "Timed out waiting 3000ms" in message


@on_ranks(2)
def test_what_one_rank_cannot_save_is_an_error_on_all_and_leaves_nothing(
    rank: Rank, tmp_path: Path
) -> None:
    run = Run(rank, "slices")
    run.train(1)
    save(tmp_path / "a", run.model, run.optimizer, step=1)
    kinds = (ConfigError,) if rank.rank == 1 else (CheckpointError,)
    with pytest.raises(kinds):
        save(tmp_path / "b", run.model, extra={"broken": Broken(rank.rank)}, step=2)
    assert latest(tmp_path) == tmp_path / "a"
    assert not (tmp_path / "b").exists()
    save(tmp_path / "b", run.model, step=2)
    assert latest(tmp_path) == tmp_path / "b"


@on_ranks(2)
def test_a_disk_that_is_full_for_one_rank_leaves_the_checkpoint_before(
    rank: Rank, tmp_path: Path
) -> None:
    run = Run(rank, "flat")
    run.train(1)
    save(tmp_path / "a", run.model, run.optimizer, step=1)
    expected = full_params(run.model)
    run.train(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"rank 1: OSError: .*File too large"):
            save(tmp_path / "b", run.model, run.optimizer, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()  # the first rank removes what was written
    assert latest(tmp_path) == tmp_path / "a"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    load(tmp_path / "a", run.model, run.optimizer)
    assert all(map(torch.equal, full_params(run.model), expected))


def full_params(model: nn.Module) -> list[Tensor]:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return [param.detach().clone() for param in model.parameters()]


@on_ranks(2)
def test_parts_that_do_not_cover_a_tensor_once_are_not_saved(rank: Rank, tmp_path: Path) -> None:
    # Each rank has its own whole model; only one of them could be meant.
    groups = [dist.new_group([each]) for each in range(rank.size)]
    alone = FullyShardedDataParallel(
        nn.Linear(WIDTH, 3), process_group=groups[rank.rank], device_id=torch.device("cpu")
    )
    with pytest.raises(CheckpointError, match=r"weight: the parts of all ranks do not cover"):
        save(tmp_path / "a", alone)
    other = nn.Linear(WIDTH, 3 + rank.rank)
    with pytest.raises(CheckpointError, match=r"build the same model on all ranks"):
        save(tmp_path / "a", other)
    local = DTensor.from_local(
        torch.ones(3, 2), rank.mesh(), [Shard(0)], run_check=False, shape=(7, 2), stride=(2, 1)
    )
    model = nn.Module()
    model.weight = nn.Parameter(local)
    with pytest.raises(CheckpointError, match=r"has the shape|failed on rank"):
        save(tmp_path / "a", model)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


class Killer:
    """Kills its process while a checkpoint is being written: no clean-up, no message."""

    def __init__(self, rank: int, victims: tuple[int, ...]) -> None:
        self.rank, self.victims = rank, victims

    def state_dict(self) -> dict[str, Any]:
        if self.rank in self.victims:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}


def save_then_die(rank: Rank, folder: str, victims: tuple[int, ...]) -> None:
    run = Run(rank, "flat")
    run.train(1)
    save(Path(folder) / "step_1", run.model, run.optimizer, extra=run.extra, step=1)
    run.train(1)
    extra = {**run.extra, "killer": Killer(rank.rank, victims)}
    save(Path(folder) / "step_2", run.model, run.optimizer, extra=extra, step=2)


def resume(rank: Rank, folder: str) -> list[float]:
    run = Run(rank, "slices", seed=4)
    found = latest(folder)
    assert found == Path(folder) / "step_1"
    load(found, run.model, run.optimizer, extra=run.extra)
    losses = run.train(1)
    save(Path(folder) / "step_2", run.model, run.optimizer, extra=run.extra, step=2, keep=1)
    assert latest(folder) == Path(folder) / "step_2"
    return losses


def test_a_run_that_is_killed_while_it_saves_resumes_from_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    with RankPool(2) as ranks:
        for victims in ((0,), (1,), (0, 1)):
            folder = tmp_path / str(victims)
            with pytest.raises(RanksFailed):
                ranks.run(save_then_die, str(folder), victims, timeout_s=60)
            assert not (folder / "step_2").exists()
            assert all(len(losses) == 1 for losses in ranks.run(resume, str(folder), timeout_s=120))
            # Nothing is left of the save that was killed, nor of the checkpoint that was not kept.
            assert sorted(path.name for path in folder.iterdir()) == ["step_2"]


class Adapted(nn.Module):
    """A frozen base and a small part that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


def adapted(seed: int, wraps: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = Adapted()
    torch.manual_seed(seed)
    nn.init.normal_(model.adapter.weight)
    return FullyShardedDataParallel(model, use_orig_params=True) if wraps else model


@on_ranks(2)
def test_what_is_trained_alone_loads_back_onto_its_base(rank: Rank, tmp_path: Path) -> None:
    model = adapted(seed=1)
    save(tmp_path / "adapter", model, only="trainable")
    manifest = read_manifest(tmp_path / "adapter")
    assert list(manifest.tensors) == ["model.adapter.weight"]
    assert manifest.selection == "trainable parameters"
    other = adapted(seed=2, wraps=False)
    loaded = load(tmp_path / "adapter", other)
    assert loaded.missing == ("base.weight", "base.bias")
    expected = adapted(seed=1, wraps=False)
    for name, param in other.named_parameters():
        assert torch.equal(param, expected.get_parameter(name)), name
    save(tmp_path / "named", model, only=lambda name: name.startswith("base"))
    assert set(read_manifest(tmp_path / "named").tensors) == {
        "model.base.weight",
        "model.base.bias",
    }


@on_ranks(2)
def test_state_goes_by_name_and_groups_may_come_in_another_order(
    rank: Rank, tmp_path: Path
) -> None:
    def grouped(seed: int, order: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)))
        groups = [
            {"params": list(model[0].parameters()), "lr": 0.1, "weight_decay": 0.0},
            {"params": list(reversed(list(model[1].parameters()))), "lr": 0.2},
        ]
        return model, torch.optim.AdamW(groups[::order])

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, num: int) -> list[float]:
        losses = []
        for _ in range(num):
            loss = model(torch.ones(2, WIDTH)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = grouped(0, 1)
    steps(model, optimizer, 2)
    save(tmp_path / "a", model, optimizer)
    expected = steps(model, optimizer, 2)
    again, reordered = grouped(1, -1)
    for group in reordered.param_groups:
        group["lr"] = 7.0
    load(tmp_path / "a", again, reordered)
    assert [group["lr"] for group in reordered.param_groups] == [0.2, 0.1]
    assert [group["weight_decay"] for group in reordered.param_groups] == [0.01, 0.0]
    assert steps(again, reordered, 2) == pytest.approx(expected)


@on_ranks(2)
def test_a_model_of_another_dtype_gets_the_values_rounded_and_trains(
    rank: Rank, tmp_path: Path
) -> None:
    for form in FORMS:
        run = Run(rank, form)
        run.train(2)
        save(tmp_path / form / "a", run.model, run.optimizer)
        other = Run(rank, form, seed=1)
        other.model.bfloat16()
        optimizer = torch.optim.AdamW(other.model.parameters(), lr=0.05)
        load(tmp_path / form / "a", other.model, optimizer)
        save(tmp_path / form / "b", other.model, optimizer)
        a, b = open_checkpoint(tmp_path / form / "a"), open_checkpoint(tmp_path / form / "b")
        for key in a.keys:
            before, after = a.read(key), b.read(key)
            is_count = key.endswith(".step")
            assert after.dtype == (torch.float32 if is_count else torch.bfloat16), key
            assert torch.equal(after, before.to(after.dtype)), key
        other.model(run.loader.next().bfloat16()).sum().backward()
        optimizer.step()


@on_ranks(2)
def test_parameters_that_were_added_or_removed_are_named(rank: Rank, tmp_path: Path) -> None:
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    save(tmp_path / "a", model, optimizer)
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    before = [param.detach().clone() for param in other.parameters()]
    with pytest.raises(CheckpointError, match=r"2\.weight") as failed:
        load(tmp_path / "a", other)
    assert "1.weight" in str(failed.value)
    assert "nothing was loaded" in str(failed.value)
    assert all(map(torch.equal, before, other.parameters()))
    loaded = load(tmp_path / "a", other, strict=False)
    assert loaded.missing == ("2.weight", "2.bias")
    assert loaded.unexpected == ("1.weight", "1.bias")
    part = torch.optim.AdamW(list(model.module[0].parameters()) or model.parameters())
    assert part.state == {}
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    with pytest.raises(CheckpointError, match=r"1\.weight"):
        load(tmp_path / "a", whole, torch.optim.AdamW(whole[0].parameters()))
    misshapen = nn.Sequential(nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH + 1, 3))
    with pytest.raises(CheckpointError, match=r"0\.weight: its shape is \[7, 6\]"):
        load(tmp_path / "a", misshapen)
