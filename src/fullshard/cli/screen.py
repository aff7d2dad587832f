"""What the command prints: results on standard output, progress on standard error.

On a terminal there are tables as wide as it is, and progress bars. Anywhere else each row is one
line, however long, and progress is a few plain lines: so that `grep`, logs and scripts can read it.
Names come from files that anybody could have written: what is no printable character is shown as
its escape, so that a name cannot speak to the terminal.
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

from fullshard.plan.memory import readable

Report = Callable[[int, int], None]

_ANY_WIDTH = 100_000
_NUM_PLAIN_LINES = 4


def say(text: str) -> None:
    """One line of a result, as long as it is."""
    click.echo(printable(text))


def note(text: str) -> None:
    """Beside the result: a line, or the lines of an error."""
    for line in text.splitlines():
        click.echo(printable(line), err=True)


def printable(text: str) -> str:
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def say_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Lines of a name and what it is."""
    rows = [(name, value) for name, value in facts if value]
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        say(f"{name:<{width}}  {value}")


def say_table(columns: Iterable[str], rows: Iterable[tuple[str | int, ...]]) -> None:
    """A table; numbers stand at the right of their column."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _ANY_WIDTH
    table = Table(box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    cells = [tuple(rows_) for rows_ in rows]
    for index, column in enumerate(columns):
        is_number = bool(cells) and all(isinstance(row[index], int) for row in cells)
        table.add_column(
            column,
            justify="right" if is_number else "left",
            no_wrap=is_number or not console.is_terminal,
            overflow="fold",
        )
    for row in cells:
        table.add_row(*(Text(printable(_shown(cell))) for cell in row))
    console.print(table)


def _shown(cell: str | int) -> str:
    return f"{cell:,}" if isinstance(cell, int) else cell


def counted(number: int, what: str) -> str:
    """As in "1 tensor" and "2 tensors"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


@contextmanager
def progress(what: str, *, in_bytes: bool = False) -> Iterator[Report]:
    """A function to be told (done, total) as work goes on."""
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        yield _PlainProgress(what, readable if in_bytes else str)
        return
    amount = DownloadColumn(binary_units=True) if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _PlainProgress:
    """A line for every quarter of the work."""

    def __init__(self, what: str, words: Callable[[int], str]) -> None:
        self._what = what
        self._words = words
        self._num_lines = 0

    def __call__(self, done: int, total: int) -> None:
        num_lines = done * _NUM_PLAIN_LINES // total if total else 0
        if num_lines > self._num_lines:
            self._num_lines = num_lines
            note(f"{self._what}: {self._words(done)} of {self._words(total)}")
