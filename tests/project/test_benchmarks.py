"""Every benchmark runs, compares its variants and says what it found; simulated worlds."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import bench_checkpoint
import bench_collectives
import bench_copies
import bench_gpu
import bench_host_time
import bench_memory
import bench_muon
import bench_startup
import bench_step
import bench_tokenize
import bench_train
import bench_uneven
import bench_wires
import tables
from device_traces import busy_in
from fullshard import fully_shard
from fullshard.errors import ConfigError, LifecycleError
from fullshard.testing import pool, quiet_world
from measuring import Result, Table, check_losses, interleaved, result_for
from variants import BASE, OURS, SHARDED, UNSHARDED, WRAPPER

RATIO = "ratio"


def measured(program, path: Path, *arguments: str) -> Result:
    """Run a benchmark in this process and read what it wrote."""
    program.main([*arguments, "--json", str(path / "result.json")])
    result = Result.read(path / "result.json")
    assert str(path) not in result.command
    return result


def assert_compares(table: Table, *variants: str) -> None:
    """Each variant has its row of numbers, and the ratio of torch's `fully_shard` is 1."""
    rows = {row[0]: row for row in table.rows}
    assert set(variants) <= set(rows)
    assert rows[BASE][table.columns.index(RATIO)] == 1


def test_a_result_says_with_which_settings_to_get_it_again(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_NET_CHUNKSIZE", "524288")
    monkeypatch.setenv("NCCL_VERSION", "2.28.3-1")
    command = result_for("gpu", ["ranks", "--json", "here.json", "--ranks", "2"]).command
    expected = "NCCL_P2P_NET_CHUNKSIZE=524288 python benchmarks/bench_gpu.py ranks --ranks 2"
    assert command == expected


@pytest.mark.soak
def test_tokenizing_is_compared_with_the_library_alone(tmp_path):
    small = ("--mb", "3", "--first-step-mb", "3", "--vocabulary", "500", "--rounds", "1")
    whole, first = measured(bench_tokenize, tmp_path, *small).tables
    assert whole.rows[0][-1] == 1
    assert first.rows[0][1] > 0


def test_host_time_is_measured_per_unit_and_profiled(tmp_path, capsys):
    small = ("--worlds", "4", "--units", "2", "--width", "8", "--steps", "1")
    per_unit, optimizer = measured(bench_host_time, tmp_path, *small).tables
    assert_compares(per_unit, *SHARDED)
    assert any(row[0] == f"{BASE}, fused" and row[-1] == 1 for row in optimizer.rows)
    bench_host_time.main([*small, "--profile", OURS])
    assert "run_backward" in capsys.readouterr().out


def test_step_time_is_measured_on_ranks(tmp_path):
    small = ("--sizes", "tiny", "--dtypes", "float32", "--length", "4", "--batch", "1")
    (table,) = measured(bench_step, tmp_path, "--ranks", "2", "--steps", "1", *small).tables
    over_gloo = OURS + bench_step.OVER_GLOO
    assert_compares(table, UNSHARDED, bench_step.FLOOR, bench_step.DDP, OURS, over_gloo)


@pytest.mark.soak
def test_losses_are_compared_by_wire(tmp_path):
    small = ("losses", "--steps", "2", "--seeds", "1", "--width", "32")
    (table,) = measured(bench_wires, tmp_path, *small).tables
    assert [row[0] for row in table.rows] == list(bench_wires.WIRES)
    for name, mean, _, _, apart in table.rows:
        assert 0 < mean < 10
        assert (apart == 0) is (name == bench_wires.NONE)


def test_uneven_units_are_measured_beside_even_ones(tmp_path):
    small = ("--ranks", "2", "--widths", "8", "--experts", "2", "--rounds", "1")
    (table,) = measured(bench_uneven, tmp_path, *small).tables
    assert [row[-1] == 1 for row in table.rows] == [True, False, False] * 2


@pytest.mark.soak
def test_steps_of_muon_are_measured_beside_what_they_cannot_do_without(tmp_path):
    small = ("--device", "cpu", "--tiny", "--ranks", "2", "--steps", "2")
    modes = ("products", "simulated", "train", "ranks", "parity")
    tables = measured(bench_muon, tmp_path, *modes, *small).tables
    sent = next(table for table in tables if "sends to others" in table.title)
    assert [row[-1] for row in sent.rows] == pytest.approx([1.0, 1.0], rel=0.05)
    assert all(row[-1] < 1 for row in tables[-1].rows)  # percent of the loss


@pytest.mark.parametrize("mode", ["world1", "narrow", "ranks"])
def test_what_runs_on_a_gpu_runs_on_a_cpu(mode, tmp_path):
    small = ("--device", "cpu", "--tiny", "--steps", "1", "--ranks", "2", "--worlds", "8")
    (table,) = measured(bench_gpu, tmp_path, mode, *small).tables
    assert_compares(table, OURS, WRAPPER)


def test_one_variant_of_a_simulated_world_says_what_it_took(capsys):
    small = ("--device", "cpu", "--tiny", "--steps", "1", "--worlds", "8")
    bench_gpu.main(["simulated", *small, "--one", OURS])
    found = json.loads(capsys.readouterr().out)
    times, memory = bench_gpu.simulated_tables(8, {BASE: found, OURS: found})
    assert_compares(times, OURS)
    assert [row[0] for row in memory.rows] == [BASE, OURS]


def test_memory_is_counted(tmp_path):
    small = ("--units", "3", "--width", "64", "--dtypes", "float32")
    copied, transient = measured(bench_memory, tmp_path, *small).tables
    assert_compares(copied, *SHARDED)
    assert_compares(transient, *SHARDED)
    forward = {row[0]: row[1] for row in copied.rows}
    assert forward[BASE] > 1
    assert forward[WRAPPER] == 0


def test_copies_are_compared_with_one_copy(tmp_path: Path) -> None:
    small = ("--device", "cpu", "--worlds", "3", "--width", "16")
    (table,) = measured(bench_copies, tmp_path, *small).tables
    assert len(table.rows) == 4 * 4


@pytest.mark.soak
def test_the_trainer_is_measured_beside_a_plain_loop(tmp_path: Path) -> None:
    small = ("--model", "tiny", "--blocks", "1", "--sequence", "16", "--batch", "1", "--steps", "2")
    which = ("--variants", bench_train.PLAIN, bench_train.OURS)
    (table,) = measured(bench_train, tmp_path, *small, *which).tables
    assert [row[0] for row in table.rows] == [bench_train.PLAIN, bench_train.OURS]
    assert all(row[1] > 0 for row in table.rows)


def test_collectives_are_measured(tmp_path):
    small = ("--ranks", "2", "--sizes-kb", "64", "--rounds", "1")
    one, several, constants = measured(bench_collectives, tmp_path, *small).tables
    assert {"gather, native", "reduce, composed", "gather, shared memory"} < set(one.columns)
    assert [row[0] for row in several.rows] == ["64 KB"]
    assert all(row[2] > 0 for row in constants.rows)


@pytest.mark.soak
def test_start_up_is_measured_in_processes_of_its_own(tmp_path):
    small = ("--blocks", "1", "--width", "64", "--worlds", "4", "--ranks", "--variants", OURS)
    result = measured(bench_startup, tmp_path, *small)
    assert len(result.tables) == 2
    for table in result.tables:
        assert_compares(table, OURS)


def test_saving_a_checkpoint_is_measured(tmp_path):
    found = pool(2).run(bench_checkpoint.run, "save", str(tmp_path), 2, 16)
    assert len(found) == 2
    assert all(seconds > 0 for _, seconds in found)


def test_the_documentation_has_the_results_that_are_committed():
    for path in tables.PAGES:
        page = path.read_text()
        assert tables.filled(page) == page
    assert tables.page_of_results() == tables.PAGE.read_text()


def test_a_page_may_show_some_tables_of_a_result():
    page = tables.filled("<!-- result: gpu_wire 2 -->\n<!-- end -->")
    assert "4 ranks on one device" in page
    assert "2 ranks on one device" not in page


def test_a_result_without_a_title_is_refused(tmp_path):
    (tmp_path / "unknown.json").write_text("{}")
    with pytest.raises(SystemExit, match="unknown"):
        tables.page_of_results(tmp_path)


def test_variants_that_compute_something_else_are_not_timed():
    check_losses({"one": [1.0, 0.5], "other": [1.0, 0.500001]}, rtol=1e-4)
    with pytest.raises(RuntimeError, match="other: must have the losses of one"):
        check_losses({"one": [1.0, 0.5], "other": [1.0, 0.6]}, rtol=1e-4)
    with pytest.raises(RuntimeError, match="other"):
        check_losses({"one": [1.0], "other": [float("nan")]}, rtol=1e-4)


def test_variants_take_turns_at_being_first():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    interleaved(runs, num_rounds=2, num_warm=1)
    assert "".join(order) == "abbaab"


def test_communication_is_exposed_where_nothing_else_runs():
    kernels = [("gemm", 0, 10), ("ncclAllGather", 5, 10), ("copy", 12, 1), ("ncclReduce", 20, 5)]
    events = [{"cat": "kernel", "name": n, "ts": start, "dur": d} for n, start, d in kernels]
    events.append({"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100})
    found = busy_in(events)
    assert (found.busy_us, found.communication_us, found.exposed_us) == (20, 15, 9)


# The simulated world


def test_a_quiet_world_delivers_nothing_but_what_ranks_say():
    with quiet_world(4, rank=1) as rank:
        group = rank.mesh().get_group()
        all_gather_flat = torch.full((8,), 7.0)
        group._allgather_base(all_gather_flat, torch.zeros(2)).wait()
        assert all_gather_flat.tolist() == [7.0] * 8
        said = torch.zeros(4, dtype=torch.int64)
        group._allgather_base(said, torch.tensor([5])).wait()
        assert said.tolist() == [5] * 4
        names = [None] * 4
        dist.all_gather_object(names, "me")
        assert names == ["me"] * 4
        with pytest.raises(LifecycleError, match="quiet_world"), quiet_world(2):
            pass
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match="from 0 to 3, not 4"), quiet_world(4, rank=4):
        pass
    for shard in (torch_fully_shard, fully_shard):
        with quiet_world(64, rank=9) as rank:
            model = nn.Linear(8, 16)
            shard(model, mesh=rank.mesh((8, 8), ("replicate", "shard")))
            model(torch.randn(2, 8)).sum().backward()
            assert model.weight.grad.to_local().shape == (2, 8)
