"""The `fullshard` command and its subcommands.

Exit status: 0 success, 1 a checkpoint is damaged or two differ, 2 the request is invalid.
"""

from __future__ import annotations

import os
from importlib import import_module

import click

from fullshard import __version__
from fullshard.cli.checkpoint import checkpoint
from fullshard.cli.doctor import doctor
from fullshard.cli.group import Commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fullshard")
def fullshard() -> None:
    """Fully sharded data parallel training for PyTorch."""


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


# The only place where the library knows of the application that comes with it.
_APPLICATION = import_module("fullshard_train.cli").COMMANDS

for _command in (*_APPLICATION, doctor, checkpoint, run):
    fullshard.add_command(_command)
