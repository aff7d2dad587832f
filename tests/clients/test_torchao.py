"""torchao's optimizers and weights train on fullshard as they do on torch's fully_shard."""

from pathlib import Path

import pytest
import torch
from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight
from torchao.quantization import NF4Tensor

from fullshard.testing import Rank, on_ranks
from fullshard_train.models.quantized import FORMATS
from tests.clients.clients import Run, assert_same
from tests.support.tiny_run import TEXT, configured
from tests.train.test_train_runs import trained

PROGRAM = "torchao_training.py"
OPTIMIZERS = ("adam_8bit", "adam_4bit", "adam_fp8")
WEIGHTS = (
    "int8_weights",
    "int8_weights_bf16",
    "int8_mixed",
    "bitnet",
    "nf4",
    "nf4_small_blocks",
    "nf4_bf16",
    "nf4_offloaded",
    "float8_after",
    "float8_after_bf16",
)
CASES = (*OPTIMIZERS, *WEIGHTS)
# gloo, and torch's fully_shard with it, does not all-gather float8. A cast after the all-gather has
# the same result, up to where bfloat16 is cast to first.
WITHOUT_TORCH = {
    "float8": ("float8_after", 1e-6),
    "float8_precomputed": ("float8_after", 1e-6),
    "float8_bf16": ("float8_after_bf16", 2e-2),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizers_with_quantized_states_are_as_on_torchs(
    ours: Run, theirs: Run, case: str
) -> None:
    found = ours.found(case)
    assert found["quantized"]
    assert_same(found, theirs.found(case))
    assert_same(found["loaded"], found["then"])


@pytest.mark.parametrize("case", WEIGHTS)
def test_quantized_weights_are_as_on_torchs(ours: Run, theirs: Run, case: str) -> None:
    assert_same(ours.found(case), theirs.found(case))


@pytest.mark.parametrize("case", WITHOUT_TORCH)
def test_float8_weights_are_all_gathered(ours: Run, theirs: Run, case: str) -> None:
    same, tolerance = WITHOUT_TORCH[case]
    assert_same(ours.found(case), theirs.found(same), rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore")  # torchao's own
@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise"])
@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
@on_ranks(2)
def test_a_run_in_float8_is_saved_resumed_and_trains_like_one_in_bf16(
    rank: Rank, tmp_path: Path, api: str, precision: str
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    in_bf16 = {"sharding": {"api": api, "precision": "bf16"}, "model": {"sequence": 32}}
    in_float8 = {**in_bf16, "sharding": {"api": api, "precision": precision}}
    plain = trained(rank, configured(tmp_path, "plain", **in_bf16))
    whole = trained(rank, configured(tmp_path, "whole", **in_float8))
    assert whole != plain
    assert whole == pytest.approx(plain, rel=0.05)
    trained(rank, configured(tmp_path, "stopped", **in_float8), 3)
    resumed = {**in_float8, "run": {"out": str(tmp_path / "stopped"), "resume": True}}
    assert trained(rank, configured(tmp_path, "stopped", **resumed)) == whole
    # A checkpoint has the weights themselves: another precision goes on with them.
    other = {**resumed, **in_bf16, "optimizer": {"steps": 12}}
    assert trained(rank, configured(tmp_path, "stopped", **other))[-1] < whole[0]


def test_a_quantized_base_is_as_close_to_its_weights_as_torchaos() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    theirs = {
        "int8": Int8QuantizedTrainingLinearWeight.from_float(weight).dequantize(),
        "nf4": NF4Tensor.from_tensor(weight, 64, 256).get_original_weight(),
    }
    for base, values in theirs.items():
        kind = FORMATS[base]
        found = kind.unpack(kind.pack(weight), 256, torch.float32)
        assert (found - weight).norm() < 1.01 * (values - weight).norm()


@pytest.mark.filterwarnings("ignore")  # torchao's own
@on_ranks(2)
def test_a_run_with_states_of_8_bits_is_saved_and_resumed(rank: Rank, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    torch.compile = lambda function, **settings: function  # type: ignore[assignment]
    eight_bits = {"optimizer": {"name": "adamw8bit"}}
    expected = trained(rank, configured(tmp_path, "whole", **eight_bits))
    assert expected[-1] < expected[0]
    trained(rank, configured(tmp_path, "stopped", **eight_bits), 3)
    resumed = {**eight_bits, "run": {"out": str(tmp_path / "stopped"), "resume": True}}
    # Loading quantizes again, which is exact only where a block is largest.
    assert trained(rank, configured(tmp_path, "stopped", **resumed)) == pytest.approx(
        expected, rel=1e-3
    )
