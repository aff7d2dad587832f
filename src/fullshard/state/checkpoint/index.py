"""The format of `torch.distributed.checkpoint`: an index, and files of entries of `torch.save`.

Any program can read what is written here with `dcp.load`. Boxes of tensors are written and read one
at a time, with a checksum of each: torch's own writer keeps all tensors of a file in memory until
it closes the file, and its own reader trusts what it reads.

A checkpoint may come from an untrusted source. The index is a pickle, and unpickling it allows only
the classes of the format. Its claims about an entry are compared with the files before memory is
allocated, and entries are loaded with `weights_only`.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path, PurePath
from typing import Any, BinaryIO, ClassVar, NoReturn

import torch
import torch.distributed as dist
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
from fullshard.layout.split import Box, intersection, pieces, slices, tiles
from fullshard.state.shards import LocalPart
from fullshard.state.stored import TensorInfo, TensorSource

INDEX = ".metadata"
MODEL = "model."
OPTIMIZER = "optimizer.state."


# Checksums. They do not depend on how a tensor is sharded: each element is mixed with its place in
# the whole tensor into 64 bits, and these are added, so that the checksum of a tensor is the sum of
# the checksums of its boxes. The mixing is a permutation of what it is given: one changed element
# always changes the sum, and several changes cancel by accident only (about once in 2**64).
# Checksums notice accidents; they are no protection against a forger.

MASK = 2**64 - 1
_PIECE_NUMEL = 2**20  # extra memory is a few times eight bytes for each of these
_STRIDE = 0x9E3779B97F4A7C15  # between neighbors, before mixing: 2**64 over the golden ratio
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64, known to spread bits well
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(shape: Sequence[int], box: Box, values: torch.Tensor) -> int:
    """The checksum of one box of a tensor of `shape`, computed on the device of its values.

    It sees bits, not numbers: 0.0 and -0.0 differ, and so do two nans with different payloads.
    """
    words = values.detach().resolve_conj().resolve_neg()
    if words.dtype == torch.complex128:
        # Two words per element; they are neighbors, like elements of one more dim.
        words = torch.view_as_real(words).view(torch.int64)
        shape, box = (*shape, 2), Box((*box.offsets, 0), (*box.sizes, 2))
    else:
        words = words.view(_INTEGERS[words.itemsize])
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in pieces(box, _PIECE_NUMEL):
        bits = words[slices(piece, box)]
        bits = bits.to(torch.int64, memory_format=torch.contiguous_format, copy=True)
        first = sum(offset * each for offset, each in zip(piece.offsets, strides, strict=True))
        bits += _signed((first + 1) * _STRIDE)
        for dim, (size, stride) in enumerate(zip(piece.sizes, strides, strict=True)):
            if size > 1:
                places = torch.arange(size, device=bits.device) * _signed(stride * _STRIDE)
                bits += places.view(-1, *[1] * (len(strides) - dim - 1))
        total += _mixed(bits.view(-1)).sum()
    return int(total) & MASK


def joined(parts: Iterable[int]) -> int:
    """The checksum of a tensor whose parts have these checksums."""
    return sum(parts) & MASK


def as_text(value: int) -> str:
    return f"{value:016x}"


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Make every bit of a word depend on every other, in place."""
    low, high = words.view(torch.int32).view(-1, 2).unbind(1)
    low ^= high  # words ^= words >> 32, without the sign that torch's shift drags along
    for factor in _FACTORS:
        words *= _signed(factor)
        low ^= high
    return words


def _signed(value: int) -> int:
    """The int64 that has the bits of an unsigned 64-bit number."""
    value &= MASK
    return value - 2**64 if value >= 2**63 else value


# Writing


@dataclass(frozen=True, slots=True)
class Entry:
    """The part of a file that holds a box of a tensor, or an object that is not a tensor."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a tensor in a file, and its checksum."""

    box: Box
    checksum: str
    entry: Entry


