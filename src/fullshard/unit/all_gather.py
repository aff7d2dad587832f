"""From shards to full parameters.

`UnitAllGather` is made at a unit's first unshard: it owns the slab and every view that a gather reads
or writes, so that a gather itself makes none (rule 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from fullshard.api import MixedPrecisionPolicy
from fullshard.comm.agreement import Agreement
from fullshard.comm.collectives import Collectives, CollectiveWork
from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.device import ResizableBuffer, second_view
from fullshard.errors import ConfigError
from fullshard.layout import Bucket, BucketKind, Lane, Slot, Split, UnitLayout
from fullshard.unit.context import CommContext
from fullshard.unit.param import ShardBuffers, ShardedParam

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

    bucket: torch.Tensor
    sizes: list[int]
    parts: list[torch.Tensor]

    def run(self) -> None:
        torch.split_with_sizes_copy(self.bucket, self.sizes, dim=1, out=self.parts)


@dataclass(slots=True)
class InFlightAllGather:
    """A gather under way. It holds its buffers (rule 5)."""

    transfers: list[CollectiveWork]
    event: Any
    staged: list[torch.Tensor]
    is_landed: bool


class UnitAllGather:
    """Gathers one unit into its slab.

    `start` issues everything; `finish` makes the full parameters readable on the current stream.
    Where homes are whole (nothing is sharded, nothing cast), full parameters are views of them:
    there is no slab and nothing to gather.
    """

    def __init__(
        self,
        layout: UnitLayout,
        shard_buffers: ShardBuffers,
        params: Sequence[ShardedParam],
        axis: Axis,
        comm_ctx: CommContext,
    ) -> None:
        self._layout = layout
        self._shard_buffers = shard_buffers
        self._axis = axis
        device = comm_ctx.device.torch_device
        self._is_offloaded = any(home.device != device for home in shard_buffers.lanes)
        self._is_at_home = not self._is_offloaded and layout.is_whole
        # A multiple of 16 bytes for every divisor of the ranks, so that it can be thinned.
        alignment = 16 * layout.num_ranks
        full_bytes = 0 if self._is_at_home else layout.full_bytes
        self._full_buffer = ResizableBuffer(-(-full_bytes // alignment) * alignment, device)
        self._buffer = ResizableBuffer(self._buffer_bytes(), device)
        self._views: list[_LaneViews] = []
        self._splits: list[_SplitCopy] = []
        self._to: list[torch.Tensor] = []
        self._from: list[torch.Tensor] = []
        self._bytes = self._full_buffer.view(0, (self._full_buffer.num_bytes,), torch.uint8)
        # Then nothing arrives in the slab itself: it is not needed before the landing.
        self._is_all_copied = not self._is_at_home and all(
            bucket.kind.is_copied for lane in layout.lanes for bucket in lane.buckets
        )
        self._make_views(params)
        self._full_buffer.empty()
        self._buffer.empty()

    @property
    def full_bytes(self) -> int:
        """What the full parameters take while they are there."""
        return self._full_buffer.num_bytes

    def _buffer_bytes(self) -> int:
        return sum(
            self._layout.num_ranks * bucket.segment_numel * lane.dtypes.computed.itemsize
            for lane in self._layout.lanes
            for bucket in lane.buckets
            if bucket.kind.is_copied
        )

    def _make_views(self, params: Sequence[ShardedParam]) -> None:
        buffer_offset = 0
        num_ranks = self._layout.num_ranks
        for lane, home in zip(self._layout.lanes, self._shard_buffers.lanes, strict=True):
            views = _LaneViews()
            self._views.append(views)
            dtype = lane.dtypes.computed
            for bucket in lane.buckets:
                for slot in bucket.slots:
                    sharded_param = params[slot.param_index]
                    shape = sharded_param.split.shape
                    if self._is_at_home:
                        sharded_param.make_full(second_view(home, slot.offset, shape))
                    else:
                        sharded_param.make_full(
                            self._full_buffer.view(slot.full_offset_bytes, shape, dtype)
                        )
                if bucket.segment_numel == 0 or self._is_at_home:
                    continue
                numel = num_ranks * bucket.segment_numel
                if not bucket.kind.is_copied:
                    offset = bucket.slots[0].full_offset_bytes
                    out = self._full_buffer.view(offset, (numel,), dtype)
                else:
                    out = self._buffer.view(buffer_offset, (numel,), dtype)
                    buffer_offset += numel * dtype.itemsize
                    self._plan_landing(bucket, out, params, lane)
                views.outs.append(out)
                views.own.append(out.view(num_ranks, -1)[self._axis.rank])
                views.sends.append(home[bucket.buffer_offset :][: bucket.segment_numel])

    def _plan_landing(
        self, bucket: Bucket, out: torch.Tensor, params: Sequence[ShardedParam], lane: Lane
    ) -> None:
        num_ranks, dtype = self._layout.num_ranks, lane.dtypes.computed
        segments = out.view(num_ranks, bucket.segment_numel)
        if bucket.kind is BucketKind.PERMUTED:
            slot = bucket.slots[0]
            split = self._layout.params[slot.param_index].split
            full = self._full_buffer.view(slot.full_offset_bytes, split.shape, dtype)
            for in_full, in_message in permuted_pairs(split, full, segments):
                self._to.append(in_full)
                self._from.append(in_message)
            return
        slots = [slot for slot in bucket.slots if slot.numel]
        runs = [list(run) for _, run in groupby(slots, key=lambda slot: slot.numel)]
        if self._full_buffer.device.type == "cpu" or len(runs) <= _FEW_RUNS:
            for run in runs:
                self._plan_run(run, segments, dtype)
            return
        places = [(slot.full_offset_bytes, slot.numel) for slot in slots]
        if bucket.padding_numel:
            places.append((bucket.padding_offset_bytes, bucket.padding_numel))
        parts = [
            self._full_buffer.view(start, (num_ranks, numel), dtype) for start, numel in places
        ]
        self._splits.append(_SplitCopy(segments, [numel for _, numel in places], parts))

    def _plan_run(self, run: list[Slot], segments: torch.Tensor, dtype: torch.dtype) -> None:
        """Copy neighbours of one size together."""
        first, num_ranks, numel = run[0], segments.size(0), run[0].numel
        shape = (len(run), num_ranks, numel)
        step_bytes = run[1].full_offset_bytes - first.full_offset_bytes if len(run) > 1 else 0
        stride = (step_bytes // dtype.itemsize, numel, 1)
        self._to.append(self._full_buffer.view(first.full_offset_bytes, shape, dtype, stride))
        part = segments[:, first.offset : first.offset + len(run) * numel]
        self._from.append(part.unflatten(1, (len(run), numel)).transpose(0, 1))

    def start(self, collectives: Collectives, comm_ctx: CommContext) -> InFlightAllGather:
        """Issue the gather of all lanes; the gather stream is current."""
        self._allocate(comm_ctx, with_slab=comm_ctx.device.is_ordered or not self._is_all_copied)
        staged: list[torch.Tensor] = []
        transfers: list[CollectiveWork] = []
        for lane, home, views in zip(
            self._layout.lanes, self._shard_buffers.lanes, self._views, strict=True
        ):
            if not views.outs:
                continue
            sends: Sequence[torch.Tensor] = views.sends
            if self._is_offloaded:
                arrived = _arrived(home, comm_ctx)
                staged.append(arrived)
                sends = arrived.split([send.numel() for send in sends])
            if collectives.custom_all_gather is not None:
                transfers.append(
                    self._start_brought(collectives, lane, sends, views, comm_ctx, staged)
                )
            elif self._axis.group is None or self._axis.is_single:
                torch._foreach_copy_(views.outs, list(sends))
            else:
                if lane.dtypes.casts_to_gather:
                    # In place: this rank's segment of the output is what it sends.
                    torch._foreach_copy_(views.own, list(sends))
                    sends = views.own
                transfers.append(collectives.all_gather(views.outs, sends, self._axis.group))
        gathering = InFlightAllGather(transfers, None, staged, is_landed=False)
        if comm_ctx.device.is_ordered:
            self._land(gathering)
            gathering.event = comm_ctx.device.record()
        return gathering

    def _start_brought(
        self,
        collectives: Collectives,
        lane: Lane,
        sends: Sequence[torch.Tensor],
        views: _LaneViews,
        comm_ctx: CommContext,
        staged: list[torch.Tensor],
    ) -> CollectiveWork:
        """Gather through the user's collective, in the user's memory."""
        assert collectives.custom_all_gather is not None
        assert self._axis.group is not None
        device = comm_ctx.device.torch_device
        comm_ctx.await_all_releases()
        for out, send in zip(views.outs, sends, strict=True):
            dtype = lane.dtypes.computed
            theirs = collectives.custom_all_gather.allocate(
                (out.numel(),), dtype=dtype, device=device
            )
            own = theirs.view(self._layout.num_ranks, -1)[self._axis.rank]
            own.copy_(send)
            collectives.all_gather([theirs], [own], self._axis.group).wait()
            out.copy_(theirs)
            staged.append(theirs)
        return CollectiveWork()

    def start_from_thin(
        self, thin: torch.Tensor, axis: Axis, collectives: Collectives, comm_ctx: CommContext
    ) -> InFlightAllGather:
        """Gather from what each rank of a smaller group kept of the slab."""
        self._allocate(comm_ctx, with_buffer=False)
        assert axis.group is not None
        transfer = collectives.all_gather([self._bytes], [thin], axis.group)
        gathering = InFlightAllGather([transfer], None, [thin], is_landed=True)
        if comm_ctx.device.is_ordered:
            transfer.wait()
            gathering.event = comm_ctx.device.record()
        return gathering

    def thin(self, axis: Axis) -> torch.Tensor:
        """This rank's part of the slab, over a smaller group."""
        return self._bytes.view(axis.size, -1)[axis.rank].clone()

    def finish(self, gathering: InFlightAllGather, comm_ctx: CommContext) -> None:
        """Make the full parameters readable on the current stream."""
        if comm_ctx.device.is_ordered:
            comm_ctx.device.wait(gathering.event)
        else:
            self._land(gathering)

    def _allocate(
        self, comm_ctx: CommContext, with_slab: bool = True, with_buffer: bool = True
    ) -> None:
        if with_slab:
            self._full_buffer.fill()
            comm_ctx.await_releases(self._full_buffer.address_range)
        if with_buffer and self._buffer.num_bytes:
            self._buffer.fill()
            comm_ctx.await_releases(self._buffer.address_range)

    def _land(self, gathering: InFlightAllGather) -> None:
        for transfer in gathering.transfers:
            transfer.wait()
        gathering.transfers.clear()
        if gathering.is_landed:
            return
        if self._is_all_copied:
            self._full_buffer.fill()
        for split in self._splits:
            split.run()
        if self._to:
            torch._foreach_copy_(self._to, self._from)
        self._buffer.empty()
        gathering.is_landed = True

    def release(self) -> list[tuple[int, int]]:
        """Give the slab's memory back; where it was."""
        address_range = self._full_buffer.address_range
        self._full_buffer.empty()
        return [address_range]


