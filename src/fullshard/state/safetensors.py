"""Models as safetensors files: exported from shards, and loaded into shards.

The format is a header with names, dtypes, shapes and offsets, then the bytes of the tensors. It is
read and written here and not by the `safetensors` package because that package writes whole tensors
from one process, keeps what it has read of a file in memory, and is not a dependency of fullshard:
here each rank writes and reads boxes of tensors, within bounded memory, with torch alone.

A file may come from an untrusted source: its header is compared with its size before anything else
is done, and nothing in it could be executed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import BinaryIO, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from fullshard.errors import CheckpointError, ConfigError, DisagreementError, UnsupportedError
from fullshard.layout.split import (
    Box,
    element_ranges,
    element_span,
    intersection,
    pieces,
    slices,
    tiles,
)
from fullshard.state import store
from fullshard.state.checkpoint import NameMatch, require_values, selection
from fullshard.state.dcp import require_inside
from fullshard.state.materialize import give_memory, recreate_buffers
from fullshard.state.rank_group import RankGroup
from fullshard.state.shards import LocalPart, TensorShard, tensor_shards

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
# How much one rank sends another at a time, which is all the memory that an export takes.
_PIECE_BYTES = 8 * 2**20
# How many elements of a file are read before their memory is released.
_PIECE_NUMEL = 2**20

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


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
        table = store.parse_json(self._map[_LENGTH_BYTES : self._begin])
        table.pop("__metadata__", None)
        entries: dict[str, FileEntry] = store.decode(Mapping[str, FileEntry], table, "its header")
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
        f"{path}: a safetensors file, or an index of some, is expected, found {found}; it is "
        "damaged, or something else."
    )


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
    try:
        found = store.parse_json(path.read_bytes()).get("weight_map")
        weight_map: dict[str, str] = store.decode(Mapping[str, str], found, "its weight_map")
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"that {error}") from error
    files: dict[str, TensorFile] = {}
    for name in dict.fromkeys(weight_map.values()):
        inside = require_inside(path.parent, name)
        if not inside.is_file():
            raise CheckpointError(
                f"{path}: its files are expected beside it, found no {name!r}; the folder was not "
                "copied to its end."
            )
        files[name] = TensorFile(inside)
    for name, file_name in weight_map.items():
        if name not in files[file_name].entries:
            raise _damaged(path, f"no {name!r} in {file_name!r}")
    # Include tensors that the index does not name: a reader of the folder must know of them.
    everything = {name: file for file in files.values() for name in file.entries}
    return {**everything, **{name: files[file] for name, file in weight_map.items()}}


# The dtype and shape of a tensor.
TensorSpec: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


def _num_bytes(spec: TensorSpec) -> int:
    return prod(spec[1]) * spec[0].itemsize


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file: its name, how it begins, and where in it each tensor goes."""

    name: str
    header: bytes
    entries: dict[str, FileEntry]

    @classmethod
    def of(cls, file_name: str, tensors: Mapping[str, TensorSpec]) -> FilePlan:
        """Wide dtypes come first, so that every tensor is aligned for its dtype."""
        entries, end = dict[str, FileEntry](), 0
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda each: -each[1][0].itemsize):
            if dtype not in _DTYPE_NAMES:
                raise UnsupportedError(
                    f"{name}: safetensors has the dtypes {', '.join(DTYPES)}, found {dtype}; "
                    "convert it, or leave it out."
                )
            begin, end = end, end + _num_bytes((dtype, shape))
            entries[name] = FileEntry(_DTYPE_NAMES[dtype], shape, (begin, end))
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


def plan_files(tensors: Mapping[str, TensorSpec], max_bytes: int) -> list[FilePlan]:
    """Distribute tensors, in their order, over as many files as are needed.

    A tensor is never split: one that is larger than `max_bytes` has a file of its own.
    """
    files: list[dict[str, TensorSpec]] = [{}]
    num_bytes = 0
    for name, spec in tensors.items():
        num_bytes += _num_bytes(spec)
        if files[-1] and num_bytes > max_bytes:
            files.append({})
            num_bytes = _num_bytes(spec)
        files[-1][name] = spec
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