@dataclass(slots=True)
class Written:
    """A tensor, and its blocks on disk. `checksum` is known once all ranks' are `merged`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: list[Block] = field(default_factory=list)
    checksum: str = ""


def write_tensors(
    paths: Sequence[Path],
    checkpoint_id: str,
    sources: Mapping[str, TensorSource],
    num_threads: int = 1,
) -> dict[str, Written]:
    """Spread the boxes of tensors over files, of which so many are written at a time."""
    boxes = [(key, box) for key, source in sources.items() for box in source.boxes]
    if num_threads > 1:
        boxes.sort(key=lambda each: -each[1].numel)  # so that files get about the same size
    found = {key: Written(source.shape, source.dtype) for key, source in sources.items()}

    def write_file(number: int) -> None:
        path = paths[number]
        with path.open("xb") as file:
            for key, box in boxes[number :: len(paths)]:
                found[key].blocks.append(_write_block(file, path, sources[key], box))
            file.write(seal(checkpoint_id, path.name))
            file.flush()
            os.fsync(file.fileno())

    numbers, under_way = range(len(paths)), list[Future[None]]()
    with ThreadPoolExecutor(num_threads) as threads:
        try:
            for number in numbers if num_threads > 1 else ():
                under_way.append(threads.submit(write_file, number))
        except RuntimeError:
            pass  # the program is ending: it waits for this thread, which cannot start others
        for number in numbers[len(under_way) :]:
            write_file(number)
        for each in under_way:
            each.result()
    return found


def _write_block(file: BinaryIO, path: Path, source: TensorSource, box: Box) -> Block:
    values = source.read(box)  # freed before the next one is read
    total = as_text(checksum(source.shape, box, values))
    return Block(box, total, append_entry(file, path, values))


def merged(everyone: Iterable[Mapping[str, Written]]) -> dict[str, Written]:
    """What all ranks have written; raises unless that is every element of each tensor once."""
    found: dict[str, Written] = {}
    for own in everyone:
        for key, each in own.items():
            known = found.setdefault(key, Written(each.shape, each.dtype))
            if (known.shape, known.dtype) != (each.shape, each.dtype):
                raise CheckpointError(
                    f"{key} is {each.shape} in {each.dtype} on one rank and {known.shape} in "
                    f"{known.dtype} on another; build the same model on all ranks."
                )
            known.blocks.extend(each.blocks)
    for key, written in found.items():
        written.blocks.sort(key=lambda block: block.box.offsets)
        boxes = [block.box for block in written.blocks]
        if not tiles(written.shape, boxes):
            is_alive = dist.is_initialized()
            raise CheckpointError(
                f"{key}: the parts of all ranks do not cover its shape {written.shape} once: "
                f"{boxes}; nothing was written. Save on all ranks of the model's "
                f"mesh{'' if is_alive else ', and before the process group is destroyed'}."
            )
        written.checksum = as_text(joined(int(block.checksum, 16) for block in written.blocks))
    return found


# What ends a file of tensors: a line that says whose it is. An index does not refer to it.
_SEAL = re.compile(rb"\nfullshard ([0-9a-f]{32}) (__\d+_\d+\.distcp) *\n")
_SEAL_BYTES = 128


def seal(checkpoint_id: str, name: str) -> bytes:
    """The end of a file of tensors of a checkpoint."""
    return f"\nfullshard {checkpoint_id} {name}".encode().ljust(_SEAL_BYTES - 1) + b"\n"


def sealed_as(path: Path, checkpoint_id: str) -> tuple[str, str]:
    """The checkpoint that a file of tensors says it is of, and its name there."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _SEAL_BYTES))
        match = _SEAL.fullmatch(file.read())
    if match is None:
        return checkpoint_id, "one that is damaged at its end"
    return match[1].decode(), match[2].decode()


