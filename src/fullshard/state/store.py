"""Checkpoints on disk: how one appears under its name, says what it holds, is found and verified.

A checkpoint is a folder of

    manifest.json       what the checkpoint holds, with checksums; the last file that is written
    .metadata           the index of `torch.distributed.checkpoint`
    __<rank>_<n>.distcp tensors, as `torch.distributed.checkpoint` writes them
    rank_<rank>.pt      what each rank saved for itself, and the state of its random generators

Each file says which checkpoint it is of, and which part: exchanged files are noticed even where
their sizes and contents are equal.

It is written into a folder next to its place and then renamed, which the file system does
completely or not at all. Whatever dies in between, only these folders can exist for a checkpoint
"step_10":

    step_10                             whole, or damaged by something other than fullshard
    .step_10.incoming-<id>-<process>    being written, or left by a process that died
    .step_10.replaced-<id>              on its way out; put aside while the next takes the name

Only the first and third are ever loaded, the third only while it is whole and the first does not
exist.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import time
import types
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any, TypedDict, get_args, get_origin, get_type_hints

import torch

from fullshard.errors import CheckpointError, ConfigError
from fullshard.layout.split import Box, pieces, slices
from fullshard.processes import machine_id, start_of
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
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(shape: Sequence[int], box: Box, values: torch.Tensor) -> int:
    """The checksum of one box of a tensor of `shape`, computed on the device of its values.

    It sees bits, not numbers: 0.0 and -0.0 differ, and so do two nans with different payloads.
    """
    words = values.detach().resolve_conj().resolve_neg()
    if words.dtype == torch.complex128:
        # Two words per element; they are neighbours, like elements of one more dim.
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


# The manifest may come from an untrusted source. Before it is used, its types are checked, and that
# its files are inside the checkpoint's folder. What it says about tensors is compared with the
# index when they are verified. Its own text has a checksum, so that damaged numbers are noticed.

_FORMAT = "fullshard checkpoint"
_FORMAT_VERSION = 2  # in version 1, files do not say which part of which checkpoint they are
_BLOCK_BYTES = 512  # what `torch.save` writes for a tensor without elements is larger


def versions_here() -> dict[str, str]:
    """The versions of the libraries that write a checkpoint in this process."""
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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint; `dtype` as in "float32"."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str
    blocks: tuple[StoredBlock, ...]


class StoredOptimizer(TypedDict):
    """Parameter groups with names as "params", and state that is not a tensor, by parameter."""

    param_groups: list[Mapping[str, Any]]
    values: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known about a checkpoint without opening its tensors.

    `id` is also in each rank's file. `files` maps all other files of the folder to their sizes in
    bytes. `aliases` maps further names of tied parameters to the one they are stored under.
    `selection` is "all" or says in words what was chosen. `format_version` is that of all files.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    step: int | None = None
    num_ranks: int = 1
    versions: Mapping[str, str] = field(default_factory=versions_here)
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizer: StoredOptimizer | None = None
    files: Mapping[str, int] = field(default_factory=dict)
    selection: str = "all"
    extra: tuple[str, ...] = ()
    format_version: int = _FORMAT_VERSION

    def to_json(self) -> str:
        body = json.dumps(asdict(self))
        head = {"format": _FORMAT, "version": _FORMAT_VERSION, "sha256": digest_of(body)}
        return json.dumps(head)[:-1] + f', "manifest": {body}}}'

    @classmethod
    def from_json(cls, text: str, subject: str) -> Manifest:
        """Parse what `to_json` wrote. Errors name `subject`."""
        try:
            outer = parse_json(text)
            _require(outer.get("format") == _FORMAT, "format", repr(_FORMAT), outer.get("format"))
            version = outer.get("version")
            expected = f"1 or {_FORMAT_VERSION}, which this fullshard reads"
            _require(version in (1, _FORMAT_VERSION), "version", expected, version)
            body = outer.get("manifest")
            digest = digest_of(json.dumps(body))
            _require(outer.get("sha256") == digest, "sha256", digest, outer.get("sha256"))
            if version == 1 and isinstance(body, dict):
                body["format_version"] = 1
            found: Manifest = decode(cls, body, "manifest")
            _require(found.format_version == version, "format_version", str(version), version)
            found._require_possible()
        except (ValueError, RecursionError) as error:
            text = f"{subject}: a manifest of fullshard is expected, found a damaged one ({error})."
            raise CheckpointError(f"{text} `latest` finds whole checkpoints.") from None
        return found

    def _require_possible(self) -> None:
        _require(self.num_ranks, "num_ranks", "at least 1", self.num_ranks)
        has_zone = datetime.fromisoformat(self.created).tzinfo is not None
        _require(has_zone, "created", "a time with its zone", self.created)
        for name in self.files:
            # A name that cannot leave the folder, on any system.
            is_plain = re.fullmatch(r"[A-Za-z0-9._+-]{1,255}", name) is not None
            is_inside = is_plain and name not in (".", "..", MANIFEST)
            _require(is_inside, "files", "names of files inside the checkpoint's folder", name)
        for key, stored in self.tensors.items():
            boxes = {(block.offsets, block.sizes) for block in stored.blocks}
            is_unique = len(boxes) == len(stored.blocks)
            _require(is_unique, f"blocks of {key!a}", "there once", "one that is there twice")
        for group in self.optimizer["param_groups"] if self.optimizer else ():
            decode(list[str], group.get("params"), "params of a parameter group")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint."""
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: a checkpoint with its manifest is expected, found no {MANIFEST} that can "
            f"be read ({error}); it was not written to its end, or another program wrote it."
        ) from error
    return Manifest.from_json(text, str(path))


