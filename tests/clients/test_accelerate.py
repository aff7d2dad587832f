"""accelerate's FSDP plugins train, save and load on fullshard as they do on torch's FSDP."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.clients.clients import Run, assert_same, run, with_resumed

PROGRAM = "accelerate_fsdp.py"
VARIANTS = (
    "fsdp2",
    "fsdp2_bf16",
    "fsdp2_checkpointed",
    "fsdp2_full",
    "fsdp2_kept",
    "fsdp1",
    "fsdp1_flat",
    "fsdp1_bf16",
    "fsdp1_checkpointed",
    "fsdp1_grad_op",
)
# Variants that torch's FSDP cannot run without a GPU, and the variant that has the same result.
EQUAL = {"fsdp2_offload": "fsdp2", "fsdp1_full": "fsdp1"}
CASES = with_resumed(*VARIANTS)
WITHOUT_TORCH = with_resumed(*EQUAL)


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_norms_and_weights_are_torchs(ours: Run, theirs: Run, variant: str) -> None:
    assert_same(ours.found(variant), theirs.found(variant))


@pytest.mark.parametrize("variant", EQUAL)
def test_what_torch_cannot_do_without_a_gpu_changes_no_loss(ours: Run, variant: str) -> None:
    assert_same(ours.found(variant), ours.found(EQUAL[variant]))


@pytest.mark.parametrize("variant", [*VARIANTS, *EQUAL])
def test_a_loaded_state_goes_on_as_if_it_had_not_been_interrupted(ours: Run, variant: str) -> None:
    assert_same(ours.found(f"resume_{variant}"), ours.found(variant)["then"])


@pytest.mark.parametrize("saved_by, loaded_by", [("torch", "fullshard"), ("fullshard", "torch")])
def test_states_are_interchangeable_with_torchs_and_load_on_one_rank(
    ours: Run, theirs: Run, tmp_path: Path, saved_by: str, loaded_by: str
) -> None:
    saved = {"torch": theirs, "fullshard": ours}[saved_by]
    variants = ["fsdp2", "fsdp2_full", "fsdp1", "fsdp1_flat"]
    for variant in variants:
        shutil.copytree(saved.folder / variant, tmp_path / variant)
    names = [f"resume_{variant}" for variant in variants]
    loaded = run(PROGRAM, tmp_path, *names, on=loaded_by, num_ranks=1)
    for variant in variants:
        # One rank computes the mean of two batches as the mean of one batch of their size.
        expected = saved.found(variant)["then"]
        assert_same(loaded.found(f"resume_{variant}"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["fsdp2", "fsdp2_bf16", "fsdp1", "fsdp1_flat"])
def test_merged_weights_are_torchs(ours: Run, theirs: Run, variant: str) -> None:
    file = Path(variant) / "merged" / "model.safetensors"
    merged = load_file(ours.folder / file)
    assert_same(merged, load_file(theirs.folder / file))
    assert_same(merged, ours.found(variant)["first"]["model"])
