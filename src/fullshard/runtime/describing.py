"""The units of a model, as facts for a table."""

from __future__ import annotations

from math import prod

from torch import nn

from fullshard.layout import UnitLayout
from fullshard.runtime.runner import runner_of
from fullshard.trace.timeline import UnitFacts
from fullshard.unit.unit import Unit


def unit_facts(model: nn.Module) -> list[UnitFacts]:
    """What units a model was cut into, outer ones first; those without parameters left out."""
    runners = dict.fromkeys(runner_of(module) for module in model.modules())
    units = [unit for runner in runners if runner is not None for unit in runner.units]
    return [_facts(unit) for unit in units if unit.members]


def _facts(unit: Unit) -> UnitFacts:
    layouts = (unit.layout, unit.extension_layout)
    return UnitFacts(
        name=unit.name,
        num_parameters=len(unit.members),
        numel=sum(prod(member.shape) for member in unit.members),
        num_bytes=sum(prod(member.shape) * member.dtype.itemsize for member in unit.members),
        padding_bytes=sum(_padding_bytes(layout) for layout in layouts),
        num_messages=sum(len(lane.messages) for layout in layouts for lane in layout.lanes),
        gather_bytes=sum(_message_bytes(layout) for layout in layouts),
    )


def _message_bytes(layout: UnitLayout) -> int:
    return sum(
        layout.num_ranks * message.segment_numel * lane.stages.computed.itemsize
        for lane in layout.lanes
        for message in lane.messages
    )


def _padding_bytes(layout: UnitLayout) -> int:
    """What messages carry beyond parameters: uneven splits, and alignment."""
    carried = sum(entry.split.numel * entry.stages.computed.itemsize for entry in layout.entries)
    return max(_message_bytes(layout) - carried, 0)
