"""Output of the command: results go to standard output, progress goes to standard error.

On a terminal, tables fit its width and progress is a bar. Elsewhere, each row is one line and
progress is a few plain lines, for `grep`, logs and scripts. Names come from files of unknown
origin, so characters that are not printable are escaped: a name cannot control the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fullshard.formatting import readable

__all__ = ["printable", "progress", "say", "say_table"]

Report = Callable[[int, int], None]

_ANY_WIDTH = 100_000
_NUM_PLAIN_LINES = 4


def say(text: str) -> None:
    """Print one line of a result."""
    click.echo(printable(text))


def note(text: str) -> None:
    """Print lines to standard error."""
    for line in text.splitlines():
        click.echo(printable(line), err=True)


def printable(text: str) -> str:
    """The text with characters escaped that could control a terminal."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def say_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print aligned lines of a name and a value; empty values are skipped."""
    rows = [(name, value) for name, value in facts if value]
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        say(f"{name:<{width}}  {value}")


def say_table(columns: Iterable[str], rows: Iterable[tuple[str | int, ...]]) -> None:
    """Print a table; columns of numbers are aligned to the right."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _ANY_WIDTH
    table = Table(box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    cells = list(rows)
    for index, column in enumerate(columns):
        is_number = bool(cells) and all(isinstance(row[index], int) for row in cells)
        table.add_column(
            column,
            justify="right" if is_number else "left",
            no_wrap=is_number or not console.is_terminal,
            overflow="fold",
        )
    for row in cells:
        shown = (f"{cell:,}" if isinstance(cell, int) else cell for cell in row)
        table.add_row(*(Text(printable(cell)) for cell in shown))
    console.print(table)


@contextmanager
def progress(what: str, *, in_bytes: bool = False) -> Iterator[Report]:
    """Yield a function to call with (done, total) as work proceeds; a total of 0 is unknown."""
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        yield _PlainProgress(what, readable if in_bytes else str)
        return
    amount = DownloadColumn(binary_units=True) if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


class _PlainProgress:
    """Prints a line for every quarter of the work."""

    def __init__(self, what: str, words: Callable[[int], str]) -> None:
        self._what = what
        self._words = words
        self._num_lines = 0

    def __call__(self, done: int, total: int) -> None:
        num_lines = done * _NUM_PLAIN_LINES // total if total else 0
        if num_lines > self._num_lines:
            self._num_lines = num_lines
            note(f"{self._what}: {self._words(done)} of {self._words(total)}")
