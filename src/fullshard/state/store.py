"""Checkpoints on disk: how one appears under its name, says what it holds, is found and verified.

A checkpoint is a folder of

    manifest.json       what the checkpoint holds, with checksums; the last file that is written
    .metadata           the index of `torch.distributed.checkpoint`
    __<rank>_<n>.distcp tensors, as `torch.distributed.checkpoint` writes them
    rank_<rank>.pt      what each rank saved for itself, and the state of its random generators

It is written into a folder beside its place and gets its name by renaming, which the file system
does at once or not at all. Whatever dies in between, these are all the folders there can be beside
a checkpoint "step_10":

    step_10                     whole, or damaged by something else than us
    .step_10.incoming-<id>      being written, or left by a process that died
    .step_10.replaced-<id>      the one before: put aside for a moment while the next takes the name
    .step_10.removed-<id>       on its way out
    .step_10.owner-<id>         a file: which process writes incoming-<id>

Only the first and third are ever loaded, the third only while the first does not exist.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import time
import types
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch

from fullshard.errors import CheckpointError, ConfigError
from fullshard.layout.split import Box, pieces, slices, tiles
from fullshard.state.dcp import INDEX, Entry, TensorReader, load_entry

MANIFEST = "manifest.json"


# Checksums of tensors do not depend on how a tensor is sharded. Each element is mixed with its
# place in the whole tensor into 64 bits, and these are added, so that the checksum of a tensor is
# the sum of the checksums of its boxes. The mixing is a permutation of what it is given: one
# changed element always changes the sum, and several changes cancel by accident only (about once
# in 2**64). Checksums notice accidents; they are no protection against a forger.

MASK = 2**64 - 1
_PIECE_NUMEL = 2**20  # extra memory is a few times eight bytes for each of these
_STRIDE = 0x9E3779B97F4A7C15  # between neighbours, before mixing: 2**64 over the golden ratio
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64, known to spread bits well
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(shape: Sequence[int], box: Box, values: torch.Tensor) -> int:
    """The checksum of one box of a tensor of `shape`, computed on the device of its values.

    It sees bits, not numbers: 0.0 and -0.0 differ, and so do two nans with different payloads.
    """
    if tuple(values.shape) != box.sizes or len(shape) != len(box.sizes):
        raise ConfigError(
            f"checksum: values of shape {box.sizes} in a tensor of {len(box.sizes)} dims are "
            f"expected, found {tuple(values.shape)} in {tuple(shape)}; pass the box's own values."
        )
    words = values.detach().resolve_conj().resolve_neg()
    if words.dtype == torch.complex128:
        # Two words per element; they are neighbours, like elements of one more dim.
        words = torch.view_as_real(words).view(torch.int64)
        shape, box = (*shape, 2), Box((*box.offsets, 0), (*box.sizes, 2))
    else:
        words = words.view(_INTEGERS[words.itemsize])
    numel = min(_PIECE_NUMEL, words.numel())
    keys = torch.arange(1, numel + 1, device=words.device) * _signed(_STRIDE)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in pieces(box, _PIECE_NUMEL):
        total += _mixed(_keyed(shape, piece, words[slices(piece, box)], keys)).sum()
    return int(total) & MASK


def joined(parts: Iterable[int]) -> int:
    """The checksum of what the parts with these checksums make up."""
    return sum(parts) & MASK


def as_text(value: int) -> str:
    return f"{value:016x}"


def _keyed(
    shape: Sequence[int], box: Box, values: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """New memory with each element's bits plus a multiple of its place in the whole tensor."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    bits = values.to(torch.int64, memory_format=torch.contiguous_format, copy=True)
    dim = next((dim for dim, size in enumerate(box.sizes) if size != 1), len(box.sizes))
    if box.sizes[dim + 1 :] == tuple(shape[dim + 1 :]):  # neighbours in the whole tensor
        return bits.view(-1).add_(keys[: box.numel]).add_(_signed(first * _STRIDE))
    for dim, (size, stride) in enumerate(zip(box.sizes, strides, strict=True)):
        if size > 1:
            column = [1] * len(shape)
            column[dim] = size
            places = torch.arange(size, device=values.device) * _signed(stride * _STRIDE)
            bits += places.view(column)
    return bits.view(-1).add_(_signed((first + 1) * _STRIDE))


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Every bit of a word made to depend on every other, in place."""
    halves = words.view(torch.int32).view(-1, 2)
    low, high = halves[:, _LOW], halves[:, _HIGH]
    low ^= high  # words ^= words >> 32, without the sign that torch's shift drags along
    for factor in _FACTORS:
        words *= _signed(factor)
        low ^= high
    return words


def _signed(value: int) -> int:
    """The number in torch's int64 that has the bits of an unsigned 64-bit number."""
    value &= MASK
    return value - 2**64 if value >= 2**63 else value


