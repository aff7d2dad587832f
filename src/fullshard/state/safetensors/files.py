"""Safetensors files: a header with names, dtypes, shapes and offsets, then the tensors' bytes.

They are read and written here and not by the `safetensors` package because that package writes
whole tensors from one process, keeps what it has read of a file in memory, and is not a dependency
of fullshard: here each rank writes and reads boxes of tensors, within bounded memory, with torch
alone.

A file may come from an untrusted source: its header is compared with its size before anything else
is done, and nothing in it could be executed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from fullshard.errors import CheckpointError, UnsupportedError
from fullshard.layout.split import Box, element_ranges, element_span, pieces, slices
from fullshard.state.checkpoint.index import require_inside
from fullshard.state.plain import decode, parse_json
from fullshard.state.shards import LocalPart
from fullshard.state.stored import TensorInfo

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
_LENGTH_BYTES = 8
_ALIGNMENT = 8
# How many elements of a file are read before their memory is released.
_PIECE_NUMEL = 2**20


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One tensor of a file as its header describes it; offsets count from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, ...]


class TensorFile:
    """One file, mapped into memory: only what is accessed is read."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                # Private, so that tensors may be made of it; nothing writes to them.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self.entries = self._read_header()
        except (ValueError, RecursionError) as error:
            raise _damaged(path, f"that {error}") from error

    def _read_header(self) -> dict[str, FileEntry]:
        length = int.from_bytes(self._map[:_LENGTH_BYTES], "little")
        self._begin = _LENGTH_BYTES + length
        num_bytes = len(self._map) - self._begin
        if length > _MAX_HEADER_BYTES or num_bytes < 0:
            raise ValueError(f"its header has {length} bytes, and the file {len(self._map)}")
        table = parse_json(self._map[_LENGTH_BYTES : self._begin])
        table.pop("__metadata__", None)
        entries: dict[str, FileEntry] = decode(Mapping[str, FileEntry], table, "its header")
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            (begin, last), dtype = entry.data_offsets, DTYPES.get(entry.dtype)
            size = last - begin if dtype is None else prod(entry.shape) * dtype.itemsize
            if begin != end or last - begin != size or size < 0:
                raise ValueError(f"{name!a} must fill the bytes after the one before: {entry}")
            end = last
        if end != num_bytes:
            raise ValueError(f"its tensors have {end} bytes, and the file {num_bytes} for them")
        return entries

    def dtype(self, name: str) -> torch.dtype | None:
        """None if torch has no such dtype."""
        return DTYPES.get(self.entries[name].dtype)

    def view(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor, as a view of the file's memory if possible."""
        entry, dtype = self.entries[name], self.dtype(name)
        assert dtype is not None  # asked before
        if prod(entry.shape) == 0:
            return torch.empty(box.sizes, dtype=dtype)
        begin, num_bytes = self._begin + entry.data_offsets[0], prod(entry.shape) * dtype.itemsize
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=begin)
        raw = raw.view(*entry.shape, dtype.itemsize)[slices(box, Box.whole(entry.shape))]
        if dtype is torch.bool:
            return raw.squeeze(-1).ne(0)  # a byte may hold anything, a bool must not
        if begin % dtype.itemsize:
            raw = raw.clone(memory_format=torch.contiguous_format)
        return raw.view(dtype).squeeze(-1)

    def views(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """A box in pieces. The memory of a piece is released before the next one is read."""
        entry, dtype = self.entries[name], self.dtype(name)
        assert dtype is not None
        for piece in pieces(box, _PIECE_NUMEL):
            yield piece, self.view(name, piece)
            elements = element_span(entry.shape, piece)
            begin = self._begin + entry.data_offsets[0] + elements.start * dtype.itemsize
            rest = begin % mmap.PAGESIZE
            num_bytes = len(elements) * dtype.itemsize
            self._map.madvise(mmap.MADV_DONTNEED, begin - rest, num_bytes + rest)


def _damaged(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a safetensors file or an index of some ({found}); it is damaged, or "
        "something else."
    )


def open_tensors(path: Path) -> dict[str, TensorFile]:
    """The file of each tensor of `path`: a file, a folder with one, or a folder with an index."""
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; pass a safetensors file, or a folder with one."
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
                f"{path} should have one safetensors file, or the index of several, but has "
                f"{found or 'none'}; give the path of the file that is meant."
            )
    if path.name.endswith(INDEX_SUFFIX):
        return _open_index(path)
    file = TensorFile(path)
    return dict.fromkeys(file.entries, file)


def _open_index(path: Path) -> dict[str, TensorFile]:
    try:
        found = parse_json(path.read_bytes()).get("weight_map")
        weight_map: dict[str, str] = decode(Mapping[str, str], found, "its weight_map")
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"that {error}") from error
    files: dict[str, TensorFile] = {}
    for name in dict.fromkeys(weight_map.values()):
        inside = require_inside(path.parent, name)
        if not inside.is_file():
            raise CheckpointError(
                f"{path}: there is no {name!r} beside it; the folder was not copied to its end."
            )
        files[name] = TensorFile(inside)
    for name, file_name in weight_map.items():
        if name not in files[file_name].entries:
            raise _damaged(path, f"no {name!r} in {file_name!r}")
    # Include tensors that the index does not name: a reader of the folder must know of them.
    everything = {name: file for file in files.values() for name in file.entries}
    return {**everything, **{name: files[file] for name, file in weight_map.items()}}


