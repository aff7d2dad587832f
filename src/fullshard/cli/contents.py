"""The contents of a checkpoint, as `fullshard checkpoint info` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fullshard.formatting import counted, listed, readable
from fullshard.state.checkpoint.index import MODEL, OPTIMIZER
from fullshard.state.checkpoint.manifest import MANIFEST, Manifest
from fullshard.state.checkpoint.reader import open_checkpoint


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
    manifest: Manifest
    tensors: tuple[TensorLine, ...]
    others: tuple[str, ...]
    files: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """The size of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def counts(self) -> str:
        return f"{counted(len(self.tensors), 'tensor')}, {counted(len(self.files), 'file')}"

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield the lines below the tables."""
        yield "checkpoint", str(self.path)
        manifest = self.manifest
        if not manifest.is_ours:
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
        model, optimizer = (
            sum(tensor.num_bytes for tensor in self.tensors if tensor.name.startswith(prefix))
            for prefix in (MODEL, OPTIMIZER)
        )
        if not (self.manifest.is_ours and optimizer):
            return words
        return f"{words} (model {readable(model)}, optimizer {readable(optimizer)})"

    def as_json(self) -> dict[str, Any]:
        names = ("id", "created", "step", "num_ranks", "versions", "selection", "extra", "aliases")
        about: dict[str, Any] = dict.fromkeys(names) | {"versions": {}, "extra": [], "aliases": {}}
        if self.manifest.is_ours:
            about = {name: getattr(self.manifest, name) for name in names}
        return {
            "path": str(self.path),
            "written_by": "fullshard" if self.manifest.is_ours else "torch",
            **about,
            "num_bytes": self.num_bytes,
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "others": self.others,
            "files": self.files,
        }


def contents_of(path: Path) -> Contents:
    """Return the contents of a checkpoint, without reading its tensors."""
    opened = open_checkpoint(path)
    manifest = opened.manifest
    tensors = []
    for key in opened.keys:
        info, stored = opened.info(key), manifest.tensors.get(key)
        tensors.append(
            TensorLine(
                name=key,
                shape=info.shape,
                dtype=info.dtype_name,
                num_bytes=info.num_bytes,
                num_blocks=len(info.boxes),
                checksum=stored.checksum if stored else None,
            )
        )
    # The checkpoint's own files; the folder may contain others.
    names = {MANIFEST, *manifest.files} if manifest.is_ours else opened.file_names
    files = {name: (opened.path / name).stat().st_size for name in sorted(names)}
    return Contents(path, manifest, tuple(tensors), tuple(opened.object_keys), files)
