"""The fenced blocks of a page, what its comments say about them, and how they are run.

A comment on its own line above a block says how the block is tested. It is visible in the source
of a page and not when the page is rendered:

    <!-- test: continues -->    goes on with the names of the block before it on the page
    <!-- test: given            runs these lines first, which a reader would have already
    model = ...
    -->
    <!-- test: output -->       what the Python block before it prints
    <!-- test: output of 3 ranks -->    what the same program prints then, on that many ranks
    <!-- test: tests -->        a file of tests, which must pass
    <!-- test: shown -->        text that nobody types, such as a message or a tree of files

A `diff` is two programs: with the lines that it removes, if what they import is installed, and with
those that it adds.
"""

import ast
import contextlib
import importlib.util
import io
import os
import re
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

from fullshard.testing import Rank

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

KINDS = ("continues", "given", "output", "tests", "shown")
_FENCE = re.compile(
    r"(?:<!-- test: (?P<kind>\w+)(?P<given>.*?)-->\n)?"
    r"^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: where it is, what it is in, and what its comment says."""

    page: str
    line: int
    language: str
    text: str
    kind: str
    given: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> list[Block]:
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        language, kind, given = match["language"], match["kind"] or "", match["given"] or ""
        indent = match["indent"]
        lines = [each.removeprefix(indent) for each in match["text"].splitlines()]
        found.append(Block(page, line, language, "\n".join(lines) + "\n", kind, given.lstrip()))
    return found


@dataclass(frozen=True, slots=True)
class Program:
    """Python blocks that share their names, in order, and what the last of them must print."""

    where: str
    source: str
    output: str | None
    later_outputs: tuple[tuple[int, str], ...] = ()
    """Numbers of ranks on which the program runs again in its folder, with what it prints."""

    @property
    def starts_its_own_ranks(self) -> bool:
        return "init_process_group(" in self.source


def programs_of(blocks: list[Block]) -> list[Program]:
    """The programs of a page, in order; each begins at a Python block that continues no other."""
    found: list[Program] = []
    for block in blocks:
        if block.language == "python" and block.kind != "tests":
            source = block.given + block.text
            if block.kind == "continues":
                before = found.pop()
                # Earlier output is not compared again.
                source = f"{before.source}print({SEPARATOR!r})\n{source}"
                found.append(Program(before.where, source, None))
                if before.output is not None:
                    found.insert(-1, before)
            else:
                found.append(Program(block.where, source, None))
        elif block.language == "diff":
            found += [Program(block.where, source, None) for source in sides_of(block)]
        elif block.kind == "output":
            last = found.pop()
            if again := re.fullmatch(r"of (\d+) ranks", block.given.strip()):
                later = (*last.later_outputs, (int(again[1]), block.text))
                found.append(replace(last, later_outputs=later))
            else:
                found.append(replace(last, output=block.text))
    return found


def sides_of(block: Block) -> list[str]:
    """The programs before a diff, unless it imports what is not installed, and after it."""
    lines = block.text.splitlines(keepends=True)
    before, after = (
        "".join(line[1:] or "\n" for line in lines if line[0] in kept) for kept in (" -\n", " +\n")
    )
    imported = [
        name
        for node in ast.walk(ast.parse(before))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [each.name for each in getattr(node, "names", ())]
            if isinstance(node, ast.Import)
            else []
        )
    ]
    is_installed = all(importlib.util.find_spec(name.partition(".")[0]) for name in imported)
    return [before, after] if is_installed else [after]


SEPARATOR = "---- the next block ----"


def run_on_rank(rank: Rank, source: str, where: str, folder: str) -> str:
    """Run a program in its own module and folder; return what it prints after the separator."""
    module = types.ModuleType("program_of_a_page")
    sys.modules[module.__name__] = module  # dataclasses and pickles look for it
    printed, before = io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, where, "exec"), module.__dict__)
    finally:
        os.chdir(before)
        del sys.modules[module.__name__]
    return printed.getvalue().rpartition(SEPARATOR)[2].strip()
