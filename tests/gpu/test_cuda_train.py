"""`fullshard train` on CUDA: its loop over NCCL, its timeline, what it predicts."""

from __future__ import annotations

import gc
import gzip
import json
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.testing import Rank, on_ranks
from fullshard.trace import Activity, Span, Timeline
from fullshard_train.config import TrainConfig
from fullshard_train.config_file import config_as_toml
from fullshard_train.control import StopRequest
from fullshard_train.flops import peak_tflops
from fullshard_train.models.document_attention import attend, documents_of, mask_of_offsets
from fullshard_train.report import read_record
from fullshard_train.run import Run
from fullshard_train.trainer import Parts
from fullshard_train.world import World
from tests.support import tiny_run

SMALL: dict[str, dict[str, Any]] = {
    "model": {"name": "10m", "sequence": 128},
    "sharding": {"precision": "float32"},
    "optimizer": {"batch": 4},
    "run": {"device": "auto", "sample_tokens": 8},
}


def configured(folder: Path, out: str, **changes: dict[str, Any]) -> TrainConfig:
    both = {name: SMALL.get(name, {}) | changes.get(name, {}) for name in {*SMALL, *changes}}
    return tiny_run.configured(folder, out, **both)


def trained(rank: Rank, config: TrainConfig, kind: type[Run] = Run) -> list[float]:
    folder = Path(config.run.out)
    if rank.rank == 0:
        Path(config.data.paths[0]).write_text(tiny_run.TEXT)
    world = World(rank.rank, rank.size, rank.rank, rank.size, rank.device)
    assert kind(config, world).run(StopRequest()) is True
    torch.distributed.barrier()
    return tiny_run.losses(folder)


