"""What the pages say is true: programs run, commands exist, links lead somewhere."""

import ast
import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import reference_index
from click import ClickException, Command, Context, Group

import fullshard
from fullshard.cli.commands import fullshard as command
from fullshard.testing import pool
from fullshard_train.config_file import read_config
from tests import structure
from tests.support.documents import (
    KINDS,
    PAGES,
    ROOT,
    Block,
    Program,
    blocks_of,
    programs_of,
    run_on_rank,
)
from tests.support.programs import printed_by_ranks

BLOCKS = [
    block for path in PAGES for block in blocks_of(str(path.relative_to(ROOT)), path.read_text())
]
LANGUAGES = {"python", "diff", "bash", "toml", "text"}


def pages_programs() -> list[Program]:
    """Each program once: the first page and others may show the same one."""
    by_page = [
        [b for b in BLOCKS if b.page == page] for page in dict.fromkeys(b.page for b in BLOCKS)
    ]
    found = [program for blocks in by_page for program in programs_of(blocks)]
    return list({(program.source, program.output): program for program in found}.values())


def of_language(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def where(value: Block | Program) -> str:
    return value.where


# Blocks


def test_every_block_is_in_a_language_that_is_tested():
    for block in BLOCKS:
        assert block.language in LANGUAGES, block.where
        assert block.kind in ("", *KINDS), block.where
        if block.language == "text":
            assert block.kind in ("output", "shown"), f"{block.where}: is it an output?"
        if block.kind in ("continues", "given", "tests"):
            assert block.language == "python", block.where


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", pages_programs(), ids=where)
def test_a_program_on_a_page_runs_and_prints_what_the_page_shows(program, tmp_path, monkeypatch):
    if program.starts_its_own_ranks:
        file = tmp_path / "train.py"
        file.write_text(program.source)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.chdir(tmp_path)
        printed = [printed_by_ranks(file, 2).strip()]
        for num_ranks, output in program.later_outputs:
            assert printed_by_ranks(file, num_ranks).strip() == output.strip()
    else:
        arguments = (program.source, program.where, str(tmp_path))
        printed = pool(2).run(run_on_rank, *arguments)
    if program.output is not None:
        assert printed[0] == program.output.strip()


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "tests"], ids=where)
def test_a_file_of_tests_on_a_page_passes(block, tmp_path, monkeypatch):
    file = tmp_path / f"{Path(block.page).stem}_line_{block.line}.py"  # ranks keep modules by name
    file.write_text(block.text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec.loader.exec_module(module)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


def test_every_configuration_on_a_page_can_be_read(tmp_path):
    for number, block in enumerate(of_language("toml")):
        assert tomllib.loads(block.text), block.where
        file = tmp_path / f"{number}.toml"
        file.write_text(block.text)
        assert read_config(file), block.where


PAGE = """
<!-- test: given
first = 1
-->
```python
second = first + 1
```

<!-- test: continues -->
```python
print(second)
```

<!-- test: output -->
```text
2
```

- in a list:

  ```bash
  make test
  ```
"""


def test_blocks_are_found_with_what_their_comments_say():
    found = [(b.language, b.kind, b.text) for b in blocks_of("page.md", PAGE)]
    assert found == [
        ("python", "given", "second = first + 1\n"),
        ("python", "continues", "print(second)\n"),
        ("text", "output", "2\n"),
        ("bash", "", "make test\n"),
    ]
    (program,) = programs_of(blocks_of("page.md", PAGE))
    assert (program.where, program.output) == ("page.md:5", "2\n")
    names: dict[str, int] = {}
    exec(program.source, names)
    assert names["second"] == 2


def test_a_command_that_does_not_exist_is_noticed():
    for line in (
        "fullshard checkpoint reshard A B --no-such-option",
        "fullshard no-such-command",
        "fullshard train --resume runs/first",
        "make no-such-target",
        "torchrun --no-such-option train.py",
        "torchrun examples/no_such_file.py",
        "pip install fullshard[no_such_extra]",
        "curl https://example.com",
    ):
        with pytest.raises((AssertionError, ClickException, SystemExit)):
            check_command(line.split())


# Commands


def commands_of(block: Block) -> list[list[str]]:
    joined = block.text.replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in joined.splitlines()]
    return [line for line in lines if line]


