"""From full gradients to the gradients of shards, in four stages.

- **take** the gradients that autograd left on the full parameters, or that were kept from before
  (`Reduction.of`);
- **pack** them into buckets, unless a gradient is its bucket as it is (`Reduction._packed`);
- **reduce** the buckets over the shard axis, then over the replicas (`Reduction._reduce`);
- **deliver** the sums as gradients of the shards: assigned, added, kept, or on the host
  (`Reduction._deliver`).

The first two run on the compute stream, the others on the reduce-scatter stream, where large
buckets are also packed, piece by piece (rule 9: copied late). Once the sums are scattered, hybrid
sharding and users' hooks go on on a third stream, which reduces over the replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fullshard._torch import foreach_copy_
from fullshard.comm.collectives import all_reduce
from fullshard.comm.work import CollectiveWork
from fullshard.device import Device
from fullshard.errors import LifecycleError
from fullshard.trace import seam
from fullshard.trace.seam import Activity
from fullshard.unit.context import CommContext, HeldResults, wait_all
from fullshard.unit.grad_buffer import GradBuffer, GradSlot, GradTarget, part_of
from fullshard.unit.grad_lane import Grad, GradBucket, GradLane, Scaling
from fullshard.unit.grads import UnitGrads, sum_of
from fullshard.unit.param import ShardedParam
from fullshard.unit.settings import UnitComm, UnitSettings

_NO_WORK = CollectiveWork()


@dataclass(slots=True)
class BucketReduction:
    """One bucket's part of a reduction.

    `inp` is the bucket, and `grads` the gradients that go into it, one for each slot; the list is
    emptied once they are there. If there is no `inp`, the bucket is packed and reduced piece by
    piece. Each of `targets` receives a part of the sums, plus what earlier steps summed over the
    shard axis only (`partials`).
    """

    plan: GradBucket
    grads: list[Grad]
    targets: Sequence[GradSlot]
    partials: Mapping[GradTarget, torch.Tensor]
    inp: torch.Tensor | None = None


@dataclass(slots=True)
class LaneReduction:
    """One lane's part of a reduction.

    `outs` are the sums of its buckets, and `results` the same memory in as few tensors as possible:
    for hooks, all-reduces and scaling. `buffer` has the tensors that become `.grad`, and `grads`
    are the buckets' parts of it. There is none if gradients have to be assigned one by one.
    """

    plan: GradLane
    buckets: list[BucketReduction]
    scaling: Scaling
    outs: list[torch.Tensor] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    buffer: GradBuffer | None = None
    grads: list[torch.Tensor] = field(default_factory=list)
    work: CollectiveWork = _NO_WORK


@dataclass(slots=True, eq=False)
class Reduction:
    """One unit's gradients under way. Holds all that streams still read (rule 5: an object).

    Once `_scattered` has passed, the inputs are read; once `_event` has, the results are complete.
    `_has_followed` says whether anything was enqueued in between.
    """

    unit: str
    lanes: list[LaneReduction]
    comm: UnitComm
    settings: UnitSettings
    comm_ctx: CommContext
    unit_grads: UnitGrads
    num_bytes: int
    _scattered: Any = None
    _event: Any = None
    _has_followed: bool = False

    @classmethod
    def of(
        cls,
        grads: UnitGrads,
        unit: str,
        comm: UnitComm,
        settings: UnitSettings,
        comm_ctx: CommContext,
    ) -> Reduction | None:
        """Take the full gradients and what was kept; None if there is nothing to reduce."""
        grads.begin_taking()
        lanes = []
        for plan in grads.lanes:
            taken = [_taken(grads, bucket, settings) for bucket in plan.buckets]
            present = [bucket for bucket in taken if bucket is not None]
            if present:
                plan.follow_grads(grad for bucket in present for grad in bucket.grads)
                dtype = plan.dtypes.reduced
                scaling = Scaling.of(comm, settings, grads.mesh_info.num_ranks, dtype)
                lanes.append(LaneReduction(plan, present, scaling))
        if not lanes:
            return None
        num_bytes = sum(bucket.plan.num_bytes for lane in lanes for bucket in lane.buckets)
        return cls(unit, lanes, comm, settings, comm_ctx, grads, num_bytes)

    @property
    def device(self) -> Device:
        return self.comm_ctx.device

    @property
    def is_partial(self) -> bool:
        """Whether sums over the shard axis wait for a step that reduces over the replicas, too."""
        replicas = self.unit_grads.mesh_info.replicate
        return not (replicas.is_single or self.settings.requires_all_reduce)

    def start(self) -> None:
        """Issue the reduce-scatter; on a device with streams, all that follows it as well."""
        device, stream = self.device, self.comm_ctx.streams.reduce_scatter
        is_single = self.comm.reduce_axis.is_single
        for lane in self.lanes:
            if is_single:
                self._place_sums(lane)  # the sum over one rank is its input
            for bucket in lane.buckets:
                if not self._is_copied_late(bucket):
                    bucket.inp = self._packed(lane, bucket)
                    bucket.grads = []
            if is_single:
                lane.outs = lane.results = [b.inp for b in lane.buckets if b.inp is not None]
        device.wait(device.record(), stream)
        try:
            with device.on(stream):
                if seam.observers:
                    seam.begin(Activity.REDUCE, self.unit)
                for lane in self.lanes:
                    if not is_single:
                        self._place_sums(lane)
                        self._reduce(lane)
                if seam.observers and not device.has_streams:
                    futures = (future for lane in self.lanes for future in lane.work.futures)
                    seam.end_after(futures, Activity.REDUCE, self.unit)
                if device.has_streams:
                    self._complete()
        except BaseException:
            self._wait_for_enqueued()
            self._release()
            raise

    def _release(self) -> None:
        """Drop all tensors; compute has waited for everything that reads them."""
        self.lanes.clear()

    def _wait_for_enqueued(self) -> None:
        """After a failure, make compute wait for the rest: it gets the inputs' memory back."""
        device = self.device
        self._wait_works()
        for stream in dict.fromkeys((self.comm_ctx.streams.reduce_scatter, self._last_stream)):
            with device.on(stream):
                event = device.record()
            device.wait(event)

    def _wait_works(self) -> None:
        """Wait for the collectives; never raises (rule 11: abort cannot raise)."""
        with suppress(Exception):  # the caller already knows of a failure
            wait_all(lane.work for lane in self.lanes)

    @property
    def _last_stream(self) -> Any:
        """The stream on which sums are all-reduced, and hooks on them run."""
        stream = self.comm.all_reduce_stream
        return self.comm_ctx.streams.all_reduce if stream is None else stream

    def finish(self) -> HeldResults:
        """Make compute wait for the reduce-scatter, and drop the inputs."""
        if seam.observers:
            seam.begin(Activity.AWAIT_REDUCE, self.unit)
        if not self.device.has_streams:
            self._complete()
        # Compute allocated the inputs, and may reuse their memory from here on. On one rank, they
        # are the sums as well, and are read until the end.
        is_read_on = self.comm.reduce_axis.is_single
        self.device.wait(self._event if is_read_on else self._scattered)
        if seam.observers:
            seam.end(Activity.AWAIT_REDUCE, self.unit)
        held = [tensor for lane in self.lanes for tensor in (*lane.outs, *lane.grads)]
        self._release()
        return HeldResults(self.unit, self._event, held)

    def abort(self) -> None:
        """Wait for what is under way and drop it; never raises (rule 11: abort cannot raise)."""
        self._wait_works()
        self.device.wait(self._event)
        self._release()

    # Pack: on the stream that computes

    def _is_copied_late(self, bucket: BucketReduction) -> bool:
        """Whether gradients are copied piece by piece, on the reduce stream (rule 9: copied late).

        Then only the gradients that autograd made and one piece are in flight.
        """
        comm = self.comm
        if not self.device.has_streams or comm.reduce_axis.is_single:
            return False
        if comm.current.custom_reduce_scatter or comm.comm_hook:
            return False
        return bucket.plan.num_pieces > 1

    def _packed(self, lane: LaneReduction, bucket: BucketReduction) -> torch.Tensor:
        """The gradients of a bucket, as all ranks' segments."""
        plan, collectives = bucket.plan, self.comm.current
        custom = None if self.comm.reduce_axis.is_single else collectives.custom_reduce_scatter
        dtype, device = plan.dtypes.reduce_wire.dtype, self.device.torch_device
        numel = plan.message_numel
        buffer = plan.in_place(bucket.grads) if custom is None else None
        if buffer is not None:
            return buffer if lane.scaling.before == 1.0 else buffer.div_(lane.scaling.before)
        if custom is not None:
            buffer = custom.allocate((numel,), dtype=dtype, device=device)
        elif lane.results:
            buffer = lane.results[0]  # where the sum over one rank goes
        else:
            group = self.comm.reduce_axis.group
            buffer = collectives.allocate_bucket(numel, dtype, device, group)
        plan.pack(bucket.grads, buffer, lane.scaling.before, self.comm_ctx)
        return buffer

    # Reduce: on the reduce-scatter stream

    def _grad_dtype(self, plan: GradLane) -> torch.dtype:
        """The dtype of the gradients that optimizers see; low precision is kept as torch does."""
        if not self.settings.keep_low_precision_grads:
            return plan.grad_dtype
        is_single = self.unit_grads.mesh_info.shard.is_single
        return plan.dtypes.reduced if is_single else plan.dtypes.computed

    def _place_sums(self, lane: LaneReduction) -> None:
        """Decide where a lane's sums are written, and whether a gradient buffer gets them."""
        is_single, device = self.comm.reduce_axis.is_single, self.device.torch_device
        plans = [bucket.plan for bucket in lane.buckets]
        is_assigned_apart = (
            self._grad_dtype(lane.plan) != lane.plan.grad_dtype
            or not self.unit_grads.store.is_on_device
            or self.is_partial
            or self.comm.comm_hook is not None
        )
        if is_single and not lane.plan.is_cast:
            # The tensor that autograd made may be both the sum over one rank and the gradient.
            is_assigned_apart |= plans[0].in_place(lane.buckets[0].grads) is not None
        if not is_assigned_apart:
            lane.buffer = lane.plan.acquire_buffer(plans, device)
        if lane.buffer is not None:
            result = lane.buffer.result
            lane.grads = [result[plan.in_shards] for plan in plans]
            if not lane.plan.is_cast:
                is_all = len(plans) == len(lane.plan.buckets)
                lane.outs, lane.results = lane.grads, [result] if is_all else lane.grads
                return
        if not is_single:
            sizes = [plan.in_shards.stop - plan.in_shards.start for plan in plans]
            whole = torch.empty(sum(sizes), dtype=lane.plan.dtypes.reduced, device=device)
            lane.results = [whole]
            # A comm hook may give its tensor other memory, in another dtype: it gets no view.
            lane.outs = [whole] if len(plans) == 1 else list(whole.split(sizes))

    def _reduce(self, lane: LaneReduction) -> None:
        group, hook = self.comm.reduce_axis.group, self.comm.comm_hook
        assert group is not None
        outs, ins = [], []
        wire, average = lane.plan.dtypes.reduce_wire, lane.scaling.average
        reduce = partial(self.comm.current.reduce_scatter, group=group, average=average, wire=wire)
        for bucket, out in zip(lane.buckets, lane.outs, strict=True):
            if bucket.inp is None:
                pieces = bucket.plan.pieces(self.comm_ctx)
                for columns, piece in pieces.filled(bucket.grads, lane.scaling.before):
                    reduce([out[columns]], [piece]).wait()
            elif hook is not None:
                hook(bucket.inp, out)
            elif bucket.inp.numel():
                outs.append(out)
                ins.append(bucket.inp)
        if outs:
            lane.work = reduce(outs, ins)

    # Deliver: after the reduce-scatter

    def _complete(self) -> None:
        device, replicas = self.device, self.unit_grads.mesh_info.replicate
        wait_all(lane.work for lane in self.lanes)
        self._scattered = device.record()
        if not replicas.is_single:
            self._add_partial_sums()
        if self.is_partial:
            self._end()
        elif replicas.is_single and self.comm.all_reduce_hook is None:
            self._deliver()
            self._end()
        else:
            self._has_followed = True
            device.wait(device.record(), self._last_stream)
            with device.on(self._last_stream):
                for lane in self.lanes:
                    self._all_reduce(lane)
                self._deliver()
                self._end()

    def _add_partial_sums(self) -> None:
        """Add sums over the shard axis that were kept until a reduction over the replicas."""
        for lane in self.lanes:
            for bucket, out in zip(lane.buckets, lane.outs, strict=True):
                for param, offset in bucket.targets:
                    part, kept = part_of(out, param, offset), bucket.partials.get(param)
                    if kept is not None:
                        part.add_(kept)
                    if self.is_partial and isinstance(param, ShardedParam):
                        # Another reduce-scatter of the same backward may have kept some, too.
                        before = param.partial_grad
                        param.partial_grad = part if before is None else before.add_(part)
        self._has_followed = True

    def _all_reduce(self, lane: LaneReduction) -> None:
        """Sum over the replicas, and call the users' hooks."""
        replicas, comm = self.unit_grads.mesh_info.replicate, self.comm
        for result in lane.results:
            if comm.comm_hook is not None:
                comm.comm_hook(result)
            elif replicas.group is not None and not replicas.is_single:
                wire = lane.plan.dtypes.replica_wire
                all_reduce(result, replicas.group, average=lane.scaling.average, wire=wire)
            if comm.all_reduce_hook is not None:
                comm.all_reduce_hook(result)

    def _deliver(self) -> None:
        """Scale, cast and assign, on the current stream."""
        for lane in self.lanes:
            grads, buffer = lane.grads, lane.buffer
            is_written = buffer is not None and not lane.plan.is_cast
            self._has_followed |= lane.scaling.after != 1.0 or not is_written
            if lane.scaling.after != 1.0:
                for result in lane.results:
                    result.div_(lane.scaling.after)
            if buffer is None:
                dtype = self._grad_dtype(lane.plan)
                grads = [out.to(dtype) for out in lane.outs]
            else:
                buffer.num_reserved -= 1
                if not is_written:
                    foreach_copy_(grads, lane.outs)
            if buffer is not None and self.device.has_streams:
                # The targets had no gradients and no hooks just now, or there would be no buffer.
                for bucket in lane.buckets:
                    self.unit_grads.assign_made(bucket.targets, buffer.grads)
                continue
            made = {} if buffer is None else buffer.grads
            for bucket, grad in zip(lane.buckets, grads, strict=True):
                self._has_followed |= self.unit_grads.assign(grad, bucket.targets, made)

    def _end(self) -> None:
        """Note that everything is enqueued, on the current stream."""
        # Usually nothing follows the reduce-scatter: its sums are the gradients as they are.
        self._event = self.device.record() if self._has_followed else self._scattered
        if seam.observers and self.device.has_streams:
            seam.end(Activity.REDUCE, self.unit)


