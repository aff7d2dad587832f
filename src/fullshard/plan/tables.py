"""Tables of text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(rows: Sequence[tuple[str, ...]], numbers: Collection[int]) -> list[str]:
    """The lines of a table whose first row is a header and whose last row is a total.

    The columns of `numbers` are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    layout = "  ".join(f"{{:{'>' if n in numbers else '<'}{w}}}" for n, w in enumerate(widths))
    lines = [layout.format(*row).rstrip() for row in rows]
    rule = "  ".join("-" * width for width in widths)
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]
