"""Whether a checkpoint on disk is what was saved, down to the last bit."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from fullshard.errors import CheckpointError
from fullshard.state.checksum import as_text, checksum
from fullshard.state.dcp_format import read_index
from fullshard.state.folder import is_unfinished, located
from fullshard.state.manifest import INDEX, MANIFEST, Manifest, StoredTensor, read_manifest
from fullshard.state.opened import Opened, StoredEntry, file_problem, is_ours, load_entry


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

    One block is in memory at a time. What torch wrote has no manifest: then it is checked that
    every tensor can be read and is covered by its blocks.

    Args:
        path: The folder of a checkpoint.
        progress: Called with the bytes of tensors that are done, and with all there are.
        share: `(i, n)` does the i-th of n shares of the work. All shares together do everything.

    Returns:
        What is wrong, empty if nothing is.
    """
    folder = located(Path(path))
    if is_unfinished(folder):
        return [Problem(folder.name, "it was not written to its end")]
    try:
        manifest = read_manifest(folder) if is_ours(folder) else None
    except CheckpointError as error:
        return [Problem(MANIFEST, str(error))]
    problems = [] if manifest is None else list(_file_problems(folder, manifest, share))
    try:
        opened = Opened(folder, read_index(folder), manifest)
    except CheckpointError as error:
        return [*problems, Problem(INDEX, str(error))]
    known = set(opened.keys).union(() if manifest is None else manifest.tensors)
    keys = _share(sorted(known), share)
    total, done = sum(_num_bytes(opened, key) for key in keys), 0
    for key in keys:
        problems += _tensor_problems(opened, key)
        done += _num_bytes(opened, key)
        if progress is not None:
            progress(done, total)
    return problems


def _share(names: list[str], share: tuple[int, int]) -> list[str]:
    index, num_shares = share
    return names[index::num_shares]


def _num_bytes(opened: Opened, key: str) -> int:
    if key not in opened:
        return 0
    try:
        return prod(opened.shape(key)) * opened.dtype(key).itemsize
    except CheckpointError:
        return 0  # it is told as a problem of the tensor


# Files


def _file_problems(folder: Path, manifest: Manifest, share: tuple[int, int]) -> Iterator[Problem]:
    for name in _share(sorted(manifest.files), share):
        problem = file_problem(folder / name, manifest.files[name])
        if problem is None and re.fullmatch(r"rank_\d+\.pt", name):
            problem = _rank_file_problem(folder / name, manifest.id)
        if problem is not None:
            yield Problem(name, problem)


def _rank_file_problem(path: Path, id: str) -> str | None:
    """What is wrong with a file that holds a rank's random state and the like."""
    try:
        found = load_entry(path.name, StoredEntry(path, 0, path.stat().st_size))
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # zipfile has many for a damaged archive
        return str(error).removeprefix(f"{path.name}: ")
    if damaged is not None:
        return f"{damaged} in it must be what was written, found other bytes"
    its_id = found.get("id") if isinstance(found, dict) else None
    if its_id != id:
        return f"a file of checkpoint {id} is expected, found one of {its_id}: of another run"
    return None


# Tensors


def _tensor_problems(opened: Opened, key: str) -> list[Problem]:
    try:
        return [Problem(key, what) for what in _tensor_faults(opened, key)]
    except CheckpointError as error:
        return [Problem(key, _without(key, error))]


def _tensor_faults(opened: Opened, key: str) -> Iterator[str]:
    manifest = opened.manifest
    stored = None if manifest is None else manifest.tensors.get(key)
    if key not in opened:
        yield f"the index {INDEX} must have it as the manifest does, found nothing of that name"
        return
    if manifest is not None and stored is None:
        yield f"the manifest must have it as the index does, found only {INDEX} to know of it"
        return
    if stored is not None and (difference := _difference(opened, key, stored)) is not None:
        yield difference
        return
    opened.require_tiled(key)
    shape, expected = opened.shape(key), _checksums(stored)
    for where in opened.places(key):
        try:
            found = as_text(checksum(shape, where, opened.load(key, where)))
        except CheckpointError as error:
            yield _without(key, error)
            continue
        if stored is not None and found != expected[where.offsets, where.sizes]:
            yield (
                f"the block of {where.sizes} at {where.offsets} in "
                f"{opened.entry(key, where).path.name} must have the checksum "
                f"{expected[where.offsets, where.sizes]}, found {found}: its content changed"
            )


def _difference(opened: Opened, key: str, stored: StoredTensor) -> str | None:
    """Where the index and the manifest do not say the same."""
    found = (opened.shape(key), str(opened.dtype(key)).removeprefix("torch."))
    if found != (stored.shape, stored.dtype):
        return f"{stored.shape} in {stored.dtype} is expected, found {found[0]} in {found[1]}"
    places = {(where.offsets, where.sizes) for where in opened.places(key)}
    if places != set(_checksums(stored)):
        return f"the blocks {sorted(_checksums(stored))} are expected, found {sorted(places)}"
    return None


def _checksums(
    stored: StoredTensor | None,
) -> dict[tuple[tuple[int, ...], tuple[int, ...]], str]:
    if stored is None:
        return {}
    return {(block.offsets, block.sizes): block.checksum for block in stored.blocks}


def _without(key: str, error: CheckpointError) -> str:
    return str(error).removeprefix(f"{key}: ")
