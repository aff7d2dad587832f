"""The Trainer of transformers trains, saves and resumes on fullshard as it does on torch's."""

import pytest

from tests.clients.clients import Run, assert_same, with_resumed

PROGRAM = "transformers_trainer.py"
VARIANTS = (
    "fsdp2",
    "fsdp2_sharded",
    "fsdp2_bf16",
    "fsdp2_lora",
    "fsdp2_checkpointed",
    "fsdp1",
    "fsdp1_bf16",
    "fsdp1_lora",
)
# torch's wrapper ends the process when it makes a full state dict without a GPU.
EQUAL = {"fsdp1_full": "fsdp1"}
CASES = with_resumed(*VARIANTS)
WITHOUT_TORCH = with_resumed(*EQUAL)
# accelerate does not load the sharded state of an optimizer that has not taken a step.
WITHOUT_OPTIMIZER = {"fsdp1", "fsdp1_bf16", "fsdp1_lora"}
RESUMED = [each for each in (*VARIANTS, *EQUAL) if each not in WITHOUT_OPTIMIZER]


@pytest.mark.parametrize("case", CASES)
def test_losses_norms_and_saved_weights_are_torchs(ours: Run, theirs: Run, case: str) -> None:
    found = ours.found(case)
    assert found["units"] > 1
    assert_same(found, theirs.found(case))


@pytest.mark.parametrize("variant", EQUAL)
def test_full_state_dicts_of_the_wrapper_change_no_loss(ours: Run, variant: str) -> None:
    found = ours.found(variant)
    assert_same(found["losses"], ours.found(EQUAL[variant])["losses"])
    assert found["saved"]


@pytest.mark.parametrize("variant", RESUMED)
def test_a_resumed_run_ends_as_if_it_had_not_been_interrupted(ours: Run, variant: str) -> None:
    assert_same(ours.found(f"resume_{variant}"), ours.found(variant))
