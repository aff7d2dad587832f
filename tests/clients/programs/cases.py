"""Run the cases of a program on every rank, and write what each of them found.

    torchrun ... program.py FOLDER CASE ...

A case is a function that takes a folder of its own and returns tensors and numbers. Rank 0 writes
them to `FOLDER/CASE.pt`, or the traceback if the case failed.
"""

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

HANGS_AFTER_S = 400


def run(cases: dict[str, Callable[[Path], Any]], folder: Path | None = None) -> None:
    folder = folder or Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    (folder / "library").write_text(fully_shard.__module__)
    for name in sys.argv[2:]:
        torch.manual_seed(0)
        started = time.monotonic()
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        try:
            found: Any = cases[name](folder / name)
        except Exception:
            found = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        if RANK == 0:
            print(f"{name}: {time.monotonic() - started:.1f} s")
            torch.save(found, folder / f"{name}.pt")


def num_units(model: nn.Module) -> int:
    """How many modules of a model are sharded."""
    kinds = (FSDPModule, FullyShardedDataParallel)
    return sum(isinstance(module, kinds) for module in model.modules())


def batch(step: int, *shape: int) -> torch.Tensor:
    """A batch of this rank. A single rank gets the batches of two ranks, one after another."""
    ranks = [RANK] if WORLD_SIZE > 1 else [0, 1]
    parts = [
        torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + rank))
        for rank in ranks
    ]
    return torch.cat(parts)


def tokens(step: int, *shape: int, num: int = 32) -> torch.Tensor:
    return (batch(step, *shape).abs() * 1000).long() % num
