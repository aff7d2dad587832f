"""Step time on real gloo ranks: unsharded, DDP, torch's two APIs, ours, and the floor.

A byte-level GPT of 10 M and of 150 M parameters on 2 and on 4 ranks of this machine, in float32 and
in bf16 (parameters and gathers; sums in float32), trained with SGD. All ranks have the same batch,
so all variants, the unsharded model too, must have the same losses before any time is printed.

The floor is the compute of the unsharded model, the collectives that no sharding can do without, by
gloo (two gathers of the parameters and one reduce of the gradients, unit by unit), and an optimizer
step on a rank's share. A library can beat it by moving bytes in a better way than gloo, or during
compute. "over gloo" are our APIs with shared memory switched off.

    python benchmarks/bench_step.py [--ranks 2 4] [--sizes 10m 150m] [--dtypes float32 bf16]

DeepSpeed is measured where it is installed (and FairScale on CUDA, `--backend nccl`).
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fullshard.comm.collectives import Collectives
from fullshard.testing import Rank, RankPool
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
from models import GPT, GPT_SIZES, GPTBlock, num_parameters, tokens_for
from peers import DEEPSPEED, FAIRSCALE, DeepSpeedStep, fairscale_wrapped, installed
from variants import (
    BASE,
    BF16_WIRE,
    OURS,
    TORCH_FSDP1,
    TORCH_FSDP2,
    UNSHARDED,
    WRAPPER,
    Sharding,
    shard,
)

DDP = "torch DDP"
FLOOR = "floor"
OVER_GLOO = ", over gloo"
SWITCH = "FULLSHARD_SHARED_MEMORY"
LEARNING_RATE = 0.01
TIMEOUT_S = 1500.0
ALL = [UNSHARDED, FLOOR, DDP, TORCH_FSDP1, TORCH_FSDP2, OURS, WRAPPER]
ALL += [OURS + OVER_GLOO, WRAPPER + OVER_GLOO]
OF_BF16 = [BF16_WIRE, BF16_WIRE + OVER_GLOO]
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


class Variant:
    """A model and how it is stepped; `step` returns seconds."""

    def __init__(self, train: Callable[[Tensor], Tensor], tokens: Tensor) -> None:
        self._train = train
        self._tokens = tokens
        self.loss = torch.zeros(())

    def step(self) -> dict[str, float]:
        synchronize(self._tokens.device)
        start = time.perf_counter()
        self.loss = self._train(self._tokens).detach()
        synchronize(self._tokens.device)
        return {"step": time.perf_counter() - start}

    def losses(self, num_steps: int) -> list[float]:
        found = []
        for _ in range(num_steps):
            self.step()
            found.append(self.loss.item())
        return found


def stepped_by_sgd(model: nn.Module) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def train(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train


class Floor:
    """The unsharded model's compute, and what has to be moved."""

    def __init__(self, model: nn.Module, rank: Rank, dtype: torch.dtype) -> None:
        self._model = model
        blocks = [module for module in model.modules() if isinstance(module, GPTBlock)]
        sizes = [num_parameters(block) for block in blocks]
        sizes.append(num_parameters(model) - sum(sizes))
        self._share = [-(-size // rank.size) for size in sizes]
        self._native, self._group = Collectives(), rank.mesh().get_group()
        self._num_ranks, self._device, self._dtype = rank.size, rank.device, dtype
        shares = [torch.zeros(n, device=rank.device, requires_grad=True) for n in self._share]
        self._optimizer = torch.optim.SGD(shares, lr=LEARNING_RATE)
        self._shares = shares

    def __call__(self, tokens: Tensor) -> Tensor:
        for _ in range(2):
            for numel in self._share:
                own = torch.zeros(numel, dtype=self._dtype, device=self._device)
                full = own.new_empty(numel * self._num_ranks)
                self._native.all_gather([full], [own], self._group).wait()
        loss: Tensor = self._model(tokens)
        loss.backward()
        for share in self._shares:
            share.grad = torch.empty_like(share)
            full = torch.zeros(share.numel() * self._num_ranks, device=self._device)
            self._native.reduce_scatter([share.grad], [full], self._group, average=False).wait()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._model.zero_grad()
        return loss


@contextmanager
def shared_memory_off() -> Iterator[None]:
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def sharding_over(rank: Rank, name: str, dtype: torch.dtype) -> Sharding:
    """Give variants over gloo their own group: a group reads the switch when it is first used."""
    mesh = rank.mesh()
    if name.endswith(OVER_GLOO):
        mesh = DeviceMesh.from_group(dist.new_group(), rank.device.type)
    return Sharding(GPTBlock, mesh, rank.device, dtype)


def build(name: str, rank: Rank, numbers: dict[str, Any], made: dict[str, nn.Module]) -> Variant:
    dtype = DTYPES[numbers["dtype"]]
    size = GPT_SIZES[numbers["size"]]
    tokens = tokens_for(numbers["batch"], numbers["length"], size.vocabulary, rank.device)
    if name == FLOOR:
        return Variant(Floor(made[UNSHARDED], rank, dtype), tokens)
    torch.manual_seed(0)
    model: nn.Module = GPT(size).to(rank.device)
    if name == DEEPSPEED:
        return Variant(DeepSpeedStep(model, numbers["batch"], LEARNING_RATE, dtype), tokens)
    if name == DDP:
        model = DistributedDataParallel(model.to(dtype), gradient_as_bucket_view=True)
    elif name == FAIRSCALE:
        model = fairscale_wrapped(model, GPTBlock, dtype)
    else:
        how = sharding_over(rank, name, dtype)
        model = shard(name.removesuffix(OVER_GLOO), model, how)
    made[name] = model
    return Variant(stepped_by_sgd(model), tokens)


def measure(rank: Rank, numbers: dict[str, Any]) -> dict[str, Any]:
    """On one rank: the losses of the first steps, and the median seconds of later ones."""
    gc.collect()  # free earlier measurements first
    made: dict[str, nn.Module] = {}
    variants: dict[str, Variant] = {}
    losses: dict[str, list[float]] = {}
    for name in numbers["variants"]:
        variants[name] = build(name, rank, numbers, made)
        if name.endswith(OVER_GLOO):
            with shared_memory_off():
                losses[name] = variants[name].losses(numbers["num_warm"])
        else:
            losses[name] = variants[name].losses(numbers["num_warm"])
    del losses[FLOOR]  # it trains nothing
    check_losses(losses, rtol=2e-2 if numbers["dtype"] == "bf16" else 1e-4)
    runs = {name: variant.step for name, variant in variants.items()}
    with undisturbed():
        found = interleaved(runs, numbers["num_steps"], num_warm=0)
    return {
        "seconds": {name: medians(samples)["step"] for name, samples in found.items()},
        "losses": losses,
    }


def add_table(result: Result, title: str, seconds: dict[str, float]) -> None:
    rows: list[list[Any]] = [
        [name, spent * 1e3, spent / seconds[BASE], spent / seconds[FLOOR]]
        for name, spent in seconds.items()
    ]
    result.add(Table(title, ["variant", "ms a step", "ratio", "/ floor"], rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=["10m", "150m"], choices=GPT_SIZES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bf16"], choices=DTYPES)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, help="default: 9, and 5 of 150m")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if "nccl" in options.backend else "cpu")
    result = result_for("step", arguments, device)
    names = [*ALL, *installed(device)]
    with without_known_warnings():
        for num_ranks, size, dtype in product(options.ranks, options.sizes, options.dtypes):
            numbers = {
                "size": size,
                "dtype": dtype,
                "batch": options.batch,
                "length": options.length,
                "num_warm": 2,
                "num_steps": options.steps or (5 if size == "150m" else 9),
                "variants": names + OF_BF16 * (dtype == "bf16"),
            }
            # Ranks of one size must not hold memory while those of the next are measured.
            with RankPool(num_ranks, options.backend, TIMEOUT_S) as ranks:
                found = ranks.run(measure, numbers)
            result.details[f"{size} {dtype}, {num_ranks} ranks"] = found
            title = f"GPT {size}, {dtype}, {num_ranks} ranks"
            add_table(result, title, found[0]["seconds"])
    result.write(options.json)


if __name__ == "__main__":
    main()
