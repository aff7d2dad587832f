"""What goes wrong only between hosts: other settings, files and folders on one of them."""

from pathlib import Path

import pytest

import bench_host_faults
import bench_host_restarts
import bench_hosts
from measuring import Result
from tests.support.hosts import DEVICE, Hosts
from tests.support.tiny_run import TEXT

TIMEOUT_S = 120.0
SAVE = """
import sys
import torch
import torch.distributed as dist
from fullshard import fully_shard
from fullshard.errors import CheckpointError
from fullshard.state import save

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
fully_shard(model)
try:
    save(sys.argv[1], model)
except CheckpointError as error:
    sys.exit(str(error))
"""

JOIN = """
import os
from fullshard.errors import TopologyError
from fullshard.ranks import init_process_group

is_second = os.environ["RANK"] == "1"
for port, interface in ((29501, "missing0"), (29502, "")):
    os.environ["MASTER_PORT"] = str(port)
    os.environ["GLOO_SOCKET_IFNAME"] = interface if is_second else "eth0"
    try:
        init_process_group("gloo")
    except TopologyError as error:
        print(error, flush=True)
"""


def on_two_hosts(
    folder: Path, program: list[str], second: list[str] | None = None, *, setup: str = ":"
) -> tuple[list[int], list[str]]:
    """Run a program on two hosts, and return how it ended and what it said on each.

    `second` are its arguments on the second host, which has `setup` done to it.
    """
    logs = [folder / f"{host}.log" for host in range(2)]
    with Hosts(2) as hosts:
        processes = [
            hosts.start(0, program, log=logs[0]),
            hosts.start(1, second or program, log=logs[1], setup=setup),
        ]
        statuses = [process.wait(TIMEOUT_S) for process in processes]
    return statuses, [log.read_text() for log in logs]


def train(folder: Path, *more: str) -> list[str]:
    (folder / "text.txt").write_text(TEXT)
    (folder / "shared").mkdir(exist_ok=True)
    asked = ["--model", "tiny", "--sequence", "32", "--steps", "2", "--device", DEVICE]
    asked += ["--sample-tokens", "0", "--no-report", "--save-every", "0"]
    asked += ["--data", str(folder / "text.txt"), "--out", str(folder / "shared" / "run"), *more]
    return ["-m", "fullshard", "train", *asked]


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        "settings",
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("corpus", "folder")),
    ],
)
def test_hosts_that_cannot_do_the_same_run_say_why_on_both_and_start_nothing(
    fault: str, tmp_path: Path
) -> None:
    program, second, setup = train(tmp_path), None, ":"
    if fault == "settings":
        second = train(tmp_path, "--lr", "0.002")
        said = ["optimizer.lr (--lr): 0.001 on rank 0 (host0); 0.002 on rank 1 (host1)"]
    elif fault == "corpus":
        second = train(tmp_path, "--data", str(tmp_path / "missing.txt"))
        said = ["missing.txt does not exist"]
    else:
        setup = f"mount -t tmpfs none {tmp_path / 'shared'}"
        said = ["--out: all hosts must share the folder. rank 1 (host1) cannot see "]
    statuses, logs = on_two_hosts(tmp_path, program, second, setup=setup)
    assert statuses == [2, 2], logs
    for log in logs:
        assert all(text in log for text in said), log
        assert "Traceback" not in log
    if fault == "corpus":
        assert "failed on rank 1 (host1)" in logs[0]
    assert not list((tmp_path / "shared").glob("run/*"))


@pytest.mark.soak
@pytest.mark.long
def test_a_save_to_a_folder_that_is_not_shared_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    program = ["-c", SAVE, str(tmp_path / "shared" / "step_1")]
    setup = f"mount -t tmpfs none {tmp_path / 'shared'}"
    statuses, logs = on_two_hosts(tmp_path, program, setup=setup)
    assert statuses == [1, 1], logs
    assert all("rank 1 (host1) cannot see .step_1.incoming-" in log for log in logs), logs
    assert not list((tmp_path / "shared").iterdir())


@pytest.mark.soak
def test_steps_on_several_hosts_are_measured_beside_torchs(tmp_path: Path) -> None:
    numbers = {"hosts": 2, "ranks": 2, "blocks": 2, "width": 64, "steps": 1}
    numbers |= {"vocabulary": 64, "batch": 1, "length": 8, "variants": bench_hosts.VARIANTS}
    rows = bench_hosts.measured(numbers, "1gbit").rows
    sent = {row[0]: row[3] for row in rows}
    assert list(sent) == bench_hosts.VARIANTS
    assert sent["fullshard fully_shard"] < 0.6 * sent["torch fully_shard"]


@pytest.mark.soak
def test_a_run_on_two_hosts_goes_on_after_faults_with_the_losses_of_one_without(
    tmp_path: Path,
) -> None:
    result = Result("host_restarts", "", "")
    bench_host_restarts.soak(result, tmp_path, num_faults=2, num_steps=30, patience_s=20)
    assert result.tables[0].rows[-1] == ["losses that differ", 0]


@pytest.mark.soak
def test_a_cut_of_a_link_with_a_delay_and_losses_costs_only_time() -> None:
    result = Result("host_faults", "", "")
    with bench_host_faults.rounds_on_hosts(60, delay_ms=5, loss=0.01) as rounds:
        bench_host_faults.cuts(result, rounds, [3.0])
    assert result.tables[0].rows[0][2:] == ["all ranks end with status 0", "same"]


@pytest.mark.soak
@pytest.mark.long
def test_hosts_that_cannot_reach_each_other_say_which_variable_helps(tmp_path: Path) -> None:
    names = tmp_path / "hosts"  # as Debian installs them
    names.write_text("127.0.0.1 localhost\n127.0.1.1 host1\n10.78.0.1 host0\n")
    setup = f"mount --bind {names} /etc/hosts"
    statuses, logs = on_two_hosts(tmp_path, ["-c", JOIN], setup=setup)
    assert statuses == [0, 0], logs
    for log in logs:
        assert (
            "host1 has no network interface missing0, which GLOO_SOCKET_IFNAME asks for. "
            "Set it to one of eth0."
        ) in log
        assert "host1: other hosts cannot reach 127.0.1.1" in log
        assert (
            "Set GLOO_SOCKET_IFNAME to the interface that leads to the other hosts (one of eth0)"
            in log
        )
