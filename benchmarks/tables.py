"""Puts the results of benchmarks into the documentation, or checks that they are there.

    python benchmarks/tables.py            fills docs/benchmarks.md and other pages
    python benchmarks/tables.py --check    fails if that would change them

A result benchmarks/results/NAME.json belongs between `<!-- result: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from measuring import Result

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
PAGES = (
    PAGE,
    *(ROOT / "docs" / f"{each}.md" for each in ("planning", "reliability", "several_hosts")),
)
_PLACE = re.compile(r"(<!-- result: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def section(path: Path) -> str:
    """A result as Markdown: where and how it was measured, and its tables."""
    if not path.exists():
        return "\nNot measured yet.\n\n"
    result = Result.read(path)
    head = f"Measured with `{result.command}` on {result.machine}."
    return "\n" + "\n\n".join([head, *(table.markdown() for table in result.tables)]) + "\n\n"


def filled(page: str, results: Path = RESULTS) -> str:
    """The page with its results in their places; every result needs one on some page."""
    pages = [page, *(each.read_text() for each in PAGES)]
    named = {name for each in pages for name in re.findall(r"<!-- result: (\w+) -->", each)}
    if homeless := sorted({path.stem for path in results.glob("*.json")} - named):
        raise SystemExit(
            f"{PAGE.name}: every result needs a place, found none for {', '.join(homeless)}; add "
            f"'<!-- result: {homeless[0]} -->' and '<!-- end -->'."
        )
    return _PLACE.sub(
        lambda found: found[1] + section(results / f"{found[2]}.json") + found[3], page
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    for path in PAGES:
        before = path.read_text()
        after = filled(before)
        if not options.check:
            path.write_text(after)
        elif before != after:
            sys.exit(
                f"{path.name} differs from benchmarks/results; run python benchmarks/tables.py."
            )


if __name__ == "__main__":
    main()
