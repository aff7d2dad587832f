"""`fullshard checkpoint`: inspecting, verifying, comparing and converting checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import click
import torch

from fullshard.cli.console import counted, listed, progress, say, say_facts, say_table
from fullshard.cli.convert import Export, import_weights
from fullshard.cli.convert import export as write_exported
from fullshard.cli.convert import reshard as write_resharded
from fullshard.cli.diff import compare
from fullshard.cli.group import Commands
from fullshard.errors import CheckpointError
from fullshard.plan.memory import readable
from fullshard.state.dcp import MODEL, OPTIMIZER
from fullshard.state.store import (
    MANIFEST,
    Manifest,
    StoredCheckpoint,
    located,
    open_checkpoint,
)
from fullshard.state.store import verify as find_problems

_CHECKPOINT = click.Path(path_type=Path)
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _num_bytes(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Parse a number of bytes, such as 5000000, 500MB or 2GiB."""
    text = value.strip().lower().removesuffix("b")
    digits = text.rstrip("kmgti")
    try:
        found = int(float(digits) * _UNITS[text[len(digits) :]])
    except (ValueError, KeyError, OverflowError):
        found = 0
    if found < 1:
        raise click.BadParameter(
            f"{value!r}: a number of bytes is expected, as in 5GB or 500MiB", ctx, param
        )
    return found


@click.group(cls=Commands)
def checkpoint() -> None:
    """Inspect, verify, compare and convert checkpoints.

    PATH is the folder of a checkpoint that fullshard.state.save or torch.distributed.checkpoint
    wrote. The commands need no process group and no GPU, and at most one tensor in memory.

    Exit status: 0 success, 1 damaged or different, 2 the request is invalid.
    """


@checkpoint.command("info", short_help="Show the contents and the origin of a checkpoint.")
@click.argument("path", type=_CHECKPOINT)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def show(path: Path, as_json: bool) -> None:
    """Show the tensors and files of the checkpoint PATH, and by what it was written."""
    found = contents_of(path)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
        return
    say_facts(found.facts())
    say("")
    rows = [(t.name, str(list(t.shape)), t.dtype, t.num_bytes, t.num_blocks) for t in found.tensors]
    say_table(("tensor", "shape", "dtype", "bytes", "blocks"), rows)
    say("")
    say_table(("file", "bytes"), list(found.files.items()))


@checkpoint.command(short_help="Compare a checkpoint with its checksums.")
@click.argument("path", type=_CHECKPOINT)
def verify(path: Path) -> None:
    """Read the whole checkpoint PATH and compare it with its manifest.

    Lists changed bits, files that are truncated, missing or of another run, and incomplete tensors.
    Exits with status 1 if there are any.
    """
    if not located(path).is_dir():
        raise CheckpointError(f"{path}: the folder of a checkpoint is expected, found none.")
    with progress("verifying", in_bytes=True) as report:
        problems = find_problems(path, progress=report)
    for problem in problems:
        say(f"{problem.subject}: {problem.what}")
    if problems:
        say(f"{path}: damaged, {counted(len(problems), 'problem')}")
        raise click.exceptions.Exit(1)
    found = contents_of(path)
    what = f"{counted(len(found.tensors), 'tensor')}, {counted(len(found.files), 'file')}"
    if found.manifest is None:
        say(f"{path}: readable, {what}; there is no manifest to compare them with")
    else:
        say(f"{path}: complete, {what}")


