"""Lightning's strategies train, save and load on fullshard as they do on torch's FSDP."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.clients import PROGRAMS, TIMEOUT_S, Run, assert_same, with_resumed

PROGRAM = "lightning_strategies.py"
VARIANTS = (
    "fabric_fsdp",
    "fabric_fsdp_bf16",
    "fabric_fsdp_checkpointed",
    "fabric_fsdp_flat",
    "fabric_model_parallel",
    "fabric_model_parallel_full",
    "trainer_fsdp",
    "trainer_fsdp_bf16",
    "trainer_model_parallel",
)
# torch's wrapper ends the process when it makes a full state dict without a GPU.
EQUAL = {"fabric_fsdp_full": "fabric_fsdp", "trainer_fsdp_full": "trainer_fsdp"}
CASES = with_resumed(*VARIANTS)
WITHOUT_TORCH = with_resumed(*EQUAL)


@pytest.mark.parametrize("case", CASES)
def test_losses_norms_and_weights_are_torchs(ours: Run, theirs: Run, case: str) -> None:
    assert_same(ours.found(case), theirs.found(case))


@pytest.mark.parametrize("variant", EQUAL)
def test_full_state_dicts_of_the_wrapper_change_no_loss(ours: Run, variant: str) -> None:
    expected = EQUAL[variant]
    assert_same(ours.found(variant), ours.found(expected))
    assert_same(ours.found(f"resume_{variant}"), ours.found(f"resume_{expected}"))


@pytest.mark.parametrize("variant", [each for each in VARIANTS if each.startswith("fabric")])
def test_a_loaded_state_goes_on_as_if_it_had_not_been_interrupted(ours: Run, variant: str) -> None:
    assert_same(ours.found(f"resume_{variant}"), ours.found(variant)["then"])


def test_ranks_that_lightning_starts_train_on_fullshard(tmp_path: Path) -> None:
    program = PROGRAMS / "lightning_launcher.py"
    command = [sys.executable, "-m", "fullshard.dropin", str(program), str(tmp_path)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    for rank in range(2):
        found = (tmp_path / f"rank_{rank}").read_text()
        assert found.startswith("fullshard.")
        assert found.endswith(f"rank {rank} of 2, step 2")
