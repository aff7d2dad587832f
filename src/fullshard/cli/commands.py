"""The `fullshard` command and its subcommands.

Exit status: 0 success, 1 a checkpoint is damaged or two differ, 2 the request is invalid.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from fullshard import __version__
from fullshard.cli.checkpoint import checkpoint
from fullshard.cli.console import printable, say
from fullshard.cli.doctor import doctor
from fullshard.cli.group import Commands
from fullshard.cli.plan import plan
from fullshard.cli.train import train
from fullshard.formatting import readable
from fullshard.training.config import DEVICES


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fullshard")
def fullshard() -> None:
    """Fully sharded data parallel training for PyTorch."""


@click.command(short_help="Generate text from the checkpoint of a run.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, help="The beginning of the text; - reads standard input.")
@click.option("--tokens", default=160, show_default=True, help="The most tokens to generate.")
@click.option(
    "--temperature",
    default=0.7,
    show_default=True,
    help="The sampling temperature; 0 chooses the most likely token.",
)
@click.option(
    "--top-k", default=40, show_default=True, help="Sample from the k most likely tokens; 0: all."
)
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--ranks", default=1, show_default=True, help="Processes to shard the model over.")
@click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True)
def generate(prompt: str, **options: Any) -> None:
    """Print text that follows a prompt, from the model of CHECKPOINT.

    CHECKPOINT is the folder of a run, the folder of its checkpoints, or one of them; the newest is
    used. It may have been written on any number of ranks.
    """
    # Imported here, because printing help does not need it.
    from fullshard.training.generation import GenerateRequest, launch_generation

    prompt = sys.stdin.read() if prompt == "-" else prompt
    text = prompt + launch_generation(GenerateRequest(prompt=prompt, **options))
    # A model may generate characters that control the terminal.
    click.echo("".join(each if each in "\n\t" else printable(each) for each in text))


@click.command(short_help="Write the report of a run, or a comparison of runs, as one HTML file.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; by default report.html in the folder of the run, and of several runs "
    "comparison.html in this folder.",
)
def report(runs: tuple[Path, ...], out: Path | None) -> None:
    """Write the report of the run in the folder RUN: metrics, one traced step, configuration.

    Several runs are compared: their curves, and the settings in which they differ. The report is
    one file that opens without a network. Runs may be unfinished.
    """
    # Imported here, because printing help does not need it.
    from fullshard.report import read_record, write_report

    record, *others = map(read_record, runs)
    default = Path("comparison.html") if others else runs[0] / "report.html"
    written = write_report(record, out or default, others=others)
    say(f"{written}: {readable(written.stat().st_size)}")


@click.command(
    short_help="Run a program that uses torch's FSDP on fullshard, on one rank.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def run(program: tuple[str, ...]) -> None:
    """Run PROGRAM with the names of torch.distributed.fsdp replaced by those of fullshard.

    PROGRAM is a file or -m and a module, and its arguments. It is the only rank of its world. On
    several: torchrun --nproc-per-node N -m fullshard.dropin PROGRAM.
    """
    from fullshard import dropin

    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        os.environ.setdefault(name, str(value))
    dropin.run(program)


for _command in (train, plan, generate, report, doctor, checkpoint, run):
    fullshard.add_command(_command)
