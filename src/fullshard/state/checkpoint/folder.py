"""The folders of checkpoints: how one appears under its name, is found, and is removed.

A checkpoint is written into a folder next to its place and then renamed, which the file system does
completely or not at all. Whatever dies in between, only these folders can exist for a checkpoint
"step_10":

    step_10                             whole, or damaged by something other than fullshard
    .step_10.incoming-<id>-<process>    being written, or left by a process that died
    .step_10.replaced-<id>              on its way out; put aside while the next takes the name

Only the first and third are ever loaded, the third only while it is whole and the first does not
exist.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import uuid
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from fullshard.errors import CheckpointError, ConfigError
from fullshard.processes import machine_id, start_of
from fullshard.state.checkpoint.index import INDEX
from fullshard.state.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from fullshard.state.plain import rank_file

# Writing a folder

_BESIDE = re.compile(
    r"\.(?P<name>.+)\.(?P<state>incoming|replaced)-[0-9a-f]{32}"
    r"(-(?P<machine>[0-9a-f]{16})-(?P<pid>\d+)-(?P<started>\d+))?"
)
_OWN_FILES = re.compile(r"__\d+_\d+\.distcp|rank_\d+\.pt|\.metadata(\.tmp)?|manifest\.json")
# For writers on another machine, about which nothing else can be known.
_ABANDONED_S = 24 * 3600


def staging_folder(path: Path) -> Path:
    """The folder that becomes `path` once it is whole; its name says which process writes it."""
    pid = os.getpid()
    return Path(f"{_beside(path, 'incoming')}-{machine_id()}-{pid}-{start_of(pid) or 0}")


def begin(path: Path, num_bytes: int = 0) -> Path:
    """Make the staging folder of a checkpoint of this size; one process does this."""
    require_replaceable(path)
    require_room(path, num_bytes)
    staging = staging_folder(path)
    staging.mkdir(parents=True)
    return staging


def require_room(path: Path, num_bytes: int) -> None:
    """Raise if the disk that a path is on, or will be on, has less free space."""
    folder = next(each for each in _absolute(path).parents if each.is_dir())
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise CheckpointError(
            f"{path}: the disk is too full for {num_bytes:,} bytes: {free:,} are free, "
            f"{num_bytes - free:,} bytes are missing; make room, or choose another folder."
        )


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that is on disk when this returns."""
    path.write_bytes(content)
    sync(path)


def sync(path: Path) -> None:
    """Flush what the system caches of a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(staging: Path, path: Path) -> None:
    """Give a finished checkpoint its name, replacing one that has it.

    The writers of its files have synced them: they are on disk before the name is. One of the two
    checkpoints is whole at any moment: under the name or, for as long as a rename takes, put aside,
    where `located` and `latest` find it.
    """
    path = _absolute(path)
    require_replaceable(path)
    sync(staging)
    aside: list[Path] = []
    while True:
        with suppress(FileNotFoundError):  # unless another writer of the name was faster
            if os.path.lexists(path):
                aside.append(path.rename(_beside(path, "replaced")))
        try:
            staging.rename(path)
            break
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue
            for last in aside[-1:]:
                last.rename(path)
            raise
    sync(path.parent)
    for each in aside:
        if each.is_symlink():
            each.unlink()
    for old in _put_aside(path):
        discard(old)


def discard(staging: Path) -> None:
    """Remove the files of something that will not be finished."""
    shutil.rmtree(staging, ignore_errors=True)


def require_replaceable(path: Path) -> None:
    """Raise if something that is not a checkpoint has the name: it would be lost."""
    path = _absolute(path)
    if path.is_symlink() or not path.exists():
        return
    try:
        files = sorted(f.name for f in path.iterdir())
    except FileNotFoundError:
        return  # another writer of the name has put it aside
    except NotADirectoryError:
        files = ["a file"]
    foreign = [name for name in files if _OWN_FILES.fullmatch(name) is None]
    if foreign:
        raise CheckpointError(
            f"{path} contains other files ({', '.join(foreign[:5])}), which a checkpoint of this "
            f"name would replace; choose a name inside, such as {path / 'step_0'}, or another."
        )


def is_unfinished(path: Path) -> bool:
    """Whether a folder is one that is, or was, being written."""
    match = _BESIDE.fullmatch(path.name)
    return match is not None and match["state"] == "incoming"


def is_ours(path: Path) -> bool:
    """Whether fullshard wrote a checkpoint; if so, it is invalid without its manifest."""
    return (path / MANIFEST).exists() or (path / rank_file(0)).exists()


def whole_manifest(path: Path) -> Manifest | None:
    """The manifest of a checkpoint if all files have the right sizes. Opens no tensors."""
    try:
        manifest = read_manifest(path)
        sizes = {name: (path / name).stat().st_size for name in manifest.files}
    except (CheckpointError, OSError):
        return None
    return manifest if sizes == manifest.files and INDEX in sizes else None


def located(path: Path) -> Path:
    """Where the checkpoint of this name is.

    It is `path`, unless a process died while it replaced the checkpoint: then it is the one that
    was put aside.
    """
    path = _absolute(path)
    aside = [] if os.path.lexists(path) else _put_aside(path)
    whole = [(found.created, each) for each in aside if (found := whole_manifest(each))]
    return max(whole)[1] if whole else path


def checkpoints(folder: str | Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first: by step, then by time."""
    found = []
    for path in _folders(Path(folder)):
        match = _BESIDE.fullmatch(path.name)
        # One that was put aside counts as long as nothing else has its name.
        counts = match is None or located(path.with_name(match["name"])) == _absolute(path)
        manifest = whole_manifest(path) if counts else None
        if manifest is not None:
            step = -1 if manifest.step is None else manifest.step
            found.append((step, datetime.fromisoformat(manifest.created), path.name, path))
    return [path for *_, path in sorted(found)]


