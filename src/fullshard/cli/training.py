"""`fullshard train`: from what was typed to a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from fullshard.cli.options import ConfiguredCommand, given_of
from fullshard.training.checking import require_sane
from fullshard.training.config_file import config_as_toml, config_of


def is_rank() -> bool:
    """Whether this process was started as a rank: by torchrun, or with its variables set."""
    has = os.environ.keys()
    return {"RANK", "WORLD_SIZE"} <= has and bool({"TORCHELASTIC_RUN_ID", "MASTER_ADDR"} & has)


@click.command(cls=ConfiguredCommand, short_help="Train a model, sharded over all ranks.")
@click.option(
    "--config",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A configuration in TOML; what is typed here wins over what it has.",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print the whole configuration as a file with comments, and do nothing.",
)
@click.pass_context
def train(ctx: click.Context, /, file: Path | None, print_config: bool, **_: Any) -> None:
    """Train a model, sharded over all ranks of this machine; without options, a small one.

    Started by torchrun (torchrun -m fullshard train ...), it is one rank of a larger world.

    Exit codes: 0 trained, 2 it could not be done, 130 stopped by Ctrl-C; else that of a rank that
    failed.
    """
    config = config_of(file, given_of(ctx))
    require_sane(config)
    if print_config:
        click.echo(config_as_toml(config), nl=False)
        return
    # Imported here: what comes before needs neither the models nor torch's launcher.
    if is_rank():
        from fullshard.training.worker import run_rank

        ctx.exit(run_rank(config))
    from fullshard.training.launching import launch

    ctx.exit(launch(config))
