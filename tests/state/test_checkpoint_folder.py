"""Checkpoints as folders: they appear at once or not at all, are found, replaced and removed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.errors import CheckpointError, ConfigError
from fullshard.ranks import RankGroup
from fullshard.state.checkpoint.folder import (
    begin,
    checkpoints,
    commit,
    discard,
    located,
    prune,
    require_replaceable,
    staging_folder,
    whole_manifest,
    write_synced,
)
from fullshard.state.checkpoint.reader import latest, open_checkpoint, verify
from fullshard.state.checkpoint.save import save, write_checkpoint
from fullshard.state.stored import TensorSource
from fullshard.testing import Rank, RankPool, RanksFailed
from tests.support.stored import damage, holds, write

ID = "0123456789abcdef" * 2
ROOT = Path(__file__).parents[2]


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def staged(path: Path, seed: int = 0) -> Path:
    """A finished checkpoint that does not have its name yet."""
    write(path.with_name("elsewhere"), seed)
    staging = begin(path)
    for file in path.with_name("elsewhere").iterdir():
        shutil.copy(file, staging)
    shutil.rmtree(path.with_name("elsewhere"))
    return staging


def of_process(staging: Path, pid: int | None = None, started: str | None = None) -> Path:
    """A staging folder, as if another process of this machine wrote it."""
    *head, own_pid, own_started = staging.name.split("-")
    return staging.rename(
        staging.with_name("-".join([*head, str(pid or own_pid), started or own_started]))
    )


def leftovers(folder: Path) -> list[Path]:
    """What a folder holds beside whole checkpoints."""
    return sorted(set(folder.iterdir()) - set(checkpoints(folder)))


def dead_pid() -> int:
    """The pid of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


# Dying


NAMES = ["step_2", "step_1"]


