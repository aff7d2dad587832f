"""Step time and memory on a GPU: a model like Llama with 1 B parameters, bf16, reduced in float32.

Four modes, each a command of its own:

    python benchmarks/bench_gpu.py world1     one NCCL rank: what sharding costs by itself
    python benchmarks/bench_gpu.py simulated  the first of 8 and of 64 ranks, collectives that cost
                                              nothing: device time, host time, peak memory
    python benchmarks/bench_gpu.py ranks      2 and 4 NCCL ranks that share the GPU: step time, and
                                              the share of communication that compute does not hide
    python benchmarks/bench_gpu.py narrow     48 blocks of width 512 in a simulated world of 8:
                                              bound by the host; and whole steps as CUDA graphs

The unsharded model keeps its parameters and moments in bf16, the sharded ones keep float32 and
cast. `world1` also has two unsharded models that keep float32 and cast, and floors: the time of the
bf16 model plus the time to copy the bytes that float32 parameters cost over bf16 ones. Variants
are interleaved, except for `simulated`, where each runs in a process of its own so that its memory
is its own. Before times are taken, losses are compared: of the variants themselves in `world1` and
`ranks`, of a small model on one rank in `simulated` and `narrow`.

Megatron-FSDP and DeepSpeed are measured in `world1` and `ranks` where they can be imported; all
variants of `world1` together do not fit on one GPU, so leave some out with `--without`.

`--device cpu --tiny` goes through the same code with gloo and a tiny model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from device_traces import busy_during
from fullshard.testing import Rank, pool, quiet_world
from measuring import (
    Result,
    Table,
    check_losses,
    interleaved,
    medians,
    parser_for,
    result_for,
    synchronize,
    undisturbed,
    without_known_warnings,
)
from stepping import Stepping, Task
from variants import (
    AUTOCAST,
    BASE,
    BF16_WIRE,
    CAPTURED,
    EACH_PARAMETER,
    MASTER,
    OURS,
    PEERS,
    TORCH_FSDP1,
    TORCH_FSDP2,
    UNSHARDED,
    WIRES,
    WRAPPER,
)
from worlds import device_of, one_rank

T = TypeVar("T")
GIB = 2**30
TIMEOUT_S = 900.0


BILLION = Task(20, 2048, 32_000, batch=4, length=2048, num_steps=15)
NARROW = Task(48, 512, 256, batch=1, length=512, num_steps=20, num_warm=5, is_gpt=True)
TINY = Task(2, 32, 64, batch=1, length=8, num_steps=2, num_warm=1)
CHECKED = Task(2, 32, 64, batch=1, length=8, num_steps=3)


def variants(*, with_wrapper_of_torch: bool = False) -> list[str]:
    names = [TORCH_FSDP2, OURS, WRAPPER]
    if with_wrapper_of_torch:
        names.insert(1, TORCH_FSDP1)
    return names


def without_peers(losses: dict[str, list[float]]) -> dict[str, list[float]]:
    """Drop other libraries, which round elsewhere: their losses are recorded, not checked."""
    return {name: found for name, found in losses.items() if name not in PEERS}


def check_on_one_rank(device: torch.device) -> None:
    """Check that small models of every variant have the losses of torch's."""
    with one_rank(device) as rank:
        names = [BASE, *(name for name in variants(with_wrapper_of_torch=True) if name != BASE)]
        losses = {name: CHECKED.stepping(name, rank).losses() for name in names}
    check_losses(losses, rtol=1e-2)


def time_rows(times: dict[str, dict[str, float]]) -> list[list[Any]]:
    """Rows of milliseconds, with ratios to torch's and to the unsharded model where it is there."""
    rows: list[list[Any]] = []
    for name, spent in times.items():
        keys = ("step", "compute", "optimizer", "host")
        floor = times.get(UNSHARDED)
        over = spent["step"] / floor["step"] if floor else None
        ratio = spent["step"] / times[BASE]["step"]
        rows.append([name, *(spent[key] * 1e3 for key in keys), over, ratio])
    return rows


TIME_COLUMNS = ["variant", "step", "forward+backward", "optimizer", "host", "/ unsharded", "ratio"]


def timed_together(made: dict[str, Stepping], task: Task) -> dict[str, dict[str, float]]:
    with undisturbed():
        runs = {name: stepping.step for name, stepping in made.items()}
        found = interleaved(runs, task.num_steps, task.num_warm)
    return {name: medians(samples) for name, samples in found.items()}


