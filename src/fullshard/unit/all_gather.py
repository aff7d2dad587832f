"""From shards to full parameters.

A unit makes its `UnitAllGather` at the first unshard. It owns the full buffer and every view that
an all-gather reads or writes, so that an all-gather itself makes none (rule 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from fullshard._torch import foreach_copy_
from fullshard.api import MixedPrecisionPolicy
from fullshard.comm.agreement import Agreement
from fullshard.comm.collectives import Collectives, CollectiveWork
from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.device import ResizableBuffer, second_view
from fullshard.errors import ConfigError
from fullshard.layout import Bucket, BucketKind, Lane, Slot, Split, UnitLayout
from fullshard.unit.context import AddressRanges, CommContext, wait_all
from fullshard.unit.param import ShardBuffers, ShardedParam

# Up to how many copies cost the host less than one kernel that takes lists of pointers.
_FEW_RUNS = 8


@dataclass(slots=True)
class InFlightAllGather:
    """An all-gather under way. Holds its works and buffers until they are done (rules 5, 10)."""

    works: list[CollectiveWork] = field(default_factory=list)
    staged: list[torch.Tensor] = field(default_factory=list)
    event: Any = None
    is_copied_out: bool = False

    def wait_works(self) -> None:
        works, self.works = self.works, []
        wait_all(works)

    def abort(self) -> None:
        """Wait for what is under way; never raises (rule 11)."""
        try:
            self.wait_works()
        except Exception:
            pass  # whoever aborts already knows of a failure


@dataclass(slots=True)
class _LaneViews:
    """The views that the all-gathers of one lane go through, bucket by bucket."""

    shards: list[torch.Tensor] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)
    own_segments: list[torch.Tensor] = field(default_factory=list)


class UnitAllGather:
    """All-gathers one unit into its full buffer.

    `start` issues the collectives; `finish` makes the full parameters readable on the current
    stream. Shared buckets arrive in a staging buffer and are copied out of it. Where the shard
    buffers are the full parameters (nothing is sharded, nothing cast), full parameters are views
    of them: there is no full buffer and nothing to gather.
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
        self._is_offloaded = any(buffer.device != device for buffer in shard_buffers.lanes)
        self._is_in_shards = not self._is_offloaded and layout.is_whole
        # A multiple of 16 bytes for every divisor of the ranks, for resharding to a subgroup.
        alignment = 16 * layout.num_ranks
        full_bytes = 0 if self._is_in_shards else layout.full_bytes
        self._full_buffer = ResizableBuffer(-(-full_bytes // alignment) * alignment, device)
        copied = [b for lane in layout.lanes for b in lane.buckets if b.kind.is_copied]
        self._staging = ResizableBuffer(self._staging_bytes(), device)
        self._views: list[_LaneViews] = []
        self._split_copies: list[tuple[torch.Tensor, list[int], list[torch.Tensor]]] = []
        self._copy_to: list[torch.Tensor] = []
        self._copy_from: list[torch.Tensor] = []
        self._bytes = self._full_buffer.view(0, (self._full_buffer.num_bytes,), torch.uint8)
        # Then nothing arrives in the full buffer itself: it is needed only for the copy-out.
        num_buckets = sum(len(lane.buckets) for lane in layout.lanes)
        self._is_all_copied = not self._is_in_shards and len(copied) == num_buckets
        self._make_views(params)
        self._full_buffer.free()
        self._staging.free()

    @property
    def full_bytes(self) -> int:
        """The memory of the full parameters while they are unsharded."""
        return self._full_buffer.num_bytes

    @property
    def is_allocated(self) -> bool:
        return bool(self._full_buffer.num_bytes) and self._full_buffer.is_allocated

    def _staging_bytes(self) -> int:
        return sum(
            self._layout.num_ranks * bucket.segment_numel * lane.dtypes.computed.itemsize
            for lane in self._layout.lanes
            for bucket in lane.buckets
            if bucket.kind.is_copied
        )

    # Views, made once

    def _make_views(self, params: Sequence[ShardedParam]) -> None:
        staging_offset = 0
        num_ranks = self._layout.num_ranks
        for lane, shards in zip(self._layout.lanes, self._shard_buffers.lanes, strict=True):
            views = _LaneViews()
            self._views.append(views)
            dtype = lane.dtypes.computed
            for bucket in lane.buckets:
                for slot in bucket.slots:
                    param = params[slot.param_index]
                    if self._is_in_shards:
                        param.make_full(second_view(shards, slot.offset, param.split.shape))
                    else:
                        offset = slot.full_offset_bytes
                        param.make_full(self._full_buffer.view(offset, param.split.shape, dtype))
                if bucket.segment_numel == 0 or self._is_in_shards:
                    continue
                numel = num_ranks * bucket.segment_numel
                if not bucket.kind.is_copied:
                    offset = bucket.slots[0].full_offset_bytes
                    out = self._full_buffer.view(offset, (numel,), dtype)
                else:
                    out = self._staging.view(staging_offset, (numel,), dtype)
                    staging_offset += numel * dtype.itemsize
                    self._plan_copy_out(bucket, out, lane)
                views.outs.append(out)
                views.own_segments.append(out.view(num_ranks, -1)[self._axis.rank])
                views.shards.append(shards[bucket.buffer_offset :][: bucket.segment_numel])

    def _plan_copy_out(self, bucket: Bucket, out: torch.Tensor, lane: Lane) -> None:
        num_ranks, dtype = self._layout.num_ranks, lane.dtypes.computed
        segments = out.view(num_ranks, bucket.segment_numel)
        if bucket.kind is BucketKind.PERMUTED:
            slot = bucket.slots[0]
            split = self._layout.params[slot.param_index].split
            full = self._full_buffer.view(slot.full_offset_bytes, split.shape, dtype)
            for in_full, in_bucket in permuted_pairs(split, full, segments):
                self._copy_to.append(in_full)
                self._copy_from.append(in_bucket)
            return
        slots = [slot for slot in bucket.slots if slot.numel]
        runs = [list(run) for _, run in groupby(slots, key=lambda slot: slot.numel)]
        if self._full_buffer.device.type == "cpu" or len(runs) <= _FEW_RUNS:
            for run in runs:
                self._plan_copy_of_run(run, segments, dtype)
            return
        places = [(slot.full_offset_bytes, slot.numel) for slot in slots]
        if bucket.padding_numel:
            places.append((bucket.padding_offset_bytes, bucket.padding_numel))
        view = self._full_buffer.view
        parts = [view(start, (num_ranks, numel), dtype) for start, numel in places]
        self._split_copies.append((segments, [numel for _, numel in places], parts))

    def _plan_copy_of_run(
        self, run: list[Slot], segments: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """Copy neighbours of one size together."""
        first, num_ranks, numel = run[0], segments.size(0), run[0].numel
        shape = (len(run), num_ranks, numel)
        step_bytes = run[1].full_offset_bytes - first.full_offset_bytes if len(run) > 1 else 0
        stride = (step_bytes // dtype.itemsize, numel, 1)
        self._copy_to.append(self._full_buffer.view(first.full_offset_bytes, shape, dtype, stride))
        part = segments[:, first.offset : first.offset + len(run) * numel]
        self._copy_from.append(part.unflatten(1, (len(run), numel)).transpose(0, 1))

    # One all-gather

    def start(self, collectives: Collectives, comm_ctx: CommContext) -> InFlightAllGather:
        """Issue the all-gather of all lanes; the all-gather stream is current."""
        has_streams = comm_ctx.device.has_streams
        self._allocate(comm_ctx, with_full=has_streams or not self._is_all_copied)
        in_flight = InFlightAllGather()
        try:
            for index, views in enumerate(self._views):
                if views.outs:
                    self._start_lane(index, collectives, comm_ctx, in_flight)
            if has_streams:
                self._copy_out(in_flight)
                in_flight.event = comm_ctx.device.record()
        except BaseException:
            # Lanes that were issued still write into these buffers (rule 10).
            in_flight.abort()
            self._full_buffer.free()
            self._staging.free()
            raise
        return in_flight

    def _start_lane(
        self,
        index: int,
        collectives: Collectives,
        comm_ctx: CommContext,
        in_flight: InFlightAllGather,
    ) -> None:
        views, group = self._views[index], self._axis.group
        lane = self._layout.lanes[index]
        ins: Sequence[torch.Tensor] = views.shards
        if self._is_offloaded:
            staged = _on_device(self._shard_buffers.lanes[index], comm_ctx)
            in_flight.staged.append(staged)
            ins = staged.split([shard.numel() for shard in views.shards])
        if collectives.custom_all_gather is not None:
            self._run_custom(collectives, lane, ins, views, comm_ctx, in_flight.staged)
        elif group is None or self._axis.is_single:
            foreach_copy_(views.outs, list(ins))
        else:
            if lane.dtypes.casts_to_gather:
                # In place: this rank's segment of the output is its input.
                foreach_copy_(views.own_segments, list(ins))
                ins = views.own_segments
            in_flight.works.append(collectives.all_gather(views.outs, ins, group))

    def _run_custom(
        self,
        collectives: Collectives,
        lane: Lane,
        ins: Sequence[torch.Tensor],
        views: _LaneViews,
        comm_ctx: CommContext,
        staged: list[torch.Tensor],
    ) -> None:
        """All-gather through the user's collective, in memory that it allocates."""
        custom = collectives.custom_all_gather
        assert custom is not None
        assert self._axis.group is not None
        device, dtype = comm_ctx.device.torch_device, lane.dtypes.computed
        comm_ctx.wait_until_all_unused()
        for out, inp in zip(views.outs, ins, strict=True):
            gathered = custom.allocate((out.numel(),), dtype=dtype, device=device)
            own_segment = gathered.view(self._layout.num_ranks, -1)[self._axis.rank]
            own_segment.copy_(inp)
            collectives.all_gather([gathered], [own_segment], self._axis.group).wait()
            out.copy_(gathered)
            staged.append(gathered)

    def start_from_subgroup(
        self, kept: torch.Tensor, axis: Axis, collectives: Collectives, comm_ctx: CommContext
    ) -> InFlightAllGather:
        """All-gather what each rank of a subgroup kept of the full buffer."""
        self._allocate(comm_ctx, with_staging=False)
        assert axis.group is not None
        work = collectives.all_gather([self._bytes], [kept], axis.group)
        in_flight = InFlightAllGather([work], [kept], is_copied_out=True)
        if comm_ctx.device.has_streams:
            in_flight.wait_works()
            in_flight.event = comm_ctx.device.record()
        return in_flight

    def part_for_subgroup(self, axis: Axis) -> torch.Tensor:
        """This rank's part of the full buffer, split over a subgroup."""
        return self._bytes.view(axis.size, -1)[axis.rank].clone()

    def finish(self, in_flight: InFlightAllGather, comm_ctx: CommContext) -> None:
        """Make the full parameters readable on the current stream."""
        if comm_ctx.device.has_streams:
            comm_ctx.device.wait(in_flight.event)
        else:
            self._copy_out(in_flight)

    def _allocate(
        self, comm_ctx: CommContext, with_full: bool = True, with_staging: bool = True
    ) -> None:
        if with_full:
            self._full_buffer.allocate()
            comm_ctx.wait_until_unused(self._full_buffer.address_range)
        if with_staging and self._staging.num_bytes:
            self._staging.allocate()
            comm_ctx.wait_until_unused(self._staging.address_range)

    def _copy_out(self, in_flight: InFlightAllGather) -> None:
        in_flight.wait_works()
        if in_flight.is_copied_out:
            return
        if self._is_all_copied:
            self._full_buffer.allocate()
        for segments, sizes, parts in self._split_copies:
            torch.split_with_sizes_copy(segments, sizes, dim=1, out=parts)
        if self._copy_to:
            foreach_copy_(self._copy_to, self._copy_from)
        self._staging.free()
        in_flight.is_copied_out = True

    def free(self) -> AddressRanges:
        """Free the full buffer; the address ranges that it had."""
        address_range = self._full_buffer.address_range
        self._full_buffer.free()
        self._staging.free()
        return [address_range]


def _on_device(shards: torch.Tensor, comm_ctx: CommContext) -> torch.Tensor:
    """Offloaded shards on the device, in memory that nobody reads any more (rule 2)."""
    staged = torch.empty_like(shards, device=comm_ctx.device.torch_device)
    start = staged.data_ptr()
    comm_ctx.wait_until_unused((start, start + staged.nbytes))
    return staged.copy_(shards, non_blocking=True)


def permuted_pairs(
    split: Split, full: torch.Tensor, segments: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For a tensor sharded on an inner dim: the same elements in the tensor and in the bucket."""
    pairs = []
    rows = full.reshape(split.outer, split.num_rows, split.inner)
    for run in split.blocks():
        start = run.first_rank * split.chunk_rows
        numel = split.outer * run.num_rows * split.inner
        shape = (run.num_ranks, run.num_rows)
        in_full = rows.narrow(1, start, run.num_ranks * run.num_rows).unflatten(1, shape)
        of_run = segments[run.first_rank : run.first_rank + run.num_ranks, :numel]
        in_bucket = of_run.unflatten(1, (split.outer, run.num_rows, split.inner))
        pairs.append((in_full, in_bucket.transpose(0, 1)))
    return pairs


class ExtensionAllGather:
    """All-gathers the parameters of a unit that have an `Extension`, all in one call."""

    def __init__(
        self, params: Sequence[ShardedParam], mesh_info: MeshInfo, policy: MixedPrecisionPolicy
    ) -> None:
        self._params = params
        self._mesh_info = mesh_info
        self._policy = policy
        self._is_compared = False

    @torch.no_grad()
    def start(self, collectives: Collectives, comm_ctx: CommContext) -> InFlightAllGather:
        """Issue the all-gather; the all-gather stream is current."""
        device, axis = comm_ctx.device, self._mesh_info.shard
        outs: list[torch.Tensor] = []
        ins: list[torch.Tensor] = []
        num_bytes: list[int] = []
        comm_ctx.wait_until_all_unused()  # extensions allocate here, too (rule 2)
        mesh = self._mesh_info.mesh
        shard_mesh = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]
        for param in self._params:
            extension = param.extension
            assert extension is not None
            local = param.current_local
            if local.device != device.torch_device:
                local = local.to(device.torch_device, non_blocking=True)
            outer = torch.Size(param.split.shape)
            module = param.locations[0].module
            sent = extension.inputs(local, shard_mesh, module, self._policy, outer)
            num_bytes.append(sum(tensor.nbytes for tensor in sent))
            ins += sent
            outs += extension.outputs(sent, axis.size)
        if not self._is_compared:
            self._compare(num_bytes, axis, device.torch_device)
        in_flight = InFlightAllGather(staged=ins, is_copied_out=True)
        if axis.group is None or axis.is_single:
            foreach_copy_(outs, ins)
        else:
            # As bytes: the tensors of one parameter may have several dtypes.
            in_bytes = [tensor.view(torch.uint8) for tensor in ins]
            out_bytes = [tensor.view(torch.uint8) for tensor in outs]
            in_flight.works.append(collectives.all_gather(out_bytes, in_bytes, axis.group))
        if device.has_streams:
            in_flight.wait_works()
            in_flight.event = device.record()
        return in_flight

    def _compare(self, num_bytes: list[int], axis: Axis, device: torch.device) -> None:
        """Raise on all ranks alike if they would send different amounts."""
        everyone = Agreement.exchanged(num_bytes, axis, device)
        for param, by_rank in zip(self._params, zip(*everyone, strict=True), strict=True):
            if len(set(by_rank)) > 1:
                raise ConfigError(
                    f"{param.name}: fsdp_pre_all_gather must return as many bytes on every rank, "
                    f"found {list(by_rank)} on the ranks of the shard axis; pad an uneven shard."
                )
        self._is_compared = True

    @torch.no_grad()
    def finish(self, in_flight: InFlightAllGather, comm_ctx: CommContext) -> None:
        """Make the full parameters; runs on the stream that computes."""
        comm_ctx.device.wait(in_flight.event)
        in_flight.wait_works()
        for param in self._params:
            assert param.extension is not None
            assert isinstance(param.split, Split)
            dtype = param.dtype_plan(self._policy).computed
            made = param.extension.make_full(param.current_local, dtype, param.full, param.split)
            if made is not None:
                param.make_full(made)

    def free(self) -> AddressRanges:
        ranges: AddressRanges = []
        for param in self._params:
            assert param.extension is not None
            ranges += param.extension.free()
        return ranges
