"""How the gradients of a unit lie in buckets on their way to other ranks, and where they end.

All of it is made once (rule 7): `GradLane` and `GradBucket` follow the layout of the unit,
`BucketInput` is the memory that goes into a reduce-scatter, `GradBuffer` what optimizers are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from math import prod

import torch
from torch.distributed.tensor import DTensor

from fullshard._torch import (
    backward_hooks,
    chunk_cat,
    disable_torch_function,
    foreach_copy_,
    grad_dtype_of,
    local_tensor,
    post_accumulate_grad_hooks,
)
from fullshard.device import ResizableBuffer, reference_counts
from fullshard.layout import Bucket, BucketKind, CopyIndex, FlatSplit, Lane, Split, UnitLayout
from fullshard.unit.all_gather import MAX_INDEXED_BYTES, permuted_pairs
from fullshard.unit.context import CommContext
from fullshard.unit.flat_param import FlatParamHolder
from fullshard.unit.param import ShardedParam

Grad = torch.Tensor | None
GradTarget = ShardedParam | FlatParamHolder
GradSlot = tuple[GradTarget, int]
"""What receives a gradient, and where in a bucket's sums it begins."""

# A gradient that fills two of these pieces, as those of embeddings do, is cast and reduced by
# pieces that are cut anywhere (rule 9). So are those of a flat bucket, by at most so many copies.
PIECE_BYTES = 64 << 20
MOST_COPIES = 128
# The gradients of other parameters are copied into their bucket by about so many pieces (rule 9),
# except on few ranks, which hold much more than what that saves: on 4 NCCL ranks two pieces took
# 4 % longer than one (benchmarks/bench_gpu.py ranks). What travels in a narrow dtype is small
# already.
NUM_PIECES = 2
FEWEST_CUT_RANKS = 8
# Smaller pieces, or smaller parts of them for each rank, cost more time than they save memory.
SMALLEST_PIECE_BYTES = 16 << 20
SMALLEST_PIECE_PART_BYTES = 1 << 20


# Where gradients are assigned from


class GradBuffer:
    """The gradients of a lane, arranged like its shard buffer, and the tensors that become `.grad`.

    They are made once: a step fills `result` and assigns `grads` to their targets (rule 8), unless
    someone has kept anything of the step before: then another buffer is made. Memory is freed
    between steps if the gradients were dropped. `num_reserved` counts the reduce-scatters that
    have not assigned their gradients yet.
    """

    def __init__(self, lane: GradLane, device: torch.device) -> None:
        dtype, numel = lane.grad_dtype, lane.shard_numel
        self.memory = ResizableBuffer(numel * dtype.itemsize, device, "gradient shards")
        self.result = self.memory.view(0, (numel,), dtype)
        self.grads = {
            target: target.as_grad(part_of(self.result, target, bucket.in_shards.start + offset))
            for bucket in lane.buckets
            for target, offset in bucket.targets
        }
        self.num_reserved = 0
        self._watched = list(self.grads.values())
        self._watched += [local_tensor(grad) for grad in self._watched if isinstance(grad, DTensor)]
        self._counts = self._references()

    @property
    def is_unused(self) -> bool:
        """Whether nobody holds a gradient, a part of one, or the memory, beside this object."""
        if self.num_reserved:
            return False
        # Gradients without memory were not assigned to anything.
        return not self.memory.is_allocated or self._counts == self._references()

    def _references(self) -> list[int]:
        return [self.memory.use_count, *reference_counts(self._watched)]


def part_of(sums: torch.Tensor, target: GradTarget, offset: int) -> torch.Tensor:
    """What a target receives of sums that may begin anywhere in their memory."""
    local = target.local
    return sums.as_strided(local.size(), local.stride(), sums.storage_offset() + offset)


