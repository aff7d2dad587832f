"""Start-up: time and peak memory to shard a model from meta, and one that is already in memory.

From meta: the model has no memory until it is sharded, then each rank makes and fills its shards
(`to_empty`; the wrappers do it unit by unit, with `param_init_fn`). From memory: the rank has the
whole model and gives back what it does not keep. One process plays a rank of 8 with a model of 1 B
parameters in float32, and 2 real ranks shard a smaller one. Each run has a process of its own.

Peak memory is what the process held beyond what it had before: nothing for a model on meta, the
model itself otherwise. "allocated" is the same of torch's allocator, from a second run.

Every process checks that what its rank holds is its share of the model; real ranks also compute a
loss, which must be that of torch's `fully_shard`.

    python benchmarks/bench_startup.py [--blocks 20] [--width 2048] [--worlds 8] [--ranks 2]
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import wrap as own_wrap
from fullshard.testing import Rank, RankPool, quiet_world
from measuring import Table, check_losses, parser_for, result_for, without_known_warnings
from memory import ProcessMemory, allocated_peak_bytes
from models import Llama, LlamaBlock, tokens_for
from variants import BASE, OURS, TORCH_FSDP1, TORCH_FSDP2, WRAPPER, Sharding, shard

META, IN_MEMORY = "from meta", "from memory"
VARIANTS = [TORCH_FSDP2, TORCH_FSDP1, OURS, WRAPPER]
MIB = 2**20
VOCABULARY = 1024
TIMEOUT_S = 900.0


def parts_of(model: nn.Module) -> list[torch.Tensor]:
    """This rank's parts of the parameters."""
    return [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]


@torch.no_grad()
def fill(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(0.01)


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give one module's own parameters memory and values."""
    module.to_empty(device=device, recurse=False)
    fill(list(module.parameters(recurse=False)))


def sharded_from_meta(variant: str, model: nn.Module, how: Sharding) -> nn.Module:
    if variant in (TORCH_FSDP2, OURS):
        model = shard(variant, model, how)
        model.to_empty(device=how.device)
        fill(parts_of(model))
        return model
    package: Any = torch_fsdp if variant == TORCH_FSDP1 else fullshard
    wrap: Any = torch_wrap if variant == TORCH_FSDP1 else own_wrap
    wrapper: nn.Module = package.FullyShardedDataParallel(
        model,
        process_group=how.mesh.get_group(),
        auto_wrap_policy=wrap.ModuleWrapPolicy({how.unit_class}),
        param_init_fn=partial(materialize, device=how.device),
        device_id=how.device,
        use_orig_params=True,
    )
    return wrapper


class Start:
    """A model that is about to be sharded, and the sharding of it."""

    def __init__(self, variant: str, source: str, shape: tuple[int, int], rank: Rank) -> None:
        self._variant, self._source = variant, source
        self._how = Sharding(LlamaBlock, rank.mesh(), rank.device)
        with torch.device("meta"):
            self.model: nn.Module = Llama(*shape, VOCABULARY)
        self.num_parameters = sum(p.numel() for p in self.model.parameters())

    def prepare(self) -> None:
        if self._source == IN_MEMORY:
            self.model.to_empty(device=self._how.device)
            fill(list(self.model.parameters()))

    def run(self) -> None:
        way = shard if self._source == IN_MEMORY else sharded_from_meta
        self.model = way(self._variant, self.model, self._how)


def measure(
    rank: Rank, variant: str, source: str, shape: tuple[int, int], *, computes: bool
) -> dict[str, Any]:
    """Seconds and bytes of one start on this rank."""
    memory = ProcessMemory()
    start = Start(variant, source, shape, rank)
    start.prepare()
    began = time.perf_counter()
    start.run()
    seconds = time.perf_counter() - began
    peak = memory.peak_bytes()
    share = start.num_parameters / rank.size
    held = sum(part.numel() for part in parts_of(start.model))
    if not 0.9 * share <= held <= 1.1 * share + 64 * rank.size:
        raise RuntimeError(f"{variant}: a rank must hold about {share:.0f} elements, found {held}.")
    del start
    again = Start(variant, source, shape, rank)

    def whole_start() -> None:
        again.prepare()
        again.run()

    allocated = allocated_peak_bytes(whole_start, rank.device, before=lambda: None)
    return {
        "seconds": seconds,
        "peak": peak,
        "allocated": allocated,
        "losses": [loss_of(again.model, rank)] if computes else [],
    }


def loss_of(model: nn.Module, rank: Rank) -> float:
    with torch.no_grad():
        loss: torch.Tensor = model(tokens_for(1, 8, VOCABULARY, rank.device))
    return loss.item()


def play(world: int, variant: str, source: str, shape: tuple[int, int]) -> dict[str, Any]:
    """Measure in a process of its own."""
    # A played world gathers nothing, so it cannot compute.
    with quiet_world(world) as rank:
        return measure(rank, variant, source, shape, computes=False)


def on_ranks(num_ranks: int, variant: str, source: str, shape: tuple[int, int]) -> dict[str, Any]:
    with RankPool(num_ranks, timeout_s=TIMEOUT_S) as ranks:
        found: list[dict[str, Any]] = ranks.run(measure, variant, source, shape, computes=True)
    return found[0]


class FreshProcesses:
    """Runs functions one after another, each in a new process that has torch loaded."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "fullshard.testing"])
        self._pool = ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1)

    def __call__(self, function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        return self._pool.submit(function, *args).result()

    def __enter__(self) -> FreshProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def table(title: str, found: dict[str, dict[str, Any]]) -> Table:
    base = found[BASE]
    rows: list[list[Any]] = [
        [
            name,
            row["seconds"],
            row["seconds"] / base["seconds"],
            row["peak"] / MIB,
            row["peak"] / base["peak"],
            row["allocated"] / MIB,
            row["allocated"] / base["allocated"],
        ]
        for name, row in found.items()
    ]
    columns = ["variant", "seconds", "ratio", "peak, MiB", "ratio", "allocated, MiB", "ratio"]
    return Table(title, columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--worlds", type=int, nargs="*", default=[8], help="simulated")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2], help="real ones, over gloo")
    parser.add_argument("--rank-blocks", type=int, default=6, help="blocks of their model")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS, metavar="NAME")
    options = parser.parse_args(arguments)
    names = list(dict.fromkeys([BASE, *options.variants]))
    result = result_for("startup", arguments)
    whole, smaller = (options.blocks, options.width), (options.rank_blocks, options.width)
    with without_known_warnings(), FreshProcesses() as fresh:
        for source in (META, IN_MEMORY):
            for world in options.worlds:
                found = {name: fresh(play, world, name, source, whole) for name in names}
                result.add(table(f"{source}, rank of a simulated world of {world}", found))
            for num_ranks in options.ranks:
                found = {name: on_ranks(num_ranks, name, source, smaller) for name in names}
                check_losses({name: row["losses"] for name, row in found.items()}, rtol=1e-4)
                result.add(table(f"{source}, {num_ranks} ranks, {smaller[0]} blocks", found))
    result.write(options.json)


if __name__ == "__main__":
    main()
