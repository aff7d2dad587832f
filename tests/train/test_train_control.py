"""What ranks of `fullshard train` and their launcher tell each other, without starting them."""

import functools
import itertools
import json
import os
import signal
import socket
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from fullshard.errors import CheckpointError, ConfigError, OtherRankError
from fullshard.processes import end_with_parent, start_of
from fullshard.resilience.watcher import RankFailedError
from fullshard_train.control import Process, StatusFolder, StopRequest, end_with_launcher
from fullshard_train.output import RunFolder
from fullshard_train.run import exit_status_after
from tests.support.killed import forked

LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242"


def test_what_ranks_reported_before_a_restart_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = StatusFolder(tmp_path)
    assert status.error is None
    assert list(status.ready()) == []
    status.report_ready()
    status.report_error("nothing appears under this name")
    status.report_stopped()
    assert status.error == "nothing appears under this name"
    assert status.was_stopped
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "10")
    (tmp_path / "ready-9-1-2").touch()  # of a process that is gone
    status.report_ready()
    assert status.error is None
    assert not status.was_stopped
    assert list(status.ready()) == [(os.getpid(), start_of(os.getpid()))]
    status.report_error("another")
    assert status.error == "another"


@pytest.mark.parametrize(
    "numbers, ends_by",
    [
        # Slurm sends SIGTERM to all processes, and torchrun sends it on to its ranks.
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGINT], signal.SIGINT),
        ([signal.SIGINT, signal.SIGTERM], signal.SIGTERM),
        ([signal.SIGINT, signal.SIGINT], signal.SIGINT),
    ],
)
def test_a_second_signal_ends_a_rank_unless_both_ask_it_to_save(
    numbers: list[signal.Signals], ends_by: signal.Signals
) -> None:
    def rank() -> None:
        with StopRequest() as stop:
            stop.neighbors = ()
            for number in numbers:
                signal.raise_signal(number)
            threading.Event().wait(60)

    assert forked(rank) == 128 + ends_by


@pytest.mark.parametrize("neighbors", [None, [(os.getpid(), "0")]], ids=["unknown", "gone"])
def test_a_rank_that_has_nobody_to_save_with_ends_when_it_is_asked_to(
    neighbors: list[Process] | None,
) -> None:
    def rank() -> None:
        with StopRequest() as stop:
            stop.neighbors = neighbors
            signal.raise_signal(signal.SIGTERM)
            threading.Event().wait(15)

    assert forked(rank) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(LOST),
        CheckpointError(f"save_async: the save before this one failed: {LOST}"),
        OtherRankError(f"save runs/a/step_6: failed on rank 1: RuntimeError: {LOST}"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_lost_connection_is_no_refusal(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = StatusFolder(tmp_path)
    assert exit_status_after(error, status) == 1
    assert status.error is None
    assert "lost its connection to another rank" in capsys.readouterr().err


def test_a_rank_whose_store_is_gone_has_lost_its_connection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)
    client.set("key", "value")
    del server
    with pytest.raises(dist.DistNetworkError) as caught:
        client.get("key")
    assert exit_status_after(caught.value, StatusFolder(tmp_path)) == 1
    said = capsys.readouterr().err
    assert "lost its connection to another rank: " in said
    assert said.count("\n") == 1


def test_a_refusal_is_reported_once_and_not_restarted(tmp_path: Path) -> None:
    status = StatusFolder(tmp_path)
    assert exit_status_after(OtherRankError("train: failed on rank 1: no"), status) == 0
    assert status.error is None
    assert exit_status_after(RankFailedError("rank 1: failed"), status) == 1
    assert exit_status_after(ConfigError("no"), status) == 0
    assert status.error == "no"
    assert exit_status_after(RankFailedError("rank 1: failed"), status) == 0
    with pytest.raises(RuntimeError, match="unexpected"):
        exit_status_after(RuntimeError("unexpected"), status)


def test_a_rank_whose_launcher_died_while_it_started_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLSHARD_STATUS_FOLDER", "")
    monkeypatch.setenv("FULLSHARD_LAUNCHER", "")

    def launch(out: int, is_killed: bool, is_server: bool) -> None:
        """Be the launcher, or the server that it has started."""
        assert StatusFolder(tmp_path).export()["FULLSHARD_LAUNCHER"] == str(os.getpid())
        if is_server:
            monkeypatch.setenv("FULLSHARD_LAUNCHER", "1")
        launcher, child = os.getpid(), os.fork()
        if child == 0:
            while is_killed and os.getppid() == launcher:
                os.sched_yield()
            end_with_parent(launcher) if is_server else end_with_launcher()
            os.write(out, b"trains")
            os._exit(0)
        if is_killed:
            os.kill(launcher, signal.SIGKILL)
        os.waitpid(child, 0)

    for is_killed, is_server in itertools.product((False, True), repeat=2):
        readable, writable = os.pipe()
        end = forked(functools.partial(launch, writable, is_killed, is_server))
        assert end == (-signal.SIGKILL if is_killed else 0)
        os.close(writable)
        assert os.read(readable, 10) == (b"" if is_killed else b"trains")
        os.close(readable)


def test_a_second_living_writer_is_refused_and_a_dead_one_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    assert forked(RunFolder(path).lock) == 0  # it ends without unlocking
    assert (path / "lock.json").exists()
    held = RunFolder(path)
    held.lock()
    words = f"in use by process {os.getpid()} on {socket.gethostname()}; wait"

    def second() -> None:
        with pytest.raises(ConfigError, match=words):
            RunFolder(path).lock()

    assert forked(second) == 0
    assert forked(RunFolder(path).unlock) == 0  # not its own
    assert (path / "lock.json").exists()
    held.unlock()
    assert not (path / "lock.json").exists()
    (path / "lock.json").write_text('{"host": ')  # its writer died
    assert forked(RunFolder(path).lock) == 0


def test_the_lock_of_another_host_is_replaced_by_a_restarted_rank_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    folder = RunFolder(tmp_path)
    folder.lock()
    lock = tmp_path / "lock.json"
    own = json.loads(lock.read_text())
    lock.write_text(json.dumps({**own, "host": "elsewhere", "machine": "0" * 16}))
    RunFolder(tmp_path).lock()
    lock.write_text(json.dumps({**own, "host": "elsewhere", "machine": "0" * 16}))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    with pytest.raises(ConfigError, match="on elsewhere"):
        RunFolder(tmp_path).lock()
    lock.write_text(json.dumps({**own, "boot": "before", "machine": "0" * 16}))
    RunFolder(tmp_path).lock()
