"""What `fullshard` measures between hosts, and what it concludes for a run on them."""

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from fullshard.cli.commands import fullshard
from fullshard.plan import read_profile
from fullshard_train.report.record import read_record
from tests.support.hosts import DEVICE, Hosts
from tests.support.tiny_run import TEXT

TIMEOUT_S = 120.0
RATE, RATE_GBS = "40mbit", 0.005

pytestmark = pytest.mark.long


@pytest.mark.soak
def test_doctor_measures_between_the_hosts_of_a_launch(tmp_path: Path) -> None:
    logs = [tmp_path / f"{host}.log" for host in range(2)]
    path = tmp_path / "profile.json"
    program = ["-m", "fullshard", "doctor", "--profile", str(path)]
    with Hosts(2, RATE) as hosts:
        processes = [hosts.start(host, program, log=logs[host]) for host in range(2)]
        statuses = [process.wait(TIMEOUT_S) for process in processes]
    said = logs[0].read_text()
    assert statuses == [0, 0], said
    assert [line.split() for line in said.splitlines() if line.startswith("host")][-2:] == [
        ["host0", "0", "eth0"],
        ["host1", "1", "eth0"],
    ]
    found = re.search(r"between hosts: (\S+) GB/s into each", said)
    assert found is not None, said
    # The link allows no more, apart from its short bursts.
    assert 0 < float(found[1]) < 2 * RATE_GBS
    assert "between hosts" not in logs[1].read_text()
    profile = read_profile(path)
    assert profile.adapters_per_host == 1
    assert profile.network_gbs * profile.link_efficiency == pytest.approx(float(found[1]), rel=0.01)


@pytest.mark.soak
def test_train_predicts_steps_from_what_it_measures_between_hosts(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "run"
    asked = ["--model", "tiny", "--sequence", "32", "--steps", "2", "--device", DEVICE]
    asked += ["--sample-tokens", "0", "--save-every", "0"]
    program = ["-m", "fullshard", "train", *asked, "--data", str(tmp_path / "text.txt")]
    logs = [tmp_path / f"{host}.log" for host in range(2)]
    with Hosts(2, RATE) as hosts:
        processes = [
            hosts.start(host, [*program, "--out", str(out)], log=logs[host]) for host in range(2)
        ]
        statuses = [process.wait(TIMEOUT_S) for process in processes]
    assert statuses == [0, 0], logs[0].read_text()
    record = read_record(out)
    numel = int(re.search(r"tiny: ([\d,]+) parameters", logs[0].read_text())[1].replace(",", ""))
    # Half of the parameters cross for forward, for backward and as gradients; the profile of
    # a CPU alone would send them in a hundredth of that.
    least_s = 3 * numel * 4 / 2 / (2 * RATE_GBS * 1e9)
    assert record.predicted["step_s"] > least_s
    # What the interfaces have counted: each host has half, gathers once or twice, and reduces.
    assert [(each.name, each.ranks) for each in record.hosts] == [("host0", (0,)), ("host1", (1,))]
    for each in record.hosts:
        assert 2 < each.received_bytes / (numel * 4 / 2) < 4
        assert 2 < each.sent_bytes / (numel * 4 / 2) < 4
    page = (out / "report.html").read_text()
    assert "<b>host1</b>" in page


@pytest.mark.soak
def test_a_slow_host_is_named_with_what_it_costs(tmp_path: Path) -> None:
    """Each host has a core; on the second one, another program takes most of it."""
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "run"
    asked = ["--model", "tiny", "--sequence", "64", "--batch", "8", "--steps", "6"]
    asked += ["--device", "cpu", "--sample-tokens", "0", "--save-every", "0"]
    asked += ["--data", str(tmp_path / "text.txt"), "--out", str(out)]
    logs = [tmp_path / f"{host}.log" for host in range(2)]
    cores = sorted(os.sched_getaffinity(0))[:2]
    with Hosts(2) as hosts:
        processes = []
        for host, core in enumerate(cores):
            busy = "(while :; do :; done) & renice -n 5 $$" if host == 1 else ":"
            setup = f"taskset -pc {core} $$ && {{ {busy}; }}"
            program = ["-m", "fullshard", "train", *asked]
            processes.append(hosts.start(host, program, log=logs[host], setup=setup))
        statuses = [process.wait(TIMEOUT_S) for process in processes]
    assert statuses == [0, 0], logs[0].read_text()
    last = read_record(out).metrics[-1]
    assert last.slowest == "rank 1 (host1)"
    assert 0.1 * last.step_s < last.slowest_s < last.step_s
    attached = CliRunner().invoke(fullshard, ["doctor", "--attach", str(out)])
    assert f"the others wait {last.slowest_s:.2f} s of the last step's" in attached.output
    assert "Slowest" in (out / "report.html").read_text()


@pytest.mark.soak
def test_a_slow_link_is_named_with_what_it_costs(tmp_path: Path) -> None:
    """All hosts compute alike; the link of one has a tenth of the rate of the others."""
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "run"
    asked = ["--model", "tiny", "--sequence", "32", "--batch", "1", "--steps", "5"]
    asked += ["--device", "cpu", "--sample-tokens", "0", "--save-every", "0"]
    asked += ["--data", str(tmp_path / "text.txt"), "--out", str(out)]
    logs = [tmp_path / f"{host}.log" for host in range(3)]
    program = ["-m", "fullshard", "train", *asked]
    with Hosts(3, "200mbit") as hosts:
        hosts.set_rate(1, "20mbit")
        processes = [hosts.start(host, program, log=logs[host]) for host in range(3)]
        statuses = [process.wait(TIMEOUT_S) for process in processes]
    assert statuses == [0, 0, 0], logs[0].read_text()
    last = read_record(out).metrics[-1]
    assert last.slowest == "the link of host1"
    assert 0.1 * last.step_s < last.slowest_s < last.step_s
    attached = CliRunner().invoke(fullshard, ["doctor", "--attach", str(out)])
    assert "for the link of host1" in attached.output
