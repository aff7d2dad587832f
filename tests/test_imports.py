"""The rooms of the package: who may import whom, what nobody may, and how large they may grow."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "fullshard"
SOURCE = Path(__file__).parent.parent / "src" / PACKAGE
FILES = sorted(SOURCE.rglob("*.py"))

# A room sees the rooms of its own level and below.
LEVELS = [
    ("_torch", "api", "errors", "layout", "trace"),
    ("comm", "device"),
    ("unit",),
    ("runtime",),
    ("optim", "state"),
    (
        "wrap",
        "choosing",
        "repeated_blocks",
        "auto_shard",
        "fsdp_module",
        "fully_shard",
        "fully_sharded_data_parallel",
        "sharded_grad_scaler",
        "wrapping",
        "plan",
        "report",
        "models",
    ),
    ("training",),
    ("testing", "__init__"),
    ("cli",),
    ("__main__",),
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# They work without a process group, so they see what works without one.
SEES_ONLY = {room: {room, "_torch", "api", "errors", "layout"} for room in ("plan", "trace")}
SEES_ONLY["report"] = {"report", "_torch", "api", "errors", "trace", "runtime"}
SEES_ONLY["__main__"] = {"cli"}
SEEN_BY_NOBODY = {"testing"}
# Users of the package like any other: they may take what the package itself offers.
SEES_PUBLIC_NAMES = {"cli", "testing"}

FORBIDDEN = ("torch.distributed.fsdp", "torch.distributed._composable")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60


def room_of(module: str) -> str:
    """The room of `fullshard.room.file`; `__init__` for the package itself."""
    return [*module.split("."), "__init__"][1]


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def is_module(name: str) -> bool:
    location = SOURCE.parent.joinpath(*name.split("."))
    return location.is_dir() or location.with_suffix(".py").is_file()


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import, wherever it stands, as `module` or `module.name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, f"{'.' * node.level}{node.module or ''}.{alias.name}"


def own_imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    for node, target in imports(tree):
        if target.split(".")[0] == PACKAGE:
            yield node, target


def target_room(target: str) -> str:
    """The room an import leads to; a name that is no module comes from the package itself."""
    room = room_of(target)
    return room if is_module(f"{PACKAGE}.{room}") or room in LEVEL else "__init__"


def upward_imports(tree: ast.AST, module: str) -> Iterator[str]:
    room = room_of(module)
    if room not in LEVEL:
        yield f"{module}: {room!r} is no room of the design; found none of {sorted(LEVEL)}"
        return
    for node, target in imports(tree):
        if target.startswith("."):
            yield f"{module}:{node.lineno}: imports are absolute, found {target}"
    for node, target in own_imports(tree):
        to = target_room(target)
        if to == "__init__" and room in SEES_PUBLIC_NAMES:
            continue
        allowed = to == room or (
            to not in SEEN_BY_NOBODY
            and to in LEVEL
            and LEVEL[to] <= LEVEL[room]
            and to in SEES_ONLY.get(room, LEVEL)
            and to != "__init__"
        )
        if not allowed:
            yield f"{module}:{node.lineno}: {room} may not import {target} (room {to})"


def forbidden_modules(tree: ast.AST, module: str) -> Iterator[str]:
    found = [(node, target) for node, target in imports(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.append((node, ast.unparse(node)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            found += [(node, a.value) for a in node.args if isinstance(a, ast.Constant)]
    for node, target in found:
        if any(f"{target}.".startswith(f"{name}.") for name in FORBIDDEN):
            yield f"{module}:{node.lineno}: the engine stands alone, found {target}"


def private_names(tree: ast.AST, module: str) -> Iterator[str]:
    bound = set()
    for node, target in own_imports(tree):
        for part in target.split("."):
            if part.startswith("_") and not part.endswith("__"):
                yield f"{module}:{node.lineno}: {part} belongs to the file that defines it"
        if is_module(target):
            bound |= {alias.asname or target.split(".")[-1] for alias in node.names}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in bound
            and node.attr.startswith("_")
            and not node.attr.endswith("__")
        ):
            yield f"{module}:{node.lineno}: {ast.unparse(node)} belongs to the file that defines it"


def long_functions(tree: ast.AST, module: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            num_lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                assert docstring.end_lineno is not None
                num_lines -= docstring.end_lineno - docstring.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{module}:{node.lineno}: {node.name} has {num_lines} lines"


@pytest.fixture(params=FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def file(request: pytest.FixtureRequest) -> tuple[ast.Module, str]:
    return ast.parse(request.param.read_text()), module_of(request.param)


def test_imports_go_one_way(file):
    assert list(upward_imports(*file)) == []


def test_nothing_comes_from_torchs_own_fsdp(file):
    assert list(forbidden_modules(*file)) == []


def test_a_private_name_is_used_in_its_own_file_only(file):
    assert list(private_names(*file)) == []


def test_functions_stay_short(file):
    assert list(long_functions(*file)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


def test_no_two_rooms_import_each_other():
    edges: dict[str, set[str]] = {room: set() for room in LEVEL}
    for path in FILES:
        room = room_of(module_of(path))
        targets = {target_room(target) for _, target in own_imports(ast.parse(path.read_text()))}
        edges.setdefault(room, set()).update(targets - {room})
    loops = [(a, b) for a in edges for b in edges[a] if a < b and a in edges.get(b, ())]
    assert loops == []


@pytest.mark.parametrize(
    "module, source",
    [
        ("fullshard.layout.rows", "from fullshard.comm.groups import Groups"),
        ("fullshard.comm.groups", "import fullshard.unit.slab"),
        ("fullshard.unit.slab", "def f():\n    from fullshard.runtime import root"),
        ("fullshard.runtime.scheduler", "from fullshard import fully_shard"),
        ("fullshard.runtime.scheduler", "from fullshard import FSDPModule"),
        ("fullshard.plan.memory", "from fullshard.unit.slab import Slab"),
        ("fullshard.trace.events", "from fullshard.runtime.scheduler import Root"),
        ("fullshard.state.model", "from fullshard.testing import Rank"),
        ("fullshard.state.model", "from fullshard.fully_shard import FSDPModule"),
        ("fullshard.__init__", "from fullshard.cli import main"),
        ("fullshard.unit.slab", "from . import messages"),
        ("fullshard.utils", "import torch"),
    ],
)
def test_an_upward_import_is_noticed(module, source):
    assert list(upward_imports(ast.parse(source), module)) != []


@pytest.mark.parametrize(
    "module, source",
    [
        ("fullshard.fully_sharded_data_parallel", "from fullshard.state.model import save"),
        ("fullshard.plan.memory", "from fullshard.layout.rows import Rows"),
        ("fullshard.testing.parity", "from fullshard import fully_shard"),
        ("fullshard.__init__", "from fullshard.fully_shard import fully_shard"),
    ],
)
def test_a_downward_import_is_left_alone(module, source):
    assert list(upward_imports(ast.parse(source), module)) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import torch.distributed.fsdp",
        "from torch.distributed import fsdp",
        "from torch.distributed.fsdp._fully_shard import FSDPState",
        "from torch.distributed._composable.fsdp import fully_shard",
        "import torch\nx = torch.distributed.fsdp.fully_shard",
        "from importlib import import_module\nimport_module('torch.distributed.fsdp')",
    ],
)
def test_torchs_own_fsdp_is_noticed(source):
    assert list(forbidden_modules(ast.parse(source), "fullshard.unit.slab")) != []


@pytest.mark.parametrize(
    "source",
    [
        "from fullshard.errors import _describe",
        "from fullshard._hidden import name",
        "from fullshard import errors\nerrors._describe()",
    ],
)
def test_a_borrowed_private_name_is_noticed(source):
    assert list(private_names(ast.parse(source), "fullshard.unit.slab")) != []


def test_a_long_function_is_noticed_without_its_docstring():
    docstring = '    """' + "words\n" * 50 + '    """\n'
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert list(long_functions(ast.parse("def f():\n" + docstring + body), "m")) != []
    short = "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
    assert list(long_functions(ast.parse("def f():\n" + docstring + short), "m")) == []