def prune(folder: str | Path, keep: int, pinned: str | None = None) -> list[Path]:
    """Remove all whole checkpoints but the newest `keep`, and what dead processes left behind.

    Damaged checkpoints are left for a person to look at, and do not count; one named `pinned`
    stays. Returns what was removed.
    """
    if type(keep) is not int or keep < 1:
        text = f"prune: keep must be at least 1, not {keep!r}; the last whole one stays."
        raise ConfigError(text)
    whole = checkpoints(folder)
    left = [path for path in _folders(Path(folder)) if path not in whole and _is_abandoned(path)]
    removed = [path for path in whole[:-keep] if path.name != pinned] + left
    for path in removed:
        _remove(path)
    return removed


def _remove(path: Path) -> None:
    """Remove a folder. A checkpoint loses its name first, so it is never seen half removed."""
    with suppress(FileNotFoundError):  # another process removed it
        if _BESIDE.fullmatch(path.name) is None:
            path = path.rename(_beside(path, "replaced"))
        shutil.rmtree(path, ignore_errors=True)


def _beside(path: Path, state: str) -> Path:
    path = _absolute(path)
    return path.parent / f".{path.name}.{state}-{uuid.uuid4().hex}"


def _absolute(path: Path) -> Path:
    """The absolute path, which has a name even for "." and "..". A link stays a link."""
    found = Path(os.path.abspath(path))
    if not found.name:
        raise ConfigError(f"{path} has no name; choose another folder.")
    return found


def _put_aside(path: Path) -> list[Path]:
    """Checkpoints that had this name and were put aside."""
    matches = ((each, _BESIDE.fullmatch(each.name)) for each in _folders(path.parent))
    state = (path.name, "replaced")
    return [each for each, match in matches if match and match.group("name", "state") == state]


def _folders(folder: Path) -> list[Path]:
    """The folders inside that are not links: the target of a link is listed where it is."""
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_abandoned(path: Path) -> bool:
    """Whether a folder beside a checkpoint is one that no process works on."""
    match = _BESIDE.fullmatch(path.name)
    if match is None or match["state"] == "replaced":
        return match is not None
    if match["machine"] == machine_id():
        return match["started"] != start_of(match["pid"])
    try:
        newest = max(os.path.getmtime(each) for each in (path, *path.iterdir()))
    except FileNotFoundError:  # another process works on it
        return False
    return time.time() - newest > _ABANDONED_S
