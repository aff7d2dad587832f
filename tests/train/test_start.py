"""What the command loads: printing help or refusing an option takes no torch."""

import pytest

import fullshard
from fullshard import api
from tests.support.programs import outcome_of_forks

PROGRAM = """
import sys
import fullshard
from click.testing import CliRunner
from fullshard import ConfigError
from fullshard.cli.commands import fullshard as command
import fullshard_train.launcher

for arguments, status in [
    ("--help", 0),
    ("--version", 0),
    ("checkpoint export --help", 0),
    ("doctor --help", 0),
    ("train --help", 0),
    ("train --print-config --steps 3", 0),
    ("train --steps 0", 2),
    ("train --device cpu --ranks 2 --mesh 3x4", 2),
    ("checkpoint export a b --max-shard-bytes none", 2),
]:
    result = CliRunner().invoke(command, arguments.split())
    assert result.exit_code == status, result.output
    assert "torch" not in sys.modules, arguments
assert "fully_shard" in dir(fullshard)
print("done")
"""


def test_help_configurations_and_refused_options_do_not_load_torch() -> None:
    assert outcome_of_forks("", PROGRAM) == "done\n"


def test_the_package_offers_all_names_of_its_api() -> None:
    assert all(getattr(fullshard, name) is getattr(api, name) for name in api.__all__)
    assert set(api.__all__) <= set(fullshard.__all__)
    assert not hasattr(fullshard, "fully_shart")


@pytest.mark.exhaustive
def test_a_rank_collects_garbage_but_not_of_what_it_was_forked_with() -> None:
    program = """
import gc
import fullshard_train.preloaded
whole = gc.get_stats()[2]["collections"]
print(whole, gc.isenabled(), gc.get_freeze_count() > 10_000)
"""
    # One collection of everything: none while modules are loaded, the last before ranks are forked.
    assert outcome_of_forks("", program) == "1 True True\n"
