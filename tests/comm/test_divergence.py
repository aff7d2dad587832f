"""Ranks whose programs differ are told, on every rank and in time; those that do not hear nothing.

The programs are in divergence.py. `make test-soak` runs all of them.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from measuring import Result
from variants import OURS

ROOT = Path(__file__).parents[2]
# One for each way in which ranks notice: in the order of passes, inside of one, by the settings of
# the optimizer, in a collective of the program, and in a step that one of them did not finish.
SHORT = [
    "no_backward",
    "a_block_frozen",
    "another_learning_rate",
    "an_optimizer_step_less",
    "all_gather",
    "first_save",
    "a_step_repeated_after_an_error_of_forward",
    "adversaries",
    "several_models_and_optimizers",
    "steps_in_hooks",
    "micro_batches_and_validation",
    "an_error_that_all_ranks_catch",
]


def run(*arguments: str) -> None:
    # The ranks have a timeout of 40 s. No test depends on how fast a busy machine is.
    program = ROOT / "tests" / "support" / "divergence.py"
    command = [sys.executable, str(program), "--margin", "30", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.exhaustive
@pytest.mark.long
def test_ranks_whose_programs_differ_are_told_in_time_and_others_hear_nothing() -> None:
    run("--cases", *SHORT, "--apis", "fully_shard", "--transports", "gloo", "--at-once", "6")


@pytest.mark.soak
def test_every_way_to_differ_is_told_with_both_apis_and_transports() -> None:
    run()


@pytest.mark.soak
def test_no_correct_program_hears_a_word() -> None:
    run("--correct")


@pytest.mark.soak
def test_faults_of_every_kind_are_named(tmp_path: Path) -> None:
    program, path = ROOT / "benchmarks" / "bench_faults.py", tmp_path / "faults.json"
    small = ["--phases", "forward", "--at-once", "3", "--timeout", "10", "--json", str(path)]
    subprocess.run([sys.executable, str(program), *small], check=True, cwd=ROOT)
    (table,) = Result.read(path).tables
    for row in table.rows:
        for cell in row[table.columns.index(OURS) :]:
            assert str(cell).endswith("s, named"), row