# Take: on the stream that computes


def _taken(
    unit_grads: UnitGrads, plan: GradBucket, settings: UnitSettings
) -> BucketReduction | None:
    """What goes into a bucket; None if nothing does."""
    grads: list[Grad] = []
    missing: set[GradTarget] = set()
    partials: dict[GradTarget, torch.Tensor] = {}
    for param, _ in plan.slots:
        grad, before = unit_grads.take_full(param), param.accumulated
        if before is not None:
            param.accumulated = None
            grad = before if grad is None else sum_of(before, grad)
        if grad is None and settings.reduce_scatter_unused_params and param.is_trainable:
            shape, dtype = param.split.shape, plan.dtypes.computed
            grad = torch.zeros(shape, dtype=dtype, device=unit_grads.device.torch_device)
        grads.append(grad)
        kept, param.partial_grad = param.partial_grad, None
        if kept is not None:
            if kept.numel() != param.local.numel():
                raise LifecycleError(
                    f"{param.name} has {kept.numel()} accumulated gradient elements for a shard "
                    f"of {param.local.numel()}: it has moved between steps that accumulate "
                    "gradients; finish the accumulation first."
                )
            partials[param] = kept
        elif grad is None and not (plan.is_always_reduced and param.is_trainable):
            missing.add(param)
    if len(missing) == len(grads) and not plan.is_always_reduced:
        return None
    targets = plan.targets
    if missing:
        targets = [slot for slot in targets if slot[0] not in missing]
    return BucketReduction(plan, grads, targets, partials)
