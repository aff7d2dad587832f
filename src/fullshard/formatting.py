"""Numbers in words, for tables and messages. Without torch: the command's help does not load it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

__all__ = ["counted", "readable"]


def readable(num_bytes: int, word: str = "bytes") -> str:
    """A size as in "1.5 GiB"; `word` is for sizes of less than 1 KiB."""
    size, units = float(num_bytes), [word, "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.0f} {word}" if units[0] == word else f"{size:.1f} {units[0]}"


def counted(number: int, what: str) -> str:
    """Format a number of things as in "1 rank" and "2 ranks"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first names, and the number of others."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def table(rows: Sequence[tuple[str, ...]], numbers: Collection[int]) -> list[str]:
    """The lines of a table whose first row is a header and whose last row is a total.

    The columns of `numbers` are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    layout = "  ".join(f"{{:{'>' if n in numbers else '<'}{w}}}" for n, w in enumerate(widths))
    lines = [layout.format(*row).rstrip() for row in rows]
    rule = "  ".join("-" * width for width in widths)
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]
