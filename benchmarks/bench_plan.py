"""Compares the memory and time that a plan predicts with those of a step.

On a CPU each configuration runs as rank 0 of a simulated world (its collectives send nothing), and
torch's profiler gives the peak memory of tensors. With `--times`, two ranks run the steps of one
job with all settings that plans choose from. On a GPU the steps were measured before, by
`plan_measurements.py`, without communication.

    python benchmarks/bench_plan.py [--model 10m] [--world 8]
    python benchmarks/bench_plan.py --times
    python benchmarks/bench_plan.py --measured FILE
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm.placement import full_tensor
from fullshard.formatting import readable
from fullshard.fully_sharded_data_parallel import FullyShardedDataParallel
from fullshard.plan import Machine, StepPlan, profile_named
from fullshard.testing import Rank, RankPool, quiet_world
from fullshard_train.config import ModelSection, OptimizerSection, ShardingSection, TrainConfig
from fullshard_train.optimizer import build_optimizer
from fullshard_train.planning import choose_settings, plan_run, this_machine
from fullshard_train.sharding import architecture_for, build_sharded_model
from fullshard_train.world import World
from measuring import (
    Result,
    Table,
    interleaved,
    medians,
    parser_for,
    result_for,
    undisturbed,
    without_known_warnings,
)
from memory import held_peak_bytes

CPU = torch.device("cpu")
BUDGETS_GIB = (8, 12, 20, 40, 80)
TIMEOUT_S = 500.0
WRAPPER, RECOMPUTED = {"api": "wrapper"}, {"activation_checkpointing": True}
SELECTIVE = {"selective_checkpointing": True}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"sharding": WRAPPER},
    {"sharding": RECOMPUTED},
    {"sharding": {**WRAPPER, **RECOMPUTED}},
    {"sharding": SELECTIVE},
    {"sharding": {"prefetch": 2, "reshard_to": 2, **SELECTIVE}},
    {"sharding": {"units": ("Attention", "SwiGLU"), **RECOMPUTED}},
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
            loss = self._architecture.loss(self._model, self._tokens, self._tokens)
            (loss / self._tokens.numel() / self._accumulate).backward()
            del loss
        if isinstance(self._model, FullyShardedDataParallel):
            self._model.clip_grad_norm_(1.0)
        else:
            norm = nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            _ = full_tensor(norm) if isinstance(norm, DTensor) else norm
        self._optimizer.step()
        self._optimizer.zero_grad()


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
    for key, value in sharding.items():
        name = key.replace("_", " ")
        if isinstance(value, str) or value is True:
            words.append(name if value is True else value)
        elif value:
            words.append(f"{name} {' and '.join(value) if isinstance(value, tuple) else value}")
    words += [f"{key} {given[key]}" for key in ("accumulate", "batch") if key in given]
    return ", ".join(words)


def machine_of(name: str, num_ranks: int, **changes: float) -> Machine:
    """A machine without time for communication: there is none."""
    alone = replace(profile_named(name), link_gbs=1e9, latency_s=0.0, hop_s=0.0, **changes)
    return Machine(profile=alone, ranks_per_host=num_ranks)


def planned(config: TrainConfig, num_ranks: int, **changes: float) -> StepPlan:
    machine = machine_of("H200" if changes else "CPU", num_ranks, **changes)
    return plan_run(config, architecture_for(config.model), machine)


def measured_bytes(config: TrainConfig, num_ranks: int) -> int:
    """The peak memory of tensors in a step, after two others."""
    steps: list[Step] = []

    def prepare() -> None:
        steps.append(Step(config, num_ranks))
        for _ in range(2):
            steps[0]()
        gc.collect()

    gc.collect()  # earlier objects would be freed in the step
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


def settings_of_a_job() -> list[dict[str, Any]]:
    """All settings that plans choose from, of a step of 8 sequences."""
    every = product((1, 2, 4, 8), ("grad-op", "full"), ({}, SELECTIVE, RECOMPUTED))
    return [
        {
            "batch": batch,
            "accumulate": 8 // batch,
            "sharding": {"strategy": strategy, **recomputation},
        }
        for batch, strategy, recomputation in every
    ]


def measured_times(rank: Rank, configs: list[TrainConfig], num_rounds: int) -> list[float]:
    """The median seconds of a step on one of the ranks, which all run at once."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // rank.size))  # as the launcher does
    steps = {str(number): Step(config, rank.size) for number, config in enumerate(configs)}

    def timed(step: Step) -> dict[str, float]:
        dist.barrier()
        start = time.perf_counter()
        step()
        return {"step": time.perf_counter() - start}

    runs = {name: partial(timed, step) for name, step in steps.items()}
    with undisturbed():
        found = interleaved(runs, num_rounds)
    return [medians(samples)["step"] for samples in found.values()]


