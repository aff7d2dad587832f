"""`fullshard train` in one piece: what a run leaves behind, and that settings change no losses."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.errors import ConfigError, FullshardError
from fullshard.report import read_record
from fullshard.state import checkpoints, verify
from fullshard.testing import Rank, on_ranks, pool
from fullshard.training.config import TrainConfig
from fullshard.training.control import StopRequest
from fullshard.training.run import Run
from fullshard.training.world import World
from tests.tiny_run import TEXT, configured, losses


class StopsAfter(StopRequest):
    """Asks for the end after some steps, on one rank."""

    def __init__(self, num_steps: int, is_asking: bool) -> None:
        super().__init__()
        self.num_left, self.is_asking = num_steps, is_asking

    @property
    def is_requested(self) -> bool:
        self.num_left -= 1
        return self.num_left <= 0 and self.is_asking

    @is_requested.setter
    def is_requested(self, value: bool) -> None: ...


def run_of(rank: Rank, config: TrainConfig) -> Run:
    return Run(config, World(rank.rank, rank.size, rank.rank, rank.size, torch.device("cpu")))


def trained(rank: Rank, config: TrainConfig, num_steps: int | None = None) -> list[float]:
    """The losses of a run, or of its first steps, after which it is stopped."""
    if num_steps is None:
        assert run_of(rank, config).run(StopRequest()) is True
    else:
        assert run_of(rank, config).run(StopsAfter(num_steps, rank.rank == 1)) is False
    dist.barrier()  # the first rank writes when the others are done
    return losses(Path(config.run.out))


def train_reference(rank: Rank, folder: Path) -> None:
    run = {"report": True, "save_every": 2, "keep": 2, "tensorboard": True, "sample_tokens": 4}
    trained(rank, configured(folder, "reference", run=run))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a text, and a run of six steps on it."""
    path = tmp_path_factory.mktemp("runs")
    (path / "text.txt").write_text(TEXT)
    pool(2).run(train_reference, path)
    return path


def test_a_run_leaves_metrics_a_checkpoint_a_sample_and_a_report(folder: Path) -> None:
    run = folder / "reference"
    found = losses(run)
    assert len(found) == 6
    assert found[-1] < found[0] - 0.5
    record = read_record(run)
    assert [each.step for each in record.metrics] == [1, 2, 3, 4, 5, 6]
    assert all(each.tokens == 2 * 2 * 32 for each in record.metrics)
    assert all(each.step_s > 0 and each.memory_bytes > 0 for each in record.metrics)
    assert [timeline.rank for timeline in record.timelines] == [0, 1]
    assert record.traced_step == 6
    assert [path.name for path in checkpoints(run / "checkpoints")] == ["step_4", "step_6"]
    assert list(verify(run / "checkpoints" / "step_6")) == []
    assert (run / "sample.txt").read_text().startswith("def ")
    assert "</html>" in (run / "report.html").read_text()
    assert len(list((run / "tensorboard").glob("events.out.tfevents.*"))) == 1


SAME_LOSSES: dict[str, dict[str, Any]] = {
    "wrapper": {"sharding": {"api": "wrapper"}},
    "wrapper grad-op": {"sharding": {"api": "wrapper", "strategy": "grad-op"}},
    "wrapper none": {"sharding": {"api": "wrapper", "strategy": "none"}},
    "grad-op": {"sharding": {"strategy": "grad-op"}},
    "none": {"sharding": {"strategy": "none"}},
    "replicas": {"sharding": {"mesh": "2x1"}},
    "offload": {"sharding": {"offload": True}},
    "recomputed": {"sharding": {"activation_checkpointing": True}},
    "linear units": {"sharding": {"units": ("Linear",)}},
    "accumulated": {"optimizer": {"accumulate": 2, "batch": 1}},
}


