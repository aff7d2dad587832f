"""Files of the safetensors format: a header with names, dtypes, shapes and offsets, then the bytes.

A file may come from a stranger: its header is compared with its size before anything else is done,
and there is nothing in it that could run.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import CheckpointError, UnsupportedError
from fullshard.layout.split import Box
from fullshard.state.dcp_format import require_inside

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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# What the format's own library accepts at most.
_MAX_HEADER_BYTES = 100_000_000
_MAX_INDEX_BYTES = 1_000_000_000
_LENGTH_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: the name of its dtype, its shape, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def pieces(where: Box, max_numel: int) -> Iterator[Box]:
    """A block in pieces of at most so many elements, in the order of its elements."""
    if where.numel == 0:
        return
    if where.numel <= max_numel:
        yield where
        return
    dim = next(dim for dim, size in enumerate(where.sizes) if size > 1)
    num_rows = max(1, max_numel * where.sizes[dim] // where.numel)
    begin, end = where.offsets[dim], where.offsets[dim] + where.sizes[dim]
    for row in range(begin, end, num_rows):
        rows = min(num_rows, end - row)
        offsets = (*where.offsets[:dim], row, *where.offsets[dim + 1 :])
        sizes = (*where.sizes[:dim], rows, *where.sizes[dim + 1 :])
        yield from pieces(Box(offsets, sizes), max_numel)


def cut_out(values: torch.Tensor, block: Box, piece: Box) -> torch.Tensor:
    """A piece of a block, as a view of the block's values."""
    for dim, (begin, offset, size) in enumerate(
        zip(block.offsets, piece.offsets, piece.sizes, strict=True)
    ):
        values = values.narrow(dim, offset - begin, size)
    return values


def runs(shape: Sequence[int], where: Box) -> Iterator[tuple[int, int]]:
    """Elements of a contiguous tensor that are neighbours and lie in a block: (first, count)."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = max(len(shape) - 1, 0)
    while inner > 0 and where.sizes[inner] == shape[inner]:
        inner -= 1  # rows that are whole are neighbours
    count = prod(where.sizes[inner:])
    base = sum(o * s for o, s in zip(where.offsets, strides, strict=True))
    for index in product(*(range(size) for size in where.sizes[:inner])):
        yield base + sum(i * s for i, s in zip(index, strides[:inner], strict=True)), count


def encoded_header(tensors: Sequence[Described]) -> tuple[bytes, dict[str, Entry]]:
    """The beginning of a file, and where in it each tensor goes.

    Wide dtypes come first, so that every tensor is aligned for its dtype.
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in ordered:
        if tensor.dtype not in DTYPE_NAMES:
            raise UnsupportedError(
                f"{tensor.name}: safetensors has the dtypes {', '.join(DTYPES)}, found "
                f"{tensor.dtype}; convert it, or leave it out."
            )
        table[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.nbytes],
        }
        begin += tensor.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    entries: dict[str, Entry] = {}
    for tensor in ordered:
        said = table[tensor.name]
        begin, end = (len(header) + offset for offset in said["data_offsets"])
        entries[tensor.name] = Entry(said["dtype"], tensor.shape, begin, end)
    return header, entries


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

    def view(self, name: str, where: Box) -> torch.Tensor:
        """A block of a tensor, as the file's memory where that is possible."""
        entry, dtype = self.entries[name], self.dtype(name)
        assert dtype is not None  # asked before
        whole = Box((0,) * len(entry.shape), entry.shape)
        numel = whole.numel
        if numel == 0:
            return torch.empty(where.sizes, dtype=dtype)
        if dtype is not torch.bool and entry.begin % dtype.itemsize == 0:
            values = torch.frombuffer(self._map, dtype=dtype, count=numel, offset=entry.begin)
            return cut_out(values.view(entry.shape), whole, where)
        raw = torch.frombuffer(
            self._map, dtype=torch.uint8, count=numel * dtype.itemsize, offset=entry.begin
        )
        part = cut_out(raw.view(*entry.shape, dtype.itemsize), whole, where)
        if dtype is torch.bool:
            return part.squeeze(-1).ne(0)  # a byte may hold anything, a bool must not
        return part.clone(memory_format=torch.contiguous_format).view(dtype).squeeze(-1)

    def forget(self, name: str, where: Box) -> None:
        """Give back the memory that looking at a block took; the file still has it."""
        entry, dtype = self.entries[name], self.dtype(name)
        if dtype is None or where.numel == 0:
            return
        strides = [prod(entry.shape[dim + 1 :]) for dim in range(len(entry.shape))]
        ends = [o + s - 1 for o, s in zip(where.offsets, where.sizes, strict=True)]
        first = sum(o * s for o, s in zip(where.offsets, strides, strict=True))
        last = sum(e * s for e, s in zip(ends, strides, strict=True))
        begin = entry.begin + first * dtype.itemsize
        end = entry.begin + (last + 1) * dtype.itemsize
        begin -= begin % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _damaged(path: Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {expected} is expected, found {found}; the file is damaged, or something else."
    )


def _decoded_header(path: Path, content: mmap.mmap, size: int) -> dict[str, Entry]:
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
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name that is there twice")
        return found

    try:
        table = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "JSON", f"something else ({error})") from error
    if not isinstance(table, dict):
        raise _damaged(path, "a JSON object", type(table).__name__)
    return table


def _entry(path: Path, name: str, said: Any, begin: int, size: int) -> Entry:
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
    return Entry(dtype, shape, first, last)


def _sizes(value: Any) -> tuple[int, ...] | None:
    are_sizes = isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
    return tuple(value) if are_sizes else None


def open_tensors(path: Path) -> dict[str, TensorFile]:
    """The file of each tensor of `path`: a file, a folder with one, or a folder with an index."""
    if not path.is_dir():
        if not path.is_file():
            raise CheckpointError(
                f"{path}: a safetensors file, or a folder with one, is expected, found nothing."
            )
        if path.name.endswith(INDEX_SUFFIX):
            return _open_index(path)
        return _contents(TensorFile(path))
    if (path / ONE_FILE).is_file():
        return _contents(TensorFile(path / ONE_FILE))
    indexes = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    files = sorted(path.glob("*.safetensors"))
    if len(indexes) == 1:
        return _open_index(indexes[0])
    if not indexes and len(files) == 1:
        return _contents(TensorFile(files[0]))
    found = [each.name for each in indexes or files][:8]
    raise CheckpointError(
        f"{path}: one safetensors file, or the index of several, is expected, found "
        f"{found or 'none'}; give the path of the file that is meant."
    )


def _contents(file: TensorFile) -> dict[str, TensorFile]:
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
    return _indexed(path, weight_map, files)


def _indexed(
    path: Path, weight_map: Mapping[str, str], files: Mapping[str, TensorFile]
) -> dict[str, TensorFile]:
    for name, file_name in weight_map.items():
        if name not in files[file_name].entries:
            raise _damaged(path, f"{name!r} in {file_name!r}", "a file without it")
    # A tensor that the index does not name is there, too: who reads the folder must hear of it.
    unnamed = {
        name: file for file in files.values() for name in file.entries if name not in weight_map
    }
    return {**{name: files[file] for name, file in weight_map.items()}, **unnamed}
