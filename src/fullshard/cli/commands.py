"""The commands, their arguments and their help; what they do is in the other files of this room.

Exit codes: 0 all is well, 1 a checkpoint is damaged or two differ, 2 the command could not be done.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import click
import torch

from fullshard.cli.comparing import compare
from fullshard.cli.contents import contents_of
from fullshard.cli.converting import import_weights
from fullshard.cli.converting import reshard as write_resharded
from fullshard.cli.doctor import doctor
from fullshard.cli.exporting import Export
from fullshard.cli.exporting import export as write_exported
from fullshard.cli.generating import generate
from fullshard.cli.group import Commands
from fullshard.cli.reporting import report
from fullshard.cli.screen import (
    counted,
    progress,
    say,
    say_facts,
    say_table,
)
from fullshard.cli.training import train
from fullshard.errors import CheckpointError
from fullshard.plan.memory import readable
from fullshard.state.store import located, open_checkpoint
from fullshard.state.store import verify as find_problems

_CHECKPOINT = click.Path(path_type=Path)
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _num_bytes(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """A number of bytes: 5000000, 500MB, 5GB, 2GiB."""
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


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version("fullshard"), prog_name="fullshard")
def fullshard() -> None:
    """Fully sharded data parallel training for PyTorch: what can be done from the shell."""


for _command in (train, generate, report, doctor):
    fullshard.add_command(_command)


@fullshard.group()
def checkpoint() -> None:
    """Look into checkpoints, check, compare and convert them.

    PATH is the folder of a checkpoint, as fullshard.state.save or torch.distributed.checkpoint
    wrote it. No process group and no GPU is needed, and never more than a tensor is in memory.

    Exit codes: 0 all is well, 1 damaged or different, 2 the command could not be done.
    """


@checkpoint.command("info", short_help="What is in a checkpoint, and who wrote it when.")
@click.argument("path", type=_CHECKPOINT)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def show(path: Path, as_json: bool) -> None:
    """Show what is in the checkpoint PATH: its tensors, and who wrote it when."""
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


@checkpoint.command(short_help="Read all of a checkpoint and compare it with its manifest.")
@click.argument("path", type=_CHECKPOINT)
def verify(path: Path) -> None:
    """Read all of the checkpoint PATH and compare it with its manifest.

    Finds changed bits, files that are cut off, missing or of another run, and tensors that are not
    complete; names each of them. Exit code 1 if there are any.
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
        say(f"{path}: readable, {what}; without a manifest there is nothing to compare them with")
    else:
        say(f"{path}: whole, {what}")


@checkpoint.command(short_help="What differs between two checkpoints.")
@click.argument("first", type=_CHECKPOINT)
@click.argument("second", type=_CHECKPOINT)
@click.option(
    "--values", is_flag=True, help="Say how far tensors of the same shape lie apart (reads them)."
)
def diff(first: Path, second: Path, values: bool) -> None:
    """Compare the checkpoints FIRST and SECOND: names, shapes, dtypes and content, to the last bit.

    However they are cut into files. Content is compared by the checksums of the manifests, and read
    where there are none. Of an optimizer, the options and values that are not tensors are compared,
    too; steps, times and random state are not. Exit code 1 if there is a difference.
    """
    a, b = open_checkpoint(first), open_checkpoint(second)
    with progress("comparing") as report:
        found = compare(a, b, with_values=values, progress=report)
    for difference in found.differences:
        say(f"{difference.subject}: {difference.what}")
    same = f"{counted(found.num_same, 'tensor')} the same"
    if found.differences:
        say(f"different: {counted(len(found.differences), 'difference')}, {same}")
        raise click.exceptions.Exit(1)
    say(f"no difference: {same}")


@checkpoint.command(short_help="Write a checkpoint again, in another number of files.")
@click.argument("path", type=_CHECKPOINT)
@click.argument("out", type=_CHECKPOINT)
@click.option(
    "--files", "num_files", type=click.IntRange(1), required=True, help="How many files to write."
)
@click.option(
    "--tensors-only",
    is_flag=True,
    help="Leave out what is no tensor (of checkpoints that torch itself wrote).",
)
def reshard(path: Path, out: Path, num_files: int, tensors_only: bool) -> None:
    """Write the checkpoint PATH again as OUT, with its tensors in another number of files.

    A checkpoint need not be resharded to be loaded on another number of ranks; few large files or
    many small ones may suit a file system better.
    """
    with progress("resharding", in_bytes=True) as report:
        write_resharded(path, out, num_files, tensors_only=tensors_only, progress=report)
    _say_written(out)


@checkpoint.command(short_help="Write the model of a checkpoint as safetensors.")
@click.argument("path", type=_CHECKPOINT)
@click.argument("out", type=_CHECKPOINT)
@click.option("--dtype", type=click.Choice(_DTYPES), help="Of floating-point tensors; else as is.")
@click.option(
    "--max-shard-bytes",
    "max_bytes",
    metavar="BYTES",
    callback=_num_bytes,
    default="5GB",
    show_default=True,
    help="How large a file may become; a larger tensor has one of its own.",
)
@click.option(
    "--prefix",
    help="What the keys of the model begin with; needed where a checkpoint that torch itself wrote "
    "leaves it open.",
)
def export(path: Path, out: Path, dtype: str | None, max_bytes: int, prefix: str | None) -> None:
    """Write the model of the checkpoint PATH as safetensors into the folder OUT.

    The files are named as transformers and other tools expect them, with an index if there are
    several.
    """
    asked = Export(None if dtype is None else getattr(torch, dtype), max_bytes, prefix)
    with progress("exporting") as report:
        written = write_exported(path, out, asked, progress=report)
    total = readable(sum(plan.nbytes for plan in written))
    say(f"{out}: {counted(len(written), 'file')}, {total}")


@checkpoint.command("import", short_help="Write safetensors, or a state dict, as a checkpoint.")
@click.argument("path", type=_CHECKPOINT)
@click.argument("out", type=_CHECKPOINT)
@click.option(
    "--files", "num_files", type=click.IntRange(1), default=1, help="How many files to write."
)
@click.option("--key", help="Of a .pt file: under which key its model is, as in state_dict.")
def import_(path: Path, out: Path, num_files: int, key: str | None) -> None:
    """Write the weights PATH as a checkpoint OUT, of a model without optimizer.

    PATH is a safetensors file, a folder with one or with an index, or a state dict that torch.save
    wrote. Of the latter nothing is run: it is read with weights_only.
    """
    with progress("importing", in_bytes=True) as report:
        import_weights(path, out, num_files, key=key, progress=report)
    _say_written(out)


def _say_written(out: Path) -> None:
    found = contents_of(out)
    what = f"{counted(len(found.tensors), 'tensor')}, {counted(len(found.files), 'file')}"
    say(f"{out}: {what}, {readable(found.num_bytes)}")