def set_grad(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Make a tensor the gradient of a parameter, also one of another dtype."""
    if grad_dtype_of(param) in (grad.dtype, None):
        param.grad = grad
        return
    # torch wants a gradient in its parameter's dtype, but checks that only here.
    param.grad = torch.empty_like(param, requires_grad=False)
    param.grad.data = grad


def has_hooks(param: torch.Tensor) -> bool:
    """Whether a user's hook reads the gradient as soon as it is there."""
    return bool(backward_hooks(param) or post_accumulate_grad_hooks(param))


# How gradients lie in buckets


class BucketInput:
    """Memory that the gradients of a bucket go into to be reduced, with views made once (rule 7).

    With a `copy_index`, gradients are first copied to memory beside it, one after another.
    """

    def __init__(
        self, plan: GradBucket, device: torch.device, copy_index: CopyIndex | None
    ) -> None:
        num_bytes, dtype = plan.num_bytes, plan.dtypes.wire
        self._buffers = [
            ResizableBuffer(num_bytes, device, "full gradients")
            for _ in range(1 if copy_index is None else 2)
        ]
        self._bucket = self._buffers[0].view(0, (plan.numel,), dtype)
        self._parts = plan.parts_of(self._buffers[-1].view(0, (plan.numel,), dtype))
        self._words: tuple[torch.Tensor, ...] = ()
        if copy_index is not None:
            index, dtype = copy_index.index, copy_index.dtype
            to, source = (buffer.view(0, index.shape, dtype) for buffer in self._buffers)
            self._words = source, index, to
        self.free()

    @property
    def is_in_use(self) -> bool:
        return self._buffers[0].is_allocated

    def free(self) -> None:
        for buffer in self._buffers:
            buffer.free()

    def fill(self, grads: Sequence[Grad]) -> torch.Tensor:
        """Allocate the bucket and copy gradients into it."""
        for buffer in self._buffers:
            buffer.allocate()
        _copy_parts(self._parts, grads)
        if self._words:
            source, index, to = self._words
            torch.gather(source, 0, index, out=to)
            self._buffers[1].free()
        return self._bucket


def _copy_parts(parts: Sequence[torch.Tensor], grads: Sequence[Grad]) -> None:
    """Copy gradients, with zeros for those that are missing, and behind the last."""
    outs, ins = [], []
    for part, grad in zip(parts, (*grads, None), strict=True):
        if grad is not None:
            outs.append(part)
            ins.append(grad)
        elif part.numel():
            part.zero_()
    if outs:
        foreach_copy_(outs, ins)


class GradBucket:
    """A bucket to be reduced: the parameters whose gradients it carries, and how they lie in it.

    `slots` says where in a segment the shard of each parameter begins, `targets` what receives a
    part of the sums, and `in_shards` where these belong in the shard buffer. `is_piece` says that
    it is one of several that are all-gathered as one.
    """

    def __init__(
        self,
        lane: Lane,
        bucket: Bucket,
        slots: Sequence[tuple[ShardedParam, int]],
        num_ranks: int,
        is_piece: bool,
    ) -> None:
        self.is_piece = is_piece
        self.params = [param for param, _ in slots]
        self.slots = slots
        self.targets: list[GradSlot] = [slot for slot in slots if slot[0].takes_gradient]
        self.dtypes = lane.dtypes
        self.numel = num_ranks * bucket.segment_numel
        self.in_shards = slice(bucket.buffer_offset, bucket.buffer_offset + bucket.segment_numel)
        # A flat bucket is always reduced: other ranks may have used parameters that this rank has
        # a part of, without its knowing.
        is_flat_param = any(isinstance(param.split, FlatSplit) for param in self.params)
        self.is_always_reduced = is_flat_param and lane.is_trainable
        self.is_flat = is_flat = bucket.kind is BucketKind.FLAT
        num_bytes = self.num_bytes
        # The only gradient of a flat bucket may be the bucket on some ranks, and lack on others.
        can_be_cut = bucket.kind is BucketKind.IN_PLACE or (is_flat and len(slots) > 1)
        self.is_large = (
            can_be_cut
            and num_bytes >= 2 * PIECE_BYTES
            and num_bytes // num_ranks >= 2 * SMALLEST_PIECE_PART_BYTES
        )
        smallest = num_bytes * 3 * len(slots) // MOST_COPIES if is_flat else 0
        self.piece_bytes = max(PIECE_BYTES, smallest, num_ranks * SMALLEST_PIECE_PART_BYTES)
        self._bucket = bucket
        self._num_ranks = num_ranks
        # Rows that are cut into one chunk per rank, of parameters sharded along another dim.
        self._row_shapes = [
            (split.num_rows, split.inner)
            if isinstance(split := param.split, Split) and split.dim
            else None
            for param in self.params
        ]
        self._is_even = all(
            num_ranks * slot.numel == prod(param.split.shape)
            for slot, param in zip(bucket.slots, self.params, strict=True)
        )
        self._input: BucketInput | None = None

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtypes.wire.itemsize

    def unused_input(self, comm_ctx: CommContext) -> BucketInput | None:
        """Memory with views made once; None if it is in use, or if the bucket can have none."""
        if self._input is None:
            copy_index = None
            if not self.is_flat:
                is_split = self._bucket.kind is BucketKind.SPLIT
                if not is_split or not self._is_even or self.num_bytes >= MAX_INDEXED_BYTES:
                    return None
                make, itemsize = Bucket.copy_in_index, self.dtypes.wire.itemsize
                copy_index = comm_ctx.copy_index(make, self._bucket, self._num_ranks, itemsize)
                if copy_index is None:
                    return None
            self._input = BucketInput(self, comm_ctx.device.torch_device, copy_index)
        return None if self._input.is_in_use else self._input

    def forget_input(self) -> None:
        self._input = None

    def in_place(self, grads: Sequence[Grad]) -> Grad:
        """The tensor that autograd produced, if it is the bucket (rule 4)."""
        grad = grads[0]
        if len(grads) > 1 or self._bucket.kind.is_copied or grad is None:
            return None
        is_bucket = grad.dtype == self.dtypes.wire and self.is_whole(grad)
        return grad.view(-1) if is_bucket else None

    def is_whole(self, grad: torch.Tensor) -> bool:
        """Whether a gradient lies in memory as it lies in the bucket."""
        return grad.numel() == self.numel and grad.is_contiguous()

    def copy_in(self, grads: Sequence[Grad], buffer: torch.Tensor) -> None:
        """Copy gradients to where they belong in a buffer of all ranks' segments, cast."""
        num_chunks, split = self._num_ranks, self.params[0].split
        if self._bucket.kind in (BucketKind.IN_PLACE, BucketKind.PERMUTED):
            assert isinstance(split, Split)
            if grads[0] is None:
                buffer.zero_()
                return
            for in_full, in_bucket in permuted_pairs(split, grads[0], buffer.view(num_chunks, -1)):
                in_bucket.copy_(in_full)
            return
        if self.is_flat:
            _copy_parts(self.parts_of(buffer), grads)
            return
        # Side by side in every rank's segment.
        if len({grad.dtype for grad in grads if grad is not None}) > 1:
            # Some are fresh and some were accumulated, in the dtype of the reduction.
            grads = [None if grad is None else grad.to(buffer.dtype) for grad in grads]
        like = next((grad for grad in grads if grad is not None), buffer)
        parts: list[torch.Tensor] = []
        for slot, grad, shape in zip(self._bucket.slots, grads, self._row_shapes, strict=True):
            if not slot.numel:
                continue
            if grad is None:
                grad = like.new_zeros(num_chunks, slot.numel)
            elif not grad.ndim:
                grad = grad.repeat(num_chunks)  # every rank has all of it
            elif shape is not None:
                grad = grad.reshape(shape)
            parts.append(grad)
        if self._bucket.padding_numel:
            parts.append(like.new_zeros(num_chunks, self._bucket.padding_numel))
        if parts:  # none if all parameters are empty
            chunk_cat(parts, dim=0, num_chunks=num_chunks, out=buffer.view(num_chunks, -1))

    def parts_of(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Where gradients are that lie in memory one after another, and the rest of it."""
        shapes = [param.split.shape for param in self.params]
        sizes = [prod(shape) for shape in shapes]
        parts = memory.split_with_sizes([*sizes, self.numel - sum(sizes)])
        return [*map(torch.Tensor.view, parts, shapes), parts[-1]]

    def copy_columns(self, grads: Sequence[Grad], start: int, piece: torch.Tensor) -> None:
        """Copy what belongs into every rank's segment from `start` on, of gradients or a flat."""
        rows = piece.view(self._num_ranks, -1)
        stop, outs, ins = start + rows.size(1), [], []
        if not self.is_flat:
            assert grads[0] is not None
            rows.copy_(grads[0].view(self._num_ranks, -1)[:, start:stop])
            return
        size, used = self._bucket.segment_numel, self._bucket.used_numel
        places = [(slot.offset, slot.numel) for slot in self._bucket.slots]
        for place, grad in zip((*places, (used, self.numel - used)), (*grads, None), strict=True):
            flat = None if grad is None else grad.reshape(-1)
            for rank, num, column, width, first in self._bucket.flat_rows(*place, start, stop):
                out = rows[rank : rank + num, column - start : column - start + width]
                if flat is None:
                    out.zero_()
                    continue
                outs.append(out)
                ins.append(flat[first:].as_strided((num, width), (size, 1)))
        foreach_copy_(outs, ins)


class GradLane:
    """A lane to be reduced. Owns the buffer of its gradients.

    `target` is the flat parameter that receives all of it, if there is one. With `is_cut`, shared
    buckets are reduced by pieces.
    """

    def __init__(
        self,
        layout: UnitLayout,
        lane: Lane,
        params: Sequence[ShardedParam],
        rank: int,
        target: GradTarget | None,
        *,
        is_cut: bool,
    ) -> None:
        self.dtypes = lane.dtypes
        self.shard_numel = lane.shard_numel
        self.buckets: list[GradBucket] = []
        smallest = max(SMALLEST_PIECE_PART_BYTES, SMALLEST_PIECE_BYTES // layout.num_ranks)
        is_cut &= layout.num_ranks >= FEWEST_CUT_RANKS and not lane.dtypes.sums_on_arrival
        for whole in lane.buckets:
            pieces = [whole]
            if is_cut and whole.kind is BucketKind.SPLIT:
                smallest_numel = smallest // lane.dtypes.wire.itemsize
                piece_numel = max(whole.segment_numel // NUM_PIECES, smallest_numel)
                pieces = list(whole.cut(piece_numel, lane.dtypes.alignment_numel))
            for piece in pieces:
                slots = [(params[s.param_index], piece.shard_offset(s, rank)) for s in piece.slots]
                is_piece = len(pieces) > 1
                self.buckets.append(GradBucket(lane, piece, slots, layout.num_ranks, is_piece))
        if target is not None:
            self.buckets[0].targets = [(target, 0)]
        self.buffer: GradBuffer | None = None
        self.in_buffer: set[GradBucket] = set()
        """The buckets that are in it already, from the backward under way."""

    @property
    def grad_dtype(self) -> torch.dtype:
        return self.dtypes.grad or self.dtypes.reduced

    @property
    def is_cast(self) -> bool:
        return self.grad_dtype != self.dtypes.reduced

    def follow_grads(self, grads: Iterable[Grad]) -> None:
        """Where gradients may have any dtype, reduce them in the widest that backward has made."""
        if self.dtypes.grad is not None:
            return
        found = {grad.dtype for grad in grads if grad is not None}
        widest = reduce(torch.promote_types, found, self.dtypes.reduced)
        if widest != self.dtypes.reduced:
            self.dtypes = replace(self.dtypes, reduced=widest, wire=widest)
            self.buffer = None
            for bucket in self.buckets:
                bucket.dtypes = self.dtypes
                bucket.forget_input()

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
            self.buffer = GradBuffer(self, device)
        self.in_buffer.update(buckets)
        self.buffer.num_reserved += 1
        self.buffer.memory.allocate()
        return self.buffer
