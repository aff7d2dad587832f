"""A checkpoint on disk, opened by one process without a process group.

Nothing in it is trusted. The index was unpickled without running anything; here each entry's
claims are compared with the files before memory is allocated for it, and entries are loaded with
`weights_only`.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from fullshard.errors import CheckpointError, UnknownNameError
from fullshard.layout.split import Box, tiles
from fullshard.state.dcp_format import read_index, require_inside
from fullshard.state.folder import is_unfinished, located
from fullshard.state.manifest import MANIFEST, Manifest, read_manifest


def open_checkpoint(path: str | Path) -> Opened:
    """Open a checkpoint of ours or of torch's, which must have all its files."""
    found = located(Path(path))
    if not found.is_dir():
        raise CheckpointError(
            f"{path}: the folder of a checkpoint is expected, found "
            f"{'a file' if found.exists() else 'nothing'}; `latest` finds the newest one."
        )
    if is_unfinished(found):
        raise CheckpointError(
            f"{path}: a whole checkpoint is expected, found one that was not written to its end; "
            "`latest` finds whole ones."
        )
    manifest = read_manifest(found) if is_ours(found) else None
    for name, num_bytes in ({} if manifest is None else manifest.files).items():
        problem = file_problem(found / name, num_bytes)
        if problem is not None:
            raise CheckpointError(f"{found / name}: {problem}. `latest` finds whole checkpoints.")
    return Opened(found, read_index(found), manifest)


def file_problem(path: Path, num_bytes: int) -> str | None:
    """What is wrong with a file that should have a number of bytes, if anything."""
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"a file of {num_bytes} bytes is expected, found none ({error.strerror})"
    if size != num_bytes:
        return f"a file of {num_bytes} bytes is expected, found {size}; it is damaged or another"
    return None


def is_ours(path: Path) -> bool:
    """Whether fullshard wrote it; then it is nothing without its manifest."""
    return (path / MANIFEST).exists() or (path / "rank_00000.pt").exists()


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """Where a block, or an object that is no tensor, lies: a part of a file."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What the index says of a tensor, once that has been checked."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Box, ...]


class Opened:
    """The tensors of a checkpoint, read as they are asked for.

    `manifest` is None for a checkpoint that torch wrote. Reading holds one block in memory at a
    time, beside the result.
    """

    def __init__(self, path: Path, index: Metadata, manifest: Manifest | None) -> None:
        self.path = path
        self.manifest = manifest
        self._index = index
        self._known: dict[str, _Tensor] = {}

    @property
    def keys(self) -> list[str]:
        """Of tensors."""
        return self._keys(TensorStorageMetadata)

    @property
    def object_keys(self) -> list[str]:
        """Of everything else, which torch's own checkpoints have."""
        return self._keys(BytesStorageMetadata)

    def __contains__(self, key: str) -> bool:
        return isinstance(self._index.state_dict_metadata.get(key), TensorStorageMetadata)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._tensor(key).shape

    def dtype(self, key: str) -> torch.dtype:
        return self._tensor(key).dtype

    def places(self, key: str) -> tuple[Box, ...]:
        """Where the blocks of a tensor are, as they were written."""
        return self._tensor(key).blocks

    def entry(self, key: str, where: Box) -> StoredEntry:
        """The part of a file that a block is stored in; large enough for what it claims to be."""
        found = self._entry(key, MetadataIndex(key, where.offsets))
        expected = where.numel * self.dtype(key).itemsize
        if expected > found.length:
            _damaged(key, f"{expected} bytes in {found.path.name}", f"{found.length}")
        return found

    def load(self, key: str, where: Box) -> torch.Tensor:
        """One block, as it was written."""
        entry = self.entry(key, where)
        found = load_entry(key, entry)
        if type(found) not in (torch.Tensor, torch.nn.Parameter):
            _damaged(key, f"a tensor in {entry.path.name}", type(found).__name__)
        expected = (where.sizes, self.dtype(key), torch.strided)
        if (tuple(found.shape), found.dtype, found.layout) != expected:
            _damaged(
                key,
                f"a block of {where.sizes} in {expected[1]}, as the index says,",
                f"{tuple(found.shape)} in {found.dtype} in {entry.path.name}",
            )
        values: torch.Tensor = found.detach()
        return values

    def blocks(self, key: str) -> Iterator[tuple[Box, torch.Tensor]]:
        """All blocks as they were written, one at a time."""
        for where in self.places(key):
            yield where, self.load(key, where)

    def read(self, key: str) -> torch.Tensor:
        """A whole tensor."""
        shape = self.shape(key)
        return self.read_block(key, Box((0,) * len(shape), shape))

    def read_block(self, key: str, where: Box) -> torch.Tensor:
        """Any block of a tensor, from those stored blocks that it meets."""
        tensor = self._tensor(key)
        if not _is_inside(tensor.shape, where):
            raise UnknownNameError(
                f"{key}: a block inside of {tensor.shape} is expected, found {where}; ask for less."
            )
        self.require_tiled(key)
        parts = [(p, common) for p in tensor.blocks if (common := _common(p, where)) is not None]
        for place, _ in parts:
            self.entry(key, place)  # what it claims is there, before memory is allocated for it
        result = torch.empty(where.sizes, dtype=tensor.dtype)
        for place, common in parts:
            _region(result, where, common).copy_(_region(self.load(key, place), place, common))
        return result

    def read_object(self, key: str) -> Any:
        """Something that is no tensor, as plain data."""
        if key not in self.object_keys:
            raise UnknownNameError(f"{key}: one of {self.object_keys} is expected.")
        return load_entry(key, self._entry(key, MetadataIndex(key)))

    def require_tiled(self, key: str) -> None:
        tensor = self._tensor(key)
        if not tiles(tensor.shape, tensor.blocks):
            _damaged(key, f"every element of {tensor.shape} once", "gaps or overlaps")

    # What the index says

    def _keys(self, kind: type[TensorStorageMetadata | BytesStorageMetadata]) -> list[str]:
        found = self._index.state_dict_metadata.items()
        return [key for key, stored in found if isinstance(stored, kind)]

    def _tensor(self, key: str) -> _Tensor:
        if key not in self._known:
            if key not in self:
                raise UnknownNameError(
                    f"{key}: a tensor of {self.path} is expected, found none of that name; `keys` "
                    "has all."
                )
            try:
                self._known[key] = _checked(self._index.state_dict_metadata[key])
            except (AttributeError, TypeError, ValueError) as error:
                _damaged(key, "a shape, a dtype and blocks in the index", str(error))
        return self._known[key]

    def _entry(self, key: str, index: MetadataIndex) -> StoredEntry:
        stored = self._index.storage_data.get(index)
        name, offset, length = (
            getattr(stored, field, None) for field in ("relative_path", "offset", "length")
        )
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            said = type(stored).__name__ if stored is None else f"bytes {offset!r} on, {length!r}"
            _damaged(key, f"a part of a file for the block at {index.offset}", said)
        if getattr(stored, "transform_descriptors", None):
            _damaged(key, "tensors as they are", "compressed or otherwise transformed ones")
        path = require_inside(self.path, name)
        try:
            is_inside = path.resolve().is_relative_to(self.path.resolve())
            size = path.stat().st_size
        except (OSError, ValueError) as error:
            _damaged(key, f"a block in {path.name}", str(error))
        if not is_inside:
            _damaged(key, "a file inside of the checkpoint", f"{path.name}, which leads out")
        if offset + length > size:
            _damaged(key, f"bytes {offset} to {offset + length} of {path.name}", f"only {size}")
        return StoredEntry(path, offset, length)


