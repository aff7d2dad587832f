"""What a sharded model consists of, and what its memory is used for."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard._torch import to_local
from fullshard.runtime.hooks import units_below
from fullshard.runtime.step import FULL_BYTES
from fullshard.state.materialize import device_of
from fullshard.trace.recording import Clock
from fullshard.trace.seam import Activity
from fullshard.trace.timeline import Timeline, UnitFacts
from fullshard.unit.unit import Unit

__all__ = ["PROCESS_KIND", "memory_by_kind", "unit_facts"]

# The rest of the memory on a CPU, where the memory of the whole process is measured.
PROCESS_KIND = "activations, program and libraries"


def unit_facts(model: nn.Module) -> list[UnitFacts]:
    """The units of a model, outer ones first; units without parameters are left out."""
    return [_facts(unit) for unit in units_below(model) if unit.params]


def memory_by_kind(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    moment: Timeline | BaseException | None = None,
) -> dict[str, int]:
    """The bytes on this rank's device by what they are used for.

    `moment` is a timeline, for its peak; an error, for what was in use when it was raised; or now.
    What is left after shards, optimizer state and full parameters are activations. On a CPU, where
    the memory of the process is measured, the rest is called `PROCESS_KIND`.
    """
    device = device_of(model)
    units = units_below(model)
    params = [param for unit in units for param in unit.params]
    held = {*model.parameters()} - {param.full for param in params}  # full while in use
    shards: list[Any] = list(held | {p.param for p in params})
    kinds = {"parameter shards": shards}
    kinds["gradient shards"] = [p.grad for p in shards if p.grad is not None]
    freed_bytes = getattr(moment, FULL_BYTES, 0)
    full_bytes = freed_bytes + sum(unit.full_bytes for unit in units)
    allocated_bytes = freed_bytes + Clock(device).allocated_bytes()
    if isinstance(moment, Timeline):
        kinds["gradient shards"] = [p for p in shards if p.requires_grad]
        full_bytes = max(each.full_bytes for each in moment.memory)
        peak = max(moment.memory, key=lambda each: each.allocated_bytes)
        allocated_bytes = peak.allocated_bytes
        if device.type != "cpu":  # on a CPU, the peak is that of the process
            full_bytes = peak.full_bytes
            reduces = [each for each in moment.spans if each.activity is Activity.REDUCE]
            reduced = {each.unit for each in reduces if each.end_s <= peak.at_s}
            by_unit = [p.param for unit in units if unit.name in reduced for p in unit.params]
            kinds["gradient shards"] = [p for p in by_unit if p.requires_grad]
    states = () if optimizer is None else optimizer.state.values()
    state = (value for each in states for value in each.values())
    kinds["optimizer state"] = [value for value in state if isinstance(value, torch.Tensor)]
    found = {k: sum(to_local(t).nbytes for t in v if t.device == device) for k, v in kinds.items()}
    found["full parameters"] = full_bytes
    kind = "activations" if device.type != "cpu" else PROCESS_KIND
    found[kind] = max(0, allocated_bytes - sum(found.values()))
    if not isinstance(moment, Timeline) and device.type != "cpu":
        reserved_bytes = torch.get_device_module(device).memory_reserved(device)
        found["fragmentation"] = max(0, reserved_bytes - allocated_bytes)
    return found


def _facts(unit: Unit) -> UnitFacts:
    gather_bytes = padding_bytes = num_buckets = 0
    for layout in (unit.layout, unit.arrangement.extension_layout):
        num_bytes = 0
        for lane in layout.lanes:
            wire = lane.dtypes.gather_wire
            for bucket in lane.buckets:
                numel = layout.num_ranks * bucket.segment_numel
                num_bytes += numel * lane.dtypes.computed.itemsize
                gather_bytes += wire.message_numel(numel) * wire.dtype.itemsize
        carried = sum(param.split.numel * param.dtypes.computed.itemsize for param in layout.params)
        padding_bytes += max(num_bytes - carried, 0)  # uneven splits, and alignment
        num_buckets += sum(len(lane.buckets) for lane in layout.lanes)
    return UnitFacts(
        name=unit.name,
        num_parameters=len(unit.params),
        numel=sum(prod(param.shape) for param in unit.params),
        num_bytes=sum(prod(param.shape) * param.dtype.itemsize for param in unit.params),
        padding_bytes=padding_bytes,
        num_buckets=num_buckets,
        gather_bytes=gather_bytes,
    )
