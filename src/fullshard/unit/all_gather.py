"""From shards to full parameters.

A unit makes its `UnitAllGather` at the first unshard. It owns the full buffer and every view that
an all-gather reads or writes, so that an all-gather itself makes none (rule 7: host time).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fullshard._torch import foreach_copy_
from fullshard.api import MixedPrecisionPolicy
from fullshard.comm.agreement import Agreement
from fullshard.comm.collectives import Collectives
from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.comm.work import CollectiveWork
from fullshard.device import ResizableBuffer, address_of
from fullshard.errors import ConfigError
from fullshard.layout import Bucket, Lane, Plain, UnitLayout
from fullshard.trace import Activity, seam
from fullshard.unit.context import AddressRanges, CommContext, wait_all
from fullshard.unit.copy_program import Decoder, allocates, encode, unpacker
from fullshard.unit.extensions import Extension
from fullshard.unit.param import ShardBuffers, ShardedParam
from fullshard.unit.store import Store


@dataclass(slots=True)
class InFlightAllGather:
    """An all-gather under way. Holds works and buffers until they are done (rule 5: an object)."""

    works: list[CollectiveWork] = field(default_factory=list)
    staged: list[torch.Tensor] = field(default_factory=list)
    event: Any = None
    is_copied_out: bool = False

    def wait_works(self) -> None:
        works, self.works = self.works, []
        wait_all(works)

    def abort(self) -> None:
        """Wait for what is under way; never raises (rule 11: abort cannot raise)."""
        with suppress(Exception):  # the caller already knows of a failure
            self.wait_works()


@dataclass(slots=True)
class _LaneViews:
    """The views that the all-gathers of one lane go through, bucket by bucket."""

    lane: Lane
    buffer: torch.Tensor
    shards: list[torch.Tensor] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)
    own_segments: list[torch.Tensor] = field(default_factory=list)


class UnitAllGather:
    """All-gathers one unit into its full buffer.

    `start` issues the collectives; `finish` makes the full parameters readable on the current
    stream. Buckets that have to be copied arrive in a staging buffer, and `finish` copies them to
    the full buffer. If nothing else arrives, the full buffer is allocated only then, when compute
    has left the previous unit's, so that a forward holds two units and not three. Where the shard
    buffers are the full parameters (nothing is sharded, nothing cast), full parameters are views of
    them: there is no full buffer and nothing to gather. `extensions` gather by themselves.
    """

    def __init__(
        self,
        layout: UnitLayout,
        shard_buffers: ShardBuffers,
        params: Sequence[ShardedParam],
        axis: Axis,
        store: Store,
        comm_ctx: CommContext,
        extensions: ExtensionAllGather,
    ) -> None:
        device = comm_ctx.device.torch_device
        self._layout = layout
        self._axis = axis
        self._extensions = extensions
        self._store = store
        self._is_in_shards = store.is_on_device and layout.is_whole
        # A multiple of 16 bytes for every divisor of the ranks, for resharding to a subgroup.
        alignment = 16 * layout.num_ranks
        full_bytes = 0 if self._is_in_shards else layout.full_bytes
        self._full_buffer = ResizableBuffer(
            -(-full_bytes // alignment) * alignment, device, "full parameters"
        )
        staged = [_staged_bytes(lane, bucket) for lane in layout.lanes for bucket in lane.buckets]
        staging_bytes = sum(map(sum, staged)) * layout.num_ranks
        self._staging = ResizableBuffer(staging_bytes, device, "staging")
        self._decoders: list[Decoder] = []
        self._lanes: list[_LaneViews] = []
        self._copy_out = unpacker(self._full_buffer, comm_ctx)
        self._bytes = self._full_buffer.view(0, (self._full_buffer.num_bytes,), torch.uint8)
        # If so, nothing arrives in the full buffer itself: only the copy-out needs it.
        self._is_all_copied = not self._is_in_shards and all(map(any, staged))
        self._make_views(params, shard_buffers)
        self._full_buffer.free()
        self._staging.free()

    @property
    def full_bytes(self) -> int:
        """The memory of the full parameters while they are unsharded."""
        return self._full_buffer.num_bytes

    # Views, made once

    def _make_views(self, params: Sequence[ShardedParam], shard_buffers: ShardBuffers) -> None:
        staging_offset = 0
        num_ranks = self._layout.num_ranks
        for lane, shards in zip(self._layout.lanes, shard_buffers.lanes, strict=True):
            views = _LaneViews(lane, shards)
            self._lanes.append(views)
            dtype = lane.dtypes.computed
            for bucket in lane.buckets:
                for slot in bucket.slots:
                    param = params[slot.param_index]
                    shape = param.split.shape
                    if self._is_in_shards:
                        start = slot.in_segment(0)
                        # `data` has a version counter of its own.
                        param.make_full(shards[start : start + prod(shape)].view(shape).data)
                    else:
                        offset = slot.full_offset_bytes
                        param.make_full(self._full_buffer.view(offset, shape, dtype))
                if bucket.segment_numel == 0 or self._is_in_shards:
                    continue
                numel = num_ranks * bucket.segment_numel
                message_bytes, values_bytes = _staged_bytes(lane, bucket)
                if bucket.full_offset_bytes is not None:
                    values = self._full_buffer.view(bucket.full_offset_bytes, (numel,), dtype)
                else:
                    values = self._staging.view(staging_offset, (numel,), dtype)
                    staging_offset += num_ranks * values_bytes
                    self._copy_out.add(bucket, values)
                out = values
                if message_bytes:
                    wire = lane.dtypes.gather_wire
                    shape = (num_ranks * wire.message_numel(bucket.segment_numel),)
                    out = self._staging.view(staging_offset, shape, wire.dtype)
                    staging_offset += num_ranks * message_bytes
                    self._decoders.append(Decoder(wire, out, values, num_ranks))
                views.outs.append(out)
                views.own_segments.append(out.view(num_ranks, -1)[self._axis.rank])
                views.shards.append(shards[bucket.buffer_offset :][: bucket.segment_numel])

    # One all-gather

    def start(self, collectives: Collectives, comm_ctx: CommContext) -> InFlightAllGather:
        """Issue the all-gather of all lanes; the all-gather stream is current."""
        device = comm_ctx.device
        if not self._is_all_copied:
            _allocate(self._full_buffer, comm_ctx)
        _allocate(self._staging, comm_ctx)
        in_flight = InFlightAllGather()
        try:
            for lane in self._lanes:
                if lane.outs:
                    self._start_lane(lane, collectives, comm_ctx, in_flight)
            if self._extensions.params:
                self._extensions.start(collectives, comm_ctx, in_flight)
            if device.has_streams:
                in_flight.wait_works()
                in_flight.event = device.record()
        except BaseException:
            # Lanes that were issued still write into these buffers (rule 10: wait before raising).
            in_flight.abort()
            self.free()
            raise
        return in_flight

    def _start_lane(
        self,
        views: _LaneViews,
        collectives: Collectives,
        comm_ctx: CommContext,
        in_flight: InFlightAllGather,
    ) -> None:
        group, device = self._axis.group, comm_ctx.device.torch_device
        ins: Sequence[torch.Tensor] = views.shards
        if not self._store.is_on_device:
            staged = torch.empty_like(views.buffer, device=device)
            start = address_of(staged)
            comm_ctx.wait_until_unused((start, start + staged.nbytes))
            self._store.read(views.buffer, staged)
            in_flight.staged.append(staged)
            ins = staged.split([shard.numel() for shard in views.shards])
        custom = collectives.custom_all_gather
        if group is None or self._axis.is_single:
            foreach_copy_(views.outs, list(ins))
            return
        wire = views.lane.dtypes.gather_wire
        if seam.observers:
            seam.send(Activity.GATHER, wire, views.outs, self._axis.size)
        if custom is not None:
            # In memory that the user's collective allocates.
            comm_ctx.wait_until_unused()
            for out, inp in zip(views.outs, ins, strict=True):
                gathered = custom.allocate((out.numel(),), dtype=out.dtype, device=device)
                own_segment = gathered.view(self._axis.size, -1)[self._axis.rank]
                encode(wire, inp, own_segment)
                collectives.all_gather([gathered], [own_segment], group).wait()
                out.copy_(gathered)
                in_flight.staged.append(gathered)
        else:
            if wire != Plain(views.lane.dtypes.stored):
                # In place: this rank's segment of the output is its input.
                if wire.is_plain:
                    foreach_copy_(views.own_segments, list(ins))
                else:
                    if allocates(wire, ins[0]):
                        comm_ctx.wait_until_unused()  # its memory may be anywhere (rule 2)
                    for own, inp in zip(views.own_segments, ins, strict=True):
                        encode(wire, inp, own)
                ins = views.own_segments
            in_flight.works.append(collectives.all_gather(views.outs, ins, group))

    def start_from_subgroup(
        self, kept: torch.Tensor, axis: Axis, collectives: Collectives, comm_ctx: CommContext
    ) -> InFlightAllGather:
        """All-gather what each rank of a subgroup kept of the full buffer."""
        _allocate(self._full_buffer, comm_ctx)
        assert axis.group is not None
        if seam.observers:
            form = ", ".join(
                dict.fromkeys(str(views.lane.dtypes.computed) for views in self._lanes)
            )
            seam.send(Activity.GATHER, form, [self._bytes], axis.size)
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
        in_flight.wait_works()
        comm_ctx.device.wait(in_flight.event)
        if not in_flight.is_copied_out:
            if self._is_all_copied:
                _allocate(self._full_buffer, comm_ctx)
            for decoder in self._decoders:
                decoder.run()
            self._copy_out.run()
            if self._staging.num_bytes:
                comm_ctx.free_after_compute(self._staging)
            in_flight.is_copied_out = True
        if self._extensions.params:
            self._extensions.finish(comm_ctx)

    def free(self, *, keep_storage: bool = False) -> AddressRanges:
        """Free what was gathered; return its address ranges.

        With `keep_storage`, the full parameters keep their memory for the next all-gather, which
        waits for compute that still reads it, as for any other memory.
        """
        address_range = self._full_buffer.address_range
        if not keep_storage:
            self._full_buffer.free()
        self._staging.free()
        return [address_range, *self._extensions.free(keep_storage)]


def _staged_bytes(lane: Lane, bucket: Bucket) -> tuple[int, int]:
    """For each rank, the bytes of a message to be decoded, and of values to be copied."""
    dtypes, numel = lane.dtypes, bucket.segment_numel
    wire = dtypes.gather_wire
    message = 0 if dtypes.arrives_as_computed else wire.message_numel(numel) * wire.dtype.itemsize
    return message, numel * dtypes.computed.itemsize if bucket.is_copied else 0


def _allocate(buffer: ResizableBuffer, comm_ctx: CommContext) -> None:
    if buffer.num_bytes:
        buffer.allocate()
        comm_ctx.wait_until_unused(buffer.address_range)


class ExtensionAllGather:
    """All-gathers the parameters of a unit that have an `Extension`, all in one call.

    On one rank, one that is frozen and not cast may be a view of its shard: `_views` has the shards
    that such parameters were made of, and the views.
    """

    def __init__(
        self, params: Sequence[ShardedParam], mesh_info: MeshInfo, policy: MixedPrecisionPolicy
    ) -> None:
        self.params = [(param, param.extension) for param in params if param.extension is not None]
        self._mesh_info = mesh_info
        self._policy = policy
        self._is_compared = False
        self._views: dict[ShardedParam, tuple[torch.Tensor, torch.Tensor]] = {}

    def _is_view(self, param: ShardedParam, mesh: DeviceMesh, device: torch.device) -> bool:
        local, dtypes = param.current_local, param.dtypes
        is_whole = self._mesh_info.shard.is_single and local.device == device
        if not is_whole or param.is_trainable or dtypes.stored != dtypes.computed:
            self._views.pop(param, None)
            return False
        if param not in self._views or self._views[param][0] is not local:
            self._views.pop(param, None)
            view = Extension.view_of(local, mesh, param.locations[0].module, self._policy)
            if view is not None:
                self._views[param] = local, view
                param.full = None
        return param in self._views

    @torch.no_grad()
    def start(
        self, collectives: Collectives, comm_ctx: CommContext, in_flight: InFlightAllGather
    ) -> None:
        """Issue the all-gather; the all-gather stream is current."""
        device, axis = comm_ctx.device.torch_device, self._mesh_info.shard
        mesh = self._mesh_info.mesh
        outs: list[torch.Tensor] = []
        ins: list[torch.Tensor] = []
        num_bytes: list[int] = []
        comm_ctx.wait_until_unused()  # extensions allocate here, too (rule 2: memory by stream)
        shard_mesh = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]
        for param, extension in self.params:
            if self._is_view(param, shard_mesh, device):
                num_bytes.append(0)
                continue
            local, module = param.current_local, param.locations[0].module
            if local.device != device:
                local = local.to(device, non_blocking=True)
            sent = extension.prepare(local, shard_mesh, module, self._policy, param.split)
            num_bytes.append(sum(tensor.nbytes for tensor in sent))
            ins += sent
            outs += extension.outs
        if not self._is_compared:
            self._compare(num_bytes, axis, device)
        in_flight.staged += ins
        if axis.group is None or axis.is_single:
            foreach_copy_(outs, ins)
        else:
            # As bytes: the tensors of one parameter may have several dtypes.
            in_bytes = [tensor.view(torch.uint8) for tensor in ins]
            out_bytes = [tensor.view(torch.uint8) for tensor in outs]
            if seam.observers:
                seam.send(Activity.GATHER, "fsdp_pre_all_gather", out_bytes, axis.size)
            in_flight.works.append(collectives.all_gather(out_bytes, in_bytes, axis.group))

    def _compare(self, num_bytes: list[int], axis: Axis, device: torch.device) -> None:
        """Raise on all ranks alike if they would send different amounts."""
        everyone = Agreement.exchanged(num_bytes, axis, device)
        for (param, _), by_rank in zip(self.params, zip(*everyone, strict=True), strict=True):
            if len(set(by_rank)) > 1:
                raise ConfigError(
                    f"{param.name}: fsdp_pre_all_gather must return all-gather inputs with the "
                    f"padded sharded size, but the ranks of the shard axis have {list(by_rank)} "
                    "bytes; pad an uneven shard."
                )
        self._is_compared = True

    @torch.no_grad()
    def finish(self, comm_ctx: CommContext) -> None:
        """Make the full parameters; runs on the stream that computes."""
        for param, extension in self.params:
            if param in self._views:
                if param.full is None:
                    param.make_full(self._views[param][1])
                continue
            local, dtype = param.current_local, param.dtypes.computed
            made = extension.make_full(local, dtype, param.full, param.split)
            if made is not None:
                param.make_full(made)
            if extension.is_independent(local):
                for buffer in extension.buffers:
                    comm_ctx.free_after_compute(buffer)

    def free(self, keep_storage: bool) -> AddressRanges:
        return [freed for _, each in self.params for freed in each.free(keep_storage)]