def append_entry(file: BinaryIO, path: Path, values: torch.Tensor) -> Entry:
    """Write a box of a tensor at the end of a file."""
    host = values.detach().to("cpu")
    is_view = host.untyped_storage().nbytes() != host.nbytes or not host.is_contiguous()
    if is_view or host.is_conj() or host.is_neg():
        # torch.save writes the whole storage of a view.
        host = torch.empty(host.shape, dtype=host.dtype).copy_(host)
    offset = file.tell()
    try:
        torch.save(host, file)
    except RuntimeError as error:  # the archive writer fails again when it is closed
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    return Entry(path, offset, file.tell() - offset)


def encode_index(checkpoint_id: str, tensors: Mapping[str, Written]) -> bytes:
    """The index of a checkpoint: shapes, dtypes, and where the boxes of tensors are."""
    about, places = {}, {}
    for key, written in tensors.items():
        chunks = []
        for number, (box, entry) in enumerate((each.box, each.entry) for each in written.blocks):
            chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
            place = MetadataIndex(key, torch.Size(box.offsets), number)
            places[place] = StorageInfo(entry.path.name, entry.offset, entry.length)
        properties = TensorProperties(dtype=written.dtype)
        about[key] = TensorStorageMetadata(properties, torch.Size(written.shape), chunks)
    index = Metadata(
        dict(about),
        planner_data={key: _nesting_of(key) for key in tensors},
        storage_data=places,
        storage_meta=StorageMeta(save_id=checkpoint_id),
        version="1.0.0",  # as torch writes it
    )
    return pickle.dumps(index)


def _nesting_of(key: str) -> tuple[str, ...]:
    """The path of a key in nested dicts, which torch's tools use to unflatten it."""
    if key.startswith(OPTIMIZER):
        name, _, state = key.removeprefix(OPTIMIZER).rpartition(".")
        return ("optimizer", "state", name, state)
    return ("model", key.removeprefix(MODEL)) if key.startswith(MODEL) else (key,)


# Reading


