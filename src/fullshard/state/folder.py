"""Checkpoints as folders: how one appears under its name, is found, replaced and removed.

A checkpoint is written into a folder beside its place and gets its name by renaming, which the
file system does at once or not at all. Whatever dies in between, these are all the folders there
can be beside a checkpoint "step_10":

    step_10                     whole, or damaged by something else than us
    .step_10.incoming-<id>      being written, or left by a process that died
    .step_10.replaced-<id>      the one before: put aside for a moment while the next takes the name
    .step_10.removed-<id>       on its way out
    .step_10.owner-<id>         a file: which process writes incoming-<id>

Only the first and third are ever loaded, the third only while the first does not exist.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from fullshard.errors import CheckpointError, ConfigError
from fullshard.state.manifest import INDEX, MANIFEST, Manifest, read_manifest

_BESIDE = re.compile(r"\.(?P<name>.+)\.(?P<state>incoming|replaced|removed)-[0-9a-f]{32}")
_OWN_FILES = re.compile(r"__\d+_\d+\.distcp|rank_\d+\.pt|\.metadata(\.tmp)?|manifest\.json")
# For writers on another machine, of which nothing else can be known.
_ABANDONED_S = 24 * 3600


# Writing one


def staging_folder(path: Path, id: str) -> Path:
    """Where the checkpoint `path` is written before it is whole."""
    return _beside(path, "incoming", id)


def begin(path: Path, id: str) -> Path:
    """Make the staging folder, and say which process writes there; one process does this."""
    staging = staging_folder(path, id)
    require_replaceable(path)
    staging.parent.mkdir(parents=True, exist_ok=True)
    # First, so that nobody finds a folder of which it is not known that it is being written.
    try:
        write_synced(_owner_file(staging), json.dumps(_this_process()).encode())
        staging.mkdir()
    except BaseException:
        _owner_file(staging).unlink(missing_ok=True)
        raise
    return staging


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that is on disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def commit(staging: Path, path: Path) -> None:
    """Give a finished checkpoint its name, in place of one that has it.

    All its files are on disk before the name is. Of the two, one is whole at any moment: under the
    name or, for as long as a rename takes, put aside, where `located` and `latest` find it.
    """
    path = _absolute(path)
    if not is_whole(staging):
        raise CheckpointError(
            f"{path}: all files and the manifest must be written before a checkpoint gets its "
            f"name, found {staging} unfinished; nothing appears under this name."
        )
    require_replaceable(path)
    for file in sorted(staging.iterdir()):
        sync(file)
    sync(staging)
    aside = _beside(path, "replaced", uuid.uuid4().hex)
    is_replacing = os.path.lexists(path)
    if is_replacing:
        path.rename(aside)
    try:
        staging.rename(path)
    except BaseException:
        if is_replacing:
            aside.rename(path)
        raise
    sync(path.parent)
    _owner_file(staging).unlink(missing_ok=True)
    if aside.is_symlink():
        aside.unlink()
    for old in _found_beside(path, "replaced"):
        _remove(old)


def discard(staging: Path) -> None:
    """Remove what was written of a checkpoint that will not be finished."""
    if not is_unfinished(staging):
        raise ConfigError(
            f"discard: a staging folder is expected, found {staging}; `prune` removes checkpoints."
        )
    _remove(staging)
    _owner_file(staging).unlink(missing_ok=True)


def require_replaceable(path: Path) -> None:
    """Raise if something that is not a checkpoint has the name: it would be lost."""
    path = _absolute(path)
    if path.is_symlink() or not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: the folder of a checkpoint, or nothing, is expected, found a file; choose "
            "another name."
        )
    foreign = sorted(f.name for f in path.iterdir() if _OWN_FILES.fullmatch(f.name) is None)
    if foreign:
        raise CheckpointError(
            f"{path}: a checkpoint, or nothing, is expected where one is saved, found other files "
            f"({', '.join(foreign[:5])}), which would be lost; choose a name inside, such as "
            f"{path / 'step_0'}."
        )


def is_unfinished(path: Path) -> bool:
    """Whether a folder is one that is, or was, being written or removed."""
    match = _BESIDE.fullmatch(path.name)
    return match is not None and match["state"] != "replaced"


# Finding one


def is_whole(path: Path) -> bool:
    """Whether a checkpoint has its manifest and all files in their sizes. Opens no tensors."""
    return _whole_manifest(path) is not None


def located(path: Path) -> Path:
    """Where the checkpoint of this name is.

    It is `path`, unless a process died while it replaced the checkpoint: then it is the one that
    was put aside.
    """
    path = _absolute(path)
    if not os.path.lexists(path):
        aside = [each for each in _found_beside(path, "replaced") if is_whole(each)]
        if aside:
            return aside[-1]
    return path


def checkpoints(folder: str | Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first: by step, then by time."""
    found = []
    for path in _folders(Path(folder)):
        match = _BESIDE.fullmatch(path.name)
        if match is not None and not _is_only_one(path, match):
            continue
        manifest = _whole_manifest(path)
        if manifest is not None:
            found.append((_age(manifest), path.name, path))
    return [path for _, _, path in sorted(found)]


def latest(folder: str | Path) -> Path | None:
    """The newest whole checkpoint in a folder, or None."""
    found = checkpoints(Path(folder))
    return found[-1] if found else None


