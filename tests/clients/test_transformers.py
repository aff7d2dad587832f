"""The Trainer of transformers trains, saves and resumes on fullshard what it does on torch's."""

import pytest

from tests.clients.clients import Run, assert_same, run

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
WITHOUT_TORCH = {"fsdp1_full": "fsdp1"}
# accelerate does not load the sharded state of an optimizer that has not taken a step.
WITHOUT_OPTIMIZER = {"fsdp1", "fsdp1_bf16", "fsdp1_lora"}
RESUMED = [each for each in (*VARIANTS, *WITHOUT_TORCH) if each not in WITHOUT_OPTIMIZER]


def cases(*variants: str) -> list[str]:
    return [*variants, *(f"resume_{variant}" for variant in variants)]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(PROGRAM, tmp_path_factory.mktemp("torch"), *cases(*VARIANTS), on="torch")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Run:
    variants = (*VARIANTS, *WITHOUT_TORCH)
    return run(PROGRAM, tmp_path_factory.mktemp("ours"), *cases(*variants), on="fullshard")


@pytest.mark.parametrize("case", cases(*VARIANTS))
def test_losses_norms_and_saved_weights_are_torchs(ours: Run, theirs: Run, case: str) -> None:
    found = ours.found(case)
    assert found["units"] > 1
    assert_same(found, theirs.found(case))


@pytest.mark.parametrize("variant", WITHOUT_TORCH)
def test_full_state_dicts_of_the_wrapper_change_no_loss(ours: Run, variant: str) -> None:
    found = ours.found(variant)
    assert_same(found["losses"], ours.found(WITHOUT_TORCH[variant])["losses"])
    assert found["saved"]


@pytest.mark.parametrize("variant", RESUMED)
def test_a_resumed_run_ends_as_if_it_had_not_been_interrupted(ours: Run, variant: str) -> None:
    assert_same(ours.found(f"resume_{variant}"), ours.found(variant))