@on_ranks(2)
def test_apis_strategies_and_memory_savers_change_no_losses(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    expected = losses(folder / "reference")[:2]
    for name, changes in SAME_LOSSES.items():
        out = {"run": {"out": str(tmp_path / name)}}
        found = trained(rank, configured(folder, name, **changes, **out), num_steps=2)
        assert found == pytest.approx(expected, rel=2e-4), name


@on_ranks(2)
def test_a_run_that_is_stopped_goes_on_with_the_losses_of_one_that_was_not(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    whole = losses(folder / "reference")
    config = configured(folder, "parts", run={"out": str(tmp_path / "parts"), "save_every": 2})
    assert trained(rank, config, num_steps=3) == whole[:3]
    if rank.rank == 0:
        shutil.copytree(tmp_path / "parts", tmp_path / "others")
    dist.barrier()
    resumed = replace(config, run=replace(config.run, resume=True))
    assert trained(rank, resumed) == whole
    assert (tmp_path / "parts" / "checkpoints" / "step_6").is_dir()
    # By the other API, and with parameters in host memory.
    sharding = replace(config.sharding, api="wrapper", offload=True)
    run = replace(resumed.run, out=str(tmp_path / "others"))
    other = replace(resumed, sharding=sharding, run=run)
    assert trained(rank, other) == pytest.approx(whole, rel=2e-4)


@on_ranks(2)
def test_bf16_follows_float32_closely(rank: Rank, folder: Path, tmp_path: Path) -> None:
    found = []
    with warnings.catch_warnings():
        # torch, on a CPU without instructions for bf16.
        warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)
        for precision in ("auto", "bf16"):
            config = configured(
                folder,
                precision,
                model={"name": "tiny", "sequence": 8},
                sharding={"precision": precision},
                run={"out": str(tmp_path / precision)},
            )
            found.append(trained(rank, config, num_steps=2))
    assert found[0] != found[1]
    assert found[1] == pytest.approx(found[0], rel=0.02)


@on_ranks(2)
def test_lora_trains_adapters_and_saves_only_them(rank: Rank, folder: Path, tmp_path: Path) -> None:
    config = configured(
        folder,
        "lora",
        model={"lora_rank": 4},
        optimizer={"lr": 2e-2},
        run={"out": str(tmp_path / "lora")},
    )
    found = trained(rank, config)
    assert found[-1] < found[0]
    small, large = (
        sum(path.stat().st_size for path in (run / "checkpoints" / "step_6").iterdir())
        for run in (tmp_path / "lora", folder / "reference")
    )
    assert small < large / 3


@on_ranks(2)
def test_a_folder_of_hugging_face_is_fine_tuned_by_either_api(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    if rank.rank == 0:
        from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

        shape = LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        torch.manual_seed(0)
        LlamaForCausalLM(shape).save_pretrained(tmp_path / "llama")
    dist.barrier()

    def tuned(name: str, num_steps: int | None, lora_rank: int = 0, **sharding: Any) -> list[float]:
        model = {"name": str(tmp_path / "llama"), "lora_rank": lora_rank}
        run = {"out": str(tmp_path / name)}
        return trained(
            rank, configured(folder, name, model=model, sharding=sharding, run=run), num_steps
        )

    found = tuned("tuned", None)
    assert found[-1] < found[0] - 0.3
    assert tuned("wrapped", 2, api="wrapper") == pytest.approx(found[:2], rel=2e-4)
    # Adapters begin as nothing: the first loss is that of the model itself.
    assert tuned("adapted", 1, lora_rank=4)[0] == pytest.approx(found[0], rel=1e-6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a folder with a run": ({}, "pass --resume to continue it"),
    "a checkpoint of another model": (
        {"model": {"name": "10m", "sequence": 32}, "run": {"resume": True}},
        "found",
    ),
    "a unit that is no class of the model": (
        {"sharding": {"units": ("Blok",)}},
        r"found .Blok.; choose one of .*Block",
    ),
}


@on_ranks(2)
def test_what_cannot_be_run_is_refused_and_the_run_before_is_left_alone(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    before = losses(folder / "reference")
    for what, (changes, words) in REFUSED.items():
        out = {"run": {"out": str(tmp_path)}} if "sharding" in changes else {}
        with pytest.raises((ConfigError, FullshardError, RuntimeError), match=words) as refusal:
            run_of(rank, configured(folder, "reference", **changes, **out)).run(StopRequest())
        assert len(str(refusal.value).splitlines()) == 1, what
    assert losses(folder / "reference") == before
