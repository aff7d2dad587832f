"""The format of `torch.distributed.checkpoint`: an index, and files of entries of `torch.save`.

What is written here, any program reads with `dcp.load`. Boxes of tensors are written and read one
at a time: torch's own writer keeps all tensors of a file in memory until it closes the file, and
its own reader trusts what it reads.

A checkpoint may come from a stranger. The index is a pickle, of which only the classes of the
format are made. What it claims of an entry is compared with the files before memory is allocated,
and entries are loaded with `weights_only`.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fullshard._torch import StorageInfo
from fullshard.errors import CheckpointError, UnknownNameError
from fullshard.layout.split import Box, intersection, slices, tiles
from fullshard.state.shards import LocalPart

INDEX = ".metadata"
MODEL = "model."
OPTIMIZER = "optimizer.state."

_FORMAT_VERSION = "1.0.0"  # as torch notes it in an index


@dataclass(frozen=True, slots=True)
class Entry:
    """The part of a file that holds a box of a tensor, or an object that is no tensor."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What an index says of a tensor; `boxes` are the parts that it was written in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


# Writing


def append_entry(file: BinaryIO, path: Path, values: torch.Tensor) -> Entry:
    """Write a box of a tensor at the end of a file."""
    host = values.detach().to("cpu")
    is_view = host.untyped_storage().nbytes() != host.nbytes or not host.is_contiguous()
    if is_view or host.is_conj() or host.is_neg():
        # torch.save writes the whole storage of a view.
        host = torch.empty(host.shape, dtype=host.dtype).copy_(host)
    offset = file.tell()
    torch.save(host, file)
    return Entry(path, offset, file.tell() - offset)


def encode_index(
    checkpoint_id: str,
    tensors: Mapping[str, TensorInfo],
    entries: Iterable[tuple[str, Box, Entry]],
) -> bytes:
    """The index of a checkpoint whose entries were written."""
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        key: TensorStorageMetadata(
            TensorProperties(dtype=info.dtype),
            torch.Size(info.shape),
            [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in info.boxes],
        )
        for key, info in tensors.items()
    }
    numbers = {(key, b): n for key, info in tensors.items() for n, b in enumerate(info.boxes)}
    places = {
        MetadataIndex(key, torch.Size(box.offsets), numbers[key, box]): StorageInfo(
            entry.path.name, entry.offset, entry.length
        )
        for key, box, entry in entries
    }
    index = Metadata(
        stored,
        planner_data={key: _nesting_of(key) for key in tensors},
        storage_data=places,
        storage_meta=StorageMeta(save_id=checkpoint_id),
        version=_FORMAT_VERSION,
    )
    return pickle.dumps(index)


def _nesting_of(key: str) -> tuple[str, ...]:
    """Where a key belongs in nested dicts, by which torch's tools unflatten it."""
    if key.startswith(OPTIMIZER):
        name, _, state = key.removeprefix(OPTIMIZER).rpartition(".")
        return ("optimizer", "state", name, state)
    return ("model", key.removeprefix(MODEL)) if key.startswith(MODEL) else (key,)


# Reading