@pytest.fixture(scope="module")
def all_deaths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[Path, int]]:
    """Folders with step_1 in which a save of step_2, or of step_1 again, ended in some way."""
    folder = tmp_path_factory.mktemp("deaths")
    command = [sys.executable, "-m", "tests.support.killed", str(folder), *NAMES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ends = json.loads(done.stdout)
    return {name: {folder / name / case: end for case, end in ends[name].items()} for name in NAMES}


@pytest.fixture(params=NAMES)
def deaths(request: pytest.FixtureRequest, all_deaths: Any) -> Any:
    return request.param, all_deaths[request.param]


def ended(deaths: Any, prefix: str) -> tuple[str, list[tuple[Path, int]]]:
    name, ends = deaths
    return name, [(path, end) for path, end in ends.items() if path.name.startswith(prefix)]


@pytest.mark.exhaustive
def test_a_save_killed_at_any_call_leaves_a_whole_checkpoint(deaths: Any) -> None:
    name, cases = ended(deaths, "call_")
    assert [end for _, end in cases] == [-signal.SIGKILL] * (len(cases) - 1) + [0]
    seen = []
    for folder, _ in cases:
        newest = latest(folder)
        assert newest is not None
        assert verify(newest) == []
        is_new = holds(newest, seed=-2)
        assert is_new or holds(newest, seed=-1)
        seen.append(is_new)
        # The folder of that name is whole, or the name is free and the one put aside is found.
        assert verify(located(folder / "step_1")) == []
        assert not (folder / name).exists() or whole_manifest(folder / name)
    assert seen == sorted(seen)  # once a save has the name, it keeps it
    assert len(set(seen)) == 2


def test_pruning_clears_what_a_killed_save_left(deaths: Any, tmp_path: Path) -> None:
    _, cases = ended(deaths, "call_")
    num_left = 0
    for case, _ in cases:
        folder = shutil.copytree(case, tmp_path / case.name)
        num_left += len(leftovers(folder))
        newest = latest(folder)
        prune(folder, keep=1)
        assert checkpoints(folder) == [newest]
        assert leftovers(folder) == []
    assert num_left > len(cases) / 2


def test_after_a_killed_save_the_next_one_works(deaths: Any, tmp_path: Path) -> None:
    name, cases = ended(deaths, "call_")
    for case, _ in cases[:-8:10] + cases[-8:]:
        folder = shutil.copytree(case, tmp_path / case.name)
        write(folder / name, seed=3, step=2)
        assert located(folder / name) == folder / name
        assert latest(folder) == folder / name
        assert holds(folder / name, seed=3)
        assert [each for each in folder.iterdir() if ".replaced-" in each.name] == []


def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_else(deaths: Any) -> None:
    _, cases = ended(deaths, "limit_")
    assert [end for _, end in cases] == [3] * len(cases)  # every save said so
    for folder, _ in cases:
        assert os.listdir(folder) == ["step_1"]
        assert holds(folder / "step_1", seed=-1)


def test_a_checkpoint_that_has_no_room_is_refused_before_it_is_written(tmp_path: Path) -> None:
    def read(box: Any) -> torch.Tensor:
        raise AssertionError("nothing is to be written")

    huge = TensorSource((2**50,), torch.float32, (), read)
    with pytest.raises(CheckpointError, match="too full for 4,503,599,627,370,496 bytes") as raised:
        write_checkpoint(tmp_path / "step_1", {"model.huge": huge})
    found, missing = (int(each.replace(",", "")) for each in re.findall(
        r"([\d,]+) are free, ([\d,]+) bytes are missing", str(raised.value))[0])  # fmt: skip
    assert found + missing == 2**52
    assert list(tmp_path.iterdir()) == []


# Appearing


def test_everything_is_on_disk_before_the_name_is(tmp_path: Path) -> None:
    path = tmp_path / "step_1"
    staging = staged(path)
    assert staging.name.startswith(".step_1.incoming-")
    assert latest(tmp_path) is None
    commit(staging, path)
    assert names(list(tmp_path.iterdir())) == ["step_1"]
    assert latest(tmp_path) == path
    write(path, seed=1)
    num_files = len(list(path.iterdir()))
    calls = []

    def noted(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in ("fsync", "rename", "unlink"):
            calls.append(function.__name__)

    sys.setprofile(noted)
    try:
        write(path)
    finally:
        sys.setprofile(None)
    expected = ["fsync"] * (num_files + 1) + ["rename", "rename", "fsync"]
    assert calls[: len(expected)] == expected


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path: Path) -> None:
    staging = staged(tmp_path / "step_1", seed=2)
    inside = staging / "step_1"
    write(inside, seed=1)
    with pytest.raises(OSError, match="Invalid argument"):
        commit(staging, inside)  # a folder cannot move into itself
    assert holds(inside, seed=1)


def test_one_put_aside_is_found_only_while_the_name_is_free(tmp_path: Path) -> None:
    path, aside = tmp_path / "step_1", tmp_path / f".step_1.replaced-{ID}"
    write(path, seed=1, step=1)
    path.rename(aside)
    assert located(path) == latest(tmp_path) == aside
    assert leftovers(tmp_path) == []
    assert holds(path, seed=1)
    write(path, seed=2, step=1)
    assert located(path) == latest(tmp_path) == path
    assert not aside.exists()
    write(aside, seed=3, step=9)
    assert located(path) == latest(tmp_path) == path
    assert leftovers(tmp_path) == [aside]
    shutil.rmtree(path)
    (aside / "__0_0.distcp").unlink()  # a broken one is not found
    assert located(path) == path
    assert latest(tmp_path) is None
    assert leftovers(tmp_path) == [aside]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(CheckpointError, match="other files"):
            require_replaceable(path)
        with pytest.raises(CheckpointError, match="other files"):
            write(path)
    assert sorted(os.listdir(tmp_path)) == ["file", "thesis.tex"]
    write(tmp_path / "step_1")
    (tmp_path / "step_1" / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        write(tmp_path / "step_1")


def test_an_empty_folder_a_broken_one_and_a_link_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "broken")
    (tmp_path / "broken" / "manifest.json").unlink()
    write(tmp_path / "target", seed=5)
    (tmp_path / "link").symlink_to("target")
    for name in ("empty", "broken", "link"):
        write(tmp_path / name, seed=1)
        assert holds(tmp_path / name, seed=1)
    assert holds(tmp_path / "target", seed=5)
    assert sorted(os.listdir(tmp_path)) == ["broken", "empty", "link", "target"]


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    staging = begin(tmp_path / "step_1")
    write_synced(staging / "__0_0.distcp", b"half")
    discard(staging)
    assert os.listdir(tmp_path) == []
    discard(staging)


def test_a_path_is_taken_from_where_the_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    assert staging_folder(Path(".")).name.startswith(".run.incoming-")
    assert staging_folder(Path(".")).parent == tmp_path
    write(Path("step_1"))
    assert latest(".") == Path("step_1")
    assert whole_manifest(located(Path("../run/step_1")))
    with pytest.raises(ConfigError, match="/ has no name"):
        staging_folder(Path("/"))


# Finding


def test_the_latest_is_by_step_and_then_by_time(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    for name, step in [("c", 10), ("a", 9), ("first", None), ("b", 10), ("second", None)]:
        write(tmp_path / name, step=step)
    assert names(checkpoints(tmp_path)) == ["first", "second", "a", "c", "b"]
    assert latest(str(tmp_path)) == tmp_path / "b"


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp", "rank_00000.pt", "manifest.json"])
def test_a_checkpoint_with_a_truncated_or_missing_file_is_not_whole(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path / "good", step=1)
    write(tmp_path / "bad", step=2)
    file = tmp_path / "bad" / name
    os.truncate(file, file.stat().st_size - 1)
    for _ in range(2):
        assert whole_manifest(tmp_path / "bad") is None
        assert latest(tmp_path) == tmp_path / "good"
        assert names(leftovers(tmp_path)) == ["bad"]
        file.unlink(missing_ok=True)


def test_links_and_foreign_folders_are_not_listed(tmp_path: Path) -> None:
    write(tmp_path / "step_1")
    (tmp_path / "newest").symlink_to("step_1")
    (tmp_path / "by_torch").mkdir()
    shutil.copy(tmp_path / "step_1" / ".metadata", tmp_path / "by_torch")
    (tmp_path / "logs").mkdir()
    (tmp_path / "file").write_text("")
    assert names(checkpoints(tmp_path)) == ["step_1"]
    assert prune(tmp_path, keep=1) == []
    assert whole_manifest(tmp_path / "newest")


# Removing


def test_pruning_keeps_the_newest_by_count(tmp_path: Path) -> None:
    for step in (3, 1, 2, 10):
        write(tmp_path / f"step_{step}", step=step)
    assert names(prune(tmp_path, keep=3)) == ["step_1"]
    assert names(prune(str(tmp_path), keep=2)) == ["step_2"]
    assert prune(tmp_path, keep=7) == []
    assert prune(tmp_path, keep=1, pinned="step_3") == []
    assert names(prune(tmp_path, keep=1)) == ["step_3"]
    assert os.listdir(tmp_path) == ["step_10"]


@pytest.mark.parametrize("keep", [0, -1, True, 1.0, None])
def test_the_last_whole_one_is_never_pruned(tmp_path: Path, keep: Any) -> None:
    write(tmp_path / "step_1", step=1)
    with pytest.raises(ConfigError, match="at least 1"):
        prune(tmp_path, keep=keep)
    prune(tmp_path, keep=1)
    assert whole_manifest(tmp_path / "step_1")


def test_a_damaged_one_neither_counts_nor_goes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path / f"step_{step}", step=step)
    (tmp_path / "step_3" / "__0_0.distcp").unlink()
    assert names(prune(tmp_path, keep=1)) == ["step_1"]
    assert sorted(os.listdir(tmp_path)) == ["step_2", "step_3"]


def test_one_put_aside_counts_as_the_one_it_is(tmp_path: Path) -> None:
    write(tmp_path / "step_1", step=1)
    write(tmp_path / "step_2", step=2)
    (tmp_path / "step_2").rename(tmp_path / f".step_2.replaced-{ID}")
    assert names(prune(tmp_path, keep=1)) == ["step_1"]
    assert holds(tmp_path / "step_2", seed=0)
    write(tmp_path / "step_3", step=3)
    assert names(prune(tmp_path, keep=1)) == [f".step_2.replaced-{ID}"]
    assert os.listdir(tmp_path) == ["step_3"]


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    staging = begin(tmp_path / "step_1")
    assert leftovers(tmp_path) == [staging]
    assert prune(tmp_path, keep=1) == []
    assert staging.is_dir()


def test_what_a_dead_process_wrote_is_removed(tmp_path: Path) -> None:
    staging = begin(tmp_path / "step_1")
    staging = of_process(staging, pid=dead_pid())
    assert prune(tmp_path, keep=1) == [staging]
    assert os.listdir(tmp_path) == []
    staging = begin(tmp_path / "step_1")  # another process with the same number is another
    staging = of_process(staging, started="1")
    assert prune(tmp_path, keep=1) == [staging]


@pytest.mark.parametrize("process", ["", f"-{ID[:16]}-1-1"])
def test_of_another_machine_only_what_is_a_day_old_is_removed(tmp_path: Path, process: str) -> None:
    staging = tmp_path / f".step_1.incoming-{ID}{process}"
    staging.mkdir()
    write_synced(staging / "__0_0.distcp", b"half")
    os.utime(staging, (0, 0))
    assert prune(tmp_path, keep=1) == []
    yesterday = time.time() - 25 * 3600
    os.utime(staging / "__0_0.distcp", (yesterday, yesterday))
    assert prune(tmp_path, keep=1) == [staging]
    assert os.listdir(tmp_path) == []


def test_a_removal_that_was_cut_short_is_finished_by_the_next(tmp_path: Path) -> None:
    write(tmp_path / "step_1", step=1)
    write(tmp_path / "step_2", step=2)
    gone = tmp_path / f".step_1.replaced-{ID}"
    (tmp_path / "step_1").rename(gone)
    (gone / "__0_0.distcp").unlink()
    assert checkpoints(tmp_path) == [tmp_path / "step_2"]
    assert located(tmp_path / "step_1") == tmp_path / "step_1"
    assert prune(tmp_path, keep=1) == [gone]
    assert os.listdir(tmp_path) == ["step_2"]


def test_latest_compares_content_if_asked(tmp_path: Path) -> None:
    write(tmp_path / "a", step=1)
    write(tmp_path / "b", step=2)
    damage(tmp_path / "b" / "__0_0.distcp")
    assert latest(tmp_path) == tmp_path / "b"
    assert latest(tmp_path, verify=True) == tmp_path / "a"
    write(tmp_path / "b", step=2)
    assert latest(tmp_path, verify=True) == tmp_path / "b"


def test_two_writers_of_one_name_both_end_and_leave_one_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "best"

    def save_often(writer: int) -> None:
        for number in range(100):
            staging = begin(path)
            (staging / "manifest.json").write_text(f"{writer}.{number}")
            commit(staging, path)

    with ThreadPoolExecutor(3) as threads:
        for each in [threads.submit(save_often, writer) for writer in range(3)]:
            each.result()
    assert [each.name for each in tmp_path.iterdir()] == ["best"]
    assert (path / "manifest.json").read_text().endswith(".99")


def test_a_checkpoint_that_is_moved_or_replaced_while_it_is_read_is_not_called_damaged(
    tmp_path: Path,
) -> None:
    path = tmp_path / "step_1"
    write(path)
    opened = open_checkpoint(path)
    write(path, seed=1)
    with (
        pytest.raises(CheckpointError, match="another one was saved under its name while"),
        opened.unchanged(),
    ):
        opened.read("model.weight")  # without an error, but not what was opened
    opened = open_checkpoint(path)
    path.rename(tmp_path / "step_2")
    with (
        pytest.raises(CheckpointError, match="it was moved or removed while"),
        opened.unchanged(),
    ):
        opened.read("model.weight")


def save_without_the_other(rank: Rank, path: Path) -> None:
    if rank.rank == 1:
        RankGroup.run_first = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    save(path, nn.Linear(2, 2))


@pytest.mark.exhaustive
def test_a_rank_that_dies_while_the_folder_is_made_leaves_nothing_and_is_explained(
    tmp_path: Path,
) -> None:
    with RankPool(2) as ranks, pytest.raises(RanksFailed, match="another rank was lost while all"):
        ranks.run(save_without_the_other, tmp_path / "step_1")
    assert not list(tmp_path.iterdir())