def compare_cpu_times(options: Any) -> list[Table]:
    """Steps of one job on two ranks that share this machine, as `fullshard train` starts them."""
    num_ranks = 2
    machine, every = this_machine("cpu", num_ranks, num_ranks), settings_of_a_job()
    configs = [config_of(given, options.model, options.sequence, 8) for given in every]
    with RankPool(num_ranks, timeout_s=TIMEOUT_S) as ranks:
        measured = ranks.run(measured_times, configs, options.steps)[0]
    runs: list[dict[str, Any]] = []
    rows: list[list[Any]] = []
    for given, config, step_s in zip(every, configs, measured, strict=True):
        found = plan_run(config, architecture_for(config.model), machine)
        runs.append({"config": given, "peak_allocated_bytes": found.peak_bytes, "step_s": step_s})
        rows.append([named(given), 1e3 * found.step_s, 1e3 * step_s, percent(found.step_s, step_s)])
    columns = ["configuration", "planned", "measured", "difference"]
    title = f"Time of a step of 8 sequences, {options.model}, {num_ranks} ranks, in ms"
    budgets = sorted(run["peak_allocated_bytes"] for run in runs)[3::5]
    return [Table(title, columns, rows), chosen_among(runs, configs, machine, budgets)]


def compare_with(found: dict[str, Any]) -> list[Table]:
    memory: list[list[Any]] = []
    times: list[list[Any]] = []
    runs: list[dict[str, Any]] = found["runs"]
    for number, run in enumerate(runs):
        given, num_ranks = run["config"], run["config"]["world"]
        # The first run allocates the workspace of matmuls, which then stays.
        kept = profile_named("H200").workspace_bytes if number == 0 else 0
        plan = planned(config_of(given, "", 0, 0), num_ranks, workspace_bytes=kept)
        name = f"{given['model']} on {num_ranks}, {named(given)}"
        peak, truth = plan.peak_bytes / 2**20, run["peak_allocated_bytes"] / 2**20
        memory.append([name, peak, truth, percent(peak, truth)])
        step, truth = 1e3 * plan.step_s, 1e3 * run["step_s"]
        times.append([name, step, truth, percent(step, truth)])
        print(memory[-1], times[-1][1:], flush=True)
    columns = ["configuration", "planned", "measured", "difference"]
    tables = [
        Table("Peak memory that tensors take, in MiB", columns, memory),
        Table("Time of a step, in ms", columns, times),
    ]
    is_sweep = (
        len({run["config"]["batch"] * run["config"].get("accumulate", 1) for run in runs}) == 1
    )
    if not is_sweep:
        return tables
    configs = [config_of(run["config"], "", 0, 0) for run in runs]
    nothing = {"context_bytes": 0, "comm_bytes": 0, "workspace_bytes": 0}
    machine = machine_of("H200", runs[0]["config"]["world"], **nothing)
    return [*tables, chosen_among(runs, configs, machine, [gib << 30 for gib in BUDGETS_GIB])]


def chosen_among(
    runs: list[dict[str, Any]],
    configs: list[TrainConfig],
    machine: Machine,
    budgets: Sequence[int],
) -> Table:
    """The choice for a budget, against the fastest of the measured runs that fit into it."""
    rows: list[list[Any]] = []
    unmeasured = ("offload", "prefetch", "reshard_to", "units")
    given = {("sharding", name) for name in unmeasured}
    if not any("selective_checkpointing" in run["config"]["sharding"] for run in runs):
        given.add(("sharding", "selective_checkpointing"))
    for limit in budgets:
        architecture = architecture_for(configs[0].model)
        best = choose_settings(configs[0], architecture, machine, limit, given)[0]
        chosen = runs[configs.index(best.config)]
        fitting = [run for run in runs if run["peak_allocated_bytes"] <= limit]
        fastest = min(fitting, key=lambda run: run["step_s"])
        assert chosen in fitting
        step_s, fastest_s = chosen["step_s"], fastest["step_s"]
        name = named(chosen["config"])
        rows.append(
            [readable(limit), name, 1e3 * step_s, 1e3 * fastest_s, percent(step_s, fastest_s)]
        )
        print(rows[-1], flush=True)
    columns = ["budget", "chosen", "measured, in ms", "the fastest that fits", "difference"]
    return Table("Settings chosen for a budget", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", default="10m")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--configs", type=int, default=len(CONFIGS), help="the first of them only")
    parser.add_argument("--times", action="store_true", help="of the settings of one job")
    parser.add_argument("--steps", type=int, default=15, help="rounds of --times")
    parser.add_argument("--measured", type=Path, help="what plan_measurements.py wrote")
    options = parser.parse_args(arguments)
    with without_known_warnings():
        if options.measured is None:
            result = result_for("plan", arguments)
            for table in compare_cpu_times(options) if options.times else [compare_on_cpu(options)]:
                result.add(table)
        else:
            found = json.loads(options.measured.read_text())
            command = "python benchmarks/bench_plan.py --measured FILE"
            result = Result("plan", command, f"{found['device']}, torch {found['torch']}")
            for table in compare_with(found):
                result.add(table)
    result.write(options.json)


if __name__ == "__main__":
    main()
