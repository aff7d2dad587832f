"""What a plan says of memory and time, against what a step takes.

On a CPU each configuration runs as rank 0 of a simulated world (its collectives send nothing), and
torch's profiler tells what tensors took at most. On a GPU the steps were measured before, by
`plan_measurements.py`, also without communication.

    python benchmarks/bench_plan.py [--model 10m] [--world 8]
    python benchmarks/bench_plan.py --measured FILE
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm.placement import full_tensor
from fullshard.fully_sharded_data_parallel import FullyShardedDataParallel
from fullshard.plan import Machine, StepPlan, profile_named
from fullshard.testing import quiet_world
from fullshard.training.config import ModelSection, OptimizerSection, ShardingSection, TrainConfig
from fullshard.training.optimizer import build_optimizer
from fullshard.training.planning import plan_run
from fullshard.training.sharding import architecture_for, build_sharded_model
from fullshard.training.world import World
from measuring import Result, Table, parser_for, result_for, without_known_warnings
from memory import held_peak_bytes

CPU = torch.device("cpu")
WRAPPER, RECOMPUTED = {"api": "wrapper"}, {"activation_checkpointing": True}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"sharding": WRAPPER},
    {"sharding": RECOMPUTED},
    {"sharding": {**WRAPPER, **RECOMPUTED}},
    {"sharding": {"strategy": "grad-op"}},
    {"accumulate": 2},
    {"sharding": {"mesh": "2x4"}},
    {"sharding": {**WRAPPER, "strategy": "none"}},
    {"sharding": {"precision": "bf16"}},
    {"sharding": {**WRAPPER, "precision": "bf16"}},
    {"sharding": {"precision": "bf16", **RECOMPUTED}},
    {"sharding": WRAPPER, "accumulate": 2},
    {"sharding": {"offload": True}},
    {"batch": 8},
]


class Step:
    """A step as `fullshard train` does it."""

    def __init__(self, config: TrainConfig, num_ranks: int, device: torch.device = CPU) -> None:
        world = World(0, num_ranks, 0, num_ranks, device)
        self._architecture = architecture_for(config.model)
        self._model = build_sharded_model(self._architecture, config.sharding, world)
        with torch.no_grad():
            for param in self._model.parameters():
                (param.to_local() if isinstance(param, DTensor) else param).normal_(0, 0.02)
        self._optimizer = build_optimizer(self._model, config.optimizer, device)
        self._accumulate = config.optimizer.accumulate
        shape = (config.optimizer.batch, config.model.sequence)
        self._tokens = torch.randint(256, shape, device=device)

    def __call__(self) -> None:
        for _ in range(self._accumulate):
            loss = self._loss()
            (loss / self._tokens.numel() / self._accumulate).backward()
            del loss
        if isinstance(self._model, FullyShardedDataParallel):
            self._model.clip_grad_norm_(1.0)
        else:
            norm = nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            _ = full_tensor(norm) if isinstance(norm, DTensor) else norm
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self) -> torch.Tensor:
        logits = self._architecture.logits(self._model, self._tokens).flatten(0, 1).float()
        return F.cross_entropy(logits, self._tokens.flatten(), reduction="sum")


def config_of(given: dict[str, Any], model: str, sequence: int, batch: int) -> TrainConfig:
    return TrainConfig(
        model=ModelSection(
            name=given.get("model", model), sequence=given.get("sequence", sequence)
        ),
        sharding=ShardingSection(**given.get("sharding", {})),
        optimizer=OptimizerSection(
            batch=given.get("batch", batch), accumulate=given.get("accumulate", 1)
        ),
    )


def named(given: dict[str, Any]) -> str:
    sharding = {key: value for key, value in given.get("sharding", {}).items() if key != "api"}
    words = [
        given.get("sharding", {}).get("api", "fully_shard").replace("fully_shard", "`fully_shard`")
    ]
    words += [
        key.replace("_", " ") if value is True else str(value) for key, value in sharding.items()
    ]
    words += [f"{key} {given[key]}" for key in ("accumulate", "batch") if key in given]
    return ", ".join(words)


def planned(config: TrainConfig, num_ranks: int, **changes: float) -> StepPlan:
    """Without time for communication, of which there is none."""
    profile = profile_named("H200" if changes else "CPU")
    alone = replace(profile, link_gbs=1e9, latency_s=0.0, hop_s=0.0, **changes)
    machine = Machine(profile=alone, ranks_per_host=num_ranks)
    return plan_run(config, architecture_for(config.model), machine)


def measured_bytes(config: TrainConfig, num_ranks: int) -> int:
    """What tensors took at most in a step, after two others."""
    steps: list[Step] = []

    def prepare() -> None:
        steps.append(Step(config, num_ranks))
        for _ in range(2):
            steps[0]()
        gc.collect()

    gc.collect()  # what was made before would be freed in the step
    with quiet_world(num_ranks):
        found = held_peak_bytes(lambda: steps[0](), before=prepare)
        steps.clear()
    return found


def percent(found: float, truth: float) -> str:
    return f"{100 * (found / truth - 1):+.1f} %"


def compare_on_cpu(options: Any) -> Table:
    rows: list[list[Any]] = []
    for given in CONFIGS[: options.configs]:
        config = config_of(given, options.model, options.sequence, options.batch)
        truth = measured_bytes(config, options.world) / 2**20
        plan = planned(config, options.world).peak_bytes / 2**20
        rows.append([named(given), plan, truth, percent(plan, truth)])
        print(rows[-1], flush=True)
    title = (
        f"Peak memory of a rank of {options.world}, {options.model} with {options.batch} sequences "
        f"of {options.sequence} tokens, in MiB"
    )
    return Table(title, ["configuration", "planned", "measured", "difference"], rows)


def compare_with(found: dict[str, Any]) -> list[Table]:
    memory: list[list[Any]] = []
    times: list[list[Any]] = []
    for number, run in enumerate(found["runs"]):
        given, num_ranks = run["config"], run["config"]["world"]
        # The first run has the workspace of matmuls allocated, which then stays.
        kept = profile_named("H200").workspace_bytes if number == 0 else 0
        plan = planned(config_of(given, "", 0, 0), num_ranks, workspace_bytes=kept)
        name = f"{given['model']} on {num_ranks}, {named(given)}"
        peak, truth = plan.peak_bytes / 2**20, run["peak_allocated_bytes"] / 2**20
        memory.append([name, peak, truth, percent(peak, truth)])
        step, truth = 1e3 * plan.step_s, 1e3 * run["step_s"]
        times.append([name, step, truth, percent(step, truth)])
        print(memory[-1], times[-1][1:], flush=True)
    columns = ["configuration", "planned", "measured", "difference"]
    return [
        Table("Peak memory that tensors take, in MiB", columns, memory),
        Table("Time of a step, in ms", columns, times),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", default="10m")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--configs", type=int, default=len(CONFIGS), help="the first of them only")
    parser.add_argument("--measured", type=Path, help="what plan_measurements.py wrote")
    options = parser.parse_args(arguments)
    with without_known_warnings():
        if options.measured is None:
            result = result_for("plan", arguments)
            result.add(compare_on_cpu(options))
        else:
            found = json.loads(options.measured.read_text())
            command = "python benchmarks/bench_plan.py --measured FILE"
            result = Result("plan", command, f"{found['device']}, torch {found['torch']}")
            for table in compare_with(found):
                result.add(table)
    result.write(options.json)


if __name__ == "__main__":
    main()
