"""From shards to full parameters.

`Gatherer` is made at a unit's first unshard: it owns the slab and every view that a gather reads
or writes, so that a gather itself makes none (rule 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from fullshard.comm.collectives import Collectives, Transfer
from fullshard.comm.topology import Axis
from fullshard.device.storage import Slab, second_view
from fullshard.layout import Landing, Lane, Message, Slot, Split, UnitLayout
from fullshard.unit.flow import Flow
from fullshard.unit.homes import Homes
from fullshard.unit.member import Member

# Up to how many copies are less work for the host than one kernel that is given lists of places.
_FEW_RUNS = 8


@dataclass(slots=True)
class _LaneViews:
    """The views that the gathers of one lane go through, message by message."""

    sends: list[torch.Tensor] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)
    own: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _SplitCopy:
    """A shared message, and where its parts go: all in one kernel."""

    message: torch.Tensor
    sizes: list[int]
    parts: list[torch.Tensor]

    def run(self) -> None:
        torch.split_with_sizes_copy(self.message, self.sizes, dim=1, out=self.parts)


@dataclass(slots=True)
class Gathering:
    """A gather under way. It holds its buffers (rule 5)."""

    transfers: list[Transfer]
    event: Any
    staged: list[torch.Tensor]
    is_landed: bool


class Gatherer:
    """Gathers one unit into its slab.

    `start` issues everything; `finish` makes the full parameters readable on the current stream.
    Where homes are whole (nothing is sharded, nothing cast), full parameters are views of them:
    there is no slab and nothing to gather.
    """

    def __init__(
        self, layout: UnitLayout, homes: Homes, members: Sequence[Member], axis: Axis, flow: Flow
    ) -> None:
        self._layout = layout
        self._homes = homes
        self._axis = axis
        device = flow.device.torch_device
        self._is_offloaded = any(home.device != device for home in homes.lanes)
        self._is_at_home = not self._is_offloaded and layout.is_whole
        # A multiple of 16 bytes for every divisor of the ranks, so that it can be thinned.
        alignment = 16 * layout.num_ranks
        slab_bytes = 0 if self._is_at_home else layout.slab_bytes
        self._slab = Slab(-(-slab_bytes // alignment) * alignment, device)
        self._buffer = Slab(self._buffer_bytes(), device)
        self._views: list[_LaneViews] = []
        self._splits: list[_SplitCopy] = []
        self._to: list[torch.Tensor] = []
        self._from: list[torch.Tensor] = []
        self._bytes = self._slab.view(0, (self._slab.num_bytes,), torch.uint8)
        # Then nothing arrives in the slab itself: it is not needed before the landing.
        self._is_all_copied = not self._is_at_home and all(
            message.landing.is_copied for lane in layout.lanes for message in lane.messages
        )
        self._make_views(members)
        self._slab.empty()
        self._buffer.empty()

    @property
    def slab_bytes(self) -> int:
        """What the full parameters take while they are there."""
        return self._slab.num_bytes

    def _buffer_bytes(self) -> int:
        return sum(
            self._layout.num_ranks * message.segment_numel * lane.stages.computed.itemsize
            for lane in self._layout.lanes
            for message in lane.messages
            if message.landing.is_copied
        )

    def _make_views(self, members: Sequence[Member]) -> None:
        buffer_offset = 0
        num_ranks = self._layout.num_ranks
        for lane, home in zip(self._layout.lanes, self._homes.lanes, strict=True):
            views = _LaneViews()
            self._views.append(views)
            dtype = lane.stages.computed
            for message in lane.messages:
                for slot in message.slots:
                    member = members[slot.entry]
                    shape = member.split.shape
                    if self._is_at_home:
                        member.make_full(second_view(home, slot.offset, shape))
                    else:
                        member.make_full(self._slab.view(slot.slab_offset_bytes, shape, dtype))
                if message.segment_numel == 0 or self._is_at_home:
                    continue
                numel = num_ranks * message.segment_numel
                if not message.landing.is_copied:
                    offset = message.slots[0].slab_offset_bytes
                    out = self._slab.view(offset, (numel,), dtype)
                else:
                    out = self._buffer.view(buffer_offset, (numel,), dtype)
                    buffer_offset += numel * dtype.itemsize
                    self._plan_landing(message, out, members, lane)
                views.outs.append(out)
                views.own.append(out.view(num_ranks, -1)[self._axis.rank])
                views.sends.append(home[message.home_offset :][: message.segment_numel])

    def _plan_landing(
        self, message: Message, out: torch.Tensor, members: Sequence[Member], lane: Lane
    ) -> None:
        num_ranks, dtype = self._layout.num_ranks, lane.stages.computed
        segments = out.view(num_ranks, message.segment_numel)
        if message.landing is Landing.PERMUTED:
            slot = message.slots[0]
            split = self._layout.entries[slot.entry].split
            full = self._slab.view(slot.slab_offset_bytes, split.shape, dtype)
            for in_full, in_message in permuted_pairs(split, full, segments):
                self._to.append(in_full)
                self._from.append(in_message)
            return
        slots = [slot for slot in message.slots if slot.numel]
        runs = [list(run) for _, run in groupby(slots, key=lambda slot: slot.numel)]
        if self._slab.device.type == "cpu" or len(runs) <= _FEW_RUNS:
            for run in runs:
                self._plan_run(run, segments, dtype)
            return
        places = [(slot.slab_offset_bytes, slot.numel) for slot in slots]
        if message.padding_numel:
            places.append((message.padding_offset_bytes, message.padding_numel))
        parts = [self._slab.view(start, (num_ranks, numel), dtype) for start, numel in places]
        self._splits.append(_SplitCopy(segments, [numel for _, numel in places], parts))

    def _plan_run(self, run: list[Slot], segments: torch.Tensor, dtype: torch.dtype) -> None:
        """Copy neighbours of one size together."""
        first, num_ranks, numel = run[0], segments.size(0), run[0].numel
        shape = (len(run), num_ranks, numel)
        step_bytes = run[1].slab_offset_bytes - first.slab_offset_bytes if len(run) > 1 else 0
        stride = (step_bytes // dtype.itemsize, numel, 1)
        self._to.append(self._slab.view(first.slab_offset_bytes, shape, dtype, stride))
        part = segments[:, first.offset : first.offset + len(run) * numel]
        self._from.append(part.unflatten(1, (len(run), numel)).transpose(0, 1))

    def start(self, collectives: Collectives, flow: Flow) -> Gathering:
        """Issue the gather of all lanes; the gather stream is current."""
        self._allocate(flow, with_slab=flow.device.is_ordered or not self._is_all_copied)
        staged: list[torch.Tensor] = []
        transfers: list[Transfer] = []
        for lane, home, views in zip(
            self._layout.lanes, self._homes.lanes, self._views, strict=True
        ):
            if not views.outs:
                continue
            sends: Sequence[torch.Tensor] = views.sends
            if self._is_offloaded:
                arrived = _arrived(home, flow)
                staged.append(arrived)
                sends = arrived.split([send.numel() for send in sends])
            if collectives.gather_comm is not None:
                transfers.append(self._start_brought(collectives, lane, sends, views, flow, staged))
            elif self._axis.group is None or self._axis.is_single:
                torch._foreach_copy_(views.outs, list(sends))
            else:
                if lane.stages.casts_to_gather:
                    # In place: this rank's segment of the output is what it sends.
                    torch._foreach_copy_(views.own, list(sends))
                    sends = views.own
                transfers.append(collectives.gather(views.outs, sends, self._axis.group))
        gathering = Gathering(transfers, None, staged, is_landed=False)
        if flow.device.is_ordered:
            self._land(gathering)
            gathering.event = flow.device.record()
        return gathering

    def _start_brought(
        self,
        collectives: Collectives,
        lane: Lane,
        sends: Sequence[torch.Tensor],
        views: _LaneViews,
        flow: Flow,
        staged: list[torch.Tensor],
    ) -> Transfer:
        """Gather through the user's collective, in the user's memory."""
        assert collectives.gather_comm is not None
        assert self._axis.group is not None
        device = flow.device.torch_device
        flow.await_all_releases()
        for out, send in zip(views.outs, sends, strict=True):
            dtype = lane.stages.computed
            theirs = collectives.gather_comm.allocate((out.numel(),), dtype=dtype, device=device)
            own = theirs.view(self._layout.num_ranks, -1)[self._axis.rank]
            own.copy_(send)
            collectives.gather([theirs], [own], self._axis.group).wait()
            out.copy_(theirs)
            staged.append(theirs)
        return Transfer()

    def start_from_thin(
        self, thin: torch.Tensor, axis: Axis, collectives: Collectives, flow: Flow
    ) -> Gathering:
        """Gather from what each rank of a smaller group kept of the slab."""
        self._allocate(flow, with_buffer=False)
        assert axis.group is not None
        transfer = collectives.gather([self._bytes], [thin], axis.group)
        gathering = Gathering([transfer], None, [thin], is_landed=True)
        if flow.device.is_ordered:
            transfer.wait()
            gathering.event = flow.device.record()
        return gathering

    def thin(self, axis: Axis) -> torch.Tensor:
        """This rank's part of the slab, over a smaller group."""
        return self._bytes.view(axis.size, -1)[axis.rank].clone()

    def finish(self, gathering: Gathering, flow: Flow) -> None:
        """Make the full parameters readable on the current stream."""
        if flow.device.is_ordered:
            flow.device.wait(gathering.event)
        else:
            self._land(gathering)

    def _allocate(self, flow: Flow, with_slab: bool = True, with_buffer: bool = True) -> None:
        if with_slab:
            self._slab.fill()
            flow.await_releases(self._slab.address_range)
        if with_buffer and self._buffer.num_bytes:
            self._buffer.fill()
            flow.await_releases(self._buffer.address_range)

    def _land(self, gathering: Gathering) -> None:
        for transfer in gathering.transfers:
            transfer.wait()
        gathering.transfers.clear()
        if gathering.is_landed:
            return
        if self._is_all_copied:
            self._slab.fill()
        for split in self._splits:
            split.run()
        if self._to:
            torch._foreach_copy_(self._to, self._from)
        self._buffer.empty()
        gathering.is_landed = True

    def release(self) -> list[tuple[int, int]]:
        """Give the slab's memory back; where it was."""
        address_range = self._slab.address_range
        self._slab.empty()
        return [address_range]


def _arrived(home: torch.Tensor, flow: Flow) -> torch.Tensor:
    """A home on the device, in memory that nobody reads any more (rule 2)."""
    arrived = torch.empty_like(home, device=flow.device.torch_device)
    start = arrived.data_ptr()
    flow.await_releases((start, start + arrived.nbytes))
    return arrived.copy_(home, non_blocking=True)


def permuted_pairs(
    split: Split, full: torch.Tensor, segments: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For a tensor cut along an inner dim: the same elements in the tensor and in the message."""
    pairs = []
    rows = full.reshape(split.outer, split.num_rows, split.inner)
    for block in split.blocks():
        start = block.first_rank * split.chunk_rows
        numel = split.outer * block.num_rows * split.inner
        shape = (block.num_ranks, block.num_rows)
        in_full = rows.narrow(1, start, block.num_ranks * block.num_rows).unflatten(1, shape)
        of_block = segments[block.first_rank : block.first_rank + block.num_ranks, :numel]
        in_message = of_block.unflatten(1, (split.outer, block.num_rows, split.inner))
        pairs.append((in_full, in_message.transpose(0, 1)))
    return pairs