def run_world1(options: argparse.Namespace, result: Result) -> None:
    task = options.task
    with one_rank(options.device) as rank:
        names = [UNSHARDED, AUTOCAST, MASTER, *variants(), *PEERS]
        names = [name for name in names if name not in options.without]
        made = {name: task.stepping(name, rank) for name in names}
        losses = {name: stepping.losses(2) for name, stepping in made.items()}
        check_losses(without_peers(losses), rtol=2e-2)
        num_params = sum(param.numel() for param in made[UNSHARDED].model.parameters())
        times = timed_together(made, task)
        bytes_per_s = copy_bytes_per_s(options.device)
    result.details["losses"] = losses
    rows = time_rows(times)
    unsharded, base = times[UNSHARDED]["step"], times[BASE]["step"]
    for name, moved_bytes in FLOORS.items():
        floor = unsharded + num_params * moved_bytes / bytes_per_s
        rows.append([name, floor * 1e3, None, None, None, floor / unsharded, floor / base])
    result.add(Table("One rank: milliseconds", TIME_COLUMNS, rows))


# The bytes that a float32 parameter costs over a bf16 one: cast for forward, gradient cast to
# float32, and an optimizer that reads four and writes three numbers of twice the size. Variants
# that reshard after forward, as all do, cast for backward again.
FLOORS = {
    "floor": (4 + 2) + (2 + 4) + 7 * 2,
    "floor, parameters cast twice": 2 * (4 + 2) + (2 + 4) + 7 * 2,
}


def copy_bytes_per_s(device: torch.device) -> float:
    """The speed at which a copy reads and writes memory."""
    source = torch.empty(2**30 if device.type == "cuda" else 2**20, dtype=torch.uint8).to(device)
    target = torch.empty_like(source)

    def copied() -> dict[str, float]:
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        return {"seconds": time.perf_counter() - start}

    return 2 * source.numel() / medians([copied() for _ in range(9)])["seconds"]


def run_narrow(options: argparse.Namespace, result: Result) -> None:
    check_on_one_rank(options.device)
    task, names = options.task, [UNSHARDED, *variants(with_wrapper_of_torch=True), EACH_PARAMETER]
    if options.device.type == "cuda":
        names += [name + CAPTURED for name in (UNSHARDED, TORCH_FSDP2, OURS, WRAPPER)]
    for world in options.worlds:
        with quiet_world(world, device=options.device) as rank:
            times = timed_together({name: task.stepping(name, rank) for name in names}, task)
        title = f"{task.num_blocks} blocks of width {task.width}, simulated world of {world}"
        result.add(Table(f"{title}: milliseconds", TIME_COLUMNS, time_rows(times)))


def run_simulated(options: argparse.Namespace, result: Result) -> None:
    check_on_one_rank(options.device)
    for world in options.worlds:
        found = {
            name: _in_own_process(options, "--one", name, "--worlds", str(world))
            for name in [*variants(with_wrapper_of_torch=True), *options.wires]
            if name not in options.without
        }
        result.details[f"world_{world}"] = found
        for table in simulated_tables(world, found):
            result.add(table)


def simulated_tables(world: int, found: dict[str, dict[str, float]]) -> list[Table]:
    base = found[BASE]
    times: list[list[Any]] = []
    memory: list[list[Any]] = []
    for name, row in found.items():
        spent = [row[key] * 1e3 for key in ("step", "busy", "host")]
        times.append([name, *spent, row["step"] / base["step"]])
        held: list[Any] = []
        for key in ("allocated", "reserved", "gathered"):
            is_known = bool(row[key] and base[key])
            held += [row[key] / GIB, row[key] / base[key]] if is_known else [None, None]
        memory.append([name, *held])
    return [
        Table(
            f"Simulated world of {world}: milliseconds",
            ["variant", "step", "device busy", "host", "ratio"],
            times,
        ),
        Table(
            f"Simulated world of {world}: peak memory, and what a step gathers, GiB",
            ["variant", "allocated", "ratio", "reserved", "ratio", "gathered", "ratio"],
            memory,
        ),
    ]


def _in_own_process(options: argparse.Namespace, *arguments: str) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__)), "simulated", "--device", str(options.device)]
    command += [*arguments, *(["--tiny"] if options.tiny else [])]
    task = options.task
    command += ["--batch", str(task.batch), "--steps", str(task.num_steps)]
    command += ["--vocabulary", str(task.vocabulary)] + ["--frozen"] * task.is_frozen
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment, timeout=TIMEOUT_S
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def play_one(options: argparse.Namespace) -> dict[str, float]:
    """One variant in a simulated world: the medians of its times, and the most memory it held."""
    task, device = options.task, options.device
    is_cuda = device.type == "cuda"
    with quiet_world(options.worlds[0], device=device) as rank, undisturbed():
        stepping = task.stepping(options.one, rank)
        if is_cuda:
            torch.cuda.empty_cache()  # do not count the memory of building the model
        for _ in range(task.num_warm):
            stepping.step()
        gc.collect()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        group: Any = rank.mesh().get_group()
        before = group.gathered_bytes
        found = medians([stepping.step() for _ in range(task.num_steps)])
        found["gathered"] = (group.gathered_bytes - before) / task.num_steps
        found["allocated"] = torch.cuda.max_memory_allocated() if is_cuda else 0
        found["reserved"] = torch.cuda.max_memory_reserved() if is_cuda else 0
        found["busy"] = busy_during(stepping.step).busy_us / 1e6 if is_cuda else found["step"]
    return found


