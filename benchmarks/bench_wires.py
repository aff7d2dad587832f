"""Wires: the loss that a model is trained to with each of them, and the speed of their kernels.

    python benchmarks/bench_wires.py losses     gloo ranks on a CPU, or NCCL ranks that share a GPU
                                                (`--device cuda`: bf16, gradients in float32); a
                                                Llama of bytes on the sources of Python's library
    python benchmarks/bench_wires.py kernels    on a GPU: encoding, decoding, and adding what four
                                                ranks have sent, beside a copy

The losses are means of the last fifth of the steps, over all ranks. Every wire starts from the same
values and sees the same data, for each seed. The ranks say that each is on a host of its own, so
that gradients may travel in four bits. Error feedback, which the library does not have, is a wire
of this program.
"""

from __future__ import annotations

import argparse
import itertools
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.comm.topology import Topology
from fullshard.testing import Rank, RankPool
from fullshard.wire import Fp8, Int4, Int8, Plain, Wire
from measuring import Result, Table, parser_for, result_for
from models import Llama, LlamaBlock

TIMEOUT_S = 3600.0


class Feedback(Wire):
    """What a wire rounds off is kept, and added to what is sent next.

    One of these is for one unit, whose buckets have different sizes. It keeps as many elements as a
    rank sends: all of the gradients of the unit, unsharded.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire, self.dtype = wire, wire.dtype
        self.kept: dict[torch.Size, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"Feedback({self.wire})"

    @property
    def alignment_numel(self) -> int:
        return self.wire.alignment_numel

    def suits(self, shape: Sequence[int]) -> bool:
        return self.wire.suits(shape)

    def message_numel(self, numel: int) -> int:
        return self.wire.message_numel(numel)

    def encode(self, segments: torch.Tensor, messages: torch.Tensor) -> None:
        wanted = segments + self.kept.get(segments.shape, 0.0)
        self.wire.encode(wanted, messages)
        arrives = torch.empty_like(wanted)
        self.wire.decode(messages, arrives)
        self.kept[segments.shape] = wanted.sub_(arrives)

    def decode(self, messages: torch.Tensor, segments: torch.Tensor) -> None:
        self.wire.decode(messages, segments)


NONE = "none"
WIRES: dict[str, dict[str, Wire]] = {
    NONE: {},
    "gradients in bf16": {"reduce_wire": Plain(torch.bfloat16)},
    "parameters in int8": {"gather_wire": Int8()},
    "both in int8": {"gather_wire": Int8(), "reduce_wire": Int8()},
    "both in int8, gradients rounded stochastically": {
        "gather_wire": Int8(),
        "reduce_wire": Int8(stochastic=True),
    },
    "both in int8, gradients with error feedback": {
        "gather_wire": Int8(),
        "reduce_wire": Feedback(Int8()),
    },
    "both in fp8": {"gather_wire": Fp8(), "reduce_wire": Fp8()},
    "parameters in int8, gradients in int4": {"gather_wire": Int8(), "reduce_wire": Int4()},
    "parameters in int8, gradients in int4, rounded stochastically": {
        "gather_wire": Int8(),
        "reduce_wire": Int4(stochastic=True),
    },
    "parameters in int8, gradients in int4, with error feedback": {
        "gather_wire": Int8(),
        "reduce_wire": Feedback(Int4()),
    },
}
LENGTH, BATCH = 128, 8


def bytes_of_library() -> torch.Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def trained(
    rank: Rank,
    name: str,
    seed: int,
    num_steps: int,
    num_blocks: int,
    width: int,
    learning_rate: float,
) -> float:
    group = dist.new_group()
    with patch("fullshard.comm.topology.machine_id", lambda: str(rank.rank)):
        assert Topology.of(group).num_hosts == rank.size
    mesh = DeviceMesh.from_group(group, rank.device.type, mesh_dim_names=(f"{name}, {seed}",))
    torch.manual_seed(seed)
    model: Any = Llama(num_blocks, width, 257).to(rank.device)
    is_cuda = rank.device.type == "cuda"
    dtypes = (torch.bfloat16, torch.float32) if is_cuda else ()
    blocks = [module for module in model.modules() if isinstance(module, LlamaBlock)]
    for module in (*blocks, model):
        wires = deepcopy(WIRES[name])  # feedback is that of one unit
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(*dtypes, **wires))
    settings: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": is_cuda}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    generator = torch.Generator().manual_seed(1000 * seed + rank.rank)
    data, losses = bytes_of_library(), []
    for step in range(num_steps):
        for group in optimizer.param_groups:
            sinking = 1 - 0.9 * step / num_steps
            group["lr"] = learning_rate * min(1, (step + 1) / 20) * sinking
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
        batch = torch.stack([data[start : start + LENGTH + 1] for start in starts])
        loss = model(batch.to(rank.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    last = torch.stack(losses[-num_steps // 5 :]).mean()
    dist.all_reduce(last)
    return float(last) / rank.size


def run_losses(options: argparse.Namespace, result: Result) -> None:
    lesson = options.steps, options.blocks, options.width, options.learning_rate
    names = list(dict.fromkeys([NONE, *(options.only or WIRES)]))
    backend = "nccl" if options.device == "cuda" else "gloo"

    def loss_of(run: tuple[int, str]) -> float:
        seed, name = run
        with RankPool(options.ranks, backend, timeout_s=TIMEOUT_S) as ranks:
            loss: float = ranks.run(trained, name, seed, *lesson)[0]
        print(f"seed {seed}, {name}: {loss:.4f}", flush=True)
        return loss

    runs = list(itertools.product(range(options.seeds), names))
    with ThreadPoolExecutor(options.at_once) as threads:
        losses_of = dict(zip(runs, threads.map(loss_of, runs), strict=True))
    found = {name: [losses_of[seed, name] for seed in range(options.seeds)] for name in names}
    rows: list[list[Any]] = []
    for name, losses in found.items():
        mean = sum(losses) / len(losses)
        apart = [100 * (a / b - 1) for a, b in zip(losses, found[NONE], strict=True)]
        rows.append([name, mean, min(losses), max(losses), max(apart, key=abs)])
    num = sum(param.numel() for param in Llama(options.blocks, options.width, 257).parameters())
    title = f"{num / 1e6:.2g} million parameters, {options.steps} steps on {options.ranks} ranks"
    title += f", {options.seeds} seeds: loss"
    columns = ["wire", "mean", "least", "most", "largest difference of a seed, %"]
    result.add(Table(title, columns, rows))


def milliseconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[2:])


def run_kernels(options: argparse.Namespace, result: Result) -> None:
    numel = 1 << 26
    rows = [row for dtype in (torch.float32, torch.bfloat16) for row in kernel_rows(numel, dtype)]
    title = f"{numel >> 20} Mi elements of four ranks, milliseconds"
    result.add(Table(title, ["", "encode", "decode", "add"], rows))


def kernel_rows(numel: int, dtype: torch.dtype) -> list[list[Any]]:
    segments = torch.randn(4, numel // 4, device="cuda").to(dtype)
    total, other = torch.empty(numel // 4, device="cuda"), torch.empty_like(segments)
    copy = milliseconds(lambda: other.copy_(segments))
    rows: list[list[Any]] = [[f"copy, {dtype}", copy, copy, None]]
    wires: list[Wire] = [Int8(), Int8(stochastic=True), Fp8(), Int4()]
    for wire in wires:
        shape = 4, wire.message_numel(numel // 4)
        messages = segments.new_empty(shape, dtype=wire.dtype)
        runs: list[Callable[[], object]] = [
            partial(wire.encode, segments, messages),
            partial(wire.decode, messages, segments),
            partial(wire.add_up, messages.unbind(), total),
        ]
        rows.append([f"{wire}, {dtype}", *map(milliseconds, runs)])
    return rows


MODES = {"losses": run_losses, "kernels": run_kernels}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="for losses")
    parser.add_argument("--at-once", type=int, default=1, help="runs that train at the same time")
    parser.add_argument("--only", action="append", choices=WIRES, help="wires beside none")
    options = parser.parse_args(arguments)
    device = "cuda" if options.mode == "kernels" else options.device
    result = result_for("wires", arguments, device)
    MODES[options.mode](options, result)
    result.write(options.json)


if __name__ == "__main__":
    main()
