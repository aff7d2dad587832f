"""The units of a model, for tables and reports."""

from __future__ import annotations

from math import prod

from torch import nn

from fullshard.layout import UnitLayout
from fullshard.runtime.hooks import hooks_of
from fullshard.trace.timeline import UnitFacts
from fullshard.unit.unit import Unit


def unit_facts(model: nn.Module) -> list[UnitFacts]:
    """The units of a model, outer ones first; units without parameters are left out."""
    hooks_list = dict.fromkeys(hooks_of(module) for module in model.modules())
    units = [unit for hooks in hooks_list if hooks is not None for unit in hooks.units]
    return [_facts(unit) for unit in units if unit.params]


def _facts(unit: Unit) -> UnitFacts:
    layouts = (unit.layout, unit.extension_layout)
    return UnitFacts(
        name=unit.name,
        num_parameters=len(unit.params),
        numel=sum(prod(sharded_param.shape) for sharded_param in unit.params),
        num_bytes=sum(
            prod(sharded_param.shape) * sharded_param.dtype.itemsize
            for sharded_param in unit.params
        ),
        padding_bytes=sum(_padding_bytes(layout) for layout in layouts),
        num_buckets=sum(len(lane.buckets) for layout in layouts for lane in layout.lanes),
        gather_bytes=sum(_message_bytes(layout) for layout in layouts),
    )


def _message_bytes(layout: UnitLayout) -> int:
    return sum(
        layout.num_ranks * bucket.segment_numel * lane.dtypes.computed.itemsize
        for lane in layout.lanes
        for bucket in lane.buckets
    )


def _padding_bytes(layout: UnitLayout) -> int:
    """What buckets carry beyond parameters: uneven splits, and alignment."""
    carried = sum(param.split.numel * param.dtypes.computed.itemsize for param in layout.params)
    return max(_message_bytes(layout) - carried, 0)