def digest_of(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def parse_json(text: str | bytes) -> dict[str, Any]:
    """A JSON object in which no name appears twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        _require(len(found) == len(pairs), "names", "there once", "one that is there twice")
        return found

    result: dict[str, Any] = json.loads(text, object_pairs_hook=unique)
    _require(isinstance(result, dict), "JSON", "an object", result)
    return result


_hints_of = functools.cache(get_type_hints)


def decode(kind: Any, value: Any, what: str) -> Any:
    """Convert a parsed JSON value to the type that it is declared with, or raise ValueError."""
    if kind is Any:
        return value
    if kind is str:
        _require(isinstance(value, str), what, "text", value)
        return value
    if kind is int:
        # bool is an int in Python, but not here.
        fits = type(value) is int and 0 <= value < 2**63
        _require(fits, what, "an integer of at least 0 that fits in 64 bits", value)
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is types.UnionType:  # with None
        return None if value is None else decode(arguments[0], value, what)
    if origin in (tuple, list):
        _require(isinstance(value, list), what, "a list", value)
        return origin(decode(arguments[0], each, what) for each in value)
    _require(isinstance(value, dict), what, "names with values", value)
    if origin is Mapping:
        return {name: decode(arguments[1], v, f"{name!a} in {what}") for name, v in value.items()}
    hints = _hints_of(kind)
    if value.keys() != hints.keys():
        _require(False, what, f"the fields {sorted(hints)}", str(sorted(value)))
    return kind(**{n: decode(hint, value[n], f"{n} of {what}") for n, hint in hints.items()})


def _require(condition: object, what: str, expected: str, found: Any) -> None:
    if not condition:
        # Lists from an untrusted source may nest deeper than repr can go.
        is_short = isinstance(found, str | int | float | None)
        shown = ascii(found)[:200] if is_short else type(found).__name__
        raise ValueError(f"{what} must be {expected}, found {shown}")


# Writing a folder

_BESIDE = re.compile(
    r"\.(?P<name>.+)\.(?P<state>incoming|replaced)-[0-9a-f]{32}"
    r"(-(?P<machine>[0-9a-f]{16})-(?P<pid>\d+)-(?P<started>\d+))?"
)
_OWN_FILES = re.compile(r"__\d+_\d+\.distcp|rank_\d+\.pt|\.metadata(\.tmp)?|manifest\.json")
# For writers on another machine, about which nothing else can be known.
_ABANDONED_S = 24 * 3600


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def staging_folder(path: Path) -> Path:
    """The folder that becomes `path` once it is whole; its name says which process writes it."""
    pid = os.getpid()
    return Path(f"{_beside(path, 'incoming')}-{machine_id()}-{pid}-{start_of(pid) or 0}")


def begin(path: Path, num_bytes: int = 0) -> Path:
    """Make the staging folder of a checkpoint of this size; one process does this."""
    require_replaceable(path)
    require_room(path, num_bytes)
    staging = staging_folder(path)
    staging.mkdir(parents=True)
    return staging


def require_room(path: Path, num_bytes: int) -> None:
    """Raise if the disk that a path is on, or will be on, has less free space."""
    folder = next(each for each in _absolute(path).parents if each.is_dir())
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise CheckpointError(
            f"{path}: a disk with {num_bytes:,} free bytes is expected, found {free:,} free, "
            f"{num_bytes - free:,} bytes are missing; make room, or choose another folder."
        )


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that is on disk when this returns."""
    path.write_bytes(content)
    sync(path)


# What ends a file of tensors: a line that says whose it is. An index does not refer to it.
_SEAL = re.compile(rb"\nfullshard ([0-9a-f]{32}) (__\d+_\d+\.distcp) *\n")
_SEAL_BYTES = 128


def seal(checkpoint_id: str, name: str) -> bytes:
    """The end of a file of tensors of a checkpoint."""
    return f"\nfullshard {checkpoint_id} {name}".encode().ljust(_SEAL_BYTES - 1) + b"\n"


def _require_sealed(path: Path, checkpoint_id: str) -> None:
    """Raise if a file of tensors was written as another one."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _SEAL_BYTES))
        end = file.read()
    match = _SEAL.fullmatch(end)
    found = (checkpoint_id, "one that is damaged at its end")
    if match is not None:
        found = match[1].decode(), match[2].decode()
    _require_own(path, (checkpoint_id, path.name), found)


def _require_own(path: Path, expected: tuple[str, str], found: tuple[str, str]) -> None:
    """Compare whose a file is, as a checkpoint and a part of it, with what the file says."""
    if found != expected:
        other = "" if found[0] == expected[0] else f" of the checkpoint {found[0]}"
        raise CheckpointError(
            f"{path}: {expected[1]} of the checkpoint {expected[0]} is expected, found "
            f"{found[1]}{other}; files were exchanged, copied or damaged. Load another checkpoint, "
            "which `latest(..., verify=True)` finds."
        )


def sync(path: Path) -> None:
    """Flush what the system caches of a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(staging: Path, path: Path) -> None:
    """Give a finished checkpoint its name, replacing one that has it.

    The writers of its files have synced them: they are on disk before the name is. One of the two
    checkpoints is whole at any moment: under the name or, for as long as a rename takes, put aside,
    where `located` and `latest` find it.
    """
    path = _absolute(path)
    require_replaceable(path)
    sync(staging)
    aside: list[Path] = []
    while True:
        with suppress(FileNotFoundError):  # unless another writer of the name was faster
            if os.path.lexists(path):
                aside.append(path.rename(_beside(path, "replaced")))
        try:
            staging.rename(path)
            break
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue
            for last in aside[-1:]:
                last.rename(path)
            raise
    sync(path.parent)
    for each in aside:
        if each.is_symlink():
            each.unlink()
    for old in _put_aside(path):
        discard(old)


def discard(staging: Path) -> None:
    """Remove the files of something that will not be finished."""
    shutil.rmtree(staging, ignore_errors=True)


def require_replaceable(path: Path) -> None:
    """Raise if something that is not a checkpoint has the name: it would be lost."""
    path = _absolute(path)
    if path.is_symlink() or not path.exists():
        return
    try:
        files = sorted(f.name for f in path.iterdir())
    except FileNotFoundError:
        return  # another writer of the name has put it aside
    except NotADirectoryError:
        files = ["a file"]
    foreign = [name for name in files if _OWN_FILES.fullmatch(name) is None]
    if foreign:
        raise CheckpointError(
            f"{path}: a checkpoint, or nothing, is expected where one is saved, found other files "
            f"({', '.join(foreign[:5])}), which would be lost; choose a name inside, such as "
            f"{path / 'step_0'}, or another."
        )


def is_unfinished(path: Path) -> bool:
    """Whether a folder is one that is, or was, being written."""
    match = _BESIDE.fullmatch(path.name)
    return match is not None and match["state"] == "incoming"


def is_ours(path: Path) -> bool:
    """Whether fullshard wrote a checkpoint; if so, it is invalid without its manifest."""
    return (path / MANIFEST).exists() or (path / rank_file(0)).exists()


def whole_manifest(path: Path) -> Manifest | None:
    """The manifest of a checkpoint if all files have the right sizes. Opens no tensors."""
    try:
        manifest = read_manifest(path)
        sizes = {name: (path / name).stat().st_size for name in manifest.files}
    except (CheckpointError, OSError):
        return None
    return manifest if sizes == manifest.files and INDEX in sizes else None


def located(path: Path) -> Path:
    """Where the checkpoint of this name is.

    It is `path`, unless a process died while it replaced the checkpoint: then it is the one that
    was put aside.
    """
    path = _absolute(path)
    aside = [] if os.path.lexists(path) else _put_aside(path)
    whole = [(found.created, each) for each in aside if (found := whole_manifest(each))]
    return max(whole)[1] if whole else path


def checkpoints(folder: str | Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first: by step, then by time."""
    found = []
    for path in _folders(Path(folder)):
        match = _BESIDE.fullmatch(path.name)
        # One that was put aside counts as long as nothing else has its name.
        counts = match is None or located(path.with_name(match["name"])) == _absolute(path)
        manifest = whole_manifest(path) if counts else None
        if manifest is not None:
            step = -1 if manifest.step is None else manifest.step
            found.append((step, datetime.fromisoformat(manifest.created), path.name, path))
    return [path for *_, path in sorted(found)]


def latest(folder: str | Path, *, verify: bool = False) -> Path | None:
    """The newest whole checkpoint in a folder, or None; with `verify`, content is verified, too."""
    found = reversed(checkpoints(folder))
    return next((path for path in found if not (verify and _problems_of(path))), None)


def prune(folder: str | Path, keep: int, pinned: str | None = None) -> list[Path]:
    """Remove all whole checkpoints but the newest `keep`, and what dead processes left behind.

    Damaged checkpoints are left for a person to look at, and do not count; one named `pinned`
    stays. Returns what was removed.
    """
    if type(keep) is not int or keep < 1:
        text = f"prune: keep must be at least 1, found {keep!r}; the last whole one stays."
        raise ConfigError(text)
    whole = checkpoints(folder)
    left = [path for path in _folders(Path(folder)) if path not in whole and _is_abandoned(path)]
    removed = [path for path in whole[:-keep] if path.name != pinned] + left
    for path in removed:
        _remove(path)
    return removed


def _remove(path: Path) -> None:
    """Remove a folder. A checkpoint loses its name first, so it is never seen half removed."""
    with suppress(FileNotFoundError):  # another process removed it
        if _BESIDE.fullmatch(path.name) is None:
            path = path.rename(_beside(path, "replaced"))
        shutil.rmtree(path, ignore_errors=True)


def _beside(path: Path, state: str) -> Path:
    path = _absolute(path)
    return path.parent / f".{path.name}.{state}-{uuid.uuid4().hex}"


def _absolute(path: Path) -> Path:
    """The absolute path, which has a name even for "." and "..". A link stays a link."""
    found = Path(os.path.abspath(path))
    if not found.name:
        raise ConfigError(f"{path}: a folder with a name is expected, found {found}; choose one.")
    return found


def _put_aside(path: Path) -> list[Path]:
    """Checkpoints that had this name and were put aside."""
    matches = ((each, _BESIDE.fullmatch(each.name)) for each in _folders(path.parent))
    state = (path.name, "replaced")
    return [each for each, match in matches if match and match.group("name", "state") == state]


def _folders(folder: Path) -> list[Path]:
    """The folders inside that are not links: the target of a link is listed where it is."""
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_abandoned(path: Path) -> bool:
    """Whether a folder beside a checkpoint is one that no process works on."""
    match = _BESIDE.fullmatch(path.name)
    if match is None or match["state"] == "replaced":
        return match is not None
    if match["machine"] == machine_id():
        return match["started"] != start_of(match["pid"])
    try:
        newest = max(os.path.getmtime(each) for each in (path, *path.iterdir()))
    except FileNotFoundError:  # another process works on it
        return False
    return time.time() - newest > _ABANDONED_S


class StoredCheckpoint(TensorReader):
    """A checkpoint on disk; `manifest` is None if torch wrote it."""

    def __init__(self, path: Path, manifest: Manifest | None) -> None:
        self.path, self.manifest = path, manifest
        self._opened = self._file_id()
        if manifest is not None:  # before anything is done for each block
            num_blocks = sum(len(stored.blocks) for stored in manifest.tensors.values())
            num_bytes = sum(manifest.files.values())
            if num_blocks * _BLOCK_BYTES > num_bytes:
                raise CheckpointError(
                    f"{path / MANIFEST}: {num_blocks:,} blocks do not fit into files of "
                    f"{num_bytes:,} bytes; it is damaged. `latest` finds whole checkpoints."
                )
        super().__init__(path)
        if manifest is not None and manifest.format_version > 1:
            _require_own(path / INDEX, (manifest.id, INDEX), (self.save_id, INDEX))

    def _file_id(self) -> tuple[int, ...] | None:
        """Identify the checkpoint on disk by a file that is written once, None if there is none."""
        try:
            found = (self.path / (INDEX if self.manifest is None else MANIFEST)).stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What a rank saved for itself. In a larger world, further ranks begin with the first."""
        if self.manifest is None:
            return {}
        name = rank_file(rank % self.manifest.num_ranks)
        return _read_rank_file(self.path / name, self.manifest)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise after the block, also instead of an error in it, if the folder has changed."""
        try:
            yield
        except Exception as error:
            self.require_unchanged(error)
            raise
        self.require_unchanged()

    def require_unchanged(self, cause: Exception | None = None) -> None:
        """Raise if another checkpoint, or none, is where this one was when it was opened."""
        now, found = self._file_id(), ""
        if now != self._opened:
            found = "another one was saved under its name" if now else "it was moved or removed"
        if found:
            raise CheckpointError(
                f"{self.path}: {found} while it was read; load it from where it is now, or the "
                "newest one, which `latest` finds."
            ) from cause


def open_checkpoint(path: str | Path, *, check_files: bool = True) -> StoredCheckpoint:
    """Open a checkpoint that fullshard or torch wrote, which must have all its files."""
    found = located(Path(path))
    if not found.is_dir() or is_unfinished(found):
        what = "one that was not written to its end" if found.is_dir() else "a file"
        raise CheckpointError(
            f"{path}: the folder of a checkpoint is expected, found "
            f"{what if found.exists() else 'nothing'}; `latest` finds the newest one."
        )
    manifest = read_manifest(found) if is_ours(found) else None
    for name, num_bytes in (manifest.files if manifest and check_files else {}).items():
        _require_size(found / name, num_bytes)
    return StoredCheckpoint(found, manifest)


def _require_size(path: Path, num_bytes: int) -> None:
    size = path.stat().st_size if path.exists() else None
    if size != num_bytes:
        raise CheckpointError(
            f"{path}: a file of {num_bytes} bytes is expected, found "
            f"{'none' if size is None else size}; it is damaged. `latest` finds whole checkpoints."
        )


def _read_rank_file(path: Path, manifest: Manifest) -> dict[str, Any]:
    try:
        found: dict[str, Any] = load_entry(path.name, Entry(path, 0, path.stat().st_size))
        its_id, its_name = str(found["id"]), path.name
        if manifest.format_version > 1:
            its_name = rank_file(int(found["rank"]))
        with zipfile.ZipFile(path) as archive:
            changed = archive.testzip()
        if changed:
            raise ValueError(f"other bytes than were written in {changed}")
    except Exception as error:  # zipfile raises many kinds for a damaged archive
        raise CheckpointError(
            f"{path}: a rank's file is expected, found one that cannot be read ({error}); the "
            "checkpoint is damaged."
        ) from error
    _require_own(path, (manifest.id, path.name), (its_id, its_name))
    return found


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

    One block is in memory at a time. A checkpoint that torch wrote has no manifest: in it, every
    tensor must be readable and covered by its blocks.

    Args:
        path: The folder of a checkpoint.
        progress: Called with the bytes of tensors that are done, and with their total.
        share: `(i, n)` does the i-th of n shares of the work. All shares together do everything.

    Returns:
        The problems that were found; empty if there are none.
    """
    folder, (index, num_shares) = located(Path(path)), share
    if is_unfinished(folder):
        return [Problem(folder.name, "it was not written to its end")]
    subject = MANIFEST
    try:
        manifest = read_manifest(folder) if is_ours(folder) else None
        subject = INDEX
        stored = StoredCheckpoint(folder, manifest)
    except CheckpointError as error:
        return [Problem(subject, str(error))]
    problems: list[Problem] = []
    files = {} if manifest is None else manifest.files
    for name in sorted(files)[index::num_shares]:
        try:
            _require_size(folder / name, files[name])
            if manifest is not None and re.fullmatch(r"rank_\d+\.pt", name):
                _read_rank_file(folder / name, manifest)
            elif manifest is not None and manifest.format_version > 1 and name != INDEX:
                _require_sealed(folder / name, manifest.id)
        except CheckpointError as error:
            problems.append(Problem(name, str(error).removeprefix(f"{folder / name}: ")))
    keys = sorted({*stored.keys, *(manifest.tensors if manifest else ())})[index::num_shares]
    known = {key: stored.info(key) for key in keys if key in stored}
    sizes = {key: prod(info.shape) * info.dtype.itemsize for key, info in known.items()}
    num_done = 0
    for key in keys:
        try:
            problems.extend(Problem(key, what) for what in _tensor_problems(stored, key))
        except CheckpointError as error:
            problems.append(Problem(key, str(error).removeprefix(f"{key}: ")))
        num_done += sizes.get(key, 0)
        if progress is not None:
            progress(num_done, sum(sizes.values()))
    return problems


_problems_of = verify  # for a function with an argument of this name


def _tensor_problems(stored: StoredCheckpoint, key: str) -> Iterator[str]:
    expected = None if stored.manifest is None else stored.manifest.tensors.get(key)
    if key not in stored or (stored.manifest is not None and expected is None):
        where = INDEX if key in stored else MANIFEST
        yield f"the index and the manifest must both have it, found it in {where} only"
        return
    info, sums = stored.info(key), dict[Box, str]()
    if expected is not None:
        sums = {Box(block.offsets, block.sizes): block.checksum for block in expected.blocks}
        dtype = str(info.dtype).removeprefix("torch.")
        if (info.shape, dtype) != (expected.shape, expected.dtype):
            yield f"{expected.shape} in {expected.dtype} is expected, found {info.shape} in {dtype}"
            return
        if set(info.boxes) != set(sums):
            yield f"the blocks {list(sums)} are expected, found {list(info.boxes)}"
            return
    stored.require_tiled(key)
    for box, values in stored.load_all(key):
        found = as_text(checksum(info.shape, box, values))
        if expected is not None and found != sums[box]:
            yield (
                f"the block of {box.sizes} at {box.offsets} in {stored.entry(key, box).path.name} "
                f"must have the checksum {sums[box]}, found {found}: its content changed"
            )
