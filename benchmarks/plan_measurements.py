"""Measures steps on a GPU as `fullshard train` runs them: the truth that plans are compared with.

Each configuration runs in a world of one rank, or as rank 0 of a simulated world. The times of
kernels of known size are measured, too: a device profile is made from them.

    python benchmarks/plan_measurements.py --json plan_h200.json
    python benchmarks/plan_measurements.py --sweep --json plan_sweep_h200.json

A sweep measures all settings of one job that plans choose from.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from bench_plan import Step, config_of
from fullshard.testing import quiet_world

DEVICE = torch.device("cuda", 0)
WRAPPER, RECOMPUTED = {"api": "wrapper"}, {"activation_checkpointing": True}
SMALL: dict[str, Any] = {"model": "150m", "sequence": 1024, "batch": 8}
LARGE: dict[str, Any] = {"model": "1b", "sequence": 2048, "batch": 2}
CONFIGS: list[dict[str, Any]] = [
    {**SMALL, "world": 1},
    {**SMALL, "world": 1, "sharding": {"precision": "float32"}, "batch": 4},
    {**SMALL, "world": 8},
    {**SMALL, "world": 8, "sharding": WRAPPER},
    {**SMALL, "world": 8, "sharding": {"precision": "float32"}, "batch": 4},
    {**LARGE, "world": 1},
    {**LARGE, "world": 1, "sharding": RECOMPUTED},
    {**LARGE, "world": 8},
    {**LARGE, "world": 8, "sharding": RECOMPUTED},
    {**LARGE, "world": 8, "sharding": {**WRAPPER, **RECOMPUTED}},
    {**LARGE, "world": 8, "sharding": WRAPPER},
    {**LARGE, "world": 8, "accumulate": 2},
    {**LARGE, "world": 8, "sharding": {"strategy": "grad-op"}},
    {**LARGE, "world": 8, "sharding": {"offload": True}},
    {**LARGE, "world": 64, "sharding": RECOMPUTED},
    {**LARGE, "world": 8, "sharding": {"precision": "bf16-reduce"}},
    {"model": "8b", "sequence": 4096, "batch": 1, "world": 8, "sharding": RECOMPUTED},
]
SWEEP: list[dict[str, Any]] = [
    {
        "model": "1b",
        "sequence": 2048,
        "world": 8,
        "batch": batch,
        "accumulate": 8 // batch,
        "sharding": {"strategy": strategy, "activation_checkpointing": is_recomputed},
    }
    for batch in (1, 2, 4, 8)
    for strategy in ("grad-op", "full")
    for is_recomputed in (False, True)
]


def measured(config: dict[str, Any]) -> dict[str, Any]:
    """The most memory that a step holds, and the median time of steps."""
    with quiet_world(config["world"], device=DEVICE):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        step = Step(config_of(config, "", 0, 0), config["world"], DEVICE)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        between = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        times, host = [], []
        for _ in range(7):
            start = time.perf_counter()
            step()
            host.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() - before
        reserved = torch.cuda.max_memory_reserved()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        kernels: dict[str, float] = {}
        for event in profiler.key_averages():
            kernels[event.key] = event.device_time_total / 1e6
        top = dict(sorted(kernels.items(), key=lambda item: -item[1])[:14])
        del step, profiler
    return {
        "config": config,
        "peak_allocated_bytes": peak,
        "between_steps_bytes": between,
        "peak_reserved_bytes": reserved,
        "step_s": median(times),
        "host_s": median(host),
        "kernels_s": sum(kernels.values()),
        "top_kernels_s": top,
    }


def rate(run: Callable[[], object], amount: float) -> float:
    """`amount` per second, of a kernel that runs many times."""
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        run()
    end.record()
    torch.cuda.synchronize()
    return 20 * amount / (start.elapsed_time(end) / 1e3)


def kernel_rates() -> dict[str, float]:
    found: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for rows, inner, out in (
            (8192, 768, 768), (8192, 768, 2048), (4096, 2048, 2048), (4096, 2048, 8192),
            (4096, 8192, 2048), (4096, 4096, 14336), (4096, 2048, 128256), (8192, 8192, 8192),
        ):  # fmt: skip
            a = torch.randn(rows, inner, dtype=dtype, device=DEVICE)
            b = torch.randn(inner, out, dtype=dtype, device=DEVICE)
            key = f"{str(dtype)[6:]} mm {rows}x{inner}x{out} TFLOP/s"
            found[key] = rate(lambda a=a, b=b: a @ b, 2 * rows * inner * out / 1e12)
    for heads, width, batch, length in ((12, 64, 8, 1024), (32, 64, 2, 2048), (32, 128, 1, 4096)):
        q = torch.randn(batch, heads, length, width, dtype=torch.bfloat16, device=DEVICE)
        q.requires_grad_()
        flops = 4 * batch * heads * length * length * width / 1e12

        def forward(q: torch.Tensor = q) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

        def both(q: torch.Tensor = q) -> None:
            forward(q).sum().backward()

        with torch.no_grad():
            found[f"attention {batch}x{heads}x{length}x{width} TFLOP/s"] = rate(forward, flops)
        found[f"attention with backward {batch}x{heads}x{length}x{width}"] = rate(both, flops)
    for megabytes in (4, 32, 256):
        x = torch.randn(megabytes << 18, device=DEVICE)
        y = torch.empty_like(x)
        found[f"copy {megabytes} MB, GB/s"] = rate(lambda x=x, y=y: y.copy_(x), 2 * x.nbytes / 1e9)
        found[f"add {megabytes} MB, GB/s"] = rate(
            lambda x=x, y=y: torch.add(x, y), 3 * x.nbytes / 1e9
        )
        low = y.bfloat16()
        found[f"cast {megabytes} MB, GB/s"] = rate(
            lambda x=x, low=low: low.copy_(x), 1.5 * x.nbytes / 1e9
        )
    logits = torch.randn(4096, 128256, device=DEVICE, requires_grad=True)
    targets = torch.randint(100, (4096,), device=DEVICE)
    found["cross_entropy 4096x128256 per s"] = rate(
        lambda: F.cross_entropy(logits, targets).backward(), 1.0
    )
    params = [torch.randn(1 << 26, device=DEVICE, requires_grad=True)]
    params[0].grad = torch.randn_like(params[0])
    optimizer = torch.optim.AdamW(params, fused=True)
    found["fused AdamW, GB/s of 28 bytes each"] = rate(optimizer.step, 28 * params[0].numel() / 1e9)
    one = torch.zeros(1, device=DEVICE)
    found["launch, s"] = 1 / rate(lambda: one.add_(1), 1.0)
    pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device=DEVICE)
    found["to device, GB/s"] = rate(
        lambda: there.copy_(pinned, non_blocking=True), pinned.nbytes / 1e9
    )
    found["to host, GB/s"] = rate(
        lambda: pinned.copy_(there, non_blocking=True), pinned.nbytes / 1e9
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true", help="measure all settings of one job")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of configurations")
    options = parser.parse_args()
    free, total = torch.cuda.mem_get_info()
    torch.zeros(1, device=DEVICE)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
        "total_bytes": total,
        "context_bytes": total - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved(),
        "free_at_first": free,
        "runs": [],
    }
    configs = SWEEP if options.sweep else CONFIGS
    for config in configs if options.only is None else [configs[each] for each in options.only]:
        try:
            run = measured(config)
        except Exception as error:  # the other measurements are still worth their time
            run = {"config": config, "error": repr(error)}
        found["runs"].append(run)
        print({key: value for key, value in run.items() if key != "top_kernels_s"}, flush=True)
        options.json.write_text(json.dumps(found, indent=1))
    if not options.sweep and options.only is None:
        found["rates"] = kernel_rates()
    options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