# The manifest may come from a stranger. Everything in it is checked before it is believed: types,
# ranges, that boxes tile their tensors, and that files are inside the checkpoint's folder. Its own
# text has a checksum, so that a damaged number is not taken for another number.

_FORMAT = "fullshard checkpoint"
_FORMAT_VERSION = 1
_MAX_NUMEL = 2**63 - 1


def versions_here() -> dict[str, str]:
    """The versions of what writes a checkpoint in this process."""
    try:
        own = importlib.metadata.version("fullshard")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"  # run from its source
    return {"fullshard": own, "torch": torch.__version__}


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A box of a tensor that one rank wrote."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    checksum: str

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint; `dtype` as in "float32"."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str
    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All there is to know of a checkpoint without opening its tensors.

    `id` is also in each rank's file, `files` are all others of the folder with their bytes,
    `aliases` leads from further names of tied parameters to the one they are stored under, and
    `selection` is "all" or says in words what was chosen.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    step: int | None = None
    num_ranks: int = 1
    versions: Mapping[str, str] = field(default_factory=versions_here)
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    files: Mapping[str, int] = field(default_factory=dict)
    selection: str = "all"
    extra: tuple[str, ...] = ()

    def to_json(self) -> str:
        try:
            body = json.dumps(asdict(self))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"manifest: plain values (numbers, strings, lists, dicts) are expected, found "
                f"others ({error}); leave them out, or save them as `extra`."
            ) from error
        head = {"format": _FORMAT, "version": _FORMAT_VERSION, "sha256": digest_of(body)}
        return json.dumps(head)[:-1] + f', "manifest": {body}}}'

    @classmethod
    def from_json(cls, text: str, subject: str) -> Manifest:
        """What `to_json` wrote. Errors speak of `subject`."""
        try:
            return _decode_manifest(text)
        except _InvalidError as error:
            what, expected, found = (
                each[:200].encode("ascii", "backslashreplace").decode() for each in error.args
            )
            raise CheckpointError(
                f"{subject}: {what} must be {expected}, found {found}; the manifest is damaged or "
                "not one of fullshard's. `latest` finds whole checkpoints."
            ) from None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint."""
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder}: a checkpoint with its manifest is expected, found no {MANIFEST}; it was "
            "not written to its end, or another program wrote it. `latest` finds whole ones."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: a manifest is expected, found a file that cannot be read ({error})."
        ) from error
    return Manifest.from_json(text, str(path))


def digest_of(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: an object in which no name appears twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name that is there twice")
    return found


class _InvalidError(Exception):
    """A value of a manifest that cannot be: what it is, what was expected, what was found."""


def _require(condition: object, what: str, expected: str, found: Any) -> None:
    if not condition:
        if isinstance(found, int | float | None):
            found = repr(found)
        elif not isinstance(found, str):
            found = type(found).__name__  # a stranger's lists may nest deeper than repr can go
        raise _InvalidError(what, expected, found)


def _decode_manifest(text: str) -> Manifest:
    try:
        outer = json.loads(text, object_pairs_hook=unique_pairs)
        is_ours = isinstance(outer, dict) and outer.get("format") == _FORMAT
        _require(is_ours, "the file", f"a manifest with format {_FORMAT!r}", "another file")
        version = outer.get("version")
        expected = f"{_FORMAT_VERSION}, which this fullshard reads"
        _require(version == _FORMAT_VERSION, "version", expected, version)
        digest = digest_of(json.dumps(outer.get("manifest")))
    except (ValueError, RecursionError) as error:
        raise _InvalidError("the file", "JSON as it was written", str(error)) from None
    _require(outer.get("sha256") == digest, "sha256", digest, repr(outer.get("sha256")))
    found: Manifest = _decode(Manifest, outer.get("manifest"), "manifest")
    _require_possible(found)
    return found


def _decode(kind: Any, value: Any, what: str) -> Any:
    """A parsed JSON value as the type that its field is declared with."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is types.UnionType:  # with None
        return None if value is None else _decode(arguments[0], value, what)
    if kind is str:
        _require(isinstance(value, str), what, "text", value)
        return value
    if kind is int:
        # bool is an int to Python, and not to us.
        fits = type(value) is int and 0 <= value <= _MAX_NUMEL
        _require(fits, what, "an integer of at least 0 that fits in 64 bits", value)
        return value
    if origin is tuple:
        _require(isinstance(value, list), what, "a list", value)
        return tuple(_decode(arguments[0], each, what) for each in value)
    _require(isinstance(value, dict), what, "names with values", value)
    if origin is Mapping:
        return {name: _decode(arguments[1], v, f"{name!r} in {what}") for name, v in value.items()}
    names = [each.name for each in fields(kind)]
    _require(set(value) == set(names), what, f"the fields {sorted(names)}", str(sorted(value)))
    hints = get_type_hints(kind)
    return kind(**{name: _decode(hints[name], value[name], f"{name} of {what}") for name in names})


