"""The command that draws the report of a run again."""

from __future__ import annotations

from pathlib import Path

import click

from fullshard.cli.screen import say
from fullshard.plan.memory import readable
from fullshard.report import read_record, write_report


@click.command(short_help="Draw the report of a run, as one HTML file.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write it; report.html in the folder of the run if it is not given.",
)
def report(run: Path, out: Path | None) -> None:
    """Draw the report of the run in the folder RUN: metrics, one step in detail, the setting.

    The page is one file that opens without a network. A run that is still going, or that died,
    shows what it has left so far.
    """
    written = write_report(read_record(run), out or run / "report.html")
    say(f"{written}: {readable(written.stat().st_size)}")
