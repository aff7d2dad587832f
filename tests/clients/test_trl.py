"""TRL's supervised fine-tuning gives on fullshard what it gives on torch's FSDP."""

import pytest

from tests.clients.clients import Run, assert_same, with_resumed

PROGRAM = "trl_sft.py"
CASES = with_resumed("fsdp2", "fsdp2_lora", "fsdp1", "fsdp1_lora")


@pytest.mark.parametrize("case", CASES)
def test_losses_norms_and_saved_weights_are_torchs(ours: Run, theirs: Run, case: str) -> None:
    found = ours.found(case)
    assert found["units"] > 1
    assert_same(found, theirs.found(case))


@pytest.mark.parametrize("variant", ["fsdp2", "fsdp2_lora"])
def test_a_resumed_run_ends_as_if_it_had_not_been_interrupted(ours: Run, variant: str) -> None:
    found = ours.found(variant)
    assert any(saved for saved in found["saved"].values())
    assert_same(ours.found(f"resume_{variant}"), found)