def _require_possible(found: Manifest) -> None:
    """Raise for values that have the right types, and still cannot be."""
    _require(re.fullmatch(r"[0-9a-f]{32}", found.id), "id", "32 hex digits", found.id)
    _require(found.num_ranks, "num_ranks", "at least 1", found.num_ranks)
    expected = "a time with its zone, as in 2026-01-31T12:00:00+00:00"
    _require(_has_zone(found.created), "created", expected, found.created)
    for name in found.files:
        # A name that stays in the folder, whatever system it is opened on.
        is_plain = re.fullmatch(r"[A-Za-z0-9._+-]{1,255}", name) is not None
        is_inside = is_plain and name not in (".", "..", MANIFEST)
        _require(is_inside, "files", "names of files inside the checkpoint's folder", name)
    for key, tensor in found.tensors.items():
        _require_possible_tensor(f"tensor {key!r}", tensor)
    optimizer = found.optimizer
    if optimizer is not None:
        are_known = set(optimizer) == {"param_groups", "values"}
        _require(are_known, "optimizer", "param_groups and values", str(sorted(optimizer)))
        groups = _decode(tuple[Mapping[str, Any], ...], optimizer["param_groups"], "param_groups")
        for group in groups:
            _decode(tuple[str, ...], group.get("params"), "params of a parameter group")
        _decode(Mapping[str, Mapping[str, Any]], optimizer["values"], "values of optimizer")


def _has_zone(text: str) -> bool:
    try:
        is_aware = datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False
    return is_aware and re.fullmatch(r"[0-9T:.+Z -]{1,40}", text) is not None