@checkpoint.command(short_help="Compare two checkpoints.")
@click.argument("first", type=_CHECKPOINT)
@click.argument("second", type=_CHECKPOINT)
@click.option(
    "--values", is_flag=True, help="Read different tensors and show their largest difference."
)
def diff(first: Path, second: Path, values: bool) -> None:
    """Compare names, shapes, dtypes and contents of the checkpoints FIRST and SECOND, bit by bit.

    How tensors are split into files does not matter. Contents are compared by the checksums of the
    manifests, and read if there are none. The optimizer's options and values that are not tensors
    are compared as well; steps, times and random state are not. Exits with status 1 if there is a
    difference.
    """
    a, b = open_checkpoint(first), open_checkpoint(second)
    with progress("comparing") as report:
        found = compare(a, b, with_values=values, progress=report)
    for difference in found.differences:
        say(f"{difference.subject}: {difference.what}")
    same = f"{counted(found.num_same, 'tensor')} identical"
    if found.differences:
        say(f"different: {counted(len(found.differences), 'difference')}, {same}")
        raise click.exceptions.Exit(1)
    say(f"no difference: {same}")


@checkpoint.command(short_help="Copy a checkpoint into another number of files.")
@click.argument("path", type=_CHECKPOINT)
@click.argument("out", type=_CHECKPOINT)
@click.option(
    "--files", "num_files", type=click.IntRange(1), required=True, help="How many files to write."
)
@click.option(
    "--tensors-only",
    is_flag=True,
    help="Drop entries that are not tensors (of checkpoints that torch itself wrote).",
)
def reshard(path: Path, out: Path, num_files: int, tensors_only: bool) -> None:
    """Copy the checkpoint PATH to OUT, with its tensors in another number of files.

    Loading on another number of ranks does not require this; but few large files, or many small
    ones, may suit a file system better.
    """
    with progress("resharding", in_bytes=True) as report:
        write_resharded(path, out, num_files, tensors_only=tensors_only, progress=report)
    _say_written(out)


@checkpoint.command(short_help="Export the model of a checkpoint as safetensors.")
@click.argument("path", type=_CHECKPOINT)
@click.argument("out", type=_CHECKPOINT)
@click.option(
    "--dtype", type=click.Choice(_DTYPES), help="Convert floating-point tensors to this dtype."
)
@click.option(
    "--max-shard-bytes",
    "max_bytes",
    metavar="BYTES",
    callback=_num_bytes,
    default="5GB",
    show_default=True,
    help="The largest size of a file; a larger tensor gets its own file.",
)
@click.option(
    "--prefix",
    help="The prefix of the model's keys; needed if a checkpoint that torch itself wrote is "
    "ambiguous.",
)
def export(path: Path, out: Path, dtype: str | None, max_bytes: int, prefix: str | None) -> None:
    """Export the model of the checkpoint PATH as safetensors to the folder OUT.

    The files have the names that transformers and other tools expect, with an index if there are
    several.
    """
    asked = Export(None if dtype is None else getattr(torch, dtype), max_bytes, prefix)
    with progress("exporting") as report:
        written = write_exported(path, out, asked, progress=report)
    total = readable(sum(plan.nbytes for plan in written))
    say(f"{out}: {counted(len(written), 'file')}, {total}")


@checkpoint.command("import", short_help="Import safetensors, or a state dict, as a checkpoint.")
@click.argument("path", type=_CHECKPOINT)
@click.argument("out", type=_CHECKPOINT)
@click.option(
    "--files", "num_files", type=click.IntRange(1), default=1, help="How many files to write."
)
@click.option("--key", help="The key of the model in a .pt file, such as state_dict.")
def import_(path: Path, out: Path, num_files: int, key: str | None) -> None:
    """Import the weights PATH as the checkpoint OUT of a model without optimizer.

    PATH is a safetensors file, a folder with one or with an index, or a state dict that torch.save
    wrote, which is loaded with weights_only=True.
    """
    with progress("importing", in_bytes=True) as report:
        import_weights(path, out, num_files, key=key, progress=report)
    _say_written(out)


def _say_written(out: Path) -> None:
    found = contents_of(out)
    what = f"{counted(len(found.tensors), 'tensor')}, {counted(len(found.files), 'file')}"
    say(f"{out}: {what}, {readable(found.num_bytes)}")


# Contents


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
        """Yield the lines above the table."""
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