class TensorReader:
    """The tensors of a checkpoint on disk, whoever wrote it.

    Reading holds one box in memory at a time, as it was written, beside the result.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._index = _read_index(path)
        self._known: dict[str, TensorInfo] = {}
        found = self._index.state_dict_metadata.items()
        self.keys = [key for key, each in found if isinstance(each, TensorStorageMetadata)]
        # What is no tensor, which torch's own checkpoints have.
        self.object_keys = [key for key, each in found if isinstance(each, BytesStorageMetadata)]

    def __contains__(self, key: str) -> bool:
        return isinstance(self._index.state_dict_metadata.get(key), TensorStorageMetadata)

    @property
    def nesting(self) -> Mapping[str, Any]:
        """The path in nested dicts that a key was made of, where its writer noted it."""
        found = self._index.planner_data
        return found if isinstance(found, dict) else {}

    @property
    def file_names(self) -> set[str]:
        return {INDEX, *(entry.relative_path for entry in self._index.storage_data.values())}

    def shape(self, key: str) -> tuple[int, ...]:
        return self.info(key).shape

    def dtype(self, key: str) -> torch.dtype:
        return self.info(key).dtype

    def boxes(self, key: str) -> tuple[Box, ...]:
        """The boxes of a tensor, as they were written."""
        return self.info(key).boxes

    def info(self, key: str) -> TensorInfo:
        if key not in self._known:
            if key not in self:
                raise UnknownNameError(
                    f"{key}: a tensor of {self.path} is expected, found none of that name; `keys` "
                    "has all."
                )
            try:
                self._known[key] = _checked_info(self._index.state_dict_metadata[key])
            except (AttributeError, TypeError, ValueError) as error:
                _damaged(key, "a shape, a dtype and blocks in the index", str(error))
        return self._known[key]

    def require_tiled(self, key: str) -> None:
        info = self.info(key)
        if not tiles(info.shape, info.boxes):
            _damaged(key, f"every element of {info.shape} once", "gaps or overlaps")

    def entry(self, key: str, box: Box) -> Entry:
        """The part of a file that holds a box, which is large enough for it."""
        found = self._entry(key, MetadataIndex(key, box.offsets))
        expected = box.numel * self.dtype(key).itemsize
        if expected > found.length:
            _damaged(key, f"{expected} bytes in {found.path.name}", f"{found.length}")
        return found

    def load(self, key: str, box: Box) -> torch.Tensor:
        """One box, as it was written."""
        entry = self.entry(key, box)
        found = load_entry(key, entry)
        if type(found) not in (torch.Tensor, torch.nn.Parameter):
            _damaged(key, f"a tensor in {entry.path.name}", type(found).__name__)
        expected = (box.sizes, self.dtype(key), torch.strided)
        if (tuple(found.shape), found.dtype, found.layout) != expected:
            _damaged(
                key,
                f"a block of {box.sizes} in {expected[1]}, as the index says,",
                f"{tuple(found.shape)} in {found.dtype} in {entry.path.name}",
            )
        values: torch.Tensor = found.detach()
        return values

    def load_all(self, key: str) -> Iterator[tuple[Box, torch.Tensor]]:
        """All boxes of a tensor as they were written, one at a time."""
        for box in self.boxes(key):
            yield box, self.load(key, box)

    def read(self, key: str, box: Box | None = None) -> torch.Tensor:
        """A whole tensor, or any box of it."""
        shape = self.shape(key)
        box = Box.whole(shape) if box is None else box
        if not box.is_within(shape):
            raise UnknownNameError(
                f"{key}: a block inside of {shape} is expected, found {box}; ask for less."
            )
        self.require_tiled(key)
        for stored in self.boxes(key):
            if intersection(stored, box) is not None:
                self.entry(key, stored)  # before memory is allocated for what it claims
        result = torch.empty(box.sizes, dtype=self.dtype(key))
        self.read_into({key: [LocalPart(box, result)]})
        return result

    def read_into(self, wanted: Mapping[str, Sequence[LocalPart]]) -> None:
        """Fill parts of tensors; each stored box that meets them is read once, file by file."""
        needed = []
        for key, parts in wanted.items():
            self.require_tiled(key)
            for stored in self.boxes(key):
                shared = [(p, both) for p in parts if (both := intersection(p.box, stored))]
                if shared:
                    needed.append((self.entry(key, stored), key, stored, shared))
        needed.sort(key=lambda each: (each[0].path, each[0].offset))
        for _, key, stored, shared in needed:
            values = self.load(key, stored)
            for part, both in shared:
                part.values[slices(both, part.box)].copy_(values[slices(both, stored)])

    def read_object(self, key: str) -> Any:
        """Something that is no tensor, as plain data."""
        if key not in self.object_keys:
            raise UnknownNameError(f"{key}: one of {self.object_keys} is expected.")
        return load_entry(key, self._entry(key, MetadataIndex(key)))

    def _entry(self, key: str, index: MetadataIndex) -> Entry:
        stored = self._index.storage_data.get(index)
        name, offset, length = (
            getattr(stored, field, None) for field in ("relative_path", "offset", "length")
        )
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            found = "nothing" if stored is None else f"bytes {offset!r} on, {length!r}"
            _damaged(key, f"a part of a file for the block at {index.offset}", found)
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
        return Entry(path, offset, length)


def _damaged(subject: str, expected: str, found: str) -> NoReturn:
    raise CheckpointError(
        f"{subject}: {expected} must be in the checkpoint, found {found}; it is damaged, or "
        "something else. `latest` finds whole ones."
    )


def _checked_info(stored: Any) -> TensorInfo:
    shape, dtype = tuple(stored.size), stored.properties.dtype
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
    numbers = [*shape, *(n for box in boxes for n in (*box.offsets, *box.sizes))]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("sizes that are no sizes")
    if any({len(box.offsets), len(box.sizes)} != {len(shape)} for box in boxes):
        raise ValueError("blocks with another number of dims")
    return TensorInfo(shape, dtype, tuple(dict.fromkeys(boxes)))


# The index


def _read_index(folder: Path) -> Metadata:
    path = folder / INDEX
    try:
        content = path.read_bytes()
        require_bounded(content)
        found = _IndexUnpickler(io.BytesIO(content)).load()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: a checkpoint has an index, found no {INDEX} in it; it was not written to "
            "its end, or it is not a checkpoint."
        ) from None
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: an index of torch.distributed.checkpoint is expected, found one that cannot "
            f"be read ({error}); the file is damaged."
        ) from error
    # A damaged pickle can leave out any attribute.
    tensors = getattr(found, "state_dict_metadata", None)
    entries = getattr(found, "storage_data", None)
    has_names = isinstance(tensors, dict) and all(isinstance(key, str) for key in tensors)
    if not isinstance(found, Metadata) or not has_names or not isinstance(entries, dict):
        raise CheckpointError(
            f"{path}: an index of torch.distributed.checkpoint is expected, found "
            f"{type(found).__name__}; the file is damaged, or something else."
        )
    for info in entries.values():
        require_inside(folder, getattr(info, "relative_path", None))
    return found


def require_inside(folder: Path, relative: Any) -> Path:
    """The path of a file of a checkpoint, which must not lead out of its folder."""
    if not isinstance(relative, str) or not relative:
        raise CheckpointError(f"{folder}: file names are expected, found {relative!r}.")
    path = PurePath(relative)
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointError(
            f"{folder}: its files must be inside of it, found {relative!r}; do not trust it."
        )
    return folder / path


def require_bounded(content: bytes) -> None:
    """Raise if loading a pickle would take more memory than its own size explains.

    Python's unpickler makes a table as long as the largest number that a pickle gives to one of
    its objects: eight bytes on disk can ask for tens of gigabytes.
    """
    try:
        for operation, argument, _ in pickletools.genops(content):
            number = int(argument or 0) if operation.name in ("PUT", "LONG_BINPUT") else 0
            if number > len(content):
                raise CheckpointError(
                    f"index: objects numbered up to {len(content)} fit in it, found {number}; "
                    "the file is damaged, or made to exhaust memory."
                )
    except ValueError as error:
        raise CheckpointError(
            f"index: a whole pickle is expected, found {error}; it is cut short or damaged."
        ) from error


# What an index consists of. Everything else that a pickle could name is refused.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "PurePath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(
            f"index: only the classes of the checkpoint format are expected, found "
            f"{module}.{name}; do not open this file with anything that runs what it holds."
        )


# Entries


def load_entry(subject: str, entry: Entry) -> Any:
    """What `torch.save` wrote into a part of a file, without running anything."""
    try:
        with entry.path.open("rb") as file:
            part = _FilePart(file, entry.offset, entry.length)
            _require_plain_archive(part, entry.length)
            part.seek(0)
            return torch.load(part, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    except CheckpointError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        _damaged(subject, f"what torch.save writes, in {entry.path.name}", f"another ({reason})")


def _require_plain_archive(part: _FilePart, length: int) -> None:
    """An archive says how large its members become; together they must fit where they are."""
    with zipfile.ZipFile(part) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise CheckpointError("an archive without compression is expected, found a compressed one")
    if sum(member.file_size for member in members) > length:
        raise CheckpointError(
            f"an archive of {length} bytes is expected, found one that claims to be larger inside"
        )


class _FilePart(io.RawIOBase):
    """Some bytes in the middle of a file, as a file. The file itself stays open."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length = file, offset, length
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