def _arrived(home: torch.Tensor, comm_ctx: CommContext) -> torch.Tensor:
    """A home on the device, in memory that nobody reads any more (rule 2)."""
    arrived = torch.empty_like(home, device=comm_ctx.device.torch_device)
    start = arrived.data_ptr()
    comm_ctx.await_releases((start, start + arrived.nbytes))
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


class ExtensionAllGather:
    """Gathers the members of a unit that have an `Extension`, all in one call."""

    def __init__(
        self, params: Sequence[ShardedParam], mesh_info: MeshInfo, policy: MixedPrecisionPolicy
    ) -> None:
        self._params = params
        self._topology = mesh_info
        self._policy = policy
        self._is_compared = False

    @torch.no_grad()
    def start(self, collectives: Collectives, comm_ctx: CommContext) -> InFlightAllGather:
        """Issue the gather; the gather stream is current."""
        axis = self._topology.shard
        outs: list[torch.Tensor] = []
        ins: list[torch.Tensor] = []
        num_bytes: list[int] = []
        comm_ctx.await_all_releases()  # what extensions make is allocated here, too (rule 2)
        mesh = self._topology.mesh
        shard_mesh = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]
        for sharded_param in self._params:
            extension = sharded_param.extension
            assert extension is not None
            local = sharded_param.current_local
            if local.device != comm_ctx.device.torch_device:
                local = local.to(comm_ctx.device.torch_device, non_blocking=True)
            outer = torch.Size(sharded_param.split.shape)
            module = sharded_param.locations[0].module
            sent = extension.inputs(local, shard_mesh, module, self._policy, outer)
            num_bytes.append(sum(tensor.numel() * tensor.element_size() for tensor in sent))
            ins += sent
            outs += extension.outputs(sent, axis.size)
        transfers = []
        if not self._is_compared:
            self._compare(num_bytes, axis, comm_ctx.device.torch_device)
        if axis.group is None or axis.is_single:
            torch._foreach_copy_(outs, ins)
        else:
            # As bytes: the tensors of one parameter may have several dtypes.
            in_bytes = [tensor.view(torch.uint8) for tensor in ins]
            out_bytes = [tensor.view(torch.uint8) for tensor in outs]
            transfers.append(collectives.all_gather(out_bytes, in_bytes, axis.group))
        gathering = InFlightAllGather(transfers, None, ins, is_landed=True)
        if comm_ctx.device.is_ordered:
            for transfer in transfers:
                transfer.wait()
            gathering.event = comm_ctx.device.record()
        return gathering

    def _compare(self, num_bytes: list[int], axis: Axis, device: torch.device) -> None:
        """Raise on all ranks alike if they would send different amounts."""
        everyone = Agreement.exchanged(num_bytes, axis, device)
        for sharded_param, by_rank in zip(self._params, zip(*everyone, strict=True), strict=True):
            if len(set(by_rank)) > 1:
                raise ConfigError(
                    f"{sharded_param.name}: fsdp_pre_all_gather must return as many bytes on every rank, "
                    f"found {list(by_rank)} on the ranks of the shard axis; pad an uneven shard."
                )
        self._is_compared = True

    @torch.no_grad()
    def finish(self, gathering: InFlightAllGather, comm_ctx: CommContext) -> None:
        """Make the full parameters; runs on the stream that computes."""
        comm_ctx.device.wait(gathering.event)
        for transfer in gathering.transfers:
            transfer.wait()
        for sharded_param in self._params:
            assert sharded_param.extension is not None
            dtype = sharded_param.dtype_plan(self._policy).computed
            split = sharded_param.split
            assert isinstance(split, Split)
            made = sharded_param.extension.finish(
                sharded_param.current_local, dtype, sharded_param.full, split
            )
            if made is not None:
                sharded_param.make_full(made)

    def release(self) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        for sharded_param in self._params:
            assert sharded_param.extension is not None
            ranges += sharded_param.extension.address_ranges
            sharded_param.extension.release()
        return ranges