class SafetensorsReader:
    """Reads the tensors of a file, of a folder with one, or of a folder with an index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = open_tensors(path)
        self.keys = list(self.files)

    def info(self, key: str) -> TensorInfo:
        file = self.files[key]
        entry, dtype = file.entries[key], file.dtype(key)
        if dtype is None:
            raise UnsupportedError(
                f"{self.path}: {key} has the dtype {entry.dtype}, which torch does not have; "
                "convert it with the program that wrote it."
            )
        return TensorInfo(entry.shape, dtype, (Box.whole(entry.shape),))

    def read(self, key: str, box: Box) -> torch.Tensor:
        values = torch.empty(box.sizes, dtype=self.info(key).dtype)
        self.read_into({key: [LocalPart(box, values)]})
        return values

    def read_into(self, wanted: Mapping[str, Sequence[LocalPart]]) -> None:
        for key, parts in wanted.items():
            for part in parts:
                for piece, values in self.files[key].views(key, part.box):
                    part.values[slices(piece, part.box)].copy_(values)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file: its name, how it begins, and where in it each tensor goes."""

    name: str
    header: bytes
    entries: dict[str, FileEntry]

    @classmethod
    def of(cls, file_name: str, tensors: Mapping[str, TensorInfo]) -> FilePlan:
        """Wide dtypes come first, so that every tensor is aligned for its dtype."""
        entries, end = dict[str, FileEntry](), 0
        for name, info in sorted(tensors.items(), key=lambda each: -each[1].dtype.itemsize):
            if info.dtype not in _DTYPE_NAMES:
                raise UnsupportedError(
                    f"{name}: safetensors has no {info.dtype}, only {', '.join(DTYPES)}; convert "
                    "it, or leave it out."
                )
            begin, end = end, end + info.num_bytes
            entries[name] = FileEntry(_DTYPE_NAMES[info.dtype], info.shape, (begin, end))
        table = {"__metadata__": {"format": "pt"}, **{n: asdict(e) for n, e in entries.items()}}
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return cls(file_name, len(text).to_bytes(_LENGTH_BYTES, "little") + text, entries)

    @property
    def num_data_bytes(self) -> int:
        return max((entry.data_offsets[1] for entry in self.entries.values()), default=0)

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.num_data_bytes


def plan_files(tensors: Mapping[str, TensorInfo], max_bytes: int) -> list[FilePlan]:
    """Distribute tensors, in their order, over as many files as are needed.

    A tensor is never split: one that is larger than `max_bytes` has a file of its own.
    """
    files: list[dict[str, TensorInfo]] = [{}]
    num_bytes = 0
    for name, info in tensors.items():
        num_bytes += info.num_bytes
        if files[-1] and num_bytes > max_bytes:
            files.append({})
            num_bytes = info.num_bytes
        files[-1][name] = info
    names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    names = names if len(files) > 1 else [ONE_FILE]
    return [FilePlan.of(name, some) for name, some in zip(names, files, strict=True)]


class FileWriter:
    """Writes the boxes of one file in any order.

    Errors are kept for `finish`: the ranks that send boxes must not be left waiting because the
    disk of the rank that writes them is full.
    """

    def __init__(self, folder: Path, plan: FilePlan) -> None:
        self._plan = plan
        self._file: BinaryIO | None = None
        self._error: OSError | None = None
        with self._keeping_errors():
            self._file = (folder / plan.name).open("xb")
            self._file.write(plan.header)

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = error

    def write(self, name: str, box: Box, values: torch.Tensor) -> None:
        """Write a box: a contiguous tensor in host memory, of the dtype that was planned."""
        if self._file is None or self._error is not None or not values.numel():
            return
        entry, itemsize = self._plan.entries[name], values.dtype.itemsize
        content = memoryview((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))
        begin, begin_data = 0, len(self._plan.header) + entry.data_offsets[0]
        with self._keeping_errors():
            for elements in element_ranges(entry.shape, box):
                end = begin + len(elements) * itemsize
                self._file.seek(begin_data + elements.start * itemsize)
                self._file.write(content[begin:end])
                begin = end

    def finish(self) -> None:
        """Make sure that the whole file is on disk; raise an error that was kept."""
        if self._file is not None and self._error is None:
            with self._keeping_errors():
                self._file.flush()
                os.fsync(self._file.fileno())
        self.close()
        if self._error is not None:
            raise CheckpointError(
                f"{self._plan.name}: writing failed ({self._error}); make room, or choose another "
                "folder that all ranks share, and export again."
            ) from self._error

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # reported by `finish`
                self._file.close()


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes, which can be sent whatever the dtype."""
    return values.reshape(-1).view(torch.uint8)
