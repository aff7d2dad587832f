"""Host time per unit and step: what sharding costs the CPU that drives it.

One process plays rank 0 of 8 through torch's `fake` group, 48 units of 8 small Linears. For each
way to shard: (step time - unsharded step time) / units. Variants are interleaved, medians taken.
`fake` copies each message once per rank, which is part of every variant's time here.

    python benchmarks/bench_host_time.py [--device cuda] [--units 48] [--width 64] [--world 8]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.testing import fake_world


def build(num_units: int, width: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(
            *(nn.Sequential(*(nn.Linear(width, width) for _ in range(8))) for _ in range(num_units))
        )


def sharded(model: nn.Sequential, shard: Callable[..., object]) -> nn.Sequential:
    for unit in model:
        shard(unit)
    shard(model)
    return model


def wrapped(model: nn.Sequential, wrapper: Callable[..., nn.Module], device: str) -> nn.Module:
    options = {"use_orig_params": True, "device_id": torch.device(device)}
    return wrapper(nn.Sequential(*(wrapper(unit, **options) for unit in model)), **options)


def timed(model: nn.Module, batch: torch.Tensor) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    wait = torch.cuda.synchronize if batch.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    loss = model(batch).sum()
    wait()
    middle = time.perf_counter()
    loss.backward()
    wait()
    end = time.perf_counter()
    model.zero_grad()
    return middle - start, end - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--units", type=int, default=48)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with fake_world(options.world, device=options.device):
        make = (options.units, options.width, options.device)
        models = {
            "unsharded": build(*make),
            "torch fully_shard": sharded(build(*make), torch_fully_shard),
            "fullshard fully_shard": sharded(build(*make), fully_shard),
            "torch wrapper": wrapped(build(*make), TorchWrapper, options.device),
            "fullshard wrapper": wrapped(build(*make), FullyShardedDataParallel, options.device),
        }
        batch = torch.randn(4, options.width, device=options.device)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
        for step in range(options.steps + 3):
            for name, model in models.items():
                spent = timed(model, batch)
                if step >= 3:
                    times[name].append(spent)
    medians = {
        name: [statistics.median(part) for part in zip(*spent, strict=True)]
        for name, spent in times.items()
    }
    base = medians.pop("unsharded")
    rows = {
        name: [(a - b) / options.units * 1e6 for a, b in zip(spent, base, strict=True)]
        for name, spent in medians.items()
    }
    print(f"{'microseconds per unit':28}{'forward':>10}{'backward':>10}{'ratio':>8}")
    torch_total = sum(rows["torch fully_shard"])
    for name, (forward, backward) in rows.items():
        ratio = (forward + backward) / torch_total
        print(f"{name:28}{forward:10.0f}{backward:10.0f}{ratio:8.2f}")
    print(json.dumps({"unsharded_s": base, "us_per_unit": rows}))


if __name__ == "__main__":
    main()
