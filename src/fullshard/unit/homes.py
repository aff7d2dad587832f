"""Where a unit's shards live."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.api import CPUOffloadPolicy, OffloadPolicy
from fullshard.layout import UnitLayout
from fullshard.unit.member import Member


class Homes:
    """One contiguous tensor per lane with this rank's shards, each shard a view of it."""

    def __init__(
        self,
        layout: UnitLayout,
        members: Sequence[Member],
        device: torch.device,
        rank: int,
        pin_memory: bool,
    ) -> None:
        self.lanes: list[torch.Tensor] = []
        for lane in layout.lanes:
            home = torch.zeros(
                lane.home_numel, dtype=lane.stages.kept, device=device, pin_memory=pin_memory
            )
            self.lanes.append(home)
            for message in lane.messages:
                for slot in message.slots:
                    member = members[slot.entry]
                    offset = message.home_offset + message.shard_offset(slot, rank)
                    view = member.place(home, offset, member.split.shard_shape(rank))
                    view.copy_(member.piece(rank).reshape(view.shape))
                    member.adopt(view)


def home_device(policy: OffloadPolicy, device: torch.device) -> tuple[torch.device, bool]:
    """The device of the homes, and whether its memory is pinned."""
    if not isinstance(policy, CPUOffloadPolicy):
        return device, False
    return torch.device("cpu"), policy.pin_memory and device.type != "cpu"
