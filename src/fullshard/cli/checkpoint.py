"""`fullshard checkpoint`: inspecting, verifying, comparing and converting checkpoints.

Each command imports what it needs when it runs, because printing help does not need it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from fullshard.cli.group import Commands
from fullshard.console import progress, say, say_facts, say_table
from fullshard.errors import CheckpointError
from fullshard.formatting import counted, readable

_NUM_SHOWN = 10
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
            f"{value!r} is not a number of bytes, as in 5GB or 500MiB", ctx, param
        )
    return found


def _newest(ctx: click.Context, param: click.Parameter, path: Path) -> Path:
    """Return the newest checkpoint of the folder of a run."""
    from fullshard.state import checkpoint_at

    return checkpoint_at(path) or path


_STORED: dict[str, Any] = {"type": _CHECKPOINT, "callback": _newest}


@click.group(cls=Commands)
def checkpoint() -> None:
    """Inspect, verify, compare and convert checkpoints.

    PATH is the folder of a checkpoint that fullshard.state.save or torch.distributed.checkpoint
    wrote, or the folder of a run, whose newest checkpoint is used. The commands need no process
    group and no GPU, and at most one tensor in memory.

    Exit status: 0 success, 1 damaged or different, 2 the request is invalid.
    """


@checkpoint.command("info", short_help="Show the contents and the origin of a checkpoint.")
@click.argument("path", **_STORED)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def show(path: Path, as_json: bool) -> None:
    """Show the tensors and files of the checkpoint PATH, and by what it was written."""
    from fullshard.cli.contents import contents_of

    found = contents_of(path)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
        return
    rows = [(t.name, str(list(t.shape)), t.dtype, t.num_bytes, t.num_blocks) for t in found.tensors]
    say_table(("tensor", "shape", "dtype", "bytes", "blocks"), rows)
    say("")
    say_table(("file", "bytes"), list(found.files.items()))
    say("")
    say_facts(found.facts())


@checkpoint.command(short_help="Compare a checkpoint with its checksums.")
@click.argument("path", **_STORED)
def verify(path: Path) -> None:
    """Read the whole checkpoint PATH and compare it with its manifest.

    Lists changed bits, files that are truncated, missing or of another run, and incomplete tensors.
    Exits with status 1 if there are any.
    """
    from fullshard.cli.contents import contents_of
    from fullshard.state.checkpoint.folder import located
    from fullshard.state.checkpoint.reader import verify as find_problems

    if not located(path).is_dir():
        raise CheckpointError(f"{path} is not the folder of a checkpoint.")
    with progress("verifying", in_bytes=True) as report:
        problems = find_problems(path, progress=report)
    for problem in problems:
        say(f"{problem.subject}: {problem.what}")
    if problems:
        say(f"{path}: damaged, {counted(len(problems), 'problem')}")
        raise click.exceptions.Exit(1)
    found = contents_of(path)
    if not found.manifest.is_ours:
        say(f"{path}: readable, {found.counts}; there is no manifest to compare them with")
    else:
        say(f"{path}: complete, {found.counts}")


@checkpoint.command(short_help="Compare two checkpoints.")
@click.argument("first", **_STORED)
@click.argument("second", **_STORED)
@click.option("--all", "is_all", is_flag=True, help="List all differences, not the largest ten.")
def diff(first: Path, second: Path, is_all: bool) -> None:
    """Compare names, shapes, dtypes and contents of the checkpoints FIRST and SECOND, bit by bit.

    How tensors are split into files does not matter. Contents are compared by the checksums of the
    manifests, and read where these differ. The optimizer's options and values that are not tensors
    are compared as well; steps, times and random state are not. Exits with status 1 if there is a
    difference.
    """
    from fullshard.state.checkpoint.compare import compare
    from fullshard.state.checkpoint.reader import open_checkpoint

    a, b = open_checkpoint(first), open_checkpoint(second)
    with progress("comparing") as report:
        differences, num_same = compare(a, b, progress=report)
    shown = differences if is_all else differences[:_NUM_SHOWN]
    for difference in shown:
        say(f"{difference.subject}: {difference.what}")
    same = f"{counted(num_same, 'tensor')} identical"
    if differences:
        more = "" if len(shown) == len(differences) else "; --all lists the others"
        say(f"different: {counted(len(differences), 'difference')}, {same}{more}")
        raise click.exceptions.Exit(1)
    say(f"no difference: {same}")


@checkpoint.command(short_help="Copy a checkpoint into another number of files.")
@click.argument("path", **_STORED)
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
    from fullshard.state.checkpoint.convert import reshard as write_resharded

    with progress("resharding", in_bytes=True) as report:
        write_resharded(path, out, num_files, tensors_only=tensors_only, progress=report)
    _say_written(out)


@checkpoint.command(short_help="Export the model of a checkpoint as safetensors.")
@click.argument("path", **_STORED)
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
@click.option(
    "--merge", is_flag=True, help="Merge adapters into the model, which must fit in memory."
)
def export(
    path: Path, out: Path, dtype: str | None, max_bytes: int, prefix: str | None, merge: bool
) -> None:
    """Export the model of the checkpoint PATH as safetensors to the folder OUT.

    For a run of `fullshard train`, OUT is a folder that transformers opens, with config.json and
    the tokenizer, or one of peft if adapters were trained. For other checkpoints, OUT has the
    weights only.
    """
    import torch

    from fullshard.cli.export import Export
    from fullshard.cli.export import export as write_exported

    asked = Export(None if dtype is None else getattr(torch, dtype), max_bytes, prefix, merge)
    with progress("exporting") as report:
        written = write_exported(path, out, asked, progress=report)
    total = readable(sum(plan.nbytes for plan in written))
    is_whole = any((out / name).is_file() for name in ("config.json", "adapter_config.json"))
    kind = "" if is_whole else ", weights only: the checkpoint is in no folder of a run"
    say(f"{out}: {counted(len(written), 'file')}, {total}{kind}")


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
    from fullshard.state.checkpoint.convert import import_weights

    with progress("importing", in_bytes=True) as report:
        import_weights(path, out, num_files, key=key, progress=report)
    _say_written(out)


def _say_written(out: Path) -> None:
    from fullshard.cli.contents import contents_of

    found = contents_of(out)
    say(f"{out}: {found.counts}, {readable(found.num_bytes)}")