def _require_possible_tensor(what: str, tensor: StoredTensor) -> None:
    shape, num_dims = tensor.shape, len(tensor.shape)
    dtype = getattr(torch, tensor.dtype, None)
    expected = f"one of torch {torch.__version__}"
    _require(isinstance(dtype, torch.dtype), f"dtype of {what}", expected, tensor.dtype)
    for sizes in (
        shape,
        *(each for block in tensor.blocks for each in (block.offsets, block.sizes)),
    ):
        fits = prod(size or 1 for size in sizes) <= _MAX_NUMEL
        _require(fits, f"shape of {what}", "sizes that memory can have", str(sizes))
    for block in tensor.blocks:
        has_dims = len(block.offsets) == len(block.sizes) == num_dims
        found = f"{block.offsets}, {block.sizes}"
        _require(has_dims, f"a block of {what}", f"of {num_dims} dims", found)
    covers = tiles(shape, [block.box for block in tensor.blocks])
    _require(covers, f"blocks of {what}", f"every element of {shape} once", "gaps or overlaps")
    for each in (tensor.checksum, *(block.checksum for block in tensor.blocks)):
        _require(re.fullmatch(r"[0-9a-f]{16}", each), f"checksum of {what}", "16 hex digits", each)
    total = as_text(joined(int(block.checksum, 16) for block in tensor.blocks))
    expected = f"{total}, the sum of its blocks"
    _require(tensor.checksum == total, f"checksum of {what}", expected, tensor.checksum)


# Writing a folder

_BESIDE = re.compile(r"\.(?P<name>.+)\.(?P<state>incoming|replaced|removed)-[0-9a-f]{32}")
_OWN_FILES = re.compile(r"__\d+_\d+\.distcp|rank_\d+\.pt|\.metadata(\.tmp)?|manifest\.json")
# For writers on another machine, of which nothing else can be known.
_ABANDONED_S = 24 * 3600


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def staging_folder(path: Path, id: str) -> Path:
    """Where the checkpoint `path` is written before it is whole."""
    return _beside(path, "incoming", id)


def begin(path: Path, id: str) -> Path:
    """Make the staging folder, and say which process writes there; one process does this."""
    staging = staging_folder(path, id)
    require_replaceable(path)
    staging.parent.mkdir(parents=True, exist_ok=True)
    # First, so that nobody finds a folder of which it is not known that it is being written.
    try:
        write_synced(_owner_file(staging), json.dumps(_this_process()).encode())
        staging.mkdir()
    except BaseException:
        _owner_file(staging).unlink(missing_ok=True)
        raise
    return staging


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that is on disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Have what the system keeps of a file or folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(staging: Path, path: Path) -> None:
    """Give a finished checkpoint its name, in place of one that has it.

    All its files are on disk before the name is. Of the two, one is whole at any moment: under the
    name or, for as long as a rename takes, put aside, where `located` and `latest` find it.
    """
    path = _absolute(path)
    if not is_whole(staging):
        raise CheckpointError(
            f"{path}: all files and the manifest must be written before a checkpoint gets its "
            f"name, found {staging} unfinished; nothing appears under this name."
        )
    require_replaceable(path)
    for file in sorted(staging.iterdir()):
        sync(file)
    sync(staging)
    aside = _beside(path, "replaced", uuid.uuid4().hex)
    is_replacing = os.path.lexists(path)
    if is_replacing:
        path.rename(aside)
    try:
        staging.rename(path)
    except BaseException:
        if is_replacing:
            aside.rename(path)
        raise
    sync(path.parent)
    _owner_file(staging).unlink(missing_ok=True)
    if aside.is_symlink():
        aside.unlink()
    for old in _found_beside(path, "replaced"):
        _remove(old)


def discard(staging: Path) -> None:
    """Remove what was written of a checkpoint that will not be finished."""
    if not is_unfinished(staging):
        raise ConfigError(
            f"discard: a staging folder is expected, found {staging}; `prune` removes checkpoints."
        )
    _remove(staging)
    _owner_file(staging).unlink(missing_ok=True)


