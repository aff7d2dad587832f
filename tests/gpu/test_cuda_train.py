"""`fullshard train` on CUDA: its loop over NCCL, its timeline, what it predicts."""

from __future__ import annotations

import gc
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.report import read_record
from fullshard.testing import Rank, on_ranks
from fullshard.trace import Activity, Span, Timeline
from fullshard.training.config import TrainConfig
from fullshard.training.control import StopRequest
from fullshard.training.memory import predict_memory
from fullshard.training.run import Run
from fullshard.training.sharding import architecture_for
from fullshard.training.world import World
from tests import tiny_run

SMALL: dict[str, dict[str, Any]] = {
    "model": {"name": "10m", "sequence": 128},
    "sharding": {"precision": "float32"},
    "optimizer": {"batch": 4},
    "run": {"device": "auto", "sample_tokens": 8},
}


def configured(folder: Path, out: str, **changes: dict[str, Any]) -> TrainConfig:
    both = {name: SMALL.get(name, {}) | changes.get(name, {}) for name in {*SMALL, *changes}}
    return tiny_run.configured(folder, out, **both)


def trained(rank: Rank, config: TrainConfig) -> list[float]:
    folder = Path(config.run.out)
    if rank.rank == 0:
        Path(config.data.paths[0]).write_text(tiny_run.TEXT)
    world = World(rank.rank, rank.size, rank.rank, rank.size, rank.device)
    assert Run(config, world).run(StopRequest()) is True
    torch.distributed.barrier()
    return tiny_run.losses(folder)


VARIANTS = {
    "wrapper": {"sharding": {"precision": "float32", "api": "wrapper"}},
    "recomputed": {"sharding": {"precision": "float32", "activation_checkpointing": True}},
    "accumulated": {"optimizer": {"accumulate": 2, "batch": 2}},
    "compiled": {"sharding": {"precision": "float32", "compile": True}},
    "captured": {"run": {"capture": "on"}},
    "captured-wrapper": {
        "sharding": {"precision": "float32", "api": "wrapper"},
        "optimizer": {"accumulate": 2, "batch": 2},
        "run": {"capture": "on"},
    },
    "captured-compiled": {
        "sharding": {"precision": "float32", "compile": True},
        "run": {"capture": "on"},
    },
    "offloaded": {"sharding": {"precision": "float32", "api": "wrapper", "offload": True}},
}
LOWER = {
    "captured fp16": {"sharding": {"precision": "fp16"}, "run": {"capture": "on"}},
    "bf16": {"sharding": {"precision": "bf16"}},
    "fp16": {"sharding": {"precision": "fp16"}},
    "bf16 wrapper": {"sharding": {"precision": "bf16-reduce", "api": "wrapper"}},
}


@on_ranks(2, backend="nccl", timeout_s=200)
def test_doors_and_precisions_train_alike(rank: Rank, tmp_path: Path) -> None:
    expected = trained(rank, configured(tmp_path, "reference"))
    assert expected[-1] < expected[0] - 0.5
    for name, changes in VARIANTS.items():
        with warnings.catch_warnings():
            if "compiled" in name:
                warnings.simplefilter("ignore")  # torch's compiler has advice of its own
            found = trained(rank, configured(tmp_path, name, **changes))
        assert found == pytest.approx(expected, rel=2e-3), name
    for name, changes in LOWER.items():
        found = trained(rank, configured(tmp_path, name.replace(" ", "-"), **changes))
        assert found == pytest.approx(expected, rel=0.05), name


@on_ranks(2, backend="nccl")
def test_a_run_resumes_where_it_was(rank: Rank, tmp_path: Path) -> None:
    steady = {"lr": 1e-3, "lr_end": 1.0, "warmup": 0}
    whole = trained(rank, configured(tmp_path, "whole", optimizer=steady))
    trained(rank, configured(tmp_path, "parts", optimizer=steady | {"steps": 3}))
    rest = configured(tmp_path, "parts", optimizer=steady, run={"resume": True})
    assert trained(rank, rest) == pytest.approx(whole, rel=1e-4)