def test_every_command_on_a_page_exists_and_takes_these_options():
    for words in (words for block in of_language("bash") for words in commands_of(block)):
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            check_command(words)


def check_command(words: list[str]) -> None:
    program, *arguments = words
    if program == "fullshard":
        parse_as_click(command, arguments)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert set(arguments) <= set(targets)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        asked = get_args_parser().parse_args(arguments)
        if asked.module and asked.training_script == "fullshard":
            parse_as_click(command, asked.training_script_args)
        elif asked.module:
            assert importlib.util.find_spec(asked.training_script) is not None
        else:
            assert asked.training_script == "train.py" or (ROOT / asked.training_script).is_file()
    elif program == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        assert arguments[0] == "launch"
        asked = launch_command_parser().parse_args(arguments[1:])
        assert asked.module
        assert importlib.util.find_spec(asked.training_script) is not None
    elif program == "pip":
        wanted = re.fullmatch(r"fullshard(?:\[([\w,]+)\])?", arguments[-1])
        assert wanted is not None
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        known = extras["optional-dependencies"]
        assert {extra for extra in (wanted[1] or "").split(",") if extra} <= set(known)
    elif program == "export":
        assert all(re.fullmatch(r"[A-Z_]+=\S+", each) for each in arguments)
    else:
        raise AssertionError(f"{program}: a command that is tested is expected")


def parse_as_click(group: Command, arguments: list[str]) -> None:
    """Let click read the arguments, without running anything."""
    context = Context(group, info_name=group.name)
    while isinstance(group, Group):
        name, group, arguments = group.resolve_command(context, arguments)
        assert group is not None
        context = Context(group, info_name=name, parent=context, **group.context_settings)
    _, too_many, _ = group.make_parser(context).parse_args(args=list(arguments))
    assert not too_many or context.allow_extra_args, f"{too_many}: arguments of no command"


# Links and names


def anchors_of(path: Path) -> set[str]:
    """The anchors that a link to a page may have: those of its headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {reference_index.slug(heading) for heading in headings}


def links_of(path: Path) -> list[str]:
    text = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_links_lead_to_files_and_headings_and_code_is_fenced():
    for path in PAGES:
        for link in links_of(path):
            if link.startswith("https://"):
                continue
            target, _, anchor = link.partition("#")
            file = (path.parent / target).resolve() if target else path
            assert file.is_file(), (path, link)
            assert not anchor or anchor in anchors_of(file), (path, link)
        text = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
        assert re.findall(r"\n\n    \S.*", text) == [], path


def test_the_reference_is_what_its_generator_writes():
    assert reference_index.PAGE.read_text() == reference_index.index()
    assert set(fullshard.__all__) <= names_of_the_reference()


def test_the_reference_has_every_name_of_the_library_that_the_application_uses():
    used = {
        target.rpartition(".")[2]
        for path in (structure.SOURCE / structure.APPLICATION).rglob("*.py")
        for _, target in structure.own_imports(ast.parse(path.read_text()))
        if not structure.is_of_application(target)
    }
    assert len(used) > 50
    assert used - {*names_of_the_reference(), "__version__"} == set()


def names_of_the_reference() -> set[str]:
    found = [e.identifier for s in reference_index.SECTIONS for e in reference_index.entries(s)]
    return {identifier.rpartition(".")[2] for identifier in found}


# Messages


def messages() -> list[str]:
    """Every string of the source, with `...` where a value is put in."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "..." for p in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.findall(r"^\| `([^`]+)` \|", TROUBLESHOOTING.read_text(), flags=re.MULTILINE)


def test_every_message_in_troubleshooting_is_raised_and_named_once():
    assert len(QUOTED) > 50
    assert len(QUOTED) == len(set(QUOTED))
    raised = messages()
    assert [quoted for quoted in QUOTED if not any(quoted in each for each in raised)] == []
