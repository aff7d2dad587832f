"""Models as safetensors files: exported from shards, and loaded into shards.

The format is a header with names, dtypes, shapes and offsets, then the bytes of the tensors. It is
read and written here and not by the `safetensors` package because that package writes whole tensors
from one process, keeps what it has read of a file in memory, and is not a dependency of fullshard:
here each rank writes and reads boxes of tensors, within bounded memory, with torch alone.

A file may come from a stranger: its header is compared with its size before anything else is done,
and there is nothing in it that could run.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.errors import (
    CheckpointError,
    ConfigError,
    DisagreementError,
    UnsupportedError,
)
from fullshard.layout.split import (
    Box,
    element_ranges,
    element_span,
    intersection,
    pieces,
    slices,
    tiles,
)
from fullshard.state.checkpoint import BACKGROUND, require_values, selection
from fullshard.state.dcp import require_inside
from fullshard.state.materialize import LostBuffers, give_memory
from fullshard.state.rank_group import RankGroup
from fullshard.state.shards import LocalPart, TensorShard, tensor_shards
from fullshard.state.store import discard, staging_folder, sync, unique_pairs, write_synced

ONE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
INDEX_SUFFIX = ".safetensors.index.json"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MAX_HEADER_BYTES = 100_000_000  # what the format's own library accepts at most
_MAX_INDEX_BYTES = 1_000_000_000
_LENGTH_BYTES = 8
_ALIGNMENT = 8
# What is on its way from one rank to another at a time: all the memory that an export takes.
_PIECE_BYTES = 8 * 2**20
# How much of a file is looked at before its memory is given back.
_PIECE_NUMEL = 2**20

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One tensor of a file: the name of its dtype, its shape, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


# Reading files


class TensorFile:
    """One file, mapped into memory: what is not looked at is not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _LENGTH_BYTES:
                raise _damaged(path, "a file that begins with its header", f"{size} bytes")
            # Private, so that tensors may be made of it; nobody writes to them.
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        self.entries = _decoded_header(path, self._map, size)

    def dtype(self, name: str) -> torch.dtype | None:
        """None if torch has no such dtype."""
        return DTYPES.get(self.entries[name].dtype)

    def view(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor, as the file's memory where that is possible."""
        entry, dtype = self.entries[name], self.dtype(name)
        assert dtype is not None  # asked before
        numel, index = prod(entry.shape), slices(box, Box.whole(entry.shape))
        if numel == 0:
            return torch.empty(box.sizes, dtype=dtype)
        if dtype is not torch.bool and entry.begin % dtype.itemsize == 0:
            values = torch.frombuffer(self._map, dtype=dtype, count=numel, offset=entry.begin)
            return values.view(entry.shape)[index]
        raw = torch.frombuffer(
            self._map, dtype=torch.uint8, count=numel * dtype.itemsize, offset=entry.begin
        )
        part = raw.view(*entry.shape, dtype.itemsize)[index]
        if dtype is torch.bool:
            return part.squeeze(-1).ne(0)  # a byte may hold anything, a bool must not
        return part.clone(memory_format=torch.contiguous_format).view(dtype).squeeze(-1)

    def views(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """A box in pieces. The memory that looking at one took is given back before the next."""
        entry, dtype = self.entries[name], self.dtype(name)
        assert dtype is not None
        for piece in pieces(box, _PIECE_NUMEL):
            yield piece, self.view(name, piece)
            elements = element_span(entry.shape, piece)
            begin = entry.begin + elements.start * dtype.itemsize
            end = entry.begin + elements.stop * dtype.itemsize
            begin -= begin % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _damaged(path: Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {expected} is expected, found {found}; the file is damaged, or something else."
    )


def _decoded_header(path: Path, content: mmap.mmap, size: int) -> dict[str, FileEntry]:
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    begin = _LENGTH_BYTES + length
    if length > _MAX_HEADER_BYTES or begin > size:
        found = f"one of {length} bytes in a file of {size}"
        raise _damaged(path, "a header inside of the file", found)
    table = _json_object(path, content[_LENGTH_BYTES:begin])
    table.pop("__metadata__", None)
    entries = {name: _entry(path, name, said, begin, size) for name, said in table.items()}
    ordered = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    for (one, a), (other, b) in pairwise(ordered):
        if a.end != b.begin:
            kind = "overlap" if b.begin < a.end else "leave a gap"
            raise _damaged(path, "one tensor after another", f"{one!r} and {other!r} that {kind}")
    first, last = (ordered[0][1].begin, ordered[-1][1].end) if ordered else (begin, begin)
    if first != begin or last != size:
        found = f"bytes {first} to {last} of {size} in use, after a header of {begin}"
        raise _damaged(path, "a file that its tensors fill", found)
    return entries


def _json_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        table = json.loads(text, object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "JSON", f"something else ({error})") from error
    if not isinstance(table, dict):
        raise _damaged(path, "a JSON object", type(table).__name__)
    return table


def _entry(path: Path, name: str, said: Any, begin: int, size: int) -> FileEntry:
    fields = said if isinstance(said, dict) else {}
    dtype, shape = fields.get("dtype"), _sizes(fields.get("shape"))
    offsets = _sizes(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        expected = f"{name!r} with a dtype, a shape and two offsets"
        raise _damaged(path, expected, repr(said)[:200])
    first, last = begin + offsets[0], begin + offsets[1]
    if not begin <= first <= last <= size:
        found = f"offsets {offsets} of {size - begin} bytes"
        raise _damaged(path, f"{name!r} inside of the file", found)
    if dtype in DTYPES and last - first != prod(shape) * DTYPES[dtype].itemsize:
        found = f"{last - first} bytes"
        raise _damaged(path, f"{name!r} with as many bytes as {dtype} {shape} has", found)
    return FileEntry(dtype, shape, first, last)


def _sizes(value: Any) -> tuple[int, ...] | None:
    are_sizes = isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
    return tuple(value) if are_sizes else None


def open_tensors(path: Path) -> dict[str, TensorFile]:
    """The file of each tensor of `path`: a file, a folder with one, or a folder with an index."""
    if not path.exists():
        raise CheckpointError(
            f"{path}: a safetensors file, or a folder with one, is expected, found nothing."
        )
    if path.is_dir():
        indexes = sorted(path.glob(f"*{INDEX_SUFFIX}"))
        files = sorted(path.glob("*.safetensors"))
        if (path / ONE_FILE).is_file():
            path = path / ONE_FILE
        elif len(indexes or files) == 1:
            path = (indexes or files)[0]
        else:
            found = [each.name for each in indexes or files][:8]
            raise CheckpointError(
                f"{path}: one safetensors file, or the index of several, is expected, found "
                f"{found or 'none'}; give the path of the file that is meant."
            )
    if path.name.endswith(INDEX_SUFFIX):
        return _open_index(path)
    file = TensorFile(path)
    return dict.fromkeys(file.entries, file)


def _open_index(path: Path) -> dict[str, TensorFile]:
    size = path.stat().st_size
    if size > _MAX_INDEX_BYTES:
        raise _damaged(path, f"an index of at most {_MAX_INDEX_BYTES} bytes", f"{size} bytes")
    weight_map = _json_object(path, path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict):
        raise _damaged(path, "a weight_map", repr(weight_map)[:200])
    files: dict[str, TensorFile] = {}
    for name in weight_map.values():
        if not isinstance(name, str) or name not in files:
            inside = require_inside(path.parent, name)
            if not inside.is_file():
                raise CheckpointError(
                    f"{path}: its files are expected beside it, found no {name!r}; the folder was "
                    "not copied to its end."
                )
            files[name] = TensorFile(inside)
    for name, file_name in weight_map.items():
        if name not in files[file_name].entries:
            raise _damaged(path, f"{name!r} in {file_name!r}", "a file without it")
    # A tensor that the index does not name is there, too: who reads the folder must hear of it.
    everything = {name: file for file in files.values() for name in file.entries}
    return {**everything, **{name: files[file] for name, file in weight_map.items()}}


# Writing files


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file: its name, how it begins, and where in it each tensor goes."""

    name: str
    header: bytes
    entries: dict[str, FileEntry]

    @classmethod
    def of(cls, file_name: str, tensors: Sequence[ExportedTensor]) -> FilePlan:
        """Wide dtypes come first, so that every tensor is aligned for its dtype."""
        ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begin = 0
        for tensor in ordered:
            if tensor.dtype not in _DTYPE_NAMES:
                raise UnsupportedError(
                    f"{tensor.name}: safetensors has the dtypes {', '.join(DTYPES)}, found "
                    f"{tensor.dtype}; convert it, or leave it out."
                )
            end = begin + tensor.nbytes
            table[tensor.name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
            begin = end
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        entries = {}
        for tensor in ordered:
            begin, end = (len(header) + each for each in table[tensor.name]["data_offsets"])
            entries[tensor.name] = FileEntry(_DTYPE_NAMES[tensor.dtype], tensor.shape, begin, end)
        return cls(file_name, header, entries)

    @property
    def nbytes(self) -> int:
        return max((entry.end for entry in self.entries.values()), default=len(self.header))


def plan_files(tensors: Sequence[ExportedTensor], max_bytes: int) -> list[FilePlan]:
    """Tensors in as many files as are needed, in their order.

    A tensor is never split: one that is larger than `max_bytes` has a file of its own.
    """
    groups: list[list[ExportedTensor]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        if groups[-1] and num_bytes + tensor.nbytes > max_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(tensor)
        num_bytes += tensor.nbytes
    if len(groups) == 1:
        return [FilePlan.of(ONE_FILE, groups[0])]
    return [
        FilePlan.of(f"model-{number:05d}-of-{len(groups):05d}.safetensors", some)
        for number, some in enumerate(groups, 1)
    ]


class FileWriter:
    """Writes the boxes of one file in any order.

    What goes wrong is kept for `finish`: the ranks that send boxes must not be left waiting because
    the disk of the one that writes them is full.
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

    def write(self, name: str, box: Box, values: torch.Tensor) -> None:
        """Write a box: a contiguous tensor in host memory, of the dtype that was planned."""
        if self._error is not None or not values.numel():
            return
        entry, itemsize = self._plan.entries[name], values.dtype.itemsize
        address, begin = values.data_ptr(), 0
        content = memoryview((ctypes.c_char * values.nbytes).from_address(address)).cast("B")
        try:
            for elements in element_ranges(entry.shape, box):
                end = begin + len(elements) * itemsize
                self._write_at(entry.begin + elements.start * itemsize, content[begin:end])
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


def new_staging(folder: Path) -> Path:
    """Where files are written before they appear in a folder.

    Inside of a folder that is there: it may be a link or a disk of its own, beside which there is
    no room.
    """
    return staging_folder(folder / "model" if folder.is_dir() else folder, uuid.uuid4().hex)


def install(staging: Path, folder: Path, plans: Sequence[FilePlan]) -> None:
    """Let files that are whole appear in a folder, which may have others, such as a configuration.

    A folder that is not there appears in one step. From others older weights are taken away first,
    and the index, or the only file, comes last: at no time are there old and new ones together.
    """
    for plan in plans:
        path = staging / plan.name
        found = path.stat().st_size if path.is_file() else None
        if found != plan.nbytes:
            raise CheckpointError(
                f"{plan.name}: {plan.nbytes} bytes are expected, found {found or 'no file'}; the "
                "folder must be on a file system that all ranks share."
            )
    if len(plans) > 1:
        total = sum(e.end - e.begin for plan in plans for e in plan.entries.values())
        weight_map = {name: plan.name for plan in plans for name in plan.entries}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
        write_synced(staging / INDEX_FILE, text.encode())
    sync(staging)
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


# Exporting


def export_safetensors(
    path: str | Path,
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    only: str | Callable[[str], bool] | None = None,
) -> Path:
    """Write the parameters and persistent buffers of a model as safetensors; all ranks call it.

    The files are laid out as `transformers` does it. The names are those of the model before it was
    sharded; tied parameters are written once. Each tensor travels to the rank that writes its file
    in small pieces, so no rank has more of it in memory than before; files are written by several
    ranks at a time.

    Args:
        path: A folder, on a file system that all ranks share. It may have other files, such as the
            configuration of the model; older weights in it are replaced. The files appear when
            all of them are whole.
        model: Sharded through either API, in part, or not at all.
        dtype: What floating point numbers are converted to; others stay what they are.
        max_shard_bytes: How large a file may become, if it has more than one tensor.
        only: "trainable" for what is trained alone (adapters), or a function of a name.
    """
    path, ranks = Path(path), RankGroup.world()
    BACKGROUND.require_success(ranks, wait=True)
    subject = f"export {path}"
    ranks.run(subject, lambda: require_export(path, dtype, max_shard_bytes))
    own = ranks.run(subject, lambda: _own_parts(path, model, dtype, only))
    tensors = tuple(own)
    plans = ranks.run(subject, lambda: plan_files(tensors, max_shard_bytes))
    boxes = {tensor.name: [part.box for part in parts] for tensor, parts in own.items()}
    everyone = ranks.all_gather((tensors, max_shard_bytes, boxes))
    _require_same(subject, everyone)
    staging = ranks.run_first(subject, lambda: new_staging(path))
    try:
        ranks.run_first(subject, lambda: staging.mkdir(parents=True))
        _Transfer(ranks, staging, plans, own, [found for *_, found in everyone]).run(subject)
        ranks.run_first(subject, lambda: install(staging, path, plans))
    except BaseException:
        if ranks.is_first:
            discard(staging)
        raise
    return path


def require_export(path: Path, dtype: torch.dtype | None, max_bytes: int) -> None:
    """Raise for arguments of an export that cannot be."""
    if path.suffix == ".safetensors" or path.is_file():
        raise ConfigError(
            f"export {path}: a folder is expected, found the name of a file; give its folder: the "
            "file in it is called model.safetensors."
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            f"export {path}: dtype must be one of floating point numbers, found {dtype!r}; leave "
            "it out to keep what the model has."
        )
    if type(max_bytes) is not int or max_bytes < 1:
        raise ConfigError(
            f"export {path}: max_shard_bytes must be at least 1, found {max_bytes!r}."
        )


def exported_dtype(kept: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    return asked if asked is not None and kept.is_floating_point else kept


def _own_parts(
    path: Path,
    model: nn.Module,
    dtype: torch.dtype | None,
    only: str | Callable[[str], bool] | None,
) -> dict[ExportedTensor, list[LocalPart]]:
    """The tensors of an export, and the parts of them that this rank gives."""
    choose, words = selection(only)
    found = {}
    for shard in filter(choose, tensor_shards(model)):
        require_values(shard, "exported")
        target = exported_dtype(shard.dtype, dtype)
        parts = shard.local_parts(shard.tensor) if shard.is_writer else []
        found[ExportedTensor(shard.name, target, tuple(shard.shape))] = parts
    if not found:
        raise ConfigError(
            f"export {path}: something to write is expected, found none of the model's parameters "
            f"and buffers chosen ({words})."
        )
    return found


def _require_same(
    subject: str, everyone: Sequence[tuple[tuple[ExportedTensor, ...], int, dict[str, list[Box]]]]
) -> None:
    """Raise, on all ranks alike, if they do not export the same, or not all of it."""
    tensors, max_bytes, _ = everyone[0]
    for rank, (others, other_max_bytes, _) in enumerate(everyone):
        for one, other in zip_longest(tensors, others):
            if one != other:
                raise DisagreementError(
                    f"{subject}: all ranks must export the same tensors, found {one} on rank 0 and "
                    f"{other} on rank {rank}; call it with the same model and arguments."
                )
        if other_max_bytes != max_bytes:
            raise DisagreementError(
                f"{subject}: all ranks must be given the same max_shard_bytes, found {max_bytes} "
                f"on rank 0 and {other_max_bytes} on rank {rank}."
            )
    for tensor in tensors:
        boxes = [box for *_, found in everyone for box in found[tensor.name]]
        if not tiles(tensor.shape, boxes):
            raise CheckpointError(
                f"{subject}: the parts of all ranks must cover {tensor.name!r} of shape "
                f"{tensor.shape} once, found {boxes}; nothing was written. Export on all ranks of "
                "the model's mesh."
            )


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Sends every piece of every tensor to the rank that writes its file.

    Files are written in rounds, one by each rank. In a round the ranks exchange pieces in shifts:
    each sends to one rank and receives from one other, a piece at a time, so that nobody waits for
    somebody who waits, and nobody keeps more than the pieces under way.
    """

    ranks: RankGroup
    staging: Path
    plans: Sequence[FilePlan]
    own: Mapping[ExportedTensor, Sequence[LocalPart]]
    boxes: Sequence[Mapping[str, Sequence[Box]]]  # of each rank

    def run(self, subject: str) -> None:
        for first in range(0, len(self.plans), self.ranks.size):
            number = first + self.ranks.rank
            has_file = number < len(self.plans)
            writer = FileWriter(self.staging, self.plans[number]) if has_file else None
            try:
                for shift in range(self.ranks.size):
                    self._exchange(first, shift, writer)
            except RuntimeError as error:  # of a rank that is gone
                if writer is not None:
                    writer.close()
                raise CheckpointError(
                    f"{subject}: an exchange between the ranks failed ({error}); nothing appears "
                    "under this name."
                ) from error
            self.ranks.run(subject, writer.finish if writer is not None else lambda: None)

    def _exchange(self, first: int, shift: int, writer: FileWriter | None) -> None:
        rank, size = self.ranks.rank, self.ranks.size
        target, source = (rank + shift) % size, (rank - shift) % size
        sending = self._pieces(first + target, rank) if shift else ()
        for sent, received in zip_longest(sending, self._pieces(first + rank, source)):
            works, outgoing = [], None
            if sent is not None:
                outgoing = _as_bytes(self._values(*sent))
                works.append(dist.isend(outgoing, target, group=self.ranks.group))
            if received is not None and shift:
                values = torch.empty(received[1].sizes, dtype=received[0].dtype)
                works.append(dist.irecv(_as_bytes(values), source, group=self.ranks.group))
            for work in works:
                assert work is not None  # this rank is in the group
                work.wait()
            if received is not None:
                assert writer is not None
                values = values if shift else self._values(*received)
                writer.write(received[0].name, received[1], values)

    def _pieces(self, number: int, source: int) -> Iterator[tuple[ExportedTensor, Box]]:
        """What a rank has of a file."""
        if number >= len(self.plans):
            return
        tensors = {tensor.name: tensor for tensor in self.own}
        for name in self.plans[number].entries:
            for box in self.boxes[source][name]:
                for piece in pieces(box, _PIECE_BYTES // tensors[name].dtype.itemsize):
                    yield tensors[name], piece

    def _values(self, tensor: ExportedTensor, piece: Box) -> torch.Tensor:
        """This rank's values of a piece; a view of what is trained, if that is possible."""
        part = next(part for part in self.own[tensor] if intersection(part.box, piece))
        return part.values[slices(piece, part.box)].to("cpu", tensor.dtype).contiguous()


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Bytes can be sent, whatever the dtype."""
    return values.reshape(-1).view(torch.uint8)


# Loading


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What a load found.

    `missing` are names of the model that the files do not have, `unexpected` names of the files
    that the model does not have, `mismatched` names of both that do not fit, and why. `tied` says
    for further names of tied parameters whose values they share. `recreated` are buffers that are
    not part of files.
    """

    path: Path
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    recreated: tuple[str, ...] = ()


def load_safetensors(
    path: str | Path,
    model: nn.Module,
    *,
    strict: bool = True,
    init_buffers: Callable[[nn.Module], object] | None = None,
    rename: Callable[[str], str] = str,
) -> LoadedWeights:
    """Load safetensors files into a model; all ranks call it.

    Each rank reads the bytes of its own shards, and no others, straight from the files. Values are
    converted to the model's dtypes. Parameters on meta are given memory, for this rank's shards
    only. Everything is checked before anything is written: what does not fit is one error that
    names it, on all ranks.

    Args:
        path: A file, a folder with one, or a folder with an index of several.
        model: Sharded through either API, in part, or not at all; on meta, or not.
        strict: Whether names that are missing, unexpected or do not fit are an error. If not,
            they are reported, and what the model has stays as it is.
        init_buffers: Called with each module that has buffers on meta which are not part of
            files, to compute them in place. Without it, a module's `reset_non_persistent_buffers`
            or `reset_parameters`, or the `_init_weights` of a module around it, is called.
        rename: What a name of the model is in the files.
    """
    path, ranks = Path(path), RankGroup.world()
    BACKGROUND.require_success(ranks, wait=True)
    subject = f"load {path}"
    files = ranks.run(subject, lambda: open_tensors(path), "nothing was loaded.")
    shards = ranks.run(subject, lambda: tensor_shards(model))
    found = _Match(files, shards, rename)
    for mismatched in ranks.all_gather(found.differing_ties()):
        found.mismatched.update(mismatched)
    ranks.run(subject, lambda: found.require_fit(subject, strict))
    lost = LostBuffers(model, init_buffers)
    ranks.run(subject, lost.recreate)
    if any(shard.tensor.is_meta for shard in shards):
        give_memory(model)
        shards = tensor_shards(model)
    with torch.no_grad():
        for shard in shards:
            name = found.sources.get(shard.name)
            for part in shard.local_parts(shard.tensor) if name is not None else ():
                assert name is not None
                for piece, values in files[name].views(name, part.box):
                    part.values[slices(piece, part.box)].copy_(values)
    return LoadedWeights(
        path,
        tuple(found.missing),
        tuple(found.unexpected),
        found.mismatched,
        {name: shard.name for shard in shards for name in shard.names[1:]},
        lost.names,
    )


class _Match:
    """Which tensor of the files each parameter and buffer is read from."""

    def __init__(
        self,
        files: Mapping[str, TensorFile],
        shards: Sequence[TensorShard],
        rename: Callable[[str], str],
    ) -> None:
        self.files, self.shards, self.rename = files, shards, rename
        self.sources: dict[str, str] = {}
        self.missing: list[str] = []
        self.mismatched: dict[str, str] = {}
        known: set[str] = set()
        for shard in shards:
            names = [rename(name) for name in shard.names]
            known.update(names)
            source = next((name for name in names if name in files), None)
            if source is None:
                self.missing.append(shard.name)
            elif reason := _misfit(files[source], source, shard):
                self.mismatched[shard.name] = reason
            else:
                self.sources[shard.name] = source
        self.unexpected = [name for name in files if name not in known]

    def differing_ties(self) -> dict[str, str]:
        """Tensors of the files that are one in the model, but have different values."""
        return {
            name: f"the values of {source!r} are expected, to which it is tied in the model, found "
            "others"
            for shard in self.shards
            if (source := self.sources.get(shard.name)) is not None
            for name in map(self.rename, shard.names)
            if name in self.files and name != source and not self._is_same(source, name, shard)
        }

    def _is_same(self, one: str, other: str, shard: TensorShard) -> bool:
        """Whether two tensors of the files are equal, bit by bit, where this rank has a part."""
        first, second = self.files[one], self.files[other]
        a, b = first.entries[one], second.entries[other]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and all(
            torch.equal(_as_bytes(x.contiguous()), _as_bytes(y.contiguous()))
            for part in shard.local_parts(shard.tensor)
            for (_, x), (_, y) in zip(
                first.views(one, part.box), second.views(other, part.box), strict=True
            )
        )

    def require_fit(self, subject: str, strict: bool) -> None:
        problems = []
        if strict and self.missing:
            problems.append(f"missing in the files: {self.missing}")
        if strict and self.unexpected:
            problems.append(f"not in the model: {self.unexpected}")
        if strict and self.mismatched:
            problems += [f"{name}: {reason}" for name, reason in self.mismatched.items()]
        if not strict:
            on_meta = [shard.name for shard in self.shards if shard.tensor.is_meta]
            without = [name for name in on_meta if name not in self.sources]
            if without:
                problems.append(f"on meta, and without values that fit: {without}")
        if self.shards and not self.sources:
            problems.append("nothing in the files fits a parameter of the model")
        if problems:
            remedy = (
                "Pass strict=False to load what fits."
                if strict
                else "Call model.to_empty(device=...) and initialise the model before it is loaded."
            )
            raise CheckpointError(
                f"{subject}: the model and the files must have the same parameters; nothing was "
                f"loaded: {'; '.join(problems)}. {remedy}"
            )


def _misfit(file: TensorFile, name: str, shard: TensorShard) -> str:
    entry, dtype = file.entries[name], file.dtype(name)
    if entry.shape != tuple(shard.shape):
        return f"shape {list(shard.shape)} is expected, found {list(entry.shape)}"
    if dtype is None:
        return f"a dtype that torch has is expected, found {entry.dtype}"
    if _kind(dtype) != _kind(shard.dtype):
        return f"{shard.dtype} is expected, found {dtype}"
    return ""


def _kind(dtype: torch.dtype) -> str:
    """What can be converted without a change of meaning."""
    if dtype is torch.bool:
        return "truth"
    return "real" if dtype.is_floating_point else "complex" if dtype.is_complex else "whole"
