"""torchtitan's parallelized models train and are saved on fullshard as on torch's fully_shard."""

import shutil
from pathlib import Path

import pytest

from tests.clients.clients import Run, assert_same, run

PROGRAM = "torchtitan_parallelize.py"
VARIANTS = (
    "plain",
    "bf16",
    "kept",
    "checkpointed",
    "selective",
    "selective_ops",
    "compiled",
    "compiled_selective_ops",
)
CASES = [*VARIANTS, "load_plain", "load_bf16"]
# torch's fully_shard refuses torchtitan's tied weights.
WITHOUT_TORCH = ["tied", "load_tied"]
ON_FOUR = ["hybrid", "tensor_parallel", "load_hybrid", "load_tensor_parallel"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("torch")
    run(PROGRAM, folder, *CASES, on="torch")
    return run(PROGRAM, folder, *ON_FOUR, on="torch", num_ranks=4)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("ours")
    run(PROGRAM, folder, *CASES, *WITHOUT_TORCH, on="fullshard")
    return run(PROGRAM, folder, *ON_FOUR, on="fullshard", num_ranks=4)


@pytest.mark.parametrize("case", [*CASES, *ON_FOUR])
def test_losses_norms_and_weights_are_torchs(ours: Run, theirs: Run, case: str) -> None:
    assert_same(ours.found(case), theirs.found(case))


@pytest.mark.parametrize("variant", ["plain", "bf16", "tied", "hybrid", "tensor_parallel"])
def test_a_loaded_checkpoint_goes_on_as_if_it_had_not_been_interrupted(
    ours: Run, variant: str
) -> None:
    assert_same(ours.found(f"load_{variant}"), ours.found(variant)["then"])


def test_a_checkpoint_of_two_ranks_loads_on_one_and_into_the_other_library(
    ours: Run, theirs: Run, tmp_path: Path
) -> None:
    shutil.copytree(theirs.folder / "plain", tmp_path / "ours" / "plain")
    shutil.copytree(ours.folder / "plain", tmp_path / "theirs" / "plain")
    on_ours = run(PROGRAM, tmp_path / "ours", "load_plain", on="fullshard", num_ranks=1)
    on_theirs = run(PROGRAM, tmp_path / "theirs", "load_plain", on="torch", num_ranks=1)
    assert_same(on_ours.found("load_plain"), on_theirs.found("load_plain"))