def require_replaceable(path: Path) -> None:
    """Raise if something that is not a checkpoint has the name: it would be lost."""
    path = _absolute(path)
    if path.is_symlink() or not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: the folder of a checkpoint, or nothing, is expected, found a file; choose "
            "another name."
        )
    foreign = sorted(f.name for f in path.iterdir() if _OWN_FILES.fullmatch(f.name) is None)
    if foreign:
        raise CheckpointError(
            f"{path}: a checkpoint, or nothing, is expected where one is saved, found other files "
            f"({', '.join(foreign[:5])}), which would be lost; choose a name inside, such as "
            f"{path / 'step_0'}."
        )


def is_unfinished(path: Path) -> bool:
    """Whether a folder is one that is, or was, being written or removed."""
    match = _BESIDE.fullmatch(path.name)
    return match is not None and match["state"] != "replaced"


# Finding checkpoints


def is_ours(path: Path) -> bool:
    """Whether fullshard wrote a checkpoint; then it is nothing without its manifest."""
    return (path / MANIFEST).exists() or (path / rank_file(0)).exists()


def is_whole(path: Path) -> bool:
    """Whether a checkpoint has its manifest and all files in their sizes. Opens no tensors."""
    return _whole_manifest(path) is not None


def located(path: Path) -> Path:
    """Where the checkpoint of this name is.

    It is `path`, unless a process died while it replaced the checkpoint: then it is the one that
    was put aside.
    """
    path = _absolute(path)
    if not os.path.lexists(path):
        aside = [each for each in _found_beside(path, "replaced") if is_whole(each)]
        if aside:
            return aside[-1]
    return path


