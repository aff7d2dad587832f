"""Ranks whose programs differ: after how many seconds both raise an error that says so.

    python benchmarks/bench_divergence.py

The programs, and what is promised of them, are in tests/support/divergence.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from measuring import Result, Table, parser_for, result_for

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.divergence import (
    APIS,
    CASES,
    CORRECT,
    ODD,
    PATIENCE_S,
    TRANSPORTS,
    Outcome,
    load_modules,
    outcomes_of,
)


def cell(found: Outcome) -> str:
    """How long the slower rank took, and what the other one than the odd one raised."""
    if found.problem:
        return found.problem
    error = found.ranks[1 - ODD].last_line.partition(": ")[2].partition(":")[0].split(".")[-1]
    kind = error if error.endswith("Error") else "DisagreementError"
    return f"{max(said.seconds for said in found.ranks):.1f} s, `{kind}`"


def compare(result: Result, names: Sequence[str], at_once: int) -> None:
    kinds = list(product(APIS, TRANSPORTS))
    chosen = [(name, *kind) for name in names for kind in kinds]
    found = {(each.name, each.api, each.transport): each for each in outcomes_of(chosen, at_once)}
    rows = [
        [name.replace("_", " "), *(cell(found[name, *kind]) for kind in kinds)] for name in names
    ]
    title = f"Rank 1 of 2 does something else, with FULLSHARD_PATIENCE_S={PATIENCE_S:g}"
    result.add(Table(title, ["rank 1", *(", ".join(kind) for kind in kinds)], list(rows)))


def check_silence(result: Result, names: Sequence[str], at_once: int) -> None:
    chosen = list(product(names, APIS, TRANSPORTS))
    found = list(outcomes_of(chosen, at_once))
    rows = [
        [
            name.replace("_", " "),
            " ".join(each.problem for each in found if each.name == name).strip() or "nothing",
        ]
        for name in names
    ]
    result.add(Table("What ranks say in correct programs", ["program", "said"], list(rows)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--correct", nargs="+", default=list(CORRECT), choices=list(CORRECT))
    parser.add_argument("--at-once", type=int, default=4, help="how many cases")
    options = parser.parse_args(arguments)
    load_modules()
    result = result_for("divergence", arguments)
    compare(result, options.cases, options.at_once)
    check_silence(result, options.correct, options.at_once)
    result.write(options.json)


if __name__ == "__main__":
    main()
