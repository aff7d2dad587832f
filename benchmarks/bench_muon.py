"""Muon: what its step takes, over its matrix products alone, over AdamW, and over torch's.

    python benchmarks/bench_muon.py products   Newton-Schulz by shape: one by one and in batches,
                                               and the rate of a bf16 product of 4096
    python benchmarks/bench_muon.py billion    1 B parameters on one rank: the optimizer's time over
                                               that of its products at that rate, and what it does
    python benchmarks/bench_muon.py simulated  the first of 8 ranks, collectives that cost nothing:
                                               the optimizer's share of a step of 8,192 tokens
    python benchmarks/bench_muon.py train      150m as `fullshard train` has it, on one rank: a step
                                               with Muon over one with AdamW, eager and captured
    python benchmarks/bench_muon.py ranks      2 and 4 ranks that share the GPU: bytes that Muon
                                               adds, and a step over torch's `fully_shard` with
                                               `torch.optim.Muon`
    python benchmarks/bench_muon.py parity     500 steps of 30m on 1, 2 and 4 ranks, rows and flat,
                                               against torch's Muon unsharded

Variants are interleaved, and times are medians. The last column or line of each table says what is
asked for. `--device cpu --tiny` goes through the same code with gloo and a tiny model.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

import fullshard
from fullshard.optim import Muon
from fullshard.optim.newton_schulz import cost, orthogonalize_
from fullshard.optim.selection import select
from fullshard.testing import Rank, pool, quiet_world
from measuring import (
    Result,
    Table,
    interleaved,
    medians,
    parser_for,
    result_for,
    synchronize,
    undisturbed,
    without_known_warnings,
)
from models import Llama, LlamaBlock, tokens_for
from variants import OURS, TORCH_FSDP2, UNSHARDED, Sharding, shard
from worlds import device_of, one_rank

TIMEOUT_S = 540.0
ADAMW, MUON, FOREACH_NONE = "AdamW", "Muon", "torch.optim.Muon"


@dataclass(frozen=True)
class Shape:
    """A model like Llama, and its batch."""

    num_blocks: int
    width: int
    vocabulary: int
    batch: int
    length: int
    num_steps: int = 12
    num_warm: int = 4

    def build(self) -> nn.Module:
        return Llama(self.num_blocks, self.width, self.vocabulary)


BILLION = Shape(20, 2048, 32_000, batch=4, length=2048)
SMALL = Shape(20, 768, 32_000, batch=8, length=1024)  # 150m
TRAINED = Shape(10, 512, 257, batch=2, length=128, num_steps=500)  # 30m
TINY = Shape(2, 32, 64, batch=1, length=8, num_steps=2, num_warm=1)


def muon_for(model: nn.Module, lr: float = 1e-3) -> Muon:
    return Muon.of(model, lr)


def adamw_for(model: nn.Module, lr: float = 1e-3) -> Optimizer:
    return fullshard.by_unit(torch.optim.AdamW(model.parameters(), lr=lr, fused=True))


class Both:
    """torch's Muon and its fused AdamW, one after the other, over the same parameters as ours."""

    def __init__(self, model: nn.Module, lr: float = 1e-3) -> None:
        found = select(model)
        muon = torch.optim.Muon(found.matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
        groups = [
            {"params": found.decayed, "weight_decay": 0.1},
            {"params": found.undecayed, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
        self.each = (muon, adamw)

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad()


class Step:
    """A training step on the same tokens; times in seconds, on CUDA those of the device."""

    def __init__(
        self, variant: str, optimizer: Callable[[nn.Module], Any], shape: Shape, rank: Rank
    ) -> None:
        torch.manual_seed(0)
        with rank.device:
            model = shape.build()
        precision = torch.float32 if rank.device.type == "cpu" else torch.bfloat16
        how = Sharding(LlamaBlock, rank.mesh(), rank.device, precision)
        self.model = shard(variant, model, how)
        self.optimizer = optimizer(self.model)
        self.device = rank.device
        self.tokens = tokens_for(
            shape.batch, shape.length + 1, shape.vocabulary, rank.device, rank.rank
        )
        self.loss: Tensor | None = None

    def compute(self) -> None:
        loss = self.model(self.tokens)
        loss.backward()
        self.loss = loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens)
        loss.backward()
        self.update()
        return loss.detach()

    def __call__(self) -> dict[str, float]:
        return timed(self.device, {"compute": self.compute, "optimizer": self.update})

    def losses(self, num_steps: int) -> list[float]:
        found = []
        for _ in range(num_steps):
            self()
            assert self.loss is not None
            found.append(float(self.loss))
        return found


def timed(device: torch.device, parts: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Run parts one after another; the seconds of each, of all (`step`), and of the host."""
    is_cuda = device.type == "cuda"
    synchronize(device)
    start, marks, hosts = time.perf_counter(), [], []
    num_events = (len(parts) + 1) * is_cuda
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_events)]
    if is_cuda:
        events[0].record()
    for number, run in enumerate(parts.values()):
        before = time.perf_counter()
        run()
        hosts.append(time.perf_counter() - before)
        marks.append(time.perf_counter())
        if is_cuda:
            events[number + 1].record()
    synchronize(device)
    if is_cuda:
        spent = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    else:
        spent = [end - begin for begin, end in pairwise([start, *marks])]
    found = dict(zip(parts, spent, strict=True))
    found |= {f"{name}, host": host for name, host in zip(parts, hosts, strict=True)}
    return found | {"step": sum(spent)}


# What products take


def repeated(run: Callable[[], object], device: torch.device, number: int = 10) -> float:
    """The median time of a run, in seconds, when several follow each other."""
    run()

    def several() -> None:
        for _ in range(number):
            run()

    times = [timed(device, {"all": several})["all"] / number for _ in range(5)]
    return sorted(times)[len(times) // 2]


def product_rate(device: torch.device, size: int = 4096) -> float:
    """The FLOP/s of a bf16 product of square matrices."""
    size = size if device.type == "cuda" else 128
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / repeated(lambda: a @ b, device)


def matrix_shapes(model: nn.Module) -> Counter[tuple[int, int]]:
    return Counter(tuple(param.shape) for param in select(model).matrices)  # type: ignore[misc]


def run_products(options: argparse.Namespace, result: Result) -> None:
    device, rows = options.device, []
    rate = product_rate(device)
    shapes: Counter[tuple[int, int]] = Counter()
    with torch.device("meta"):
        for shape in [TINY] if options.tiny else [SMALL, BILLION]:
            shapes += matrix_shapes(shape.build())
    for (tall, wide), total in sorted(shapes.items()):
        number = min(total, max(1, (32 << 20) // (tall * wide)))
        ideal = number * 2 * cost(tall, wide, 5) / rate
        matrices = torch.randn(number, tall, wide, device=device).bfloat16()
        spent = {}
        for name, batches in (("one by one", matrices.split(1)), ("batch", [matrices])):

            def run(batches: Sequence[Tensor] = batches) -> None:
                for batch in batches:
                    orthogonalize_(batch, (3.4445, -4.7750, 2.0315), 5, 1e-7)

            spent[name] = repeated(run, device)
        row = [f"{number} of {tall} x {wide}", ideal * 1e3]
        row += [spent["one by one"] * 1e3, spent["batch"] * 1e3]
        rows.append([*row, spent["one by one"] / ideal, spent["batch"] / ideal])
    columns = ["matrices", "products at that rate", "one by one", "batch", "ratio", "batch ratio"]
    title = f"Newton-Schulz, milliseconds; a bf16 product of 4096 runs at {rate / 1e12:.0f} TFLOP/s"
    result.add(Table(title, columns, rows))


# One rank


def profiled(run: Callable[[], object], device: torch.device, what: str) -> Table:
    """What the device does during a run, by kind of kernel."""
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda
    with profile(activities=activities) as profiler:
        run()
        synchronize(device)
    spent: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for event in profiler.key_averages():
        took = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        if took and not (is_cuda and event.self_cpu_time_total):
            spent[kind_of(event.key)] += took
            number[kind_of(event.key)] += event.count
    total = sum(spent.values()) or 1
    rows: list[list[Any]] = [
        [kind, time_us / 1e3, 100 * time_us / total, number[kind]]
        for kind, time_us in spent.most_common(12)
    ]
    return Table(f"{what}: milliseconds by kernel", ["kernel", "time", "%", "number"], rows)


_KINDS = {
    "nccl": "collectives",
    "gemm": "matrix products",
    "cutlass": "matrix products",
    "nvjet": "matrix products",
    "bmm": "matrix products",
    "lerp": "momentum (lerp)",
    "adam": "AdamW",
    "copy": "copies and casts",
    "memcpy": "copies and casts",
    "multi_tensor_apply": "foreach, other",
    "reduce": "norms",
}


def kind_of(kernel: str) -> str:
    found = next((kind for part, kind in _KINDS.items() if part in kernel.lower()), None)
    return found or kernel[:60]


def optimizer_row(name: str, spent: dict[str, float], ideal: float | None) -> list[Any]:
    row: list[Any] = [name, spent["step"] * 1e3, spent["optimizer"] * 1e3]
    row += [spent["optimizer, host"] * 1e3, 100 * spent["optimizer"] / spent["step"]]
    return [*row, None if ideal is None else spent["optimizer"] / ideal]


COLUMNS = ["variant", "step", "optimizer", "optimizer, host", "% of step", "/ its products"]


def ideal_seconds(model: nn.Module, rate: float) -> float:
    shapes = matrix_shapes(model)
    return sum(2 * cost(*shape, 5) * number for shape, number in shapes.items()) / rate


def run_billion(options: argparse.Namespace, result: Result) -> None:
    shape = options.shape or BILLION
    with one_rank(options.device) as rank, undisturbed():
        rate = product_rate(rank.device)
        with torch.device("meta"):
            ideal = ideal_seconds(shape.build(), rate)
        made = {
            f"{OURS}, {name}": Step(OURS, make, shape, rank)
            for name, make in ((ADAMW, adamw_for), (MUON, muon_for))
        }
        found = interleaved(made, shape.num_steps, shape.num_warm)
        times = {name: medians(samples) for name, samples in found.items()}
        matrices_alone = _matrices_alone(made[f"{OURS}, {MUON}"], shape.num_steps)
        rows = [optimizer_row(n, t, ideal if MUON in n else None) for n, t in times.items()]
        spent_ms = matrices_alone * 1e3
        row = ["of that its matrices alone", None, spent_ms, None, None]
        rows.append([*row, matrices_alone / ideal])
        rows.append(["asked: the optimizer over its products", None, ideal * 1e3, None, None, 1.35])
        title = f"1 B parameters, one rank, {rate / 1e12:.0f} TFLOP/s: milliseconds"
        result.add(Table(title, COLUMNS, rows))
        step = made[f"{OURS}, {MUON}"]
        step.compute()
        result.add(profiled(step.update, rank.device, "The optimizer's step"))


def _matrices_alone(step: Step, number: int) -> float:
    """The time of a step of Muon whose AdamW has no gradients."""
    optimizer: Muon = step.optimizer
    times = []
    for _ in range(number):
        step.compute()
        for group in optimizer.param_groups:
            for param in group["params"] if "betas" in group else ():
                param.grad = None
        times.append(timed(step.device, {"all": step.update})["all"])
    return sorted(times)[len(times) // 2]


def run_simulated(options: argparse.Namespace, result: Result) -> None:
    shape = options.shape or BILLION
    for world in options.worlds:
        with quiet_world(world, device=options.device) as rank, undisturbed():
            rate = product_rate(rank.device)
            with torch.device("meta"):
                ideal = ideal_seconds(shape.build(), rate) / world
            made = {name: Step(OURS, make, shape, rank) for name, make in both()}
            found = interleaved(made, shape.num_steps, shape.num_warm)
            times = {name: medians(samples) for name, samples in found.items()}
            rows = [optimizer_row(n, t, ideal if n == MUON else None) for n, t in times.items()]
            rows.append(["asked: at most, % of step", None, None, None, 8, None])
            tokens = shape.batch * shape.length
            title = f"1 B parameters, simulated world of {world}, {tokens} tokens: milliseconds"
            result.add(Table(title, COLUMNS, rows))
            made[MUON].compute()
            result.add(profiled(made[MUON].update, rank.device, "The optimizer's step"))


def both() -> tuple[tuple[str, Callable[[nn.Module], Any]], ...]:
    return (ADAMW, adamw_for), (MUON, muon_for)


def run_train(options: argparse.Namespace, result: Result) -> None:
    """`fullshard train` without its input and output: its model, sharding, optimizer, clipping."""
    from fullshard_train.config import TrainConfig
    from fullshard_train.models.transformer import SIZES, BuiltinArchitecture
    from fullshard_train.optimizer import build_optimizer
    from fullshard_train.sharding import build_sharded_model
    from fullshard_train.world import World

    config, rows = TrainConfig(), []
    size = SIZES["tiny" if options.tiny else "150m"]
    batch, length = (1, 8) if options.tiny else (options.batch or 8, 1024)
    with one_rank(options.device) as rank, undisturbed():
        made: dict[str, Callable[[], dict[str, float]]] = {}
        is_cuda = rank.device.type == "cuda"
        for name in ("adamw", "muon"):
            section = replace(config.sharding, precision="bf16" if is_cuda else "float32")
            architecture = BuiltinArchitecture(size)
            torch.manual_seed(0)
            model = build_sharded_model(architecture, section, World(0, 1, 0, 1, rank.device))
            architecture.fill(model, 0)
            optimizer = build_optimizer(model, replace(config.optimizer, name=name), rank.device)
            tokens = tokens_for(batch, length + 1, size.vocabulary, rank.device)
            eager = TrainStep(model, architecture, optimizer, is_cuda)
            made[name] = lambda e=eager, t=tokens: timed(rank.device, {"optimizer": lambda: e(t)})
            if is_cuda:
                graph = fullshard.capture(eager, fallback=True)
                made[f"{name}, CUDA graph"] = lambda g=graph, t=tokens: timed(
                    rank.device, {"optimizer": lambda: g(t)}
                )
        steps = (2, 1) if options.tiny else (30, 8)
        found = interleaved(made, *steps)
        times = {name: medians(samples)["step"] for name, samples in found.items()}
    for name, spent in times.items():
        base = "adamw, CUDA graph" if "CUDA graph" in name else "adamw"
        rows.append([name, spent * 1e3, batch * length / spent, spent / times[base]])
    rows.append(["asked: Muon over AdamW", None, None, 1.12])
    title = f"150m on one rank, {batch} x {length} tokens: milliseconds"
    result.add(Table(title, ["variant", "step", "tokens/s", "ratio"], rows))


class TrainStep:
    """The update of `fullshard train`: forward, backward, clipping, and a step if all is finite."""

    def __init__(self, model: nn.Module, architecture: Any, optimizer: Any, is_cuda: bool) -> None:
        self.model, self.architecture, self.optimizer = model, architecture, optimizer
        for group in optimizer.param_groups if is_cuda else ():
            group["lr"] = torch.tensor(group["lr"], device="cuda")
            if "capturable" in group:
                group["capturable"] = True

    def __call__(self, tokens: Tensor) -> Tensor:
        targets = tokens[:, 1:].contiguous()
        loss = self.architecture.loss(self.model, tokens[:, :-1], targets) / targets.numel()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        norm = norm.to_local() if hasattr(norm, "to_local") else norm
        self.optimizer.found_inf = 1 - norm.isfinite().float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


# Ranks


@contextmanager
def counted_bytes() -> Iterator[Counter[str]]:
    """Count what this rank sends to others in all-to-alls, and in everything that torch issues."""
    from fullshard.comm.collectives import Collectives, ShmCollectives

    sent: Counter[str] = Counter()
    originals = {kind: kind.all_to_all for kind in (Collectives, ShmCollectives)}

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def all_to_all(self: Any, out: Any, inp: Any, outs: Any, ins: Any, group: Any) -> Any:
            others = [n for rank, n in enumerate(ins) if rank != group.rank()]
            sent["all-to-all"] += sum(others) * inp.itemsize
            return original(self, out, inp, outs, ins, group)

        return all_to_all

    for kind, original in originals.items():
        kind.all_to_all = counting(original)  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        for kind, original in originals.items():
            kind.all_to_all = original  # type: ignore[method-assign]


def on_torchs_shards(model: nn.Module) -> Any:
    return Both(model)


def measure_on_ranks(rank: Rank, *fields: int) -> dict[str, Any]:
    shape = Shape(*fields)
    with undisturbed():
        made = {f"{OURS}, {MUON}": Step(OURS, muon_for, shape, rank)}
        made[f"{OURS}, {ADAMW}"] = Step(OURS, adamw_for, shape, rank)
        error = ""
        try:
            theirs = Step(TORCH_FSDP2, on_torchs_shards, shape, rank)
            theirs()
            made[f"{TORCH_FSDP2}, {FOREACH_NONE}"] = theirs
        except Exception as raised:  # alike on all ranks: it does not run on these DTensors
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        found = interleaved(made, shape.num_steps, shape.num_warm)
        with counted_bytes() as sent:
            made[f"{OURS}, {MUON}"]()
        model = made[f"{OURS}, {MUON}"].model
        momentum = sum(param.numel() for param in select(model).matrices) // rank.size * 2
    return {
        "times": {name: medians(samples) for name, samples in found.items()},
        "sent": sent["all-to-all"],
        "asked": 2 * momentum * (rank.size - 1) / rank.size,
        "error": error,
    }


def run_ranks(options: argparse.Namespace, result: Result) -> None:
    backend = "nccl" if options.device.type == "cuda" else "gloo"
    for number in options.ranks:
        ranks = pool(number, backend)
        shape = options.shape or replace(BILLION, num_blocks=10, batch=1, num_steps=5)
        found = ranks.run(measure_on_ranks, *astuple(shape), timeout_s=TIMEOUT_S)
        if backend == "nccl":
            ranks.close()
        times = found[0]["times"]
        theirs = times.get(f"{TORCH_FSDP2}, {FOREACH_NONE}")
        rows = [
            [*optimizer_row(n, t, None)[:-1], t["step"] / theirs["step"] if theirs else None]
            for n, t in times.items()
        ]
        rows.append([f"asked: {OURS}, {MUON}", None, None, None, None, 0.6])
        columns = [*COLUMNS[:-1], "/ torch's"]
        result.add(Table(f"{number} ranks on one device: milliseconds", columns, rows))
        if found[0]["error"]:
            print(f"torch.optim.Muon on torch's shards does not run: {found[0]['error']}")
        bytes_rows = [
            [
                f"rank {rank}",
                each["sent"] / 2**20,
                each["asked"] / 2**20,
                each["sent"] / each["asked"],
            ]
            for rank, each in enumerate(found)
        ]
        title = f"{number} ranks: MiB that Muon sends to others in a step"
        result.add(Table(title, ["", "sent", "momentum in bf16, twice", "ratio"], bytes_rows))


def train_long(rank: Rank, form: str, *fields: int) -> list[float]:
    """The losses of many steps; all ranks have the same batches."""
    shape = Shape(*fields)
    torch.manual_seed(0)
    with rank.device:
        model = shape.build()
    if form == UNSHARDED:
        optimizer: Any = Both(model)
    else:
        how = Sharding(LlamaBlock, rank.mesh(), rank.device)
        model = shard(form, model, how)
        optimizer = muon_for(model)
    losses = []
    for step in range(shape.num_steps):
        tokens = tokens_for(shape.batch, shape.length + 1, shape.vocabulary, rank.device, step % 32)
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def run_parity(options: argparse.Namespace, result: Result) -> None:
    from variants import WRAPPER

    backend = "nccl" if options.device.type == "cuda" else "gloo"
    shape = options.shape or TRAINED
    shape = replace(shape, num_steps=options.steps or shape.num_steps)
    rows: list[list[Any]] = []
    wanted: list[float] = []
    for number in (1, *options.ranks):
        ranks = pool(number, backend)
        for form in (*[UNSHARDED] * (number == 1), OURS, WRAPPER):
            losses = ranks.run(train_long, form, *astuple(shape), timeout_s=TIMEOUT_S)[0]
            wanted = wanted or losses
            last = sum(losses[-10:]) / len(losses[-10:])
            apart = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
            rows.append([f"{form}, {number} ranks", losses[0], last, 100 * apart])
        if backend == "nccl":
            ranks.close()
    columns = ["variant", "first loss", "mean of the last 10", "largest difference, %"]
    title = f"{shape.num_steps} steps of {shape.num_blocks} blocks of width {shape.width}"
    result.add(Table(title, columns, rows))


MODES: dict[str, Callable[[argparse.Namespace, Result], None]] = {
    "products": run_products,
    "billion": run_billion,
    "simulated": run_simulated,
    "train": run_train,
    "ranks": run_ranks,
    "parity": run_parity,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("modes", nargs="*", choices=[*MODES, []], help="all if none is given")
    parser.add_argument("--device", type=device_of, default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the program")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8], help="of `simulated`")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batch", type=int, help="sequences of `train`")
    parser.add_argument("--steps", type=int, help="of `parity`")
    options = parser.parse_args(arguments)
    options.shape = TINY if options.tiny else None
    with without_known_warnings():
        result = result_for("muon", arguments, options.device)
        print(result.machine, flush=True)
        for mode in options.modes or MODES:
            MODES[mode](options, result)
            if dist.is_initialized():
                dist.destroy_process_group()
        result.write(options.json)


if __name__ == "__main__":
    main()
