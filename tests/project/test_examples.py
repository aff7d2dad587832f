"""The examples run, and show what they say."""

from pathlib import Path

import pytest

from tests.support.programs import printed_by_each, printed_by_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 120

# How many ranks, and what a reader should see.
SHOWN = {
    "own_model_fully_shard": (2, ["528,001 parameters", "Shard(dim=0)", "step 20", "loss 7."]),
    "own_model_wrapper": (2, ["gradient norm", "528,001 parameters in a plain model"]),
    "huggingface_model": (2, ["streamed into shards; tied: {'lm_head", "opened with transformers"]),
    "lora": (2, ["6,400 of 125,632 parameters are trained", "same logits True"]),
    "hybrid_sharding": (4, ["2 replicas of 2 shards", "replicas are the same: True"]),
    "gradient_accumulation": (2, ["4 micro-batches and one batch agree within"]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_examples_run_and_show_what_they_are_about(num_ranks):
    names = [name for name, (wanted, _) in SHOWN.items() if wanted == num_ranks]
    for name, printed in zip(
        names,
        printed_by_each([EXAMPLES / f"{name}.py" for name in names], num_ranks),
        strict=True,
    ):
        assert [each for each in SHOWN[name][1] if each not in printed] == [], (name, printed)


@pytest.mark.exhaustive
def test_a_run_is_resumed_on_another_number_of_ranks(tmp_path):
    example, folder = EXAMPLES / "resume_on_another_world_size.py", str(tmp_path / "run")
    first = printed_by_ranks(example, 2, "--folder", folder)
    assert "starts at step 0 on 2 ranks" in first
    second = printed_by_ranks(example, 3, "--folder", folder)
    assert "resumed at step 8 on 3 ranks" in second
    assert "largest difference to the first run" in second


def test_every_example_is_run_short_and_says_how_it_is_run():
    paths = sorted(EXAMPLES.glob("*.py"))
    assert {path.stem for path in paths} == {*SHOWN, "resume_on_another_world_size"}
    for path in paths:
        lines = path.read_text().splitlines()
        assert len(lines) < MAX_LINES, path
        assert any(each.startswith("torchrun --standalone") and path.name in each for each in lines)
