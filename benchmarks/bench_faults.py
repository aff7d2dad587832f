"""Faults of one rank: how long until all others raise, and whether they say which rank it was.

    python benchmarks/bench_faults.py             kinds of fault in each phase, beside torch's FSDP
    python benchmarks/bench_faults.py --backend nccl --timeout 10 --at-once 6          on a GPU
    python benchmarks/bench_faults.py --store     what the watchers of many ranks ask of the store

A fault happens on rank 1 of 3, in the third step of a small model, whose process group has a
timeout of `--timeout` seconds. torch may also end a rank without an error that its program can see,
as NCCL's watchdog does by default. The store is a real one; a few threads, each with its own
connection, send what the watchers of 1,024 and of 8,192 ranks send in a period.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.resilience import watcher
from fullshard.resilience.places import Place
from fullshard.testing import Rank, RankPool
from fullshard.testing.failures import RanksFailed
from measuring import Result, Table, parser_for, result_for, without_known_warnings
from variants import OURS, TORCH_FSDP1, TORCH_FSDP2, WRAPPER, Sharding, shard

VARIANTS = [TORCH_FSDP2, TORCH_FSDP1, OURS, WRAPPER]
KINDS = ["killed", "stopped", "raises"]
PHASES = ["forward", "backward", "optimizer"]
ODD, OTHERS, NUM_RANKS, BAD_STEP = 1, (0, 2), 3, 2
NUM_CLIENTS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.faults: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.faults.get("forward", int)()
        y = self.linear(x)
        if "backward" in self.faults:
            y.register_hook(lambda _: self.faults["backward"]())
        return y.tanh()


def fail(kind: str, folder: Path) -> None:
    (folder / "fault").write_text(str(time.monotonic()))
    if kind == "raises":
        raise ZeroDivisionError("planned")
    os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)


def take_steps(
    rank: Rank, variant: str, kind: str, phase: str, folder: str, limit_s: float
) -> None:
    """Train until the fault; write what this rank raises, and when."""
    os.environ[watcher.SWITCH] = "1"
    pids = [0] * NUM_RANKS
    dist.all_gather_object(pids, os.getpid())
    (Path(folder) / f"pid{rank.rank}").write_text(str(os.getpid()))
    if variant in (OURS, WRAPPER):  # as `fullshard train` does
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    group = dist.new_group(timeout=timedelta(seconds=limit_s))
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)]).to(rank.device)
    blocks = list(model)
    mesh = DeviceMesh.from_group(group, rank.device.type)
    model = shard(variant, model, Sharding(Block, mesh, rank.device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        for step in range(BAD_STEP + 3):
            if rank.rank == ODD and step == BAD_STEP:
                blocks[1].faults[phase] = lambda: fail(kind, Path(folder))
            loss = model(torch.ones(2, 32, device=rank.device)).sum()
            loss.backward()
            blocks[1].faults.get("optimizer", int)()
            optimizer.step()
            loss.item()
    except Exception as error:
        if rank.rank != ODD:
            found = {"at": time.monotonic(), "text": f"{type(error).__name__}: {error}"}
            (Path(folder) / f"rank{rank.rank}").write_text(json.dumps(found))
            while not all(is_known(Path(folder), other) for other in OTHERS):
                time.sleep(0.1)
            with suppress(ProcessLookupError):
                os.kill(pids[ODD], signal.SIGKILL)
        raise


def is_known(folder: Path, rank: int) -> bool:
    return (folder / f"rank{rank}").exists() or has_ended(folder, rank)


def has_ended(folder: Path, rank: int) -> bool:
    try:
        pid = (folder / f"pid{rank}").read_text()
        return not pid or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return (folder / f"pid{rank}").exists()


def note_ends(folder: Path, is_over: threading.Event) -> None:
    """Record when a rank has ended without an error of its own, then end the stopped rank."""
    while not is_over.wait(0.1) and not all(is_known(folder, rank) for rank in OTHERS):
        continue
    for rank in OTHERS:
        if not (folder / f"rank{rank}").exists() and has_ended(folder, rank):
            ended = {"at": time.monotonic(), "text": ""}
            (folder / f"rank{rank}").write_text(json.dumps(ended))
    with suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int((folder / f"pid{ODD}").read_text()), signal.SIGKILL)


def outcome(variant: str, kind: str, phase: str, backend: str, limit_s: float) -> str:
    """Seconds until the last of the other ranks raised or ended, and whether all named the rank."""
    with tempfile.TemporaryDirectory() as name:
        folder, is_over = Path(name), threading.Event()
        notes = threading.Thread(target=note_ends, args=(folder, is_over))
        notes.start()
        waits_s, waiting = 3 * limit_s, []
        with RankPool(NUM_RANKS, backend, timeout_s=waits_s) as ranks:
            try:
                ranks.run(take_steps, variant, kind, phase, name, limit_s, expect_failure=True)
            except RanksFailed as failed:
                waiting = [
                    r for r in OTHERS if r in failed.silent and not failed.silent[r].exit_code
                ]
        is_over.set()
        notes.join()
        if waiting:
            return f"no error in {waits_s:g} s"
        said = [folder / f"rank{rank}" for rank in OTHERS]
        if not all(path.exists() for path in said):
            return "no error"
        found = [json.loads(path.read_text()) for path in said]
        seconds = max(each["at"] for each in found) - float((folder / "fault").read_text())
    if not all(each["text"] for each in found):
        return f"{seconds:.1f} s, ended by torch"
    is_named = all(f"rank {ODD}" in each["text"] for each in found)
    return f"{seconds:.1f} s, {'named' if is_named else 'not named'}"


def compare_faults(result: Result, options: Any) -> None:
    backend, limit_s = options.backend, options.timeout
    faults = list(product(options.kinds, options.phases))
    with ThreadPoolExecutor(options.at_once) as workers:
        found = workers.map(
            lambda each: outcome(each[1], *each[0], backend, limit_s), product(faults, VARIANTS)
        )
        rows = [[f"{kind}, in {phase}", *islice(found, len(VARIANTS))] for kind, phase in faults]
    title = f"Until all other ranks raise, {backend} with a timeout of {limit_s:g} s"
    result.add(Table(title, ["rank 1 of 3", *VARIANTS], rows))


# The store


def play_watchers(port: int, ranks: range, starts: Any, ends: Any) -> None:
    store: Any = dist.TCPStore("localhost", port, is_master=False)  # type: ignore[attr-defined]
    text = json.dumps([3, 5, "forward", "model.layers.17", 1234, 0.0, "train.py:117 in main", ""])
    for rank in ranks:
        store.set(f"place/{rank}", text)
    starts.wait()
    for rank in ranks:
        store.set(f"place/{rank}", text)
        store.check(["verdict"])
    ends.wait()


def measure_store(result: Result, sizes: Sequence[int]) -> None:
    rows: list[list[Any]] = []
    for size in sizes:
        store: Any = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        starts, ends = (threading.Barrier(NUM_CLIENTS + 1) for _ in range(2))
        clients = [
            threading.Thread(
                target=play_watchers,
                args=(store.port, range(first, size, NUM_CLIENTS), starts, ends),
            )
            for first in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        starts.wait()
        before = time.monotonic()
        ends.wait()
        spent = time.monotonic() - before
        before = time.monotonic()
        places = store.multi_get([f"place/{rank}" for rank in range(size)])
        read = time.monotonic() - before
        assert all(Place(*json.loads(place)).step == 3 for place in places)
        period = watcher.period_s(size)
        rows.append([str(size), period, 2 * size, spent, 100 * spent / period, read])
        for client in clients:
            client.join()
    columns = ["ranks", "period, s", "messages", "sent in, s", "% of period", "all read in, s"]
    result.add(Table("Watchers and one store", columns, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--store", action="store_true", help="measure the store instead")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--timeout", type=float, default=20.0)
    parser.add_argument("--at-once", type=int, default=1, help="how many faults")
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    options = parser.parse_args(arguments)
    device = "cuda" if options.backend == "nccl" else "cpu"
    result = result_for("faults", arguments, device)
    if options.store:
        measure_store(result, options.sizes)
    else:
        with without_known_warnings():
            compare_faults(result, options)
    result.write(options.json)


if __name__ == "__main__":
    main()
