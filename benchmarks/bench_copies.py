"""Copies between parameters and buckets: the rate in memory, and the host time of a call.

For the units of models, on the first of some ranks: parameters copied out of a gathered bucket,
gradients copied into one with a cast, and without. One copy of as many bytes beside them. On a GPU
with Triton, the kernel is measured, elsewhere strided views. Values are compared before.

    python benchmarks/bench_copies.py [--device cpu] [--worlds 2 8 64] [--width 2048]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from fullshard.device import ResizableBuffer, device_for
from fullshard.layout import CostModel, DtypePlan, ParamSpec, plan_unit, split_rows
from fullshard.unit.context import CommContext
from fullshard.unit.copy_program import packer, unpacker
from measuring import Table, parser_for, result_for, synchronize
from worlds import device_of

COMPUTED, REDUCED = torch.bfloat16, torch.float32
NUM_CALLS = 20


def units_of(width: int) -> dict[str, tuple[list[tuple[int, ...]], int]]:
    """Shapes of parameters, and the dim that they are sharded along."""
    wide = 11 * width // 4
    block = [(width, width)] * 4 + [(wide, width)] * 2 + [(width, wide), (width,), (width,)]
    odd = [(width, width + 1), (wide, width // 2 - 1), (width - 1, wide), (3,)]
    small = [(width // 4, width // 4)] * 4 + [(width // 4,)] * 4
    return {
        "block": (block, 0),
        "block, by columns": (block, 1),
        "sizes that do not divide": (odd, 0),
        "small block": (small, 0),
    }


def seconds(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """The time of a call, and that until it returns."""
    for _ in range(3):
        call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(NUM_CALLS):
        call()
    issued = time.perf_counter() - start
    synchronize(device)
    return (time.perf_counter() - start) / NUM_CALLS, issued / NUM_CALLS


def measure(
    name: str, shapes: list[tuple[int, ...]], dim: int, world: int, device: torch.device
) -> list[list[object]]:
    comm_ctx = CommContext(device_for(device))
    dtypes = DtypePlan.of(REDUCED, COMPUTED, REDUCED)
    splits = [split_rows(shape, min(dim, len(shape) - 1), world) for shape in shapes]
    params = [ParamSpec(str(index), split, dtypes, True) for index, split in enumerate(splits)]
    shares_all = CostModel(float("inf"), float("inf"))
    layout = plan_unit(params, world, shares_all, is_flat=False)
    ((bucket,),) = (lane.buckets for lane in layout.lanes)
    grads = [torch.randn(slot.split.shape, device=device).to(COMPUTED) for slot in bucket.slots]
    numel = world * bucket.segment_numel
    same, cast = (torch.empty(numel, dtype=each, device=device) for each in (COMPUTED, REDUCED))
    plans = {out: DtypePlan.of(out.dtype) for out in (same, cast)}
    pack = {
        out: packer(bucket.table, plan, plan.reduce_wire, world, comm_ctx)
        for out, plan in plans.items()
    }
    for out, program in pack.items():
        program.pack(grads, out)
    assert torch.equal(cast.to(COMPUTED), same)
    full = ResizableBuffer(layout.full_bytes, device)
    unpack = unpacker(full, comm_ctx)
    unpack.add(bucket, same)
    unpack.run()
    for slot, grad in zip(bucket.slots, grads, strict=True):
        found = full.view(slot.full_offset_bytes, slot.split.shape, COMPUTED)
        assert torch.equal(found, grad), name
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "out of the bucket": (unpack.run, 2 * same.nbytes),
        "into it, cast": (lambda: pack[cast].pack(grads, cast), same.nbytes + cast.nbytes),
        "into it": (lambda: pack[same].pack(grads, same), 2 * same.nbytes),
        "one copy": (lambda: cast.copy_(same), same.nbytes + cast.nbytes),
    }
    rows: list[list[object]] = []
    for what, (call, num_bytes) in calls.items():
        spent_s, issued_s = seconds(call, device)
        rows.append([f"{name}: {what}", same.nbytes / 2**20, num_bytes / spent_s / 1e9])
        rows[-1].append(1e6 * issued_s)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--device", type=device_of, default="cuda")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8])
    parser.add_argument("--width", type=int, default=2048)
    options = parser.parse_args(arguments)
    result = result_for("copies", arguments, options.device)
    for world in options.worlds:
        rows = [
            row
            for name, (shapes, dim) in units_of(options.width).items()
            for row in measure(name, shapes, dim, world, options.device)
        ]
        columns = ["copy", "MiB", "GB/s", "host, us"]
        result.add(Table(f"The first of {world} ranks", columns, rows))
    result.write(options.json)


if __name__ == "__main__":
    main()
