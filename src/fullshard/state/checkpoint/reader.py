"""Reading and verifying a checkpoint that fullshard or torch wrote."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError
from fullshard.layout.split import Box
from fullshard.state.checkpoint.checksum import as_text, checksum
from fullshard.state.checkpoint.folder import (
    checkpoints,
    is_ours,
    is_unfinished,
    located,
    rank_file,
)
from fullshard.state.checkpoint.index import INDEX, Entry, IndexReader, load_entry
from fullshard.state.checkpoint.manifest import MANIFEST, Manifest, read_manifest

_BLOCK_BYTES = 512  # what `torch.save` writes for a tensor without elements is larger


# What ends a file of tensors: a line that says whose it is. An index does not refer to it.
_SEAL = re.compile(rb"\nfullshard ([0-9a-f]{32}) (__\d+_\d+\.distcp) *\n")
_SEAL_BYTES = 128


def seal(checkpoint_id: str, name: str) -> bytes:
    """The end of a file of tensors of a checkpoint."""
    return f"\nfullshard {checkpoint_id} {name}".encode().ljust(_SEAL_BYTES - 1) + b"\n"


class StoredCheckpoint(IndexReader):
    """A checkpoint on disk; `manifest` is None if torch wrote it."""

    def __init__(self, path: Path, manifest: Manifest | None) -> None:
        self.path, self.manifest = path, manifest
        self._opened = self._file_id()
        if manifest is not None:  # before anything is done for each block
            num_blocks = sum(len(stored.blocks) for stored in manifest.tensors.values())
            num_bytes = sum(manifest.files.values())
            if num_blocks * _BLOCK_BYTES > num_bytes:
                raise CheckpointError(
                    f"{path / MANIFEST}: {num_blocks:,} blocks do not fit into files of "
                    f"{num_bytes:,} bytes; it is damaged. `latest` finds whole checkpoints."
                )
        super().__init__(path)
        if manifest is not None and manifest.format_version > 1:
            _require_own(path / INDEX, (manifest.id, INDEX), (self.save_id, INDEX))

    def _file_id(self) -> tuple[int, ...] | None:
        """Identify the checkpoint on disk by a file that is written once, None if there is none."""
        try:
            found = (self.path / (INDEX if self.manifest is None else MANIFEST)).stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What a rank saved for itself. In a larger world, further ranks begin with the first."""
        if self.manifest is None:
            return {}
        name = rank_file(rank % self.manifest.num_ranks)
        return _read_rank_file(self.path / name, self.manifest)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise after the block, also instead of an error in it, if the folder has changed."""
        try:
            yield
        except Exception as error:
            self.require_unchanged(error)
            raise
        self.require_unchanged()

    def require_unchanged(self, cause: Exception | None = None) -> None:
        """Raise if another checkpoint, or none, is where this one was when it was opened."""
        now, found = self._file_id(), ""
        if now != self._opened:
            found = "another one was saved under its name" if now else "it was moved or removed"
        if found:
            raise CheckpointError(
                f"{self.path}: {found} while it was read; load it from where it is now, or the "
                "newest one, which `latest` finds."
            ) from cause


def open_checkpoint(path: str | Path, *, check_files: bool = True) -> StoredCheckpoint:
    """Open a checkpoint that fullshard or torch wrote, which must have all its files."""
    found = located(Path(path))
    if not found.is_dir() or is_unfinished(found):
        what = "was not written to its end" if found.is_dir() else "is a file"
        raise CheckpointError(
            f"{path} {what if found.exists() else 'does not exist'}; pass the folder of a "
            "checkpoint. `latest` finds the newest one."
        )
    manifest = read_manifest(found) if is_ours(found) else None
    for name, num_bytes in (manifest.files if manifest and check_files else {}).items():
        _require_size(found / name, num_bytes)
    return StoredCheckpoint(found, manifest)


def _read_rank_file(path: Path, manifest: Manifest) -> dict[str, Any]:
    try:
        found: dict[str, Any] = load_entry(path.name, Entry(path, 0, path.stat().st_size))
        its_id, its_name = str(found["id"]), path.name
        if manifest.format_version > 1:
            its_name = rank_file(int(found["rank"]))
        with zipfile.ZipFile(path) as archive:
            changed = archive.testzip()
        if changed:
            raise ValueError(f"other bytes than were written in {changed}")
    except Exception as error:  # zipfile raises many kinds for a damaged archive
        raise CheckpointError(
            f"{path}: this rank's file cannot be read ({error}); the checkpoint is damaged."
        ) from error
    _require_own(path, (manifest.id, path.name), (its_id, its_name))
    return found


def _require_size(path: Path, num_bytes: int) -> None:
    size = path.stat().st_size if path.exists() else None
    if size != num_bytes:
        found = "is missing" if size is None else f"has {size} bytes instead of {num_bytes}"
        raise CheckpointError(
            f"{path}: it {found}; the checkpoint is damaged. `latest` finds whole ones."
        )


def _require_sealed(path: Path, checkpoint_id: str) -> None:
    """Raise if a file of tensors was written as another one."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _SEAL_BYTES))
        end = file.read()
    match = _SEAL.fullmatch(end)
    found = (checkpoint_id, "one that is damaged at its end")
    if match is not None:
        found = match[1].decode(), match[2].decode()
    _require_own(path, (checkpoint_id, path.name), found)


