"""Writing a folder of safetensors files, block by block, that appears when it is whole."""

from __future__ import annotations

import ctypes
import json
import os
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fullshard.errors import CheckpointError
from fullshard.layout.split import Box
from fullshard.state.folder import discard, staging_folder, sync, write_synced
from fullshard.state.safetensors_format import (
    INDEX_FILE,
    ONE_FILE,
    Described,
    Entry,
    encoded_header,
    runs,
)

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file: its name, how it begins, and where in it each tensor goes."""

    name: str
    header: bytes
    entries: dict[str, Entry]

    @property
    def nbytes(self) -> int:
        return max((entry.end for entry in self.entries.values()), default=len(self.header))


def plan_files(tensors: Sequence[Described], max_bytes: int) -> list[FilePlan]:
    """Tensors in as many files as are needed, in their order.

    A tensor is never split: one that is larger than `max_bytes` has a file of its own.
    """
    groups: list[list[Described]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        if groups[-1] and num_bytes + tensor.nbytes > max_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(tensor)
        num_bytes += tensor.nbytes
    if len(groups) == 1:
        return [FilePlan(ONE_FILE, *encoded_header(groups[0]))]
    return [
        FilePlan(f"model-{number:05d}-of-{len(groups):05d}.safetensors", *encoded_header(some))
        for number, some in enumerate(groups, 1)
    ]


def index_text(plans: Sequence[FilePlan]) -> str:
    """The index that says which tensor is in which file."""
    total = sum(e.end - e.begin for plan in plans for e in plan.entries.values())
    weight_map = {name: plan.name for plan in plans for name in plan.entries}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2, ensure_ascii=False) + "\n"


class FileWriter:
    """Writes the blocks of one file in any order.

    What goes wrong is kept for `finish`: the ranks that send blocks must not be left waiting
    because the disk of the one that writes them is full.
    """

    def __init__(self, folder: Path, plan: FilePlan) -> None:
        self._path = folder / plan.name
        self._plan = plan
        self._error: OSError | None = None
        self._descriptor = -1
        try:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            self._write_at(0, plan.header)
        except OSError as error:
            self._error = error

    def write(self, name: str, where: Box, values: torch.Tensor) -> None:
        """Write a block: a contiguous tensor in host memory, of the dtype that was planned."""
        if self._error is not None:
            return
        entry, itemsize = self._plan.entries[name], values.dtype.itemsize
        content = _bytes_of(values)
        begin = 0
        try:
            for first, count in runs(entry.shape, where):
                end = begin + count * itemsize
                self._write_at(entry.begin + first * itemsize, content[begin:end])
                begin = end
        except OSError as error:
            self._error = error

    def _write_at(self, offset: int, content: bytes | memoryview) -> None:
        while content:
            num_written = os.pwrite(self._descriptor, content, offset)
            offset, content = offset + num_written, content[num_written:]

    def finish(self) -> None:
        """Make sure that the file is on disk, whole; raise what went wrong."""
        try:
            if self._error is None:
                os.fsync(self._descriptor)
        except OSError as error:
            self._error = error
        self.close()
        if self._error is not None:
            raise CheckpointError(
                f"{self._path.name}: writing failed ({self._error}); make room, or choose another "
                "folder that all ranks share, and export again."
            ) from self._error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, while the tensor lives."""
    if values.numel() == 0:
        return memoryview(b"")
    array = (ctypes.c_char * (values.numel() * values.dtype.itemsize)).from_address(
        values.data_ptr()
    )
    return memoryview(array).cast("B")


def new_staging(folder: Path) -> Path:
    """Where files are written before they appear in a folder.

    Inside of a folder that is there: it may be a link or a disk of its own, beside which there is
    no room.
    """
    return staging_folder(folder / "model" if folder.is_dir() else folder, uuid.uuid4().hex)


def complete(staging: Path, plans: Sequence[FilePlan]) -> None:
    """Add the index where there are several files; raise if a file is not there, or not whole."""
    for plan in plans:
        path = staging / plan.name
        found = path.stat().st_size if path.is_file() else None
        if found != plan.nbytes:
            raise CheckpointError(
                f"{plan.name}: {plan.nbytes} bytes are expected, found {found or 'no file'}; the "
                "folder must be on a file system that all ranks share."
            )
    if len(plans) > 1:
        write_synced(staging / INDEX_FILE, index_text(plans).encode())
    sync(staging)


def install(staging: Path, folder: Path) -> None:
    """Let the files appear in a folder, which may have others, such as a configuration.

    A folder that is not there appears in one step. From others older weights are taken away first,
    and the index, or the only file, comes last: at no time are there old and new ones together.
    """
    try:
        os.rename(staging, folder)
    except OSError:
        if not folder.is_dir():
            raise
        _replace_weights(staging, folder)
        discard(staging)
        sync(folder)
    sync(folder.parent)


def _replace_weights(staging: Path, folder: Path) -> None:
    new = sorted((p.name for p in staging.iterdir()), key=lambda name: name == INDEX_FILE)
    old = [p.name for p in folder.iterdir() if _WEIGHTS.fullmatch(p.name)]
    if new == [ONE_FILE] and old in ([], [ONE_FILE]):
        os.replace(staging / ONE_FILE, folder / ONE_FILE)  # in one step
        return
    aside = staging / "replaced"
    aside.mkdir()
    moved: list[tuple[Path, Path]] = []
    # The old index goes first: without it, nobody takes the files for a whole.
    goes = sorted(old, key=lambda name: name != INDEX_FILE)
    try:
        for source, target, names in ((folder, aside, goes), (staging, folder, new)):
            for name in names:
                os.rename(source / name, target / name)
                moved.append((source / name, target / name))
    except BaseException:
        for before, after in reversed(moved):
            os.rename(after, before)
        raise
