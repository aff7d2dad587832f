"""`fullshard train` in one piece: what a run leaves behind, and that settings change no losses."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard.errors import ConfigError, FullshardError
from fullshard.report import read_record
from fullshard.state import checkpoints, verify
from fullshard.testing import Rank, on_ranks
from fullshard.training.config import TrainConfig
from fullshard.training.control import StopRequest
from fullshard.training.run import Run
from fullshard.training.world import World
from tests.tiny_run import TEXT, configured, losses


def written(folder: Path) -> str:
    path = folder / "text.txt"
    if not path.exists():
        path.write_text(TEXT)
    return str(path)


def trained(rank: Rank, config: TrainConfig) -> list[float]:
    world = World(rank.rank, rank.size, rank.rank, rank.size, torch.device("cpu"))
    assert Run(config, world).run(StopRequest()) is True
    dist.barrier()  # the first rank writes when the others are done
    return losses(Path(config.run.out))


@on_ranks(2)
def test_a_run_leaves_metrics_a_checkpoint_a_sample_and_a_report(
    rank: Rank, tmp_path: Path
) -> None:
    if rank.rank == 0:
        written(tmp_path)
    run = {"report": True, "save_every": 2, "keep": 2, "tensorboard": True, "sample_tokens": 4}
    config = configured(tmp_path, "run", run=run)
    found = trained(rank, config)
    folder = Path(config.run.out)
    assert len(found) == 6
    assert found[-1] < found[0] - 0.5
    record = read_record(folder)
    assert [each.step for each in record.metrics] == [1, 2, 3, 4, 5, 6]
    assert all(each.tokens == 2 * 2 * 32 for each in record.metrics)
    assert all(each.step_s > 0 and each.memory_bytes > 0 for each in record.metrics)
    assert [timeline.rank for timeline in record.timelines] == [0, 1]
    assert record.traced_step == 6
    assert [path.name for path in checkpoints(folder / "checkpoints")] == ["step_4", "step_6"]
    assert list(verify(folder / "checkpoints" / "step_6")) == []
    assert (folder / "sample.txt").read_text().startswith("def ")
    assert "</html>" in (folder / "report.html").read_text()
    assert len(list((folder / "tensorboard").glob("events.out.tfevents.*"))) == 1


SAME_LOSSES = {
    "wrapper": {"sharding": {"door": "wrapper"}},
    "wrapper grad-op": {"sharding": {"door": "wrapper", "strategy": "grad-op"}},
    "wrapper none": {"sharding": {"door": "wrapper", "strategy": "none"}},
    "grad-op": {"sharding": {"strategy": "grad-op"}},
    "none": {"sharding": {"strategy": "none"}},
    "replicas": {"sharding": {"mesh": "2x1"}},
    "offload": {"sharding": {"offload": True}},
    "recomputed": {"sharding": {"activation_checkpointing": True}},
    "linear units": {"sharding": {"units": ("Linear",)}},
    "accumulated": {"optimizer": {"steps": 4, "accumulate": 2, "batch": 1}},
}


@on_ranks(2)
def test_doors_strategies_and_memory_savers_change_no_losses(rank: Rank, tmp_path: Path) -> None:
    if rank.rank == 0:
        written(tmp_path)
    short = {"optimizer": {"steps": 4}}
    expected = trained(rank, configured(tmp_path, "reference", **short))
    assert len(expected) == 4
    for name, changes in SAME_LOSSES.items():
        found = trained(rank, configured(tmp_path, name.replace(" ", "-"), **(short | changes)))
        assert found == pytest.approx(expected, rel=2e-4), name


@on_ranks(2)
def test_a_checkpoint_of_another_model_is_refused(rank: Rank, tmp_path: Path) -> None:
    if rank.rank == 0:
        written(tmp_path)
    trained(rank, configured(tmp_path, "run", optimizer={"steps": 1}))
    other = {"model": {"name": "10m", "sequence": 32}, "run": {"resume": True}}
    world = World(rank.rank, rank.size, rank.rank, rank.size, torch.device("cpu"))
    with pytest.raises(FullshardError, match="found") as refusal:
        Run(configured(tmp_path, "run", **other), world).run(StopRequest())
    assert len(str(refusal.value).splitlines()) == 1


@on_ranks(2)
def test_bf16_follows_float32_closely(rank: Rank, tmp_path: Path) -> None:
    if rank.rank == 0:
        written(tmp_path)
    short = {"model": {"name": "tiny", "sequence": 8}, "optimizer": {"steps": 3}}
    expected = trained(rank, configured(tmp_path, "float32", **short))
    with warnings.catch_warnings():
        # torch, on a CPU without instructions for bf16.
        warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)
        low = {"sharding": {"precision": "bf16"}}
        found = trained(rank, configured(tmp_path, "bf16", **short, **low))
    assert found != expected
    assert found == pytest.approx(expected, rel=0.02)


@on_ranks(2)
def test_a_run_that_was_resumed_has_the_losses_of_one_that_was_not(
    rank: Rank, tmp_path: Path
) -> None:
    if rank.rank == 0:
        written(tmp_path)
    whole = trained(rank, configured(tmp_path, "whole"))
    config = configured(tmp_path, "parts", run={"save_every": 2})

    class StopsAfterTheThirdStep(StopRequest):
        num_asked = 0

        @property
        def is_requested(self) -> bool:
            self.num_asked += 1
            return self.num_asked >= 3 and rank.rank == 1

        @is_requested.setter
        def is_requested(self, value: bool) -> None: ...

    world = World(rank.rank, rank.size, rank.rank, rank.size, torch.device("cpu"))
    assert Run(config, world).run(StopsAfterTheThirdStep()) is False
    folder = Path(config.run.out)
    assert losses(folder) == whole[:3]
    resumed = trained(rank, replace(config, run=replace(config.run, resume=True)))
    assert resumed == whole
    assert (folder / "checkpoints" / "step_6").is_dir()


@on_ranks(2)
def test_a_run_goes_on_with_the_other_door_and_other_memory(rank: Rank, tmp_path: Path) -> None:
    if rank.rank == 0:
        written(tmp_path)
    steady = {"lr": 1e-3, "lr_end": 1.0, "warmup": 0}
    whole = trained(rank, configured(tmp_path, "whole", optimizer=steady))
    trained(rank, configured(tmp_path, "parts", optimizer=steady | {"steps": 3}))
    other = {"door": "wrapper", "offload": True}
    resumed = configured(tmp_path, "parts", optimizer=steady, sharding=other, run={"resume": True})
    assert trained(rank, resumed) == pytest.approx(whole, rel=2e-4)


@on_ranks(2)
def test_lora_trains_adapters_and_saves_only_them(rank: Rank, tmp_path: Path) -> None:
    if rank.rank == 0:
        written(tmp_path)
    config = configured(
        tmp_path, "lora", model={"lora_rank": 4}, optimizer={"lr": 2e-2}, run={"save_every": 3}
    )
    found = trained(rank, config)
    assert found[-1] < found[0]
    small = sum(
        path.stat().st_size
        for path in (Path(config.run.out) / "checkpoints" / "step_6").rglob("*")
        if path.is_file()
    )
    full = configured(tmp_path, "full")
    trained(rank, full)
    large = sum(
        path.stat().st_size
        for path in (Path(full.run.out) / "checkpoints" / "step_6").rglob("*")
        if path.is_file()
    )
    assert small < large / 3


@on_ranks(2)
def test_a_folder_of_hugging_face_is_fine_tuned_by_either_door(rank: Rank, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    if rank.rank == 0:
        written(tmp_path)
        shape = LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        torch.manual_seed(0)
        LlamaForCausalLM(shape).save_pretrained(folder)
    dist.barrier()
    model = {"name": str(folder)}
    found = trained(rank, configured(tmp_path, "tuned", model=model))
    assert found[-1] < found[0] - 0.3
    wrapper = configured(tmp_path, "wrapped", model=model, sharding={"door": "wrapper"})
    assert trained(rank, wrapper) == pytest.approx(found, rel=2e-4)
    # Adapters begin as nothing: the first loss is that of the model itself.
    adapted = configured(tmp_path, "adapted", model=model | {"lora_rank": 4})
    assert trained(rank, adapted)[0] == pytest.approx(found[0], rel=1e-6)


@on_ranks(2)
def test_a_folder_with_a_run_is_not_written_over(rank: Rank, tmp_path: Path) -> None:
    if rank.rank == 0:
        written(tmp_path)
    config = configured(tmp_path, "run")
    before = trained(rank, config)
    world = World(rank.rank, rank.size, rank.rank, rank.size, torch.device("cpu"))
    with pytest.raises(Exception, match="pass --resume to continue it"):
        Run(config, world).run(StopRequest())
    assert losses(Path(config.run.out)) == before


@on_ranks(2)
def test_a_unit_that_is_no_class_of_the_model_is_refused(rank: Rank, tmp_path: Path) -> None:
    if rank.rank == 0:
        written(tmp_path)
    config = configured(tmp_path, "run", sharding={"units": ("Blok",)})
    world = World(rank.rank, rank.size, rank.rank, rank.size, torch.device("cpu"))
    with pytest.raises((ConfigError, RuntimeError), match=r"found .Blok.; choose one of .*Block"):
        Run(config, world).run(StopRequest())
