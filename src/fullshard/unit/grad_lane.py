"""How the gradients of a lane lie in its buckets: what does not change from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise

import torch

from fullshard._torch import disable_torch_function
from fullshard.comm.mesh import Axis
from fullshard.comm.two_level import packed_wire
from fullshard.device import ResizableBuffer
from fullshard.errors import ConfigError
from fullshard.layout import Bucket, FlatSplit, Lane, Plain, UnitLayout, Wire
from fullshard.unit.context import CommContext
from fullshard.unit.copy_program import Packer, packer
from fullshard.unit.grad_buffer import GradBuffer, GradSlot, GradTarget, has_hooks
from fullshard.unit.param import ShardedParam
from fullshard.unit.settings import UnitComm, UnitSettings

Grad = torch.Tensor | None

# Buckets are cast and reduced in as many pieces of this size as they fill (rule 9: copied late).
PIECE_BYTES = 64 << 20
# With fewer ranks, each holds so much that pieces save little, and every piece costs time: on 4
# NCCL ranks, a step with 2 or 3 pieces for each block took 4 % longer (benchmarks/bench_gpu.py
# ranks). Pieces are larger there by this factor.
FEWEST_CUT_RANKS = 8
FEW_RANKS_FACTOR = 4
# With less than this for each rank, a piece costs more time than its memory is worth.
SMALLEST_PIECE_PART_BYTES = 1 << 20


class GradPieces:
    """The pieces of a bucket, one after another in the same memory (rule 9: copied late).

    A piece has some columns of every rank's segment.
    """

    def __init__(self, plan: GradBucket, bucket: Bucket, comm_ctx: CommContext) -> None:
        alignment = plan.dtypes.alignment_numel
        step = -(-bucket.segment_numel // (plan.num_pieces * alignment)) * alignment
        bounds = [*range(0, bucket.segment_numel, step), bucket.segment_numel]
        columns = [range(*each) for each in pairwise(bounds)]
        wire, num_ranks = plan.wire, plan.num_ranks
        numels = [num_ranks * wire.message_numel(len(each)) for each in columns]
        num_bytes = numels[0] * wire.dtype.itemsize
        self._memory = ResizableBuffer(num_bytes, comm_ctx.device.torch_device, "full gradients")
        self._pieces = [
            (
                slice(each.start, each.stop),
                packer(bucket.piece(each), plan.dtypes, wire, num_ranks, comm_ctx),
                self._memory.view(0, (numel,), wire.dtype),
            )
            for each, numel in zip(columns, numels, strict=True)
        ]
        self._memory.free()

    def filled(self, grads: Sequence[Grad], divisor: float) -> Iterator[tuple[slice, torch.Tensor]]:
        """Copy one piece after another into the memory; yield its columns and the piece."""
        self._memory.allocate()
        for columns, program, piece in self._pieces:
            program.pack(grads, piece, divisor)
            yield columns, piece
        self._memory.free()


class GradBucket:
    """A bucket to be reduced: the parameters whose gradients it carries, and how they lie in it.

    `slots` says where in a segment the shard of each parameter begins, `targets` what receives a
    part of the sums, and `in_shards` where these belong in the shard buffer. `num_pieces` says in
    how many pieces it is reduced, on a device with streams (rule 9: copied late).
    """

    def __init__(
        self,
        lane: Lane,
        bucket: Bucket,
        slots: Sequence[tuple[ShardedParam, int]],
        axis: Axis,
    ) -> None:
        self.params = [param for param, _ in slots]
        self.slots = slots
        self.targets: list[GradSlot] = [slot for slot in slots if slot[0].takes_gradient]
        self.dtypes = lane.dtypes
        self.numel = axis.size * bucket.segment_numel
        self.in_shards = slice(bucket.buffer_offset, bucket.buffer_offset + bucket.segment_numel)
        # A flat bucket is always reduced: this rank may hold a part of parameters that other ranks
        # have used, without knowing that they have.
        is_flat = any(isinstance(param.split, FlatSplit) for param in self.params)
        self.is_always_reduced = is_flat and lane.is_trainable
        self._bucket = bucket
        self._is_one = len(slots) == 1 and not bucket.is_copied
        self.num_ranks, self._axis = axis.size, axis
        self._packer: Packer | None = None
        self._pieces: GradPieces | None = None

    @property
    def num_pieces(self) -> int:
        """The same on all ranks, whichever gradients this one has."""
        dtypes = self.dtypes
        if self._is_one and dtypes.computed == dtypes.reduced and not dtypes.sums_on_arrival:
            return 1  # usually autograd's gradient is the bucket as it is
        piece_bytes = PIECE_BYTES
        if self.num_ranks < FEWEST_CUT_RANKS:
            piece_bytes *= FEW_RANKS_FACTOR
        smallest = max(piece_bytes, self.num_ranks * SMALLEST_PIECE_PART_BYTES)
        return max(1, self.num_bytes // smallest)

    @property
    def wire(self) -> Wire:
        """What gradients are packed as; all ranks ask for it in their first reduction."""
        return packed_wire(self.dtypes.reduce_wire, self._axis.group)

    @property
    def message_numel(self) -> int:
        """The elements of what is sent of all segments."""
        return self.num_ranks * self.wire.message_numel(self._bucket.segment_numel)

    @property
    def num_bytes(self) -> int:
        return self.message_numel * self.wire.dtype.itemsize

    def pieces(self, comm_ctx: CommContext) -> GradPieces:
        """The memory of the pieces that a bucket is reduced in, with their programs."""
        if self._pieces is None:
            self._pieces = GradPieces(self, self._bucket, comm_ctx)
        return self._pieces

    def forget_programs(self) -> None:
        self._packer = self._pieces = None

    def in_place(self, grads: Sequence[Grad]) -> Grad:
        """The tensor that autograd made, if it can be the bucket as it is (rule 4: in place)."""
        grad = grads[0]
        if grad is None or not self._is_one:
            return None
        is_whole = grad.numel() == self.numel and grad.is_contiguous()
        is_message = Plain(grad.dtype) == self.dtypes.reduce_wire
        return grad.view(-1) if is_whole and is_message else None

    def pack(
        self, grads: Sequence[Grad], bucket: torch.Tensor, divisor: float, comm_ctx: CommContext
    ) -> None:
        """Copy and cast gradients into memory of all ranks' segments."""
        if self._packer is None:
            self._packer = packer(
                self._bucket.table, self.dtypes, self.wire, self.num_ranks, comm_ctx
            )
        self._packer.pack(grads, bucket, divisor)


