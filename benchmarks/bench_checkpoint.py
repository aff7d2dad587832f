"""Peak host memory and time of a checkpoint, per rank: ours, and torch's ways to a full state dict.

A wrapped model of 600 MB on 4 gloo ranks with AdamW. Each way runs in its own ranks and reports the
largest memory that a rank held beyond what it had before, over the size of its shards
(parameters and moments). `full` gathers the model on every rank, `rank0_only` on the first.

    python benchmarks/bench_checkpoint.py [--ranks 4] [--blocks 54] [--width 1700]
        [--ways save load ...] [--json PATH]
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import wrap as torch_wrap

from fullshard import FullyShardedDataParallel
from fullshard.state import export_safetensors, load, load_safetensors, save
from fullshard.testing import Rank, RankPool
from fullshard.wrap import ModuleWrapPolicy
from measuring import Table, parser_for, result_for
from memory import ProcessMemory

MIB = 2**20


def measured(deed: Callable[[], object]) -> tuple[float, float]:
    """MiB beyond what was there, and seconds."""
    memory, start = ProcessMemory(), time.perf_counter()
    kept = deed()
    seconds = time.perf_counter() - start
    peak = memory.peak_bytes()
    del kept
    return peak / MIB, seconds


def build(num_blocks: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_blocks)))


def stepped(model: nn.Module, width: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def run(rank: Rank, way: str, folder: str, num_blocks: int, width: int) -> tuple[float, float]:
    path = Path(folder)
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    if way.startswith("torch"):
        policy = torch_wrap.ModuleWrapPolicy({nn.Linear})
        wrapper = torch_fsdp.FullyShardedDataParallel
        model = wrapper(build(num_blocks, width), auto_wrap_policy=policy, **options)
        optimizer = stepped(model, width)
        rank0_only = way.endswith("rank0_only")
        # With offload on a CPU, torch's class returns memory that it has already freed.
        config = torch_fsdp.FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only)
        optim_config = torch_fsdp.FullOptimStateDictConfig(False, rank0_only=rank0_only)

        def full() -> object:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kind = torch_fsdp.StateDictType.FULL_STATE_DICT
                with wrapper.state_dict_type(model, kind, config, optim_config):
                    state = model.state_dict(), wrapper.optim_state_dict(model, optimizer)
            if rank.rank == 0:
                torch.save(state, path / "full.pt")
            return state

        return measured(full)
    policy = ModuleWrapPolicy({nn.Linear})
    model = FullyShardedDataParallel(build(num_blocks, width), auto_wrap_policy=policy, **options)
    optimizer = stepped(model, width)
    deeds: dict[str, Callable[[], object]] = {
        "save": lambda: save(path / "a", model, optimizer),
        "load": lambda: load(path / "a", model, optimizer),
        "export_safetensors": lambda: export_safetensors(path / "st", model),
        "load_safetensors": lambda: load_safetensors(path / "st", model),
    }
    return measured(deeds[way])


WAYS = ["save", "load", "export_safetensors", "load_safetensors", "torch full", "torch rank0_only"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=54)
    parser.add_argument("--width", type=int, default=1700)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    options = parser.parse_args(arguments)
    result = result_for("checkpoint", arguments)
    model_mib = options.blocks * (options.width + 1) * options.width * 4 / MIB
    share_mib = 3 * model_mib / options.ranks
    rows: list[list[str | float | None]] = []
    with tempfile.TemporaryDirectory() as folder:
        for way in options.ways:
            with RankPool(options.ranks, timeout_s=600) as ranks:
                found = ranks.run(run, way, folder, options.blocks, options.width)
            others = max((peak for peak, _ in found[1:]), default=None)
            rows.append([way, found[0][0], others, max(seconds for _, seconds in found)])
            result.details[way] = found
    result.add(
        Table(
            f"Model of {model_mib:.0f} MiB, {share_mib:.0f} MiB of parameters and moments a rank",
            ["way", "MiB, first rank", "MiB, other ranks", "seconds"],
            rows,
        )
    )
    result.write(options.json)


if __name__ == "__main__":
    main()
