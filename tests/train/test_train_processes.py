"""`fullshard train` as processes: ranks that are killed, Ctrl-C, bad input."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from click.testing import CliRunner

import soak
from fullshard.cli import DEBUG
from fullshard.cli.commands import fullshard
from fullshard.state import latest
from fullshard.testing import Rank, pool
from fullshard_train.config_file import config_of
from fullshard_train.control import StopRequest
from fullshard_train.run import Run
from fullshard_train.world import World
from tests.support.made_once import made_once
from tests.support.programs import has_ended
from tests.support.tiny_run import TEXT, losses

COMMAND = [sys.executable, "-m", "fullshard"]
TIMEOUT_S = 240
DEVICE = os.environ.get("DEVICE", "cpu")  # of the runs that are killed


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    def make(folder: Path) -> None:
        (folder / "text.txt").write_text(TEXT)

    return str(made_once(tmp_path_factory, "text", make) / "text.txt")


@pytest.fixture(scope="module")
def undisturbed(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happened to."""

    def make(folder: Path) -> None:
        asked = CliRunner().invoke(
            fullshard, [*options(text, folder / "run"), "--device", "cpu", "--print-config"]
        )
        assert asked.exit_code == 0, asked.output
        (folder / "config.toml").write_text(asked.stdout)
        pool(2).run(train_on, folder / "config.toml")

    return made_once(tmp_path_factory, "undisturbed_run", make) / "run"


def train_on(rank: Rank, file: Path) -> None:
    """Do what the configuration of a run asks for, from its newest checkpoint if there is one."""
    config = config_of(file, {})
    is_there = Path(config.run.out).exists()
    config = replace(config, run=replace(config.run, resume=is_there))
    world = World(rank.rank, rank.size, rank.rank, rank.size, rank.device)
    assert Run(config, world).run(StopRequest()) is True
    dist.barrier()  # the first rank writes when the others are done


def options(text: str, out: Path, *more: str) -> list[str]:
    """A tiny run of 14 steps with a checkpoint after every third."""
    run = ["--model", "tiny", "--sequence", "32", "--batch", "2", "--steps", "14", "--warmup", "2"]
    run += ["--save-every", "3", "--sample-tokens", "0", "--no-report", "--device", DEVICE]
    return ["train", *run, "--data", text, "--out", str(out), *more]


@contextmanager
def started(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_step(process: subprocess.Popen[str], step: int, there: Path | None = None) -> None:
    """Read what the run says until it has done this step, and something is there."""
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("step") or int(line.split()[1].split("/")[0]) < step:
            continue
        if there is None or there.exists():
            return
    raise AssertionError(f"the run ended too early: {process.communicate()}")


def wait_for(process: subprocess.Popen[str], said: str) -> None:
    """Read what the run says until it says this."""
    assert process.stdout is not None
    if not any(said in line for line in process.stdout):
        raise AssertionError(f"the run ended without {said!r}: {process.communicate()}")


@pytest.mark.soak
@pytest.mark.long
def test_a_run_that_is_left_resumed_and_killed_five_times_has_the_losses_of_an_undisturbed_one(
    text: str, undisturbed: Path, tmp_path: Path
) -> None:
    expected = losses(undisturbed)
    assert len(expected) == 14

    folder = tmp_path / "run"
    with started(options(text, folder)) as process:
        wait_for_step(process, 4)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, errors
    assert "--resume" in said
    done = len(losses(folder))
    assert 4 <= done < 14
    assert (folder / "checkpoints" / f"step_{done}").is_dir()

    again = ["train", "--config", str(folder / "config.toml"), "--resume", "--max-restarts", "30"]
    with started(again) as process:
        kills = list(soak.disturb(process, 5, 0, [signal.SIGKILL], longest_s=1.0))
        said, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    assert len(kills) == 5
    assert "Traceback" not in errors
    assert losses(folder) == expected


@pytest.mark.soak
@pytest.mark.long
def test_a_second_ctrl_c_leaves_at_once(text: str, tmp_path: Path) -> None:
    with started(options(text, tmp_path / "run", "--steps", "100000")) as process:
        wait_for_step(process, 1)
        ranks = soak.ranks_of(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGSTOP)  # so that it cannot save
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "interrupt again to stop immediately" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert all(has_ended(pid, within_s=20) for pid in ranks)


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive)]
)
def test_a_rank_that_dies_or_is_stopped_without_restarts_left_ends_the_run(
    number: signal.Signals, text: str, tmp_path: Path
) -> None:
    with started(options(text, tmp_path / "run", "--max-restarts", "0")) as process:
        wait_for_step(process, 2)
        ranks = soak.ranks_of(process.pid)
        os.kill(ranks[0], number)
        assert all(has_ended(pid, within_s=6) for pid in ranks)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    errors, *_ = errors.partition("nanobind: leaked")  # Triton 3.9 says so when a process ends
    assert "rank 0 failed (SIGKILL); its output is above" in errors.splitlines()[-1]