class GradLane:
    """A lane to be reduced. Owns the buffer of its gradients.

    `target` is the flat parameter that receives all of it, if there is one.
    """

    def __init__(
        self,
        lane: Lane,
        params: Sequence[ShardedParam],
        axis: Axis,
        target: GradTarget | None = None,
    ) -> None:
        self.dtypes = lane.dtypes
        self.shard_numel = lane.shard_numel
        self.buckets: list[GradBucket] = []
        for bucket in lane.buckets:
            slots = [(params[s.param_index], s.in_segment(axis.rank)) for s in bucket.slots]
            self.buckets.append(GradBucket(lane, bucket, slots, axis))
        if target is not None:
            self.buckets[0].targets = [(target, 0)]
        self.buffer: GradBuffer | None = None
        self.in_buffer: set[GradBucket] = set()
        """The buckets that the backward under way has already put into `buffer`."""

    @property
    def grad_dtype(self) -> torch.dtype:
        return self.dtypes.grad or self.dtypes.reduced

    @property
    def is_cast(self) -> bool:
        return self.grad_dtype != self.dtypes.reduced

    def follow_grads(self, grads: Iterable[Grad]) -> None:
        """If gradients may have any dtype, reduce them in the widest that backward has produced."""
        if self.dtypes.grad is not None:
            return
        found = {grad.dtype for grad in grads if grad is not None}
        widest = reduce(torch.promote_types, found, self.dtypes.reduced)
        if widest != self.dtypes.reduced:
            self.dtypes = replace(
                self.dtypes,
                reduced=widest,
                reduce_wire=Plain(widest),
                replica_wire=Plain(widest),
            )
            self.buffer = None
            for bucket in self.buckets:
                bucket.dtypes = self.dtypes
                bucket.forget_programs()

    def acquire_buffer(
        self, buckets: Sequence[GradBucket], device: torch.device
    ) -> GradBuffer | None:
        """A buffer that the sums of these buckets can be written to and assigned from.

        None if gradients have to be assigned one by one: to parameters that have a gradient
        already, or that have a user's hook. Memory is allocated on the current stream.
        """
        if any(bucket in self.in_buffer for bucket in buckets):
            return None
        with disable_torch_function():
            for bucket in buckets:
                for target, _ in bucket.targets:
                    param = target.param
                    if param.grad is not None or has_hooks(param):
                        return None
        if self.buffer is None or not (self.in_buffer or self.buffer.is_unused):
            slots = [
                (target, bucket.in_shards.start + offset)
                for bucket in self.buckets
                for target, offset in bucket.targets
            ]
            self.buffer = GradBuffer(self.shard_numel, self.grad_dtype, slots, device)
        self.in_buffer.update(buckets)
        self.buffer.num_reserved += 1
        self.buffer.memory.allocate()
        return self.buffer


def require_plain_wires(what: str, unit: str, layout: UnitLayout, *, gathers: bool = False) -> None:
    """Raise if a user's own collective would be given messages that it does not know of."""
    for lane in layout.lanes:
        dtypes = lane.dtypes
        if dtypes.gather_wire.is_plain if gathers else not dtypes.sums_on_arrival:
            continue
        key, wire = "reduce_wire", dtypes.reduce_wire
        if gathers:
            key, wire = "gather_wire", dtypes.gather_wire
        elif wire.is_plain:
            key = "wire_dtype"
        raise ConfigError(
            f"{unit}: {what} cannot be combined with "
            f"{key}={wire.dtype if key == 'wire_dtype' else wire}; leave {key} out, and choose the "
            "form of the buckets in your own function."
        )


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a sum over ranks becomes a mean: divide before, let the backend average, divide after."""

    before: float
    average: bool
    after: float

    @classmethod
    def of(
        cls, comm: UnitComm, settings: UnitSettings, num_ranks: int, dtype: torch.dtype
    ) -> Scaling:
        factor = settings.gradient_divide_factor
        averages = comm.current.averages and not settings.force_sum_reduction_for_comms
        if comm.comm_hook is not None:
            return cls(1.0, False, 1.0)
        if factor is None and averages and dtype != torch.float16:
            return cls(1.0, num_ranks > 1, 1.0)
        factor = float(num_ranks) if factor is None else factor
        before = 1.0
        if dtype == torch.float16:
            # Its range is small: divide by about the square root before the sum, and again after.
            while factor % before == 0 and factor / before > before:
                before *= 2
        return cls(before, False, factor / before)
