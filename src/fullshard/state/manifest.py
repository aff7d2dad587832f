"""What a checkpoint says about itself: `manifest.json`, the last file that is written.

A manifest may come from a stranger. Everything in it is checked before it is believed: types,
ranges, that blocks tile their tensors, and that files are inside the checkpoint's folder. Its own
text has a checksum, so that a damaged number is not taken for another number.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch

from fullshard.errors import CheckpointError, ConfigError
from fullshard.layout.split import Box, tiles
from fullshard.state.checksum import as_text, joined

MANIFEST = "manifest.json"
INDEX = ".metadata"

_FORMAT = "fullshard checkpoint"
_FORMAT_VERSION = 1
_MAX_NUMEL = 2**63 - 1


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of a tensor that one rank wrote."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    checksum: str

    @property
    def where(self) -> Box:
        return Box(self.offsets, self.sizes)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint; `dtype` as in "float32"."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str
    blocks: tuple[StoredBlock, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All there is to know of a checkpoint without opening its tensors.

    `id` is also in each rank's file, `files` are all others of the folder with their bytes,
    `aliases` leads from further names of tied parameters to the one they are stored under, and
    `selection` is "all" or says in words what was chosen.
    """

    id: str
    created: str
    step: int | None
    num_ranks: int
    versions: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    optimizer: Mapping[str, Any] | None
    files: Mapping[str, int]
    selection: str
    extra: tuple[str, ...]

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
        return _Reader(subject).manifest(text)


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


def versions_here() -> dict[str, str]:
    """Of what writes a checkpoint in this process."""
    try:
        own = importlib.metadata.version("fullshard")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"  # run from its source
    return {"fullshard": own, "torch": torch.__version__}


