"""The manifest of a checkpoint: what it holds, with checksums.

It may come from an untrusted source. Before it is used, its types are checked, and its files must
be inside the checkpoint's folder. Verifying compares what it says about tensors with the index. Its
own text has a checksum, so that damaged numbers are noticed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

import torch

from fullshard.errors import CheckpointError
from fullshard.state.checkpoint.index import Written
from fullshard.state.plain import decode, parse_json, require

MANIFEST = "manifest.json"

_FORMAT = "fullshard checkpoint"
_FORMAT_VERSION = 2  # in version 1, files do not say which part of which checkpoint they are


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

    @classmethod
    def of(cls, written: Written) -> StoredTensor:
        """The entry of a tensor of which all ranks have written their boxes."""
        blocks = (StoredBlock(b.box.offsets, b.box.sizes, b.checksum) for b in written.blocks)
        dtype = str(written.dtype).removeprefix("torch.")
        return cls(written.shape, dtype, written.checksum, tuple(blocks))


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

    @property
    def is_ours(self) -> bool:
        """Whether fullshard wrote the checkpoint; if torch did, nothing is known about it."""
        return self.format_version > 0

    def to_json(self) -> str:
        body = json.dumps(asdict(self))
        head = {"format": _FORMAT, "version": _FORMAT_VERSION, "sha256": digest_of(body)}
        return json.dumps(head)[:-1] + f', "manifest": {body}}}'

    @classmethod
    def from_json(cls, text: str, subject: str) -> Manifest:
        """Parse what `to_json` wrote. Errors name `subject`."""
        try:
            outer = parse_json(text)
            require(outer.get("format") == _FORMAT, "format", repr(_FORMAT), outer.get("format"))
            version = outer.get("version")
            expected = f"1 or {_FORMAT_VERSION}, which this fullshard reads"
            require(version in (1, _FORMAT_VERSION), "version", expected, version)
            body = outer.get("manifest")
            digest = digest_of(json.dumps(body))
            require(outer.get("sha256") == digest, "sha256", digest, outer.get("sha256"))
            if version == 1 and isinstance(body, dict):
                body["format_version"] = 1
            found: Manifest = decode(cls, body, "manifest")
            require(found.format_version == version, "format_version", str(version), version)
            found._require_possible()
        except (ValueError, RecursionError) as error:
            text = f"{subject}: the manifest is damaged ({error})."
            raise CheckpointError(f"{text} `latest` finds whole checkpoints.") from None
        return found

    def _require_possible(self) -> None:
        require(self.num_ranks, "num_ranks", "at least 1", self.num_ranks)
        has_zone = datetime.fromisoformat(self.created).tzinfo is not None
        require(has_zone, "created", "a time with its zone", self.created)
        for name in self.files:
            # A name that cannot leave the folder, on any system.
            is_plain = re.fullmatch(r"[A-Za-z0-9._+-]{1,255}", name) is not None
            is_inside = is_plain and name not in (".", "..", MANIFEST)
            require(is_inside, "files", "names of files inside the checkpoint's folder", name)
        for key, stored in self.tensors.items():
            boxes = {(block.offsets, block.sizes) for block in stored.blocks}
            is_unique = len(boxes) == len(stored.blocks)
            require(is_unique, f"blocks of {key!a}", "there once", "one that is there twice")
        for group in self.optimizer["param_groups"] if self.optimizer else ():
            decode(list[str], group.get("params"), "params of a parameter group")


# In the place of the manifest that a checkpoint of torch's does not have.
OF_TORCH = Manifest(id="", created="", num_ranks=0, versions={}, format_version=0)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint."""
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: there is no {MANIFEST} that can be read ({error}); the checkpoint was "
            "not written to its end, or by another program."
        ) from error
    return Manifest.from_json(text, str(path))


def digest_of(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