def _require_own(path: Path, expected: tuple[str, str], found: tuple[str, str]) -> None:
    """Compare whose a file is, as a checkpoint and a part of it, with what the file says."""
    if found != expected:
        other = "" if found[0] == expected[0] else f" of the checkpoint {found[0]}"
        raise CheckpointError(
            f"{path}: it is {found[1]}{other}, not {expected[1]} of the checkpoint {expected[0]}; "
            "files were exchanged, copied or damaged. Load another checkpoint, which "
            "`latest(..., verify=True)` finds."
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a tensor, by its key, or with a file, by its name."""

    subject: str
    what: str


def verify(
    path: str | Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    share: tuple[int, int] = (0, 1),
) -> list[Problem]:
    """Compare every file and tensor of a checkpoint with its manifest.

    One block is in memory at a time. A checkpoint that torch wrote has no manifest: in it, every
    tensor must be readable and covered by its blocks.

    Args:
        path: The folder of a checkpoint.
        progress: Called with the bytes of tensors that are done, and with their total.
        share: `(i, n)` does the i-th of n shares of the work. All shares together do everything.

    Returns:
        The problems that were found; empty if there are none.
    """
    folder, (index, num_shares) = located(Path(path)), share
    if is_unfinished(folder):
        return [Problem(folder.name, "it was not written to its end")]
    subject = MANIFEST
    try:
        manifest = read_manifest(folder) if is_ours(folder) else None
        subject = INDEX
        stored = StoredCheckpoint(folder, manifest)
    except CheckpointError as error:
        return [Problem(subject, str(error))]
    problems: list[Problem] = []
    files = {} if manifest is None else manifest.files
    for name in sorted(files)[index::num_shares]:
        try:
            _require_size(folder / name, files[name])
            if manifest is not None and re.fullmatch(r"rank_\d+\.pt", name):
                _read_rank_file(folder / name, manifest)
            elif manifest is not None and manifest.format_version > 1 and name != INDEX:
                _require_sealed(folder / name, manifest.id)
        except CheckpointError as error:
            problems.append(Problem(name, str(error).removeprefix(f"{folder / name}: ")))
    keys = sorted({*stored.keys, *(manifest.tensors if manifest else ())})[index::num_shares]
    known = {key: stored.info(key) for key in keys if key in stored}
    sizes = {key: prod(info.shape) * info.dtype.itemsize for key, info in known.items()}
    num_done = 0
    for key in keys:
        try:
            problems.extend(Problem(key, what) for what in _tensor_problems(stored, key))
        except CheckpointError as error:
            problems.append(Problem(key, str(error).removeprefix(f"{key}: ")))
        num_done += sizes.get(key, 0)
        if progress is not None:
            progress(num_done, sum(sizes.values()))
    return problems


_problems_of = verify  # for a function with an argument of this name


def _tensor_problems(stored: StoredCheckpoint, key: str) -> Iterator[str]:
    expected = None if stored.manifest is None else stored.manifest.tensors.get(key)
    if key not in stored or (stored.manifest is not None and expected is None):
        where = INDEX if key in stored else MANIFEST
        yield f"only {where} has it, not both the index and the manifest"
        return
    info, sums = stored.info(key), dict[Box, str]()
    if expected is not None:
        sums = {Box(block.offsets, block.sizes): block.checksum for block in expected.blocks}
        dtype = str(info.dtype).removeprefix("torch.")
        if (info.shape, dtype) != (expected.shape, expected.dtype):
            yield (
                f"it is {info.shape} in {dtype}, but {expected.shape} in {expected.dtype} in the "
                "manifest"
            )
            return
        if set(info.boxes) != set(sums):
            yield f"its blocks are {list(info.boxes)}, but {list(sums)} in the manifest"
            return
    stored.require_tiled(key)
    for box, values in stored.load_all(key):
        found = as_text(checksum(info.shape, box, values))
        if expected is not None and found != sums[box]:
            yield (
                f"the content of the block of {box.sizes} at {box.offsets} in "
                f"{stored.entry(key, box).path.name} has changed: its checksum is {found}, not "
                f"{sums[box]}"
            )


def latest(folder: str | Path, *, verify: bool = False) -> Path | None:
    """The newest whole checkpoint in a folder, or None; with `verify`, content is verified, too."""
    found = reversed(checkpoints(folder))
    return next((path for path in found if not (verify and _problems_of(path))), None)
