"""Measures the speed of collectives, copies and matmuls on real ranks, which run this module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from fullshard.comm.collectives import collectives_for
from fullshard.errors import TopologyError
from fullshard.processes import end_with_parent

SIZES_MB = (1, 16, 64)
_SPENT_S = 0.3  # on each measurement
_MIN_TIMES, _MAX_TIMES = 3, 50
_COPIED_BYTES = 64 * 10**6
_MATMUL_WIDTH = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """GB/s received by each rank in an all-gather and a reduce-scatter of `size_mb` MB."""

    size_mb: int
    gather: float
    reduce: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of the slowest rank while all ranks work: `copy` in GB/s, `matmul` in TFLOP/s."""

    num_ranks: int
    backend: str
    links: tuple[LinkSpeed, ...]
    copy: float
    matmul: float


def measure_speeds(
    num_gpus: int, *, sizes_mb: tuple[int, ...] = SIZES_MB, timeout_s: float = 120.0
) -> Speeds:
    """Measure with one rank per GPU, or two on the CPU; raise if ranks cannot connect."""
    device, num_ranks = ("cuda", num_gpus) if num_gpus else ("cpu", 2)
    if num_ranks == 1:
        sizes_mb = ()
    with tempfile.TemporaryDirectory(prefix="fullshard-") as folder:
        logs = [Path(folder) / f"log_{rank}" for rank in range(num_ranks)]
        args = [folder, str(num_ranks), device, ",".join(map(str, sizes_mb))]
        ranks = []
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as output:
                    command = [sys.executable, "-m", __name__, str(rank), *args]
                    ranks.append(subprocess.Popen(command, stdout=output, stderr=output))
            _wait(ranks, logs, time.monotonic() + timeout_s)
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        found = json.loads((Path(folder) / "speeds.json").read_text())
    links = tuple(LinkSpeed(**each) for each in found.pop("links"))
    return Speeds(links=links, **found)


def _wait(ranks: list[subprocess.Popen[bytes]], logs: list[Path], until: float) -> None:
    for rank, process in enumerate(ranks):
        try:
            status = process.wait(max(0.0, until - time.monotonic()))
            found = f"an exit with status {status}"
        except subprocess.TimeoutExpired:
            status, found = None, "it still running"
        if status != 0:
            lines = logs[rank].read_text(errors="replace").split("\n")
            said = next((line for line in reversed(lines) if line.strip()), "no output.")
            raise TopologyError(
                f"rank {rank}: the ranks must be able to talk to each other, and finish measuring "
                f"in time, found {found}: {said}"
            )


def measured(device: torch.device, sizes_mb: Sequence[int], group: dist.ProcessGroup) -> Speeds:
    """Measure on this rank, while all others do the same, and links over one of its groups."""
    links = [LinkSpeed(size, *_link(size * 10**6, device, group)) for size in sizes_mb]
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_seconds(lambda: target.copy_(source), device)
    width = _MATMUL_WIDTH[device.type]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    matmul_s = median_seconds(lambda: a @ b, device)
    return Speeds(
        num_ranks=group.size(),
        backend=dist.get_backend(),
        links=tuple(links),
        copy=_COPIED_BYTES / copy_s / 1e9,
        matmul=2 * width**3 / matmul_s / 1e12,
    )


def _link(num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> tuple[float, float]:
    """Return GB/s of all-gather and reduce-scatter, with the collectives that training uses."""
    collectives = collectives_for(group, device)
    own_numel = num_bytes // 4 // group.size()
    own = torch.zeros(own_numel, device=device)
    full = torch.zeros(own_numel * group.size(), device=device)
    arriving = own_numel * 4 * (group.size() - 1) / 1e9
    gather_s = median_seconds(lambda: collectives.all_gather([full], [own], group).wait(), device)
    reduce_s = median_seconds(
        lambda: collectives.reduce_scatter([own], [full], group, average=False).wait(), device
    )
    return arriving / gather_s, arriving / reduce_s


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time on the slowest rank; all ranks of the default group call it."""

    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(2):
        first = once()
    num_times = min(max(int(_SPENT_S / max(first, 1e-6)), _MIN_TIMES), _MAX_TIMES)
    # Collectives need the same number of calls on all ranks.
    agreed = torch.tensor(num_times, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    slowest = torch.tensor(median(once() for _ in range(int(agreed))), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _run_rank(rank: int, folder: Path, num_ranks: int, device_type: str, sizes: list[int]) -> None:
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as the launcher does
    backend = "gloo" if device_type == "cpu" else "nccl"
    where = f"file://{folder / 'store'}"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=num_ranks)
    assert dist.group.WORLD is not None
    speeds = measured(device, sizes, dist.group.WORLD)
    if rank == 0:
        (folder / "speeds.json").write_text(json.dumps(asdict(speeds)))
    dist.destroy_process_group()


if __name__ == "__main__":
    end_with_parent(os.getppid())
    _rank, _folder, _num_ranks, _device, _sizes = sys.argv[1:]
    _sizes_mb = [int(size) for size in _sizes.split(",") if size]
    _run_rank(int(_rank), Path(_folder), int(_num_ranks), _device, _sizes_mb)