def checkpoints(folder: str | Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first: by step, then by time."""
    found = []
    for path in _folders(Path(folder)):
        match = _BESIDE.fullmatch(path.name)
        manifest = _whole_manifest(path)
        if manifest is not None and (match is None or _is_only_one(path, match)):
            step = -1 if manifest.step is None else manifest.step
            found.append((step, datetime.fromisoformat(manifest.created), path.name, path))
    return [path for *_, path in sorted(found)]


def latest(folder: str | Path) -> Path | None:
    """The newest whole checkpoint in a folder, or None."""
    found = checkpoints(Path(folder))
    return found[-1] if found else None


def leftovers(folder: Path) -> list[Path]:
    """What is in a folder of saves that were not finished, and of checkpoints that are damaged."""
    return [path for path in _folders(folder) if _is_leftover(path)]


def prune(folder: str | Path, keep: int) -> list[Path]:
    """Remove all whole checkpoints but the newest `keep`, and what dead processes left behind.

    Damaged checkpoints are left for a person to look at, and do not count. Returns what was
    removed.
    """
    if type(keep) is not int or keep < 1:
        raise ConfigError(
            f"prune: keep must be at least 1, found {keep!r}; the last whole one stays."
        )
    folder = Path(folder)
    removed = checkpoints(folder)[:-keep]
    removed += [path for path in leftovers(folder) if _is_abandoned(path)]
    for path in removed:
        _remove(path)
        if _BESIDE.fullmatch(path.name) is not None:
            _owner_file(path).unlink(missing_ok=True)
    return removed


def _remove(path: Path) -> None:
    """Remove a folder. One that can be found loses its name first: it is never half there."""
    match = _BESIDE.fullmatch(path.name)
    if match is None or match["state"] == "replaced":
        name = path.name if match is None else match["name"]
        gone = _beside(path.with_name(name), "removed", uuid.uuid4().hex)
        try:
            path.rename(gone)
        except FileNotFoundError:
            return  # another process removed it
        path = gone
    shutil.rmtree(path, ignore_errors=True)


def _beside(path: Path, state: str, id: str) -> Path:
    path = _absolute(path)
    return path.parent / f".{path.name}.{state}-{id}"


def _absolute(path: Path) -> Path:
    """With a name of its own, also for "." and "..". A link stays a link."""
    found = Path(os.path.abspath(path))
    if not found.name:
        raise ConfigError(f"{path}: a folder with a name is expected, found {found}; choose one.")
    return found


def _found_beside(path: Path, state: str) -> list[Path]:
    """Folders of a name in a state, in the order in which they were put there."""
    found = []
    for each in _folders(path.parent):
        match = _BESIDE.fullmatch(each.name)
        if match is not None and (match["name"], match["state"]) == (path.name, state):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                found.append((each.stat().st_ctime_ns, each))
    return [each for _, each in sorted(found)]


def _folders(folder: Path) -> Iterator[Path]:
    """Those that are not links: what a link leads to is listed where it is."""
    try:
        found = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from (path for path in found if path.is_dir() and not path.is_symlink())


def _whole_manifest(path: Path) -> Manifest | None:
    try:
        manifest = read_manifest(path)
        sizes = {name: (path / name).stat().st_size for name in manifest.files}
    except (CheckpointError, OSError):
        return None
    return manifest if sizes == manifest.files and INDEX in sizes else None


def _is_only_one(path: Path, match: re.Match[str]) -> bool:
    """Whether a folder beside a name is what the name stands for."""
    is_aside = match["state"] == "replaced"
    return is_aside and located(path.with_name(match["name"])) == _absolute(path)


def _is_leftover(path: Path) -> bool:
    match = _BESIDE.fullmatch(path.name)
    if match is not None:
        return not (_is_only_one(path, match) and is_whole(path))
    # Folders that torch or other programs wrote are no concern of ours.
    return is_ours(path) and not is_whole(path)


def _is_abandoned(path: Path) -> bool:
    """Whether a leftover is an unfinished one that nobody works on."""
    match = _BESIDE.fullmatch(path.name)
    if match is None:
        return False
    if match["state"] != "incoming":
        return True
    try:
        owner = json.loads(_owner_file(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        owner = None
    if isinstance(owner, dict) and owner.get("machine") == _this_process()["machine"]:
        return owner.get("started") != _start_of(owner.get("pid"))
    times = [0.0]
    for each in (path, *path.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            times.append(each.stat().st_mtime)
    return time.time() - max(times) > _ABANDONED_S


def _owner_file(folder: Path) -> Path:
    head, _, id = folder.name.rpartition("-")
    return folder.with_name(f"{head.rpartition('.')[0]}.owner-{id}")


def _this_process() -> dict[str, object]:
    """Process ids mean something within one boot and one namespace of a machine only."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        machine = uuid.uuid4().hex  # none that anybody could ask about
    return {"machine": machine, "pid": os.getpid(), "started": _start_of(os.getpid())}


def _start_of(pid: object) -> str | None:
    """When a process started, in the kernel's clock; None if there is none."""
    if type(pid) is not int:
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    is_running = fields[0] not in ("Z", "X")  # dead, though nobody has asked for its status yet
    return fields[19] if is_running else None


# Opening and verifying


class StoredCheckpoint(TensorReader):
    """A checkpoint on disk; `manifest` is None if torch wrote it."""

    def __init__(self, path: Path, manifest: Manifest | None) -> None:
        super().__init__(path)
        self.manifest = manifest

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What a rank saved for itself. On a larger world, further ranks begin with the first."""
        if self.manifest is None:
            return {}
        name = rank_file(rank % self.manifest.num_ranks)
        return _read_rank_file(self.path / name, self.manifest.id)


def open_checkpoint(path: str | Path, *, check_files: bool = True) -> StoredCheckpoint:
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
    for name, num_bytes in (manifest.files if manifest and check_files else {}).items():
        problem = _file_problem(found / name, num_bytes)
        if problem:
            raise CheckpointError(f"{found / name}: {problem}. `latest` finds whole checkpoints.")
    return StoredCheckpoint(found, manifest)


def _file_problem(path: Path, num_bytes: int) -> str:
    """What is wrong with a file that should have a number of bytes."""
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"a file of {num_bytes} bytes is expected, found none ({error.strerror})"
    if size != num_bytes:
        return f"a file of {num_bytes} bytes is expected, found {size}; it is damaged or another"
    return ""


def _read_rank_file(path: Path, checkpoint_id: str) -> dict[str, Any]:
    try:
        found = load_entry(path.name, Entry(path, 0, path.stat().st_size))
        its_id = found["id"]
    except Exception as error:
        raise CheckpointError(
            f"{path}: a rank's file is expected, found one that cannot be read ({error}); the "
            "checkpoint is damaged."
        ) from error
    if its_id != checkpoint_id:
        raise CheckpointError(
            f"{path}: a file of checkpoint {checkpoint_id} is expected, found one of {its_id}; it "
            "is of another run."
        )
    result: dict[str, Any] = found
    return result


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
    index, num_shares = share
    if is_unfinished(folder):
        return [Problem(folder.name, "it was not written to its end")]
    try:
        manifest = read_manifest(folder) if is_ours(folder) else None
    except CheckpointError as error:
        return [Problem(MANIFEST, str(error))]
    problems: list[Problem] = []
    for name in sorted(manifest.files if manifest else ())[index::num_shares]:
        assert manifest is not None
        what = _file_problem(folder / name, manifest.files[name])
        if not what and re.fullmatch(r"rank_\d+\.pt", name):
            what = _rank_file_problem(folder / name, manifest.id)
        problems += [Problem(name, what)] if what else []
    try:
        stored = StoredCheckpoint(folder, manifest)
    except CheckpointError as error:
        return [*problems, Problem(INDEX, str(error))]
    keys = sorted({*stored.keys, *(manifest.tensors if manifest else ())})[index::num_shares]
    sizes = {key: _num_bytes(stored, key) for key in keys}
    num_done = 0
    for key in keys:
        try:
            problems += [Problem(key, what) for what in _tensor_problems(stored, key)]
        except CheckpointError as error:
            problems.append(Problem(key, str(error).removeprefix(f"{key}: ")))
        num_done += sizes[key]
        if progress is not None:
            progress(num_done, sum(sizes.values()))
    return problems


def _num_bytes(stored: StoredCheckpoint, key: str) -> int:
    try:
        return prod(stored.shape(key)) * stored.dtype(key).itemsize if key in stored else 0
    except CheckpointError:
        return 0  # it is told as a problem of the tensor


def _rank_file_problem(path: Path, id: str) -> str:
    try:
        _read_rank_file(path, id)
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # zipfile has many for a damaged archive
        return str(error).removeprefix(f"{path}: ")
    return f"{damaged} in it must be what was written, found other bytes" if damaged else ""


def _tensor_problems(stored: StoredCheckpoint, key: str) -> Iterator[str]:
    expected = None if stored.manifest is None else stored.manifest.tensors.get(key)
    if key not in stored:
        yield f"the index {INDEX} must have it as the manifest does, found nothing of that name"
        return
    if stored.manifest is not None and expected is None:
        yield f"the manifest must have it as the index does, found only {INDEX} to know of it"
        return
    info, sums = stored.info(key), dict[Box, str]()
    if expected is not None:
        sums = {block.box: block.checksum for block in expected.blocks}
        dtype = str(info.dtype).removeprefix("torch.")
        if (info.shape, dtype) != (expected.shape, expected.dtype):
            yield (
                f"{expected.shape} in {expected.dtype} is expected, found {info.shape} in {dtype}"
            )
            return
        if set(info.boxes) != set(sums):
            yield f"the blocks {list(sums)} are expected, found {list(info.boxes)}"
            return
    stored.require_tiled(key)
    for box in info.boxes:
        try:
            found = as_text(checksum(info.shape, box, stored.load(key, box)))
        except CheckpointError as error:
            yield str(error).removeprefix(f"{key}: ")
            continue
        if expected is not None and found != sums[box]:
            yield (
                f"the block of {box.sizes} at {box.offsets} in {stored.entry(key, box).path.name} "
                f"must have the checksum {sums[box]}, found {found}: its content changed"
            )
