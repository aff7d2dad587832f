"""The contents of a checkpoint, as `fullshard checkpoint info` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from fullshard.cli.console import listed
from fullshard.formatting import counted, readable
from fullshard.state.dcp import MODEL, OPTIMIZER
from fullshard.state.store import MANIFEST, Manifest, StoredCheckpoint, open_checkpoint


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One tensor; `checksum` is None if there is no manifest."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    num_blocks: int
    checksum: str | None


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a checkpoint. `others` are entries of torch that are not tensors."""

    path: Path
    manifest: Manifest | None
    tensors: tuple[TensorLine, ...]
    others: tuple[str, ...]
    files: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """The size of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield the lines below the tables."""
        yield "checkpoint", str(self.path)
        manifest = self.manifest
        if manifest is None:
            yield "written by", "torch.distributed.checkpoint itself: no manifest, no checksums"
        else:
            versions = ", ".join(f"{name} {text}" for name, text in manifest.versions.items())
            yield "written by", f"{counted(manifest.num_ranks, 'rank')}, {versions}"
            yield "created", manifest.created
            yield "step", "" if manifest.step is None else str(manifest.step)
            yield "selection", manifest.selection
            yield "extra", ", ".join(manifest.extra)
            yield "tied", ", ".join(f"{name} = {to}" for name, to in manifest.aliases.items())
        yield "tensors", self._totals()
        yield "no tensors", f"{len(self.others)}: {listed(self.others)}" if self.others else ""
        total = readable(sum(self.files.values()))
        yield "files", f"{counted(len(self.files), 'file')}, {total}"

    def _totals(self) -> str:
        words = f"{counted(len(self.tensors), 'tensor')}, {readable(self.num_bytes)}"
        parts = {"model": MODEL, "optimizer": OPTIMIZER}
        sizes = {
            name: sum(t.num_bytes for t in self.tensors if t.name.startswith(prefix))
            for name, prefix in parts.items()
        }
        if self.manifest is None or not sizes["optimizer"]:
            return words
        split = ", ".join(f"{name} {readable(size)}" for name, size in sizes.items())
        return f"{words} ({split})"

    def as_json(self) -> dict[str, Any]:
        manifest = self.manifest
        return {
            "path": str(self.path),
            "written_by": "torch" if manifest is None else "fullshard",
            "id": None if manifest is None else manifest.id,
            "created": None if manifest is None else manifest.created,
            "step": None if manifest is None else manifest.step,
            "num_ranks": None if manifest is None else manifest.num_ranks,
            "versions": {} if manifest is None else dict(manifest.versions),
            "selection": None if manifest is None else manifest.selection,
            "extra": [] if manifest is None else list(manifest.extra),
            "aliases": {} if manifest is None else dict(manifest.aliases),
            "num_bytes": self.num_bytes,
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "others": list(self.others),
            "files": dict(self.files),
        }


def contents_of(path: Path) -> Contents:
    """Return the contents of a checkpoint, without reading its tensors."""
    opened = open_checkpoint(path)
    tensors = tuple(_line(opened, key) for key in opened.keys)
    return Contents(path, opened.manifest, tensors, tuple(opened.object_keys), _files(opened))


def _line(opened: StoredCheckpoint, key: str) -> TensorLine:
    shape, dtype = opened.shape(key), opened.dtype(key)
    stored = None if opened.manifest is None else opened.manifest.tensors.get(key)
    return TensorLine(
        name=key,
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        num_bytes=prod(shape) * dtype.itemsize,
        num_blocks=len(opened.info(key).boxes),
        checksum=None if stored is None else stored.checksum,
    )


def _files(opened: StoredCheckpoint) -> dict[str, int]:
    """Return the sizes of the checkpoint's own files; the folder may contain others."""
    if opened.manifest is not None:
        names = {MANIFEST, *opened.manifest.files}
    else:
        names = opened.file_names
    return {name: (opened.path / name).stat().st_size for name in sorted(names)}
