"""`fullshard report`: a run, or several side by side, as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from fullshard.console import say
from fullshard.formatting import readable


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
    from fullshard_train.report import read_record, write_report

    record, *others = map(read_record, runs)
    default = Path("comparison.html") if others else runs[0] / "report.html"
    written = write_report(record, out or default, others=others)
    say(f"{written}: {readable(written.stat().st_size)}")
