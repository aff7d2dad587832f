"""What RL frameworks do with a model between steps gives on fullshard what it gives on torch."""

import pytest

from tests.clients.clients import Run, assert_same

PROGRAM = "between_steps.py"
CASES = ("generating", "moving", "moving_flat", "replicated")
# torch's wrapper generates with original parameters only, and fails in `async_save`.
WITHOUT_TORCH = ("generating_flat", "saved")


@pytest.mark.parametrize("case", CASES)
def test_losses_and_what_is_generated_are_torchs(ours: Run, theirs: Run, case: str) -> None:
    assert_same(ours.found(case), theirs.found(case))


def test_flat_parameters_generate_what_original_ones_do(ours: Run) -> None:
    assert_same(ours.found("generating_flat"), ours.found("generating"))


def test_what_is_saved_while_training_goes_on_is_what_was_there(ours: Run) -> None:
    expected, found = ours.found("saved")
    assert_same(found, expected)