def measure_on_ranks(rank: Rank, names: list[str], task: Task, num_hosts: int) -> dict[str, Any]:
    """On one rank: medians of times and each step's, losses, and what one step's trace shows."""
    host = str(rank.rank * num_hosts // rank.size)
    with undisturbed(), patch("fullshard.comm.topology.machine_id", lambda: host):
        made = {name: task.stepping(name, rank) for name in names}
        losses = {name: stepping.losses(task.num_warm) for name, stepping in made.items()}
        runs = {name: stepping.step for name, stepping in made.items()}
        found = interleaved(runs, task.num_steps, num_warm=0)
        traced = {}
        for name, stepping in made.items():
            if rank.device.type != "cuda":
                continue
            times: list[dict[str, float]] = []
            dist.barrier()
            busy = busy_during(_kept(stepping.step, times))
            traced[name] = {"step": times[0]["step"], **vars(busy)}
    return {
        "times": {name: medians(samples) for name, samples in found.items()},
        "steps": {name: [sample["step"] for sample in samples] for name, samples in found.items()},
        "losses": losses,
        "traced": traced,
    }


def _kept(step: Callable[[], T], kept: list[T]) -> Callable[[], None]:
    return lambda: kept.append(step())


def run_ranks(options: argparse.Namespace, result: Result) -> None:
    backend = "nccl" if options.device.type == "cuda" else "gloo"
    for num_ranks in options.ranks:
        ranks = pool(num_ranks, backend)
        names = [TORCH_FSDP2, OURS, WRAPPER, BF16_WIRE, *options.wires, *PEERS]
        names = [name for name in names if name not in options.without]
        given = names, options.task, options.hosts
        found = ranks.run(measure_on_ranks, *given, timeout_s=TIMEOUT_S)
        if backend == "nccl":
            ranks.close()  # the next ones need the memory
        for of_rank in found:
            check_losses(without_peers(of_rank["losses"]), rtol=2e-2)
        result.details[f"ranks_{num_ranks}"] = found
        times, traced = found[0]["times"], found[0]["traced"]
        hosts = f" that say they are on {options.hosts} hosts" if options.hosts > 1 else ""
        rows = []
        for name, spent in times.items():
            row: list[Any] = [name, spent["step"] * 1e3, spent["step"] / times[BASE]["step"]]
            trace = traced.get(name)
            if trace is None:
                row += [None, None]
            else:
                row += [trace["communication_us"] / 1e3]
                row += [100 * trace["exposed_us"] / 1e6 / trace["step"]]
            rows.append(row)
        result.add(
            Table(
                f"{num_ranks} ranks on one device{hosts}: milliseconds, and from a trace of a step",
                ["variant", "step", "ratio", "communication", "exposed, % of step"],
                rows,
            )
        )


MODES: dict[str, tuple[Task, Callable[[argparse.Namespace, Result], None]]] = {
    "world1": (BILLION, run_world1),
    "simulated": (replace(BILLION, batch=1, length=512, num_steps=10), run_simulated),
    "ranks": (replace(BILLION, batch=2, num_steps=3), run_ranks),
    "narrow": (NARROW, run_narrow),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--device", type=device_of, default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the program")
    parser.add_argument("--worlds", type=int, nargs="+", help="sizes of simulated worlds")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hosts", type=int, default=1, help="that ranks say they are on")
    parser.add_argument("--wires", nargs="+", default=[], choices=WIRES, help="more variants")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--without", nargs="+", default=[], help="variants to leave out")
    parser.add_argument("--vocabulary", type=int, help="of the model")
    parser.add_argument("--frozen", action="store_true", help="train vectors alone, no matrices")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    task, run = MODES[options.mode]
    task = TINY if options.tiny else task
    options.task = replace(
        task,
        batch=options.batch or task.batch,
        num_steps=options.steps or task.num_steps,
        vocabulary=options.vocabulary or task.vocabulary,
        is_frozen=options.frozen,
    )
    options.worlds = options.worlds or ([8] if options.mode == "narrow" else [8, 64])
    with without_known_warnings():
        if options.one:
            print(json.dumps(play_one(options)))
            return
        result = result_for("gpu", arguments, options.device)
        run(options, result)
        result.write(options.json)


if __name__ == "__main__":
    main()