class IndexReader:
    """Reads the tensors that an index lists, whichever program wrote it.

    Reading holds one box in memory at a time, as it was written, besides the result. `object_keys`
    are the entries that are not tensors, which torch's own checkpoints have. `nesting` maps a key
    to the path in nested dicts that it was made from, if its writer recorded it. `save_id` is what
    the writer called the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[tuple[str, tuple[int, ...] | None], Entry] = {}
        try:
            self._decode(_IndexUnpickler(io.BytesIO((path / INDEX).read_bytes())).load())
        except FileNotFoundError:
            text = f"{path} is not a checkpoint: it has no {INDEX}; `latest` finds one."
            raise CheckpointError(text) from None
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can leave out any attribute
            raise CheckpointError(
                f"{path / INDEX} cannot be read ({error}); it is damaged, or not an index of "
                "torch.distributed.checkpoint."
            ) from error
        self.keys = list(self._tensors)

    def _decode(self, index: Any) -> None:
        about, parts = index.state_dict_metadata, index.storage_data
        tensors = {str(k): v for k, v in about.items() if isinstance(v, TensorStorageMetadata)}
        num_blocks = sum(len(stored.chunks) for stored in tensors.values())
        # A few bytes of a pickle may repeat a block any number of times.
        if num_blocks > len(parts):
            raise ValueError(f"{num_blocks} blocks, and {len(parts)} parts of files for them")
        self._tensors = {key: _decoded_info(stored) for key, stored in tensors.items()}
        self.object_keys = [str(k) for k, v in about.items() if isinstance(v, BytesStorageMetadata)]
        for place, stored in parts.items():
            path = require_inside(self.path, stored.relative_path)
            if getattr(stored, "transform_descriptors", None):
                raise ValueError("compressed or otherwise transformed tensors")
            _require_sizes(stored.offset, stored.length)
            offsets = None if place.offset is None else tuple(place.offset)
            self._entries[place.fqn, offsets] = Entry(path, stored.offset, stored.length)
        save_id = getattr(getattr(index, "storage_meta", None), "save_id", None)
        self.save_id = save_id if isinstance(save_id, str) else ""
        self.nesting = index.planner_data if isinstance(index.planner_data, dict) else {}

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    @property
    def file_names(self) -> set[str]:
        return {INDEX, *(str(e.path.relative_to(self.path)) for e in self._entries.values())}

    def info(self, key: str) -> TensorInfo:
        if key not in self._tensors:
            raise UnknownNameError(f"{key}: {self.path} has no tensor of this name.")
        return self._tensors[key]

    def require_tiled(self, key: str) -> None:
        info = self.info(key)
        if not tiles(info.shape, info.boxes):
            _damaged(key, f"every element of {info.shape} once", "gaps or overlaps")

    def entry(self, key: str, box: Box | None) -> Entry:
        """The part of a file that holds a box, checked to be large enough for it, or an object."""
        offsets = None if box is None else box.offsets
        num_bytes = 0 if box is None else box.numel * self.info(key).dtype.itemsize
        found = self._entries.get((key, offsets))
        if found is None:
            _damaged(key, f"a part of a file for the block at {offsets}", "nothing")
        name, end = found.path.name, found.offset + found.length
        try:
            is_inside = found.path.resolve().is_relative_to(self.path.resolve())
            size = found.path.stat().st_size
        except (OSError, ValueError) as error:
            _damaged(key, f"a block in {name}", str(error))
        if not is_inside:
            _damaged(key, "a file inside of the checkpoint", f"{name}, which leads out")
        if end > size:
            _damaged(key, f"bytes {found.offset} to {end} of {name}", f"only {size}")
        if num_bytes > found.length:
            _damaged(key, f"{num_bytes} bytes in {name}", f"{found.length}")
        return found

    def load(self, key: str, box: Box) -> torch.Tensor:
        """One box, as it was written."""
        entry, dtype = self.entry(key, box), self.info(key).dtype
        found = load_entry(key, entry)
        if type(found) not in (torch.Tensor, torch.nn.Parameter):
            _damaged(key, f"a tensor in {entry.path.name}", type(found).__name__)
        values: torch.Tensor = found.detach()
        if (values.shape, values.dtype, values.layout) != (box.sizes, dtype, torch.strided):
            found = f"{tuple(values.shape)} in {values.dtype} in {entry.path.name}"
            _damaged(key, f"a block of {box.sizes} in {dtype}", found)
        return values

    def load_all(self, key: str) -> Iterator[tuple[Box, torch.Tensor]]:
        """All boxes of a tensor as they were written, one at a time."""
        return ((box, self.load(key, box)) for box in self.info(key).boxes)

    def read(self, key: str, box: Box | None = None) -> torch.Tensor:
        """A whole tensor, or any box of it."""
        info = self.info(key)
        box = Box.whole(info.shape) if box is None else box
        if not box.is_within(info.shape):
            raise UnknownNameError(f"{key}: {box} is not inside of {info.shape}.")
        self.require_tiled(key)
        for stored in info.boxes:
            if intersection(stored, box) is not None:
                self.entry(key, stored)  # before memory is allocated for what it claims
        result = torch.empty(box.sizes, dtype=info.dtype)
        self.read_into({key: [LocalPart(box, result)]})
        return result

    def read_into(self, wanted: Mapping[str, Sequence[LocalPart]]) -> None:
        """Fill parts of tensors; each stored box that overlaps them is read once, file by file."""
        needed = []
        for key, parts in wanted.items():
            self.require_tiled(key)
            for stored in self.info(key).boxes:
                shared = [(p, both) for p in parts if (both := intersection(p.box, stored))]
                if shared:
                    needed.append((self.entry(key, stored), key, stored, shared))
        needed.sort(key=lambda each: (each[0].path, each[0].offset))
        for _, key, stored, shared in needed:
            values = self.load(key, stored)
            for part, both in shared:
                part.values[slices(both, part.box)].copy_(values[slices(both, stored)])

    def read_object(self, key: str) -> Any:
        """An entry that is not a tensor, as plain data."""
        if key not in self.object_keys:
            raise UnknownNameError(f"{key}: there is no such entry; there are {self.object_keys}.")
        return load_entry(key, self.entry(key, None))


def _damaged(subject: str, expected: str, found: str) -> NoReturn:
    raise CheckpointError(
        f"{subject}: the checkpoint should have {expected}, but has {found}; it is damaged, or "
        "something else. `latest` finds whole ones."
    )


def _decoded_info(stored: TensorStorageMetadata) -> TensorInfo:
    shape, dtype = tuple(stored.size), stored.properties.dtype
    boxes = tuple(Box(tuple(each.offsets), tuple(each.sizes)) for each in stored.chunks)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r}, which is no dtype")
    _require_sizes(*shape)
    for box in boxes:
        _require_sizes(*box.offsets, *box.sizes)
        if not len(box.offsets) == len(box.sizes) == len(shape):
            raise ValueError("blocks with another number of dims")
    return TensorInfo(shape, dtype, boxes)


def _require_sizes(*numbers: Any) -> None:
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{numbers}, which are no sizes")


def require_inside(folder: Path, relative: Any) -> Path:
    """The path of a file of a checkpoint, which must not lead out of its folder."""
    if not isinstance(relative, str) or not relative:
        raise CheckpointError(f"{folder}: {relative!r} is not a file name.")
    path = PurePath(relative)
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointError(f"{folder}: {relative!r} is outside of the folder; do not trust it.")
    return folder / path


_PATHS = {"Path", "PosixPath", "PurePosixPath", "PurePath", "WindowsPath", "PureWindowsPath"}
_BYTEARRAY8 = pickle.BYTEARRAY8[0]
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
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "collections": {"OrderedDict"},
}


class _IndexUnpickler(pickle._Unpickler):
    """The unpickler in pure Python: the one in C makes a table as long as a pickle asks for."""

    # BYTEARRAY8 allocates its bytes before it reads them. The pickle of an index has none.
    dispatch: ClassVar = {
        op: load for op, load in pickle._Unpickler.dispatch.items() if op != _BYTEARRAY8
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(
            f"index: it contains {module}.{name}, which is not a class of the checkpoint format; "
            "do not open this file with anything that runs what it holds."
        )


def load_entry(subject: str, entry: Entry) -> Any:
    """Load what `torch.save` wrote into a part of a file, without running any code in it."""
    try:
        with _FilePart(entry) as part:
            with zipfile.ZipFile(part) as archive:
                members = archive.infolist()
            # An archive states the sizes of its members; together they must fit into this part.
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("a compressed archive")
            if sum(member.file_size for member in members) > entry.length:
                raise ValueError("an archive that claims to be larger inside")
            part.seek(0)
            return torch.load(part, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        _damaged(subject, f"what torch.save writes, in {entry.path.name}", f"another ({reason})")


class _FilePart(io.BufferedReader):
    """A range of bytes of a file, as a file."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(io.FileIO(entry.path))
        self._begin, self._end = entry.offset, entry.offset + entry.length
        self.seek(0)

    def tell(self) -> int:
        return super().tell() - self._begin

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = (self._begin, super().tell(), self._end)[whence]
        return super().seek(base + offset) - self._begin

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._end - super().tell(), 0)
        return super().read(left if size is None or size < 0 else min(size, left))

    def readinto(self, buffer: Any) -> int:
        left = max(self._end - super().tell(), 0)
        # Views are closed at once: one that an error's traceback keeps alive outlives its buffer.
        with memoryview(buffer) as given, given.cast("B") as view, view[:left] as part:
            return super().readinto(part)
