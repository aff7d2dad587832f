"""Finding, reading and verifying a checkpoint that fullshard or torch wrote."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Size

from fullshard.errors import CheckpointError
from fullshard.layout.split import Box
from fullshard.state.checkpoint.folder import checkpoints, is_ours, is_unfinished, located
from fullshard.state.checkpoint.index import (
    INDEX,
    Entry,
    IndexReader,
    as_text,
    checksum,
    load_entry,
    sealed_as,
)
from fullshard.state.checkpoint.manifest import MANIFEST, OF_TORCH, Manifest, read_manifest
from fullshard.state.plain import rank_file
from fullshard.state.safetensors.files import open_tensors

_BLOCK_BYTES = 512  # what `torch.save` writes for a tensor without elements is larger


class StoredCheckpoint(IndexReader):
    """A checkpoint on disk."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._opened = self._file_id()
        # Before anything is done for each block.
        num_blocks = sum(len(stored.blocks) for stored in manifest.tensors.values())
        num_bytes = sum(manifest.files.values())
        if num_blocks * _BLOCK_BYTES > num_bytes:
            raise CheckpointError(
                f"{path / MANIFEST}: {num_blocks:,} blocks do not fit into files of "
                f"{num_bytes:,} bytes; it is damaged. `latest` finds whole checkpoints."
            )
        super().__init__(path)
        if manifest.format_version > 1:
            _require_own(path / INDEX, (manifest.id, INDEX), (self.save_id, INDEX))

    def _file_id(self) -> tuple[int, ...] | None:
        """Identify the checkpoint on disk by a file that is written once, None if there is none."""
        try:
            found = (self.path / (MANIFEST if self.manifest.is_ours else INDEX)).stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What a rank saved for itself. In a larger world, further ranks begin with the first."""
        if not self.manifest.is_ours:
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
        if (now := self._file_id()) != self._opened:
            found = "another one was saved under its name" if now else "it was moved or removed"
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
    manifest = read_manifest(found) if is_ours(found) else OF_TORCH
    for name, num_bytes in manifest.files.items() if check_files else ():
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
        manifest = read_manifest(folder) if is_ours(folder) else OF_TORCH
        subject = INDEX
        stored = StoredCheckpoint(folder, manifest)
    except CheckpointError as error:
        return [Problem(subject, str(error))]
    problems: list[Problem] = []
    for name in sorted(manifest.files)[index::num_shares]:
        file = folder / name
        try:
            _require_size(file, manifest.files[name])
            if re.fullmatch(r"rank_\d+\.pt", name):
                _read_rank_file(file, manifest)
            elif manifest.format_version > 1 and name != INDEX:
                _require_own(file, (manifest.id, name), sealed_as(file, manifest.id))
        except CheckpointError as error:
            problems.append(Problem(name, str(error).removeprefix(f"{file}: ")))
    keys = sorted({*stored.keys, *manifest.tensors})[index::num_shares]
    sizes = {key: stored.info(key).num_bytes for key in keys if key in stored}
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
    expected = stored.manifest.tensors.get(key)
    if key not in stored or (stored.manifest.is_ours and expected is None):
        where = INDEX if key in stored else MANIFEST
        yield f"only {where} has it, not both the index and the manifest"
        return
    info, sums = stored.info(key), dict[Box, str]()
    if expected is not None:
        sums = {Box(block.offsets, block.sizes): block.checksum for block in expected.blocks}
        if (info.shape, info.dtype_name) != (expected.shape, expected.dtype):
            yield (
                f"it is {info.shape} in {info.dtype_name}, but {expected.shape} in "
                f"{expected.dtype} in the manifest"
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


def checkpoint_at(path: str | Path) -> Path | None:
    """The checkpoint of this name, or the newest whole one in the folder; None if there is none.

    The folder may also be one that has its checkpoints in `checkpoints`, as that of a run.
    """
    path = Path(path)
    if _is_checkpoint(path):
        return path if path.exists() else located(path)
    return latest(path / "checkpoints") or latest(path)


def stored_shapes(path: str | Path) -> dict[str, Size]:
    """The tensors of a checkpoint, or of safetensors files, by their keys; reads no values.

    In a checkpoint that `save` wrote, those of the model have keys that begin with "model.".
    """
    if _is_checkpoint(Path(path)):
        opened = open_checkpoint(path)
        return {key: Size(opened.info(key).shape) for key in opened.keys}
    return {key: Size(file.entries[key].shape) for key, file in open_tensors(Path(path)).items()}


def _is_checkpoint(path: Path) -> bool:
    found = located(path)
    return is_ours(found) or (found / INDEX).is_file()