def new_staging(folder: Path) -> Path:
    """Where files are written before they appear in a folder.

    This is inside the folder if that exists: it may be a link or a disk of its own, with no room
    beside it.
    """
    return store.staging_folder(folder / "model" if folder.is_dir() else folder)


def install(staging: Path, folder: Path, plans: Sequence[FilePlan]) -> None:
    """Move complete files into a folder, which may have others, such as a configuration.

    A folder that does not exist appears in one step. In others, older weights are replaced.
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
        total = sum(plan.num_data_bytes for plan in plans)
        weight_map = {name: plan.name for plan in plans for name in plan.entries}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
        store.write_synced(staging / INDEX_FILE, text.encode())
    store.sync(staging)
    try:
        os.rename(staging, folder)
    except OSError:
        if not folder.is_dir():
            raise
        _replace_weights(staging, folder)
        store.discard(staging)
        store.sync(folder)
    store.sync(folder.parent)


def _replace_weights(staging: Path, folder: Path) -> None:
    """Replace older weights, so that old and new files are never read together as one model."""
    new = sorted((p.name for p in staging.iterdir()), key=lambda name: name == INDEX_FILE)
    old = [p for p in folder.iterdir() if _WEIGHTS.fullmatch(p.name) and p.name not in new]
    if new != [ONE_FILE]:
        # Without these, the files are not taken for a whole model; the new index comes last.
        for name in (INDEX_FILE, ONE_FILE):
            (folder / name).unlink(missing_ok=True)
    for name in new:
        os.replace(staging / name, folder / name)
    for path in old:
        path.unlink(missing_ok=True)


def export_safetensors(
    path: str | Path,
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    only: str | Callable[[str], bool] | None = None,
) -> Path:
    """Write the parameters and persistent buffers of a model as safetensors; all ranks call it.

    The files have the layout of `transformers`. The names are those of the model before it was
    sharded; tied parameters are written once. Each tensor is sent in small pieces to the rank that
    writes its file, so no rank has more of it in memory than before. Several ranks write files at
    a time.

    Args:
        path: A folder, on a file system that all ranks share. It may have other files, such as the
            configuration of the model; older weights in it are replaced. The files appear when
            all of them are complete.
        model: Sharded through either API, in part, or not at all.
        dtype: What floating point tensors are converted to; others keep their dtypes.
        max_shard_bytes: The maximum size of a file that has more than one tensor.
        only: "trainable" to export only what is trained (adapters), or a function of a name.
    """
    path, ranks = Path(path), RankGroup.world()
    subject = f"export {path}"

    def planned() -> tuple[dict[str, TensorSpec], dict[str, list[LocalPart]], list[FilePlan]]:
        require_export(path, dtype, max_shard_bytes)
        choose, words = selection(only)
        specs, own = dict[str, TensorSpec](), dict[str, list[LocalPart]]()
        for shard in filter(choose, tensor_shards(model)):
            require_values(shard, "exported")
            specs[shard.name] = (exported_dtype(shard.dtype, dtype), tuple(shard.shape))
            own[shard.name] = shard.local_parts(shard.tensor) if shard.is_writer else []
        if not own:
            raise ConfigError(
                f"{subject}: something to write is expected, found none of the model's parameters "
                f"and buffers chosen ({words})."
            )
        return specs, own, plan_files(specs, max_shard_bytes)

    specs, own, plans = ranks.run(subject, planned)
    boxes = {name: [part.box for part in parts] for name, parts in own.items()}
    everyone = ranks.all_gather((max_shard_bytes, specs, boxes))
    _require_same(subject, everyone)
    staging = ranks.run_first(subject, lambda: new_staging(path))
    try:
        ranks.run_first(subject, lambda: staging.mkdir(parents=True))
        transfer = _Transfer(ranks, specs, own, [found for *_, found in everyone])
        transfer.run(subject, staging, plans)
        ranks.run_first(subject, lambda: install(staging, path, plans))
    except BaseException:
        if ranks.is_first:
            store.discard(staging)
        raise
    return path


def require_export(path: Path, dtype: torch.dtype | None, max_bytes: int) -> None:
    """Raise if the arguments of an export are invalid."""
    if path.suffix == ".safetensors" or path.is_file():
        raise ConfigError(f"export {path}: a folder is expected, found the name of a file.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"export {path}: dtype must be one of real numbers, found {dtype!r}.")
    if type(max_bytes) is not int or max_bytes < 1:
        raise ConfigError(
            f"export {path}: max_shard_bytes must be at least 1, found {max_bytes!r}."
        )


def exported_dtype(kept: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    return asked if asked is not None and kept.is_floating_point else kept


def _require_same(
    subject: str, everyone: Sequence[tuple[int, dict[str, TensorSpec], dict[str, list[Box]]]]
) -> None:
    """Raise, on all ranks alike, if they export different tensors or do not cover all of one."""
    asked = [[f"max_shard_bytes={limit}", *specs.items()] for limit, specs, _ in everyone]
    for rank, others in enumerate(asked):
        for one, other in zip_longest(asked[0], others):
            if one != other:
                raise DisagreementError(
                    f"{subject}: all ranks must export the same tensors, found {one} on rank 0 and "
                    f"{other} on rank {rank}; call it with the same model and arguments."
                )
    for name, (_, shape) in everyone[0][1].items():
        boxes = [box for *_, found in everyone for box in found[name]]
        if not tiles(shape, boxes):
            raise CheckpointError(
                f"{subject}: the parts of all ranks must cover shape {shape} of {name!r} once, "
                f"found {boxes}; nothing was written. Export on all ranks of the model's mesh."
            )


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Sends all pieces of tensors to the ranks that write their files; `boxes` are by rank.

    Files are written in rounds, one by each rank. In each step of a round, every file takes one
    piece, if possible each from another rank, so that few pieces are in memory and all ranks work.
    """

    ranks: RankGroup
    specs: Mapping[str, TensorSpec]
    own: Mapping[str, Sequence[LocalPart]]
    boxes: Sequence[Mapping[str, Sequence[Box]]]

    def run(self, subject: str, staging: Path, plans: Sequence[FilePlan]) -> None:
        rank, size = self.ranks.rank, self.ranks.size
        for first in range(0, len(plans), size):
            some = plans[first : first + size]
            writer = FileWriter(staging, some[rank]) if rank < len(some) else None
            try:
                for step in zip_longest(*map(self._pieces, some, range(size))):
                    self._take(step, writer)
            except RuntimeError as error:  # because a rank is gone
                raise CheckpointError(
                    f"{subject}: an exchange between the ranks failed ({error}); nothing appears "
                    "under this name."
                ) from error
            self.ranks.run(subject, writer.finish if writer is not None else lambda: None)

    def _pieces(self, plan: FilePlan, owner: int) -> Iterator[tuple[int, str, Box]]:
        for source in ((owner + shift) % self.ranks.size for shift in range(self.ranks.size)):
            for name in plan.entries:
                for box in self.boxes[source][name]:
                    for piece in pieces(box, _PIECE_BYTES // self.specs[name][0].itemsize):
                        yield source, name, piece

    def _take(self, step: Sequence[tuple[int, str, Box] | None], writer: FileWriter | None) -> None:
        rank, group = self.ranks.rank, self.ranks.group
        works, received = [], None
        for owner, item in enumerate(step):
            if item is None or rank not in (owner, item[0]):
                continue
            source, name, piece = item
            if rank == source:
                part = next(part for part in self.own[name] if intersection(part.box, piece))
                values = part.values[slices(piece, part.box)]
                values = values.to("cpu", self.specs[name][0]).contiguous()
            else:
                values = torch.empty(piece.sizes, dtype=self.specs[name][0])
            if source != owner:
                exchange, other = (dist.isend, owner) if rank == source else (dist.irecv, source)
                works.append((exchange(_as_bytes(values), other, group=group), values))
            if rank == owner:
                received = (name, piece, values)
        for work, _ in works:
            assert work is not None  # this rank is in the group
            work.wait()
        if received is not None and writer is not None:
            writer.write(*received)


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes, which can be sent whatever the dtype."""
    return values.reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What a load found.

    `missing` are names of the model that the files do not have, and `unexpected` are names of the
    files that the model does not have. `mismatched` maps names of both that do not fit to the
    reason. `tied` maps further names of tied parameters to those whose values they share.
    `recreated` are buffers that are not part of files.
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
    only. Everything is checked before anything is written: one error names all that does not fit,
    on all ranks.

    Args:
        path: A file, a folder with one, or a folder with an index of several.
        model: Sharded through either API, in part, or not at all. It may be on meta.
        strict: Whether names that are missing, unexpected or do not fit are an error. If not,
            they are reported, and the model keeps its values for them.
        init_buffers: Called with each module that has buffers on meta which are not part of
            files, to compute them in place. Without it, a module's `reset_non_persistent_buffers`
            or `reset_parameters`, or the `_init_weights` of a module around it, is called.
        rename: Maps a name of the model to its name in the files.
    """
    path, ranks = Path(path), RankGroup.world()
    subject = f"load {path}"
    files, shards = ranks.run(
        subject, lambda: (open_tensors(path), tensor_shards(model)), "nothing was loaded."
    )
    found = NameMatch(shards, files, rename, lambda name, shard: _misfit(files[name], name, shard))
    for mismatched in ranks.all_gather(_differing_ties(files, shards, found, rename)):
        found.mismatched.update(mismatched)

    def prepared() -> tuple[str, ...]:
        found.require(subject, "files", missing=strict, unexpected=strict, mismatched=strict)
        on_meta = [shard.name for shard in shards if shard.tensor.is_meta]
        without = [name for name in on_meta if name not in found.sources]
        if without:
            raise CheckpointError(
                f"{subject}: parameters on meta must be in the files, in a form that fits, found "
                f"on meta without values: {without}; nothing was loaded. Call "
                "model.to_empty(device=...) and initialise the model before it is loaded."
            )
        return recreate_buffers(model, init_buffers)

    recreated = ranks.run(subject, prepared)
    if any(shard.tensor.is_meta for shard in shards):
        give_memory(model)
        shards = tensor_shards(model)
    with torch.no_grad():
        for shard in (shard for shard in shards if shard.name in found.sources):
            name = found.sources[shard.name]
            for part in shard.local_parts(shard.tensor):
                for piece, values in files[name].views(name, part.box):
                    part.values[slices(piece, part.box)].copy_(values)
    tied = {name: shard.name for shard in shards for name in shard.names[1:]}
    missing, unexpected = tuple(found.missing), tuple(found.unexpected)
    return LoadedWeights(path, missing, unexpected, found.mismatched, tied, recreated)


def _differing_ties(
    files: Mapping[str, TensorFile],
    shards: Sequence[TensorShard],
    found: NameMatch,
    rename: Callable[[str], str],
) -> dict[str, str]:
    """Tied tensors of the model whose values in the files differ where this rank has a part."""

    def is_same(one: str, other: str, shard: TensorShard) -> bool:
        first, second = files[one], files[other]
        a, b = first.entries[one], second.entries[other]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and all(
            torch.equal(_as_bytes(x.contiguous()), _as_bytes(y.contiguous()))
            for part in shard.local_parts(shard.tensor)
            for (_, x), (_, y) in zip(
                first.views(one, part.box), second.views(other, part.box), strict=True
            )
        )

    return {
        name: f"the values of {source!r} are expected, to which it is tied in the model, found "
        "others"
        for shard in shards
        if (source := found.sources.get(shard.name)) is not None
        for name in map(rename, shard.names)
        if name in files and name != source and not is_same(source, name, shard)
    }


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
    """The kind of a dtype, within which values convert without a change of meaning."""
    if dtype is torch.bool:
        return "truth"
    return "real" if dtype.is_floating_point else "complex" if dtype.is_complex else "whole"