def test_flash_attention_over_documents_is_attention_with_their_mask() -> None:
    """Also of several documents in a sequence, of one token each, and with grouped queries."""
    torch.manual_seed(0)
    batch, length = 3, 200
    queries, keys, values = (
        torch.randn(batch, heads, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (8, 2, 2)
    )
    begins = torch.rand(batch, length, device="cuda") < 0.1
    begins[:, 0] = begins[1, 5:9] = True
    places = torch.arange(length, device="cuda")
    positions = places - places.where(begins, 0).cummax(1).values
    offsets = documents_of(positions)
    assert offsets is not None
    assert offsets.dim() == 1
    mask = mask_of_offsets(offsets, batch, length)
    found, expected = (attend(queries, keys, values, each) for each in (offsets, mask))
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)
    grad = torch.randn_like(found)
    inputs = (queries, keys, values)
    for one, other in zip(
        *(torch.autograd.grad(each, inputs, grad) for each in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=2**-5, atol=2**-4)


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
    # The text has too few sequences of that length.
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


def planned(config: TrainConfig, num_ranks: int) -> int:
    """The peak of a step, planned in a process without a process group."""
    code = (
        "import sys; from pathlib import Path; from fullshard_train import planning as p;"
        "from fullshard_train.config_file import config_of;"
        "c = config_of(Path(sys.argv[1]), {});"
        "m = p.this_machine('cuda', *[int(sys.argv[2])] * 2);"
        "print(p.plan_run(c, p.planned_architecture(c), m).peak_bytes)"
    )
    file = Path(config.run.out).with_suffix(".toml")
    file.write_text(config_as_toml(config))
    command = [sys.executable, "-c", code, str(file), str(num_ranks)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


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
    plan = planned(config, 2)
    gc.collect()  # garbage of earlier tests would be freed in the run
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trained(rank, config)
    taken = torch.cuda.max_memory_allocated() - before
    print(f"recomputed {recomputes}: predicted {plan >> 20}, taken {taken >> 20} MiB")
    assert plan == pytest.approx(taken, rel=0.1)


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


@pytest.mark.parametrize("base, api", [("int8", "fully_shard"), ("nf4", "wrapper")])
@on_ranks(2, backend="nccl")
def test_adapters_are_trained_on_a_quantized_base(
    rank: Rank, tmp_path: Path, base: str, api: str
) -> None:
    found = []
    for each in ("plain", base):
        model = {"lora_rank": 4, "lora_base": each}
        sharding = {"api": api, "precision": "bf16"}
        options = {"optimizer": {"steps": 6, "lr": 2e-2}, "run": {"sample_tokens": 0}}
        config = configured(tmp_path, each, model=model, sharding=sharding, **options)
        found.append(trained(rank, config))
    plain, quantized = found
    assert quantized[-1] < quantized[0]
    assert quantized[0] == pytest.approx(plain[0], rel=1e-2)
    assert quantized[-1] == pytest.approx(plain[-1], rel=0.1)


class Poisoned(Run):
    """The data makes outputs infinite in the fourth and fifth step, which may be replayed."""

    def _build(self, architecture: Any) -> Parts:
        parts = super()._build(architecture)
        batches, original, count = parts.batches, parts.batches.next, 0

        def following() -> Any:
            nonlocal count
            count += 1
            tensors = original()
            tensors[0][0, 0] = 1 if count in (4, 5) else 2
            return tensors

        def poison(module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            return output * torch.where(args[0][0, 0] == 1, torch.inf, 1.0).to(output.dtype)

        batches.next = following  # type: ignore[method-assign]
        parts.model.get_submodule("model.embed_tokens").register_forward_hook(poison)
        return parts


@on_ranks(2, backend="nccl")
def test_a_step_that_is_not_finite_is_not_applied_eager_or_replayed(
    rank: Rank, tmp_path: Path
) -> None:
    found = []
    for capture in ("off", "on"):
        run = {"capture": capture, "on_nan": "skip"}
        config = configured(tmp_path, capture, optimizer={"steps": 12}, run=run)
        found.append(trained(rank, config, Poisoned))
    eager, captured = found
    assert [math.isfinite(loss) for loss in eager] == [*3 * [True], False, False, *7 * [True]]
    assert captured == pytest.approx(eager, rel=1e-4, nan_ok=True)
    assert eager[-1] < eager[2]


@on_ranks(2, backend="nccl", timeout_s=200)
def test_a_run_with_muon_resumes_where_it_was_and_is_captured(rank: Rank, tmp_path: Path) -> None:
    steady = {"name": "muon", "lr": 2e-3, "lr_end": 1.0}
    whole = trained(rank, configured(tmp_path, "whole", optimizer=steady))
    assert whole[-1] < whole[0] - 0.5
    captured = configured(tmp_path, "captured", optimizer=steady, run={"capture": "on"})
    assert trained(rank, captured) == pytest.approx(whole, rel=1e-2)
    trained(rank, configured(tmp_path, "parts", optimizer=steady | {"steps": 3}))
    rest = configured(tmp_path, "parts", optimizer=steady, run={"resume": True})
    assert trained(rank, rest) == pytest.approx(whole, rel=1e-2)


@on_ranks(2, backend="nccl")
def test_a_profile_has_kernels_and_the_engines_collectives(rank: Rank, tmp_path: Path) -> None:
    config = configured(tmp_path, "profiled", run={"profile": 4})
    trained(rank, config)
    with gzip.open(Path(config.run.out) / "profile" / f"rank{rank.rank}.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [each for each in events if each.get("cat") == "kernel"]
    start = min(each["ts"] for each in kernels)
    end = max(each["ts"] + each["dur"] for each in kernels)
    ours = {each["name"]: each for each in events if each.get("cat") == "fullshard"}
    for name in ("all_gather", "forward", "backward", "reduce_scatter"):
        each = ours[f"{name} model.layers.1"]
        assert start - 1e3 <= each["ts"] < end + 1e3  # microseconds
        assert each["dur"] > 0
    assert any("nccl" in each["name"] for each in kernels)
    # The peak of a GPU that is in the table, such as an H200, is known.
    if "H200" in torch.cuda.get_device_name(rank.device):
        assert peak_tflops(config, rank.device) == 67
