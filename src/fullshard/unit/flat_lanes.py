"""What a flat unit has beside its members: where they are cut, and what stands for their lanes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fullshard.comm.collectives import gathered
from fullshard.comm.topology import Axis
from fullshard.layout import FlatSplit, UnitLayout
from fullshard.unit.flat import FlatHolder, FlatMember, Form, PartMember
from fullshard.unit.homes import Homes
from fullshard.unit.member import Location, Member


def flat_name(lane: int) -> str:
    """The name of the parameter that stands for a lane: of most units, the only one."""
    return "_flat_param" if lane == 0 else f"_flat_param_{lane}"


class FlatLanes:
    """The cuts of a flat unit, and with `Form.FLAT` the parameters that stand for its lanes.

    `owner` is the module that those are registered at.
    """

    def __init__(self, form: Form, owner: nn.Module, axis: Axis, device: torch.device) -> None:
        self.form = form
        self.holders: list[FlatHolder] = []
        self._owner = owner
        self._axis = axis
        self._device = device
        self._layout: UnitLayout | None = None
        self._members: list[FlatMember] = []

    def recut(self, layout: UnitLayout, members: Sequence[Member]) -> None:
        """Follow a new plan: what is cut elsewhere than before is made whole first."""
        flat = [member for member in members if isinstance(member, FlatMember)]
        splits: dict[FlatMember, FlatSplit] = {}
        for lane in layout.lanes:
            (message,) = lane.messages
            for slot in message.slots:
                member = flat[slot.entry]
                splits[member] = FlatSplit(
                    member.split.shape, slot.offset, message.segment_numel, layout.num_ranks
                )
        if any(m.whole is None and m.split != splits[m] for m in flat):
            self.collect()
        for member in flat:
            member.split = splits[member]
        self._layout, self._members = layout, flat

    def collect(self) -> None:
        """Give every member its whole value: a collective over the shard axis."""
        if self._layout is None:
            return
        for lane in self._layout.lanes:
            (message,) = lane.messages
            members = [self._members[slot.entry] for slot in message.slots]
            if all(member.whole is not None for member in members):
                continue
            segment = torch.zeros(
                message.segment_numel, dtype=members[0].dtype, device=self._device
            )
            for slot, member in zip(message.slots, members, strict=True):
                local = member.current_local
                offset = message.shard_offset(slot, self._axis.rank)
                segment[offset : offset + local.numel()].copy_(local.reshape(-1))
            full = gathered(segment, self._axis)
            for slot, member in zip(message.slots, members, strict=True):
                part = full[slot.offset : slot.offset + slot.numel]
                member.whole = part.view(member.split.shape)

    def settle(self, layout: UnitLayout, members: Sequence[Member], homes: Homes) -> None:
        """Let one parameter stand for each lane."""
        if self.form is not Form.FLAT:
            return
        for index, (lane, home) in enumerate(zip(layout.lanes, homes.lanes, strict=True)):
            if index < len(self.holders):
                holder = self.holders[index]
                holder.adopt(home)
                holder.param.requires_grad_(lane.is_trainable)
            else:
                location = Location(self._owner, flat_name(index))
                holder = FlatHolder(location, home, lane.is_trainable)
                self.holders.append(holder)
            for slot in lane.messages[0].slots:
                member = members[slot.entry]
                assert isinstance(member, PartMember)
                member.holder = holder
        for holder in self.holders[len(layout.lanes) :]:
            holder.leave()
        del self.holders[len(layout.lanes) :]

    def part(self) -> None:
        """Let the members speak for themselves until they are settled again."""
        for member in self._members:
            if isinstance(member, PartMember) and member.holder in self.holders:
                member.leave()

    def are_current(self, homes: Homes) -> bool:
        pairs = zip(self.holders, homes.lanes, strict=False)
        return all(holder.is_current(home) for holder, home in pairs)