@on_ranks(2, backend="nccl")
def test_a_captured_run_resumes_where_it_was(rank: Rank, tmp_path: Path) -> None:
    captured = {"capture": "on", "save_every": 4}
    given = {"steps": 12, "lr_end": 1.0}
    whole = trained(rank, configured(tmp_path, "whole", optimizer=given, run=captured))
    trained(rank, configured(tmp_path, "parts", optimizer=given | {"steps": 7}, run=captured))
    rest = configured(tmp_path, "parts", optimizer=given, run=captured | {"resume": True})
    assert trained(rank, rest) == pytest.approx(whole, rel=1e-4)
    exposed = [step.exposed_s for step in read_record(Path(rest.run.out)).metrics]
    assert [math.isnan(each) for each in exposed] == 4 * [False] + 3 * [True] + 4 * [False] + [True]


def overlaps(a: Span, b: Span) -> bool:
    return a.start_s < b.end_s and b.start_s < a.end_s


@on_ranks(2, backend="nccl", timeout_s=200)
def test_a_timeline_shows_gathers_behind_compute(rank: Rank, tmp_path: Path) -> None:
    big = {"sequence": 1024}
    config = configured(
        tmp_path,
        "traced",
        model=big,
        sharding={"precision": "bf16"},
        optimizer={"batch": 16},
        run={"report": True, "trace_step": 5, "prompt": "line "},
    )
    # The text is short of sequences of that length.
    trained(rank, config)
    record = read_record(Path(config.run.out))
    assert record.traced_step == 5
    assert len(record.timelines) == 2
    for timeline in record.timelines:
        check(timeline)
    assert all(each.exposed_s >= 0 for each in record.metrics)
    assert any(each.exposed_s > 0 for each in record.metrics)


def check(timeline: Timeline) -> None:
    by_activity = {
        activity: [span for span in timeline.spans if span.activity is activity]
        for activity in Activity
    }
    for activity in (Activity.GATHER, Activity.FORWARD, Activity.BACKWARD, Activity.REDUCE):
        assert len(by_activity[activity]) >= 6, activity
    assert all(-1e-3 <= span.start_s <= span.end_s for span in timeline.spans)
    computing = [*by_activity[Activity.FORWARD], *by_activity[Activity.BACKWARD]]
    behind = [
        gather
        for gather in by_activity[Activity.GATHER]
        if any(overlaps(gather, span) and span.unit != gather.unit for span in computing)
    ]
    assert len(behind) >= 4
    assert max(sample.full_bytes for sample in timeline.memory) > 0
    assert max(sample.allocated_bytes for sample in timeline.memory) > 0


@pytest.mark.parametrize("recomputes", [False, True])
@on_ranks(2, backend="nccl", timeout_s=200)
def test_the_memory_that_a_run_takes_was_predicted(
    rank: Rank, tmp_path: Path, recomputes: bool
) -> None:
    config = configured(
        tmp_path,
        "run",
        model={"name": "150m", "sequence": 64},
        data={"paths": (str(tmp_path / "text.txt"),), "tokenizer": "bytes"},
        sharding={"precision": "bf16", "activation_checkpointing": recomputes},
        optimizer={"batch": 8, "steps": 3},
        run={"sample_tokens": 0},
    )
    plan = predict_memory(config, architecture_for(config.model), 2, rank.device)
    gc.collect()  # what earlier tests left would be freed in the run
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trained(rank, config)
    taken = torch.cuda.max_memory_allocated() - before
    print(f"recomputed {recomputes}: predicted {plan.device_bytes >> 20}, taken {taken >> 20} MiB")
    assert 0.9 * taken < plan.device_bytes < 1.3 * taken


@on_ranks(2, backend="nccl")
def test_a_captured_run_is_validated_as_an_eager_one(rank: Rank, tmp_path: Path) -> None:
    found = []
    for capture in ("off", "on"):
        run = {"capture": capture, "eval_every": 4}
        data = {"eval_share": 0.1, "paths": (str(tmp_path / "text.txt"),)}
        config = configured(tmp_path, capture, data=data, optimizer={"steps": 12}, run=run)
        trained(rank, config)
        found.append(read_record(Path(config.run.out)).metrics)
    eager, captured = ([each.eval_loss for each in some if each.step % 4 == 0] for some in found)
    assert captured == pytest.approx(eager, rel=1e-4)
    assert eager[-1] < eager[0]
    assert all(each.tflops > 0 for some in found for each in some)