def digest_of(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


class _Reader:
    """Takes parsed JSON apart; `subject` and the path of a value are in each error."""

    def __init__(self, subject: str) -> None:
        self.subject = subject

    def manifest(self, text: str) -> Manifest:
        try:
            outer = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            self.fail("the file", "JSON as it was written", str(error))
        if not isinstance(outer, dict) or outer.get("format") != _FORMAT:
            self.fail("the file", f"a manifest with format {_FORMAT!r}", "another file")
        if outer.get("version") != _FORMAT_VERSION:
            self.fail(
                "version",
                f"{_FORMAT_VERSION}, which this fullshard reads",
                repr(outer.get("version")),
            )
        values = self.mapping("manifest", outer.get("manifest"))
        try:
            digest = digest_of(json.dumps(values))
        except (ValueError, RecursionError) as error:
            self.fail("the file", "text", str(error))
        if outer.get("sha256") != digest:
            self.fail("sha256", digest, repr(outer.get("sha256")))
        names = set(Manifest.__dataclass_fields__)
        if set(values) != names:
            self.fail("manifest", f"the fields {sorted(names)}", str(sorted(values)))
        return self.fields(values)

    def fields(self, values: dict[str, Any]) -> Manifest:
        step = values["step"]
        optimizer = values["optimizer"]
        return Manifest(
            id=self.text("id", values["id"], r"[0-9a-f]{32}"),
            created=self.time("created", values["created"]),
            step=None if step is None else self.integer("step", step),
            num_ranks=self.integer("num_ranks", values["num_ranks"], least=1),
            versions=self.texts("versions", values["versions"]),
            tensors={
                key: self.tensor(f"tensor {key!r}", tensor)
                for key, tensor in self.mapping("tensors", values["tensors"]).items()
            },
            aliases=self.texts("aliases", values["aliases"]),
            optimizer=None if optimizer is None else self.optimizer(optimizer),
            files={
                self.file_name(name): self.integer(f"size of {name!r}", size)
                for name, size in self.mapping("files", values["files"]).items()
            },
            selection=self.text("selection", values["selection"]),
            extra=tuple(self.text("extra", key) for key in self.items("extra", values["extra"])),
        )

    def tensor(self, what: str, value: Any) -> StoredTensor:
        found = self.record(what, value, StoredTensor)
        shape = self.sizes(f"shape of {what}", found["shape"])
        dtype = self.text(f"dtype of {what}", found["dtype"], r"[a-z0-9_]{1,40}")
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            self.fail(f"dtype of {what}", f"one of torch {torch.__version__}", repr(dtype))
        blocks = tuple(
            self.block(what, each, len(shape))
            for each in self.items(f"blocks of {what}", found["blocks"])
        )
        if not tiles(shape, [block.where for block in blocks]):
            self.fail(f"blocks of {what}", f"every element of {shape} once", "gaps or overlaps")
        checksum = self.checksum(what, found["checksum"])
        total = as_text(joined(int(block.checksum, 16) for block in blocks))
        if checksum != total:
            self.fail(f"checksum of {what}", f"{total}, the sum of its blocks", checksum)
        return StoredTensor(shape, dtype, checksum, blocks)

    def block(self, what: str, value: Any, num_dims: int) -> StoredBlock:
        found = self.record(f"a block of {what}", value, StoredBlock)
        offsets = self.sizes(f"block of {what}", found["offsets"])
        sizes = self.sizes(f"block of {what}", found["sizes"])
        if len(offsets) != num_dims or len(sizes) != num_dims:
            self.fail(f"block of {what}", f"{num_dims} dims", f"{offsets}, {sizes}")
        return StoredBlock(offsets, sizes, self.checksum(what, found["checksum"]))

    def optimizer(self, value: Any) -> dict[str, Any]:
        found = self.mapping("optimizer", value)
        if set(found) != {"param_groups", "values"}:
            self.fail("optimizer", "param_groups and values", str(sorted(found)))
        for group in self.items("param_groups", found["param_groups"]):
            params = self.mapping("a parameter group", group).get("params")
            for name in self.items("params of a parameter group", params):
                self.text("params of a parameter group", name)
        for name, state in self.mapping("values of optimizer", found["values"]).items():
            self.mapping(f"optimizer values of {name!r}", state)
        return found

    # The kinds of values

    def record(self, what: str, value: Any, kind: type[StoredTensor | StoredBlock]) -> Any:
        found = self.mapping(what, value)
        if set(found) != set(kind.__dataclass_fields__):
            self.fail(what, str(sorted(kind.__dataclass_fields__)), str(sorted(found)))
        return found

    def mapping(self, what: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(what, "names with values", type(value).__name__)
        return value

    def items(self, what: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            self.fail(what, "a list", type(value).__name__)
        return value

    def text(self, what: str, value: Any, pattern: str = r"(?s:.*)") -> str:
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            self.fail(what, "text" if pattern == r"(?s:.*)" else f"text like {pattern}", value)
        return value

    def texts(self, what: str, value: Any) -> dict[str, str]:
        return {
            name: self.text(f"{what} of {name!r}", each)
            for name, each in self.mapping(what, value).items()
        }

    def integer(self, what: str, value: Any, least: int = 0) -> int:
        # bool is an int to Python, and not to us.
        if type(value) is not int or not least <= value <= _MAX_NUMEL:
            self.fail(what, f"an integer of at least {least} that fits in 64 bits", value)
        return value

    def sizes(self, what: str, value: Any) -> tuple[int, ...]:
        found = tuple(self.integer(what, each) for each in self.items(what, value))
        if prod(size or 1 for size in found) > _MAX_NUMEL:
            self.fail(what, "sizes that memory can have", str(found))
        return found

    def checksum(self, what: str, value: Any) -> str:
        return self.text(f"checksum of {what}", value, r"[0-9a-f]{16}")

    def time(self, what: str, value: Any) -> str:
        text = self.text(what, value, r"[0-9T:.+Z -]{1,40}")
        try:
            is_aware = datetime.datetime.fromisoformat(text).tzinfo is not None
        except ValueError:
            is_aware = False
        if not is_aware:
            self.fail(what, "a time with its zone, as in 2026-01-31T12:00:00+00:00", text)
        return text

    def file_name(self, name: str) -> str:
        """A name that stays in the folder, whatever system it is opened on."""
        is_plain = re.fullmatch(r"[A-Za-z0-9._+-]{1,255}", name) is not None
        if not is_plain or name in (".", "..", MANIFEST):
            self.fail("files", "names of files inside the checkpoint's folder", name)
        return name

    def fail(self, what: str, expected: str, found: Any) -> NoReturn:
        if isinstance(found, int | float | None):
            found = repr(found)
        elif not isinstance(found, str):
            found = type(found).__name__  # a stranger's lists may nest deeper than repr can go
        shown = found[:200].encode("ascii", "backslashreplace").decode()
        what = what[:200].encode("ascii", "backslashreplace").decode()
        raise CheckpointError(
            f"{self.subject}: {what} must be {expected}, found {shown}; the manifest is damaged or "
            "not one of fullshard's. `latest` finds whole checkpoints."
        )