def leftovers(folder: Path) -> list[Path]:
    """What is in a folder of saves that were not finished, and of checkpoints that are damaged."""
    return [path for path in _folders(folder) if _is_leftover(path)]


# Removing some


def prune(folder: str | Path, keep: int) -> list[Path]:
    """Remove all whole checkpoints but the newest `keep`, and what dead processes left behind.

    Damaged checkpoints are left for a person to look at, and do not count. Returns what was
    removed.
    """
    if type(keep) is not int or keep < 1:
        raise ConfigError(
            f"prune: keep must be at least 1, found {keep!r}; the last whole one stays."
        )
    folder = Path(folder)
    removed = checkpoints(folder)[:-keep]
    removed += [path for path in leftovers(folder) if _is_abandoned(path)]
    for path in removed:
        _remove(path)
        if _BESIDE.fullmatch(path.name) is not None:
            _owner_file(path).unlink(missing_ok=True)
    return removed


def _remove(path: Path) -> None:
    """Remove a folder. One that can be found loses its name first: it is never half there."""
    match = _BESIDE.fullmatch(path.name)
    if match is None or match["state"] == "replaced":
        name = path.name if match is None else match["name"]
        gone = _beside(path.with_name(name), "removed", uuid.uuid4().hex)
        try:
            path.rename(gone)
        except FileNotFoundError:
            return  # another process removed it
        path = gone
    shutil.rmtree(path, ignore_errors=True)


# What folders say


def _beside(path: Path, state: str, id: str) -> Path:
    path = _absolute(path)
    return path.parent / f".{path.name}.{state}-{id}"


def _absolute(path: Path) -> Path:
    """With a name of its own, also for "." and "..". A link stays a link."""
    found = Path(os.path.abspath(path))
    if not found.name:
        raise ConfigError(f"{path}: a folder with a name is expected, found {found}; choose one.")
    return found


def _found_beside(path: Path, state: str) -> list[Path]:
    """Folders of a name in a state, in the order in which they were put there."""
    found = []
    for each in _folders(path.parent):
        match = _BESIDE.fullmatch(each.name)
        if match is not None and (match["name"], match["state"]) == (path.name, state):
            found.append(each)
    return sorted(found, key=_changed_ns)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_ctime_ns
    except FileNotFoundError:
        return 0  # another process removed it


def _folders(folder: Path) -> Iterator[Path]:
    """Those that are not links: what a link leads to is listed where it is."""
    try:
        found = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from (path for path in found if path.is_dir() and not path.is_symlink())


def _whole_manifest(path: Path) -> Manifest | None:
    try:
        manifest = read_manifest(path)
        sizes = {name: (path / name).stat().st_size for name in manifest.files}
    except (CheckpointError, OSError):
        return None
    return manifest if sizes == manifest.files and INDEX in sizes else None


def _age(manifest: Manifest) -> tuple[int, datetime]:
    step = -1 if manifest.step is None else manifest.step
    return step, datetime.fromisoformat(manifest.created)


def _is_only_one(path: Path, match: re.Match[str]) -> bool:
    """Of a folder beside a name: whether it is what the name stands for."""
    return match["state"] == "replaced" and located(path.with_name(match["name"])) == _absolute(
        path
    )


def _is_leftover(path: Path) -> bool:
    match = _BESIDE.fullmatch(path.name)
    if match is not None:
        return not (_is_only_one(path, match) and is_whole(path))
    # Folders that torch or other programs wrote are no concern of ours.
    is_ours = (path / MANIFEST).exists() or (path / "rank_00000.pt").exists()
    return is_ours and not is_whole(path)


def _is_abandoned(path: Path) -> bool:
    """Whether a leftover is an unfinished one that nobody works on."""
    match = _BESIDE.fullmatch(path.name)
    if match is None:
        return False
    if match["state"] != "incoming":
        return True
    owner = _read_owner(path)
    here = _this_process()
    if owner is not None and owner.get("machine") == here["machine"]:
        return owner.get("started") != _start_of(owner.get("pid"))
    return time.time() - _last_change(path) > _ABANDONED_S


def _last_change(path: Path) -> float:
    times = []
    for each in (path, *path.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            times.append(each.stat().st_mtime)
    return max(times, default=0.0)


# Who writes


def _owner_file(folder: Path) -> Path:
    head, _, id = folder.name.rpartition("-")
    return folder.with_name(f"{head.rpartition('.')[0]}.owner-{id}")


def _read_owner(staging: Path) -> dict[str, object] | None:
    try:
        found = json.loads(_owner_file(staging).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _this_process() -> dict[str, object]:
    """Process ids mean something within one boot and one namespace of a machine only."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        machine = uuid.uuid4().hex  # none that anybody could ask about
    return {"machine": machine, "pid": os.getpid(), "started": _start_of(os.getpid())}


def _start_of(pid: object) -> str | None:
    """When a process started, in the kernel's clock; None if there is none."""
    if type(pid) is not int:
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    is_running = fields[0] not in ("Z", "X")  # dead, though nobody has asked for its status yet
    return fields[19] if is_running else None


def sync(path: Path) -> None:
    """Have what the system keeps of a file or folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