# The moments of a run: what to wait for, and for how long to go on, at most.
MOMENTS = {"forward": 0.5, "save": 0.0, "load": 1.0, "start": 4.0, "sample": 0.3, "report": 0.3}
SIGNALS = (signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT)
NUM_RANKS = "1" if DEVICE == "cuda" else "2"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", NUM_RANKS, "-m"]
# `KILLS=30 DEVICE=cuda pytest ...` tries 30 moments on a GPU.
KILLS = [(n, [*MOMENTS][n % len(MOMENTS)]) for n in range(int(os.environ.get("KILLS", "2")))]


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize("number, moment", KILLS, ids=[f"{n}-{moment}" for n, moment in KILLS])
def test_nothing_of_a_run_outlives_its_launcher_and_what_it_saved_is_whole(
    number: int, moment: str, text: str, undisturbed: Path, tmp_path: Path
) -> None:
    chosen, folder, more = random.Random(number), tmp_path / "run", ["--steps", "1000"]
    if moment == "load":
        shutil.copytree(undisturbed, folder)
        more += ["--resume"]
    elif moment in ("sample", "report"):
        more = ["--steps", "2", "--sample-tokens", "200", "--report"]
    launcher = [*TORCHRUN, "fullshard"] if number % 4 == 2 else COMMAND[1:]
    with followed([*launcher, *options(text, folder, *more)], tmp_path / "log") as (process, left):
        when = {
            "forward": (folder / "metrics.jsonl").exists,
            "load": (folder / "lock.json").exists,
            "save": lambda: any((folder / "checkpoints").glob(".step_*.incoming-*")),
            "sample": lambda: "saving step 2" in (tmp_path / "log").read_text(),
            "report": (folder / "sample.txt").exists,
        }
        while not when.get(moment, lambda: True)():
            assert process.poll() is None, (tmp_path / "log").read_text()
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
        with suppress(subprocess.TimeoutExpired):
            process.wait(chosen.uniform(0.0, MOMENTS[moment]))
        process.send_signal(chosen.choice(SIGNALS))
        process.wait(TIMEOUT_S)
        assert left(within_s=5) == {}
    saved = latest(folder / "checkpoints")
    assert saved == latest(folder / "checkpoints", verify=True)
    assert (saved is not None) >= (moment in ("load", "report"))


@contextmanager
def followed(
    arguments: list[str], log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[..., dict[int, str]]]]:
    """Start a run, and give a function that waits for all its processes to end; returns the others.

    They are known by a variable that they inherit: a rank has a session of its own.
    """
    mark = f"FULLSHARD_TEST_RUN={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")

    def processes() -> dict[int, str]:
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark.encode() in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
        return found

    def left(*, within_s: float) -> dict[int, str]:
        deadline = time.monotonic() + within_s
        while (found := processes()) and time.monotonic() < deadline:
            has_ended(next(iter(found)), within_s=0.5)
        return found

    with log.open("wb") as output:
        process = subprocess.Popen(
            ["env", "--default-signal", sys.executable, *arguments],  # a shell may ignore SIGQUIT
            stdout=output,
            stderr=output,
            env={**os.environ, name: value},
        )
    try:
        yield process, left
    finally:
        for pid in processes():
            os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    "wrong, said",
    [
        (["--mesh", "3x4"], "3x4 is a mesh of 12 ranks, but the run has 2"),
        (["--model", "tinny"], "neither a built-in size (tiny, 10m"),
        (["--data", "missing.txt"], "missing.txt does not exist"),
        (["--unit", "Blok"], "tiny has no module class 'Blok'"),
        (["--resume"], "contains no checkpoint; leave out --resume"),
        (
            ["--model", "405b", "--batch", "1", "--activation-checkpointing"],
            "405b does not fit into memory: each of 2 ranks needs ",
        ),
    ],
)
def test_what_cannot_be_done_is_one_sentence_before_a_rank_starts(
    text: str, tmp_path: Path, wrong: list[str], said: str
) -> None:
    ended = CliRunner().invoke(fullshard, options(text, tmp_path / "run", *wrong))
    assert ended.exit_code == 2, ended
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_refused_before_anything_is_started(text: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        arguments = options(text, tmp_path / "run", "--port", str(taken.getsockname()[1]))
        plain, debugged = [
            CliRunner(env={DEBUG: ""}).invoke(fullshard, [*arguments, *more])
            for more in ([], ["--debug"])
        ]
    assert [plain.exit_code, debugged.exit_code] == [2, 2]
    assert len(plain.stderr.splitlines()) == 1, plain.stderr
    assert "in use" in plain.stderr
    assert "Traceback" in debugged.stderr
    assert "in use" in debugged.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()
