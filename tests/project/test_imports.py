"""`structure.py`, which `make check` runs, notices what breaks the structure of the package."""

import ast
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.structure import (
    BRITISH,
    MAX_FUNCTION_LINES,
    MAX_LINES,
    SOURCE,
    TOLERANCE,
    borrowed_private_names,
    long_functions,
    oversized,
    private_torch_names,
    torchs_own_fsdp,
    upward_imports,
)


@pytest.mark.parametrize(
    "module, source",
    [
        ("fullshard.layout.rows", "from fullshard.comm.groups import Groups"),
        ("fullshard.comm.groups", "import fullshard.unit.param"),
        ("fullshard.unit.param", "def f():\n    from fullshard.runtime import scheduler"),
        ("fullshard.runtime.scheduler", "from fullshard import fully_shard"),
        ("fullshard.trace.timeline", "from fullshard.unit.param import ShardedParam"),
        ("fullshard.trace.seam", "from fullshard.runtime.scheduler import Scheduler"),
        ("fullshard.runtime.scheduler", "from fullshard.resilience import watcher"),
        ("fullshard.state.shards", "from fullshard.testing import Rank"),
        ("fullshard.state.shards", "from fullshard.fully_shard import FSDPModule"),
        ("fullshard.__init__", "from fullshard.cli import main"),
        ("fullshard.unit.param", "from . import unit"),
        ("fullshard.utils", "import torch"),
    ],
)
def test_an_upward_import_is_noticed(module: str, source: str) -> None:
    assert list(upward_imports(ast.parse(source), module)) != []


@pytest.mark.parametrize(
    "module, source",
    [
        ("fullshard.fully_sharded_data_parallel", "from fullshard.state.shards import save"),
        ("fullshard.plan.ledger", "from fullshard.layout.split import Split"),
        ("fullshard.testing.parity", "from fullshard import fully_shard"),
        ("fullshard.__init__", "from fullshard.fully_shard import fully_shard"),
    ],
)
def test_a_downward_import_is_left_alone(module: str, source: str) -> None:
    assert list(upward_imports(ast.parse(source), module)) == []


@pytest.mark.parametrize(
    "source",
    [
        "from fullshard.state.shards import tensor_shards",
        "from fullshard.state import LocalPart",
        "from fullshard.unit import unit",
        "from fullshard._torch import to_local",
        "from fullshard.runtime import hooks",
        "import fullshard.trace.seam",
        "from fullshard_train.cli import train",
    ],
)
def test_the_application_may_not_import_what_is_inside_the_library(source: str) -> None:
    assert list(upward_imports(ast.parse(source), "fullshard_train.trainer")) != []


@pytest.mark.parametrize(
    "source",
    [
        "from fullshard import fully_shard",
        "def f():\n    from fullshard.state import save",
        "from fullshard.errors import ConfigError",
        "from fullshard_train.models import architecture_of",
    ],
)
def test_the_application_may_import_public_names(source: str) -> None:
    assert list(upward_imports(ast.parse(source), "fullshard_train.trainer")) == []


def test_models_and_reports_see_only_themselves() -> None:
    source = ast.parse("from fullshard_train.config import TrainConfig")
    assert list(upward_imports(source, "fullshard_train.models.transformer")) != []
    assert list(upward_imports(source, "fullshard_train.report.page")) != []


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
def test_torchs_own_fsdp_is_noticed(source: str) -> None:
    assert list(torchs_own_fsdp(ast.parse(source), "fullshard.unit.param")) != []


@pytest.mark.parametrize(
    "source",
    [
        "from fullshard.errors import _describe",
        "from fullshard._hidden import name",
        "from fullshard import errors\nerrors._describe()",
    ],
)
def test_a_borrowed_private_name_is_noticed(source: str) -> None:
    assert list(borrowed_private_names(ast.parse(source), "fullshard.unit.param")) != []


@pytest.mark.parametrize(
    "source",
    [
        "from torch._C import name",
        "torch._foreach_copy_(a, b)",
        "x = dtensor._local_tensor",
        "from torch.distributed.tensor.placement_types import Shard, _StridedShard",
        "group._allgather_base(a, b)",
    ],
)
def test_a_private_name_of_torch_is_noticed(source: str) -> None:
    assert list(private_torch_names(source, "fullshard.unit.param")) != []
    assert list(private_torch_names(source, "fullshard._torch")) == []


def test_a_long_function_is_noticed_without_its_docstring() -> None:
    docstring = '    """' + "words\n" * 50 + '    """\n'
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert list(long_functions(ast.parse("def f():\n" + docstring + body), "m")) != []
    short = "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
    assert list(long_functions(ast.parse("def f():\n" + docstring + short), "m")) == []


WITHOUT_ROOMS = """
import faulthandler
import torch, torch.distributed as dist
faulthandler.dump_traceback_later(90, exit=True)  # nobody else says where ranks wait
from fullshard import FullyShardedDataParallel, fully_shard
dist.init_process_group("gloo")
for shard in fully_shard, FullyShardedDataParallel:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    model = shard(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        optim.step()
        optim.zero_grad()
    if dist.get_rank() == 0:
        print(loss.item())
dist.destroy_process_group()
"""
# What the engine must work without.
ROOMS = ("resilience", "captured_step.py")


def test_a_room_that_has_grown_is_noticed_and_one_without_a_limit_too() -> None:
    limit = MAX_LINES["fullshard.unit"]
    assert list(oversized(Counter({"fullshard.unit": limit + TOLERANCE}))) == []
    assert list(oversized(Counter({"fullshard.unit": limit + TOLERANCE + 1}))) != []
    assert list(oversized(Counter({"fullshard.utils": TOLERANCE + 1}))) != []


@pytest.mark.exhaustive
def test_the_engine_trains_without_the_rooms_that_listen_to_it(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "fullshard", ignore=shutil.ignore_patterns(*ROOMS))
    assert not any((tmp_path / "fullshard" / room).exists() for room in ROOMS)
    program = tmp_path / "trains.py"
    program.write_text(WITHOUT_ROOMS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=2", str(program)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.splitlines()]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(losses[1])


def test_british_words_are_noticed_and_american_ones_are_not():
    words = ["colo" + "urs", "neighbo" + "ring", "initiali" + "sed", "initialized", "precision"]
    found = [bool(BRITISH.search(f"the {word}")) for word in words]
    assert found == [True, False, True, False, False]
