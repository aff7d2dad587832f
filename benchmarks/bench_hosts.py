"""Steps of ranks on several hosts: time, and what each host sends, beside torch's `fully_shard`.

Hosts are network namespaces of this machine, with links of a given rate (tests/support/hosts.py),
which needs root, `ip` and `tc`. Bytes are those that the interface of the first host counts, in
units of all float32 parameters.

    python benchmarks/bench_hosts.py [--hosts 2] [--ranks 2] [--rates 100mbit 1gbit] [--blocks 12]

`hybrid` shards inside a host and replicates over hosts. All ranks have the same batch, so that all
variants must have the same losses before any time is printed.

With `--backend nccl` all ranks share one GPU, and compute in bf16 with gradients in float32:

    python benchmarks/bench_hosts.py --backend nccl --ranks 1 --rates 1gbit 10gbit --blocks 21
        --width 1024 --length 256 --variants 'torch fully_shard' ...
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

from measuring import (
    Cell,
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
from models import GPT, GPTBlock, GPTSize, num_parameters, tokens_for
from variants import BASE, BF16_WIRE, OURS, TORCH_FSDP2, WIRES, WRAPPER, Sharding, shard

HYBRID = ", hybrid"
VARIANTS = [TORCH_FSDP2, OURS, WRAPPER, BF16_WIRE]
VARIANTS += [each + HYBRID for each in (TORCH_FSDP2, OURS, BF16_WIRE)]
ALL = [*VARIANTS, *(each + more for each in WIRES for more in ("", HYBRID) if each != BF16_WIRE)]
WARM_STEPS = 2
LEARNING_RATE = 0.01
TIMEOUT_S = 1500.0
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


# On each rank


class Step:
    """One training step of a variant: its seconds, and the bytes that this host sent."""

    def __init__(self, variant: str, numbers: dict[str, Any], mesh: DeviceMesh) -> None:
        device = torch.device(mesh.device_type)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = GPTSize(numbers["blocks"], numbers["width"], numbers["vocabulary"])
        torch.manual_seed(0)
        with device:
            model = GPT(size)
        self.num_bytes = 4 * num_parameters(model)
        self._tokens = tokens_for(numbers["batch"], numbers["length"], size.vocabulary, device)
        how = Sharding(GPTBlock, mesh, device, dtype)
        self._model = shard(variant.removesuffix(HYBRID), model, how)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        self.loss = 0.0

    def __call__(self) -> dict[str, float]:
        self._wait()
        sent, start = int(_SENT.read_text()), time.perf_counter()
        loss = self._model(self._tokens)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._wait()
        spent = time.perf_counter() - start
        self.loss = float(loss)
        return {"seconds": spent, "bytes": int(_SENT.read_text()) - sent}

    def _wait(self) -> None:
        """Wait for this device, and for the others."""
        synchronize(self._tokens.device)
        dist.barrier()
        synchronize(self._tokens.device)

    def losses(self) -> list[float]:
        found = []
        for _ in range(WARM_STEPS):
            self()
            found.append(self.loss)
        return found


def measure(numbers: dict[str, Any]) -> None:
    backend, kind = numbers["backend"], "cpu"
    if backend == "nccl":
        kind = "cuda"
        os.environ.update(NCCL_HOSTID=os.environ["RANK"], NCCL_SOCKET_IFNAME="eth0")
        torch.cuda.set_device(0)
    dist.init_process_group(backend)
    shape = numbers["hosts"], numbers["ranks"]
    flat = init_device_mesh(kind, (dist.get_world_size(),))
    hybrid = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
    steps: dict[str, Callable[[], dict[str, float]]] = {}
    losses = {}
    with without_known_warnings():
        for name in numbers["variants"]:
            step = Step(name, numbers, hybrid if name.endswith(HYBRID) else flat)
            steps[name], losses[name] = step, step.losses()
        check_losses(losses, rtol=1e-3 if kind == "cpu" else 2e-2)
        with undisturbed(num_threads=1):
            found = interleaved(steps, numbers["steps"], num_warm=0)
    if dist.get_rank() == 0:
        report = {name: medians(samples) for name, samples in found.items()}
        Path(numbers["report"]).write_text(json.dumps([step.num_bytes, report]))
    dist.destroy_process_group()


# On this machine


def measured(numbers: dict[str, Any], rate: str) -> Table:
    """Run all variants on hosts with links of a rate."""
    from tests.support.hosts import Hosts

    num_hosts, num_ranks = numbers["hosts"], numbers["ranks"]
    with tempfile.TemporaryDirectory() as folder, Hosts(num_hosts, rate) as hosts:
        report = Path(folder, "report.json")
        logs = [Path(folder, f"{host}.log") for host in range(num_hosts)]
        numbers = {**numbers, "report": str(report)}
        launch = ["-m", "torch.distributed.run", "--nnodes", num_hosts]
        launch += ["--nproc-per-node", num_ranks, "--master-addr", "host0", "--master-port", 29500]
        processes = [
            hosts.run(
                host,
                [*map(str, launch), "--node-rank", str(host), __file__],
                log=logs[host],
                env={"BENCH_HOSTS": json.dumps(numbers), "OMP_NUM_THREADS": 1},
            )
            for host in range(num_hosts)
        ]
        statuses = [process.wait(TIMEOUT_S) for process in processes]
        if any(statuses):
            raise RuntimeError("\n".join(log.read_text() for log in logs))
        whole, found = json.loads(report.read_text())
    rows: list[list[Cell]] = []
    for name, each in found.items():
        base = found[BASE + HYBRID * name.endswith(HYBRID)]
        seconds = each["seconds"]
        rows.append([name, seconds * 1e3, seconds / base["seconds"], each["bytes"] / whole])
    title = f"{num_hosts} hosts of {num_ranks} ranks, links of {rate}, {numbers['backend']}"
    return Table(title, ["variant", "ms a step", "ratio", "bytes / parameters"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"], help="as `tc` has them")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=ALL)
    options = parser.parse_args(arguments)
    result: Result = result_for("hosts", arguments)
    names = "hosts", "ranks", "blocks", "width", "steps", "length", "backend", "variants"
    numbers = {name: getattr(options, name) for name in names} | {"vocabulary": 256, "batch": 1}
    for rate in options.rates:
        result.add(measured(numbers, rate))
    result.write(options.json)


if __name__ == "__main__":
    if "BENCH_HOSTS" in os.environ:
        measure(json.loads(os.environ["BENCH_HOSTS"]))
    else:
        main()
