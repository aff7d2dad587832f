"""Where a unit's shards live."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

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
                    shape = member.split.shard_shape(rank)
                    view = _view(home, message.home_offset + slot.offset, shape)
                    view.copy_(member.current_local)
                    member.adopt(view)


def _view(home: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A part of a home, with a version counter and a storage object of its own.

    A DTensor takes over the storage offset of its local tensor but not the storage: one that is
    not 0 breaks `copy.deepcopy` of a state dict (torch 2.11 to 2.13).
    """
    numel = prod(shape)
    if numel == 0:
        return home.new_empty(shape)
    part = home[offset : offset + numel].view(shape)
    return from_dlpack(to_dlpack(part))


def home_device(policy: OffloadPolicy, device: torch.device) -> tuple[torch.device, bool]:
    """The device of the homes, and whether its memory is pinned."""
    if not isinstance(policy, CPUOffloadPolicy):
        return device, False
    return torch.device("cpu"), policy.pin_memory and device.type != "cpu"