def _damaged(subject: str, expected: str, found: str) -> NoReturn:
    raise CheckpointError(
        f"{subject}: {expected} must be in the checkpoint, found {found}; it is damaged, or "
        "something else. `latest` finds whole ones."
    )


def _checked(stored: Any) -> _Tensor:
    shape, dtype = tuple(stored.size), stored.properties.dtype
    places = [Box(tuple(c.offsets), tuple(c.sizes)) for c in stored.chunks]
    numbers = [*shape, *(n for p in places for n in (*p.offsets, *p.sizes))]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("sizes that are no sizes")
    if any({len(p.offsets), len(p.sizes)} != {len(shape)} for p in places):
        raise ValueError("blocks with another number of dims")
    return _Tensor(shape, dtype, tuple(dict.fromkeys(places)))


# Blocks


def _is_inside(shape: tuple[int, ...], where: Box) -> bool:
    if {len(where.offsets), len(where.sizes)} != {len(shape)}:
        return False
    extents = zip(where.offsets, where.sizes, shape, strict=True)
    return all(o >= 0 and s >= 0 and o + s <= size for o, s, size in extents)


def _common(a: Box, b: Box) -> Box | None:
    """Where two blocks meet, if they do."""
    begins = tuple(map(max, zip(a.offsets, b.offsets, strict=True)))
    ends = (
        min(x + s, y + t) for x, s, y, t in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
    sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return Box(begins, sizes) if all(size > 0 for size in sizes) else None


def _region(values: torch.Tensor, place: Box, where: Box) -> torch.Tensor:
    """Of the values of a block, those of a block inside of it."""
    for dim, (own, begin, size) in enumerate(
        zip(place.offsets, where.offsets, where.sizes, strict=True)
    ):
        values = values.narrow(dim, begin - own, size)
    return values


# Files


def load_entry(subject: str, entry: StoredEntry) -> Any:
    """What `torch.save` wrote into a part of a file, without running anything."""
    try:
        with entry.path.open("rb") as file:
            _require_plain_archive(FilePart(file, entry.offset, entry.length), entry.length)
            part = FilePart(file, entry.offset, entry.length)
            return torch.load(part, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    except CheckpointError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        _damaged(subject, f"what torch.save writes, in {entry.path.name}", f"another ({reason})")


def _require_plain_archive(part: FilePart, length: int) -> None:
    """An archive says how large its members become; together they must fit where they are."""
    with zipfile.ZipFile(part) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise CheckpointError("an archive without compression is expected, found a compressed one")
    if sum(member.file_size for member in members) > length:
        raise CheckpointError(
            f"an archive of {length} bytes is expected, found one that claims to be larger inside"
        )


class FilePart(io.RawIOBase):
    """Some bytes in the middle of a file, as a file. The file itself stays open."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"a position in the file is expected, found {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        # Views are closed at once: one that an error's traceback keeps alive outlives its buffer.
        with memoryview(buffer) as given, given.cast("B") as view:
            wanted = min(len(view), self._length - self._position)
            if wanted <= 0:
                return 0
            self._file.seek(self._offset + self._position)
            with view[:wanted] as part:
                count = int(self._file.readinto(part))  # type: ignore[attr-defined]
        self._position += count
        return count
