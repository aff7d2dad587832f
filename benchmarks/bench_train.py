"""The loop of `fullshard train` beside a plain loop of 20 lines with torch's `fully_shard`.

Each variant trains the same built-in model on random tokens, in a process of its own, as one rank.

    python benchmarks/bench_train.py --model 1b --batch 4 --sequence 2048
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

from fullshard_train.config import (
    ModelSection,
    OptimizerSection,
    RunSection,
    ShardingSection,
    TrainConfig,
)
from fullshard_train.control import StopRequest
from fullshard_train.display import Display
from fullshard_train.models.float8 import PRECISIONS, use_float8
from fullshard_train.models.transformer import BuiltinArchitecture, Size, Transformer, size_named
from fullshard_train.optimizer import build_optimizer
from fullshard_train.output import RunFolder
from fullshard_train.sharding import build_sharded_model
from fullshard_train.trainer import Parts, Trainer
from fullshard_train.world import World
from measuring import Table, parser_for, result_for

PLAIN = "plain loop"
BLOCKS = "plain loop, compiled blocks"
BOTH = "plain loop, compiled blocks and loss"
OURS = "fullshard train"
COMPILED = "fullshard train --compile"
VARIANTS = (PLAIN, BLOCKS, BOTH, OURS, COMPILED)
VOCABULARY_SEED, WARMUP_STEPS = 0, 10


class RandomBatches:
    """What a trainer takes batches from."""

    def __init__(self, vocabulary: int, batch: int, sequence: int) -> None:
        self.num_epochs = 0  # it says nothing of tokens that come again
        generator = torch.Generator().manual_seed(VOCABULARY_SEED)
        self._tokens = torch.randint(0, vocabulary, (batch, sequence + 1), generator=generator)

    def next(self) -> list[Tensor]:
        return [self._tokens[:, :-1].contiguous(), self._tokens[:, 1:].contiguous()]


class Lines:
    """Keeps the metrics of steps."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []

    def add(self, metrics: Any) -> None:
        self.metrics.append(metrics)


def size_of(args: argparse.Namespace) -> Size:
    size = size_named(args.model)
    return replace(size, num_blocks=args.blocks or size.num_blocks)


def train_ours(args: argparse.Namespace, world: World) -> tuple[list[float], list[float]]:
    """Run the trainer of `fullshard train`; return the times and the losses of its steps."""
    config = TrainConfig(
        model=ModelSection(name=args.model, sequence=args.sequence),
        sharding=ShardingSection(compile=args.variant == COMPILED, precision=args.precision),
        optimizer=OptimizerSection(batch=args.batch, steps=args.steps),
        run=RunSection(report=False, capture=args.capture, device=world.device.type),
    )
    architecture = BuiltinArchitecture(size_of(args))
    model = build_sharded_model(architecture, config.sharding, world)
    architecture.fill(model, 0)
    optimizer = build_optimizer(model, config.optimizer, world.device)
    batches: Any = RandomBatches(architecture.vocabulary, args.batch, args.sequence)
    lines: Any = Lines()
    with tempfile.TemporaryDirectory() as folder, StopRequest() as stop:
        parts = Parts(architecture, model, optimizer, batches)
        trainer = Trainer(config, world, parts, RunFolder(Path(folder)), {})
        trainer.run(lines, Display(args.steps, 0, is_shown=False), stop)
    return [each.step_s for each in lines.metrics], [each.loss for each in lines.metrics]


def train_plainly(args: argparse.Namespace, world: World) -> tuple[list[float], list[float]]:
    """A plain loop; returns the times and the losses of its steps."""
    with world.device:
        model = Transformer(size_of(args))
    model.apply(
        lambda each: [nn.init.normal_(p, std=0.02) for p in each.parameters(False)] and None
    )
    policy = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options: Any = {"mesh": init_device_mesh(world.device.type, (1,)), "mp_policy": policy}
    for block in model.model.layers:
        if args.precision in PRECISIONS:
            use_float8(block, (nn.Module,), args.precision, world.device, gathers=False)
        if args.variant != PLAIN:
            block.compile()
        torch_fsdp.fully_shard(block, **options)
    torch_fsdp.fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    loss_fn = torch.compile(loss_of) if args.variant == BOTH else loss_of
    batches = RandomBatches(size_named(args.model).vocabulary, args.batch, args.sequence)
    times, losses = [], []
    for _ in range(args.steps):
        begun_s = time.perf_counter()
        tokens, targets = (each.to(world.device) for each in batches.next())
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - begun_s)
    return times, losses


def run_variant(args: argparse.Namespace) -> None:
    """Train one variant in this process, and print what it took."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = f"file://{folder}/store"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        train = train_plainly if args.variant in (PLAIN, BLOCKS, BOTH) else train_ours
        times, losses = train(args, World(0, 1, 0, 1, device))
        dist.destroy_process_group()
    is_cuda = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if is_cuda else 0
    step_s = statistics.median(times[min(WARMUP_STEPS, len(times) // 2) :])
    print(json.dumps({"step_s": step_s, "peak_bytes": peak, "losses": losses}))


def measured(variants: Sequence[str], options: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for variant in variants:
        command = [sys.executable, __file__, "--variant", variant, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        found = done.stdout.strip().splitlines()
        yield variant, json.loads(found[-1]) if done.returncode == 0 and found else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", default="1b")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=0, help="instead of the size's own number")
    parser.add_argument("--precision", default="auto", help="fp8 with torchao, also in plain loops")
    parser.add_argument("--capture", default="auto")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.variant is not None:
        run_variant(args)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = result_for("train", arguments, device)
    options = [
        word
        for name in ("model", "sequence", "batch", "steps", "blocks", "precision", "capture")
        for word in (f"--{name}", str(getattr(args, name)))
    ]
    rows, tokens = [], args.batch * args.sequence
    for variant, found in measured(args.variants, options):
        result.details[variant] = found
        rates = (None, None) if found is None else (tokens / found["step_s"], found["peak_bytes"])
        rows.append([variant, rates[0], None if rates[1] is None else rates[1] / 2**30])
        print(*rows[-1], flush=True)
    title = f"{args.model}, batch {args.batch} x {args.sequence}, {args.precision}, one rank"
    result.add(Table(title, ["loop", "tokens/s", "peak memory, GiB"], rows))
    result.write(args.json)


if __name__ == "__main__":
    main()
