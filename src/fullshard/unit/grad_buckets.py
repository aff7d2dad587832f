"""How the gradients of a unit lie in buckets on their way to other ranks, and where they end up.

All of it is made once (rule 7): `GradLane` and `GradBucket` follow the layout of the unit,
`BucketInput` is the memory that goes into a reduce-scatter, `GradBuffer` what optimizers are given.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
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
from fullshard.layout import Bucket, BucketKind, CopyIndex, FlatSplit, Lane, Rows, Split, UnitLayout
from fullshard.unit.all_gather import MAX_INDEXED_BYTES, permuted_pairs
from fullshard.unit.context import CommContext
from fullshard.unit.flat_param import FlatParamHolder
from fullshard.unit.param import ShardedParam

Grad = torch.Tensor | None
_Copy = tuple[torch.Tensor, int, tuple[int, ...], tuple[int, ...], int]
GradTarget = ShardedParam | FlatParamHolder
GradSlot = tuple[GradTarget, int]
"""What receives a gradient, and where in a bucket's sums it begins."""

# Buckets are cast and reduced in pieces (rule 9): those of one parameter, and flat ones, in as many
# pieces of this size as they fill; those that parameters share, in fewer. Gradients that travel in
# a narrow dtype are small already.
PIECE_BYTES = 64 << 20
NUM_PIECES = 2
# Fewer ranks each hold much more than pieces save, and pay for every piece: on 4 NCCL ranks a step
# with 2 or 3 pieces for each block took 4 % longer (benchmarks/bench_gpu.py ranks). So there pieces
# are larger by this factor, and a shared bucket is one piece.
FEWEST_CUT_RANKS = 8
FEW_RANKS_FACTOR = 4
# Smaller pieces, or smaller parts of them for each rank, cost more time than they save memory.
SMALLEST_PIECE_BYTES = 16 << 20
SMALLEST_PIECE_PART_BYTES = 1 << 20
# How many copies of a bucket's pieces, and how many runs of elements in these, are worth their time
# on the host. Runs widen gradients at 3.2 TB/s on an H200, blocks at 1.6, and chunk_cat at 2.1.
MOST_COPIES = MOST_RUNS = 128


# Where gradients are assigned from


class GradBuffer:
    """The gradients of a lane, arranged like its shard buffer, and the tensors that become `.grad`.

    They are made once: a step fills `result` and assigns `grads` to their targets (rule 8). If
    anything from the previous step is still held, another buffer is made. Memory is freed between
    steps if the gradients were dropped. `num_reserved` counts the reduce-scatters that have not
    assigned their gradients yet.
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
        """Whether nothing but this object holds a gradient, a part of one, or the memory."""
        if self.num_reserved:
            return False
        # Gradients without memory were not assigned to anything.
        return not self.memory.is_allocated or self._counts == self._references()

    def _references(self) -> list[int]:
        return [self.memory.use_count, *reference_counts(self._watched)]


def part_of(sums: torch.Tensor, target: GradTarget, offset: int) -> torch.Tensor:
    """The part of `sums` that a target receives. They may begin anywhere in their memory."""
    local = target.local
    return sums.as_strided(local.size(), local.stride(), sums.storage_offset() + offset)


def set_grad(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Make a tensor the gradient of a parameter, even if its dtype is another."""
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
    """The memory from which a bucket's gradients are reduced, with views made once (rule 7).

    With a `copy_index`, gradients are first copied to a second buffer, one after another.
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
    """Copy gradients; fill the parts of missing ones, and what follows the last, with zeros."""
    outs, ins = [], []
    for part, grad in zip(parts, (*grads, None), strict=True):
        if grad is not None:
            outs.append(part)
            ins.append(grad)
        elif part.numel():
            part.zero_()
    if outs:
        foreach_copy_(outs, ins)


class BucketPieces:
    """The pieces of a bucket, one after another in the same memory, with views made once.

    A piece has some columns of every rank's segment (rule 9). A `_Copy` into it has the
    destination, the index of the gradient, the shape and stride, and the first element. Runs of
    elements are copied all at once, blocks of several ranks' rows one by one. Where parameters that
    share a bucket would make too many runs, `GradBucket.copy_in` is faster.
    """

    def __init__(self, plan: GradBucket, bucket: Bucket, device: torch.device) -> None:
        self._plan, num_ranks, dtype = plan, plan.num_ranks, plan.dtypes.wire
        columns = [slice(*bounds) for bounds in pairwise(plan.piece_bounds())]
        widest = max(each.stop - each.start for each in columns)
        num_bytes = num_ranks * widest * dtype.itemsize
        self._memory = ResizableBuffer(num_bytes, device, "full gradients")
        shapes = [param.split.shape for param in plan.params]
        # A scalar that is not in a flat bucket is whole on every rank.
        self._numels = [prod(each) if each or plan.is_flat else num_ranks for each in shapes]
        self._has_blocks = num_ranks * (len(shapes) + len(columns)) > MOST_RUNS
        is_cat = self._has_blocks and bucket.kind is BucketKind.SPLIT
        self._pieces = []
        for each in columns:
            piece = self._memory.view(0, (num_ranks, each.stop - each.start), dtype)
            rows = bucket.columns(each.start, each.stop, num_ranks, self._numels)
            copies = None if is_cat else self._copies(piece, each.start, rows)
            self._pieces.append((each, piece.view(-1), copies))
        self._memory.free()

    def _copies(
        self, piece: torch.Tensor, start: int, all_rows: Iterable[Rows]
    ) -> tuple[list[_Copy], list[_Copy]]:
        runs: list[_Copy] = []
        blocks: list[_Copy] = []
        for rows in all_rows:
            part = piece[rows.rank :, rows.column - start :][: rows.num_ranks, : rows.width]
            if self._has_blocks and rows.num_ranks > 1:
                blocks.append((part, rows.slot, part.shape, (rows.stride, 1), rows.first))
                continue
            for index, run in enumerate(part):
                first = rows.first + index * rows.stride
                runs.append((run, rows.slot, run.shape, (1,), first))
        return runs, blocks

    def filled(self, grads: Sequence[Grad]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Copy one piece after another into the memory; yield its columns and the piece."""
        self._memory.allocate()
        flats: list[Grad] = [None] * (len(grads) + 1)
        for index, (grad, numel) in enumerate(zip(grads, self._numels, strict=True)):
            if grad is not None:
                flats[index] = grad.reshape(-1) if grad.numel() == numel else grad.repeat(numel)
        for columns, piece, copies in self._pieces:
            if copies is None:
                self._plan.copy_in(grads, piece, columns)
            for group in copies or ():
                outs, ins = [], []
                for out, index, shape, stride, first in group:
                    flat = flats[index]
                    if flat is None:
                        out.zero_()
                        continue
                    outs.append(out)
                    ins.append(flat.as_strided(shape, stride, flat.storage_offset() + first))
                if outs:
                    foreach_copy_(outs, ins)
            yield columns, piece
        self._memory.free()


class GradBucket:
    """A bucket to be reduced: the parameters whose gradients it carries, and how they lie in it.

    `slots` says where in a segment the shard of each parameter begins, `targets` what receives a
    part of the sums, and `in_shards` where these belong in the shard buffer. `num_pieces` says in
    how many pieces it is reduced, on a device with streams (rule 9).
    """

    def __init__(
        self,
        lane: Lane,
        bucket: Bucket,
        slots: Sequence[tuple[ShardedParam, int]],
        num_ranks: int,
    ) -> None:
        self.params = [param for param, _ in slots]
        self.slots = slots
        self.targets: list[GradSlot] = [slot for slot in slots if slot[0].takes_gradient]
        self.dtypes = lane.dtypes
        self.numel = num_ranks * bucket.segment_numel
        self.in_shards = slice(bucket.buffer_offset, bucket.buffer_offset + bucket.segment_numel)
        # A flat bucket is always reduced: this rank may hold a part of parameters that other ranks
        # have used, without knowing that they have.
        is_flat_param = any(isinstance(param.split, FlatSplit) for param in self.params)
        self.is_always_reduced = is_flat_param and lane.is_trainable
        self.is_flat = bucket.kind is BucketKind.FLAT
        self._bucket = bucket
        self.num_ranks = num_ranks
        self._is_even = all(
            num_ranks * slot.numel == prod(param.split.shape)
            for slot, param in zip(bucket.slots, self.params, strict=True)
        )
        self._input: BucketInput | None = None
        self._pieces: BucketPieces | None = None
        self.num_pieces = self._count_pieces()

    def _count_pieces(self) -> int:
        kind, are_few = self._bucket.kind, self.num_ranks < FEWEST_CUT_RANKS
        piece_bytes = PIECE_BYTES * (FEW_RANKS_FACTOR if are_few else 1)
        most = MOST_COPIES // len(self.params) - 2  # a parameter begins and ends within pieces
        if kind is BucketKind.SPLIT:
            is_cut = not are_few and not self.dtypes.sums_on_arrival
            most, piece_bytes = NUM_PIECES if is_cut else 1, SMALLEST_PIECE_BYTES
        elif kind is BucketKind.PERMUTED or (self.is_flat and len(self.params) == 1):
            most = 1  # the gradient may be the bucket on some ranks, and be missing on others
        smallest = max(piece_bytes, self.num_ranks * SMALLEST_PIECE_PART_BYTES)
        return max(1, min(most, self.num_bytes // smallest))

    def piece_bounds(self) -> list[int]:
        """The columns where pieces begin and end: in a shared bucket, between parameters."""
        num_columns, alignment = self._bucket.segment_numel, self.dtypes.alignment_numel
        step = -(-num_columns // (self.num_pieces * alignment)) * alignment
        bounds = list(range(0, num_columns, step))
        if self._bucket.kind is BucketKind.SPLIT:
            offsets = [slot.offset for slot in self._bucket.slots]
            offsets = [offset for offset in offsets if offset % alignment == 0]
            bounds = [min(offsets, key=lambda offset: abs(offset - bound)) for bound in bounds]
        return sorted({*bounds, num_columns})

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
                copy_index = comm_ctx.copy_index(make, self._bucket, self.num_ranks, itemsize)
                if copy_index is None:
                    return None
            self._input = BucketInput(self, comm_ctx.device.torch_device, copy_index)
        return None if self._input.is_in_use else self._input

    def pieces(self, device: torch.device) -> BucketPieces:
        """The memory of the pieces that a bucket is reduced in, with views made once."""
        if self._pieces is None:
            self._pieces = BucketPieces(self, self._bucket, device)
        return self._pieces

    def forget_input(self) -> None:
        self._input = self._pieces = None

    def in_place(self, grads: Sequence[Grad]) -> Grad:
        """The tensor that autograd produced, if it can be the bucket as it is (rule 4)."""
        grad = grads[0]
        if len(grads) > 1 or self._bucket.kind.is_copied or grad is None:
            return None
        is_whole = grad.numel() == self.numel and grad.is_contiguous()
        return grad.view(-1) if is_whole and grad.dtype == self.dtypes.wire else None

    def copy_in(
        self, grads: Sequence[Grad], buffer: torch.Tensor, columns: slice = slice(0, sys.maxsize)
    ) -> None:
        """Copy and cast gradients to where they belong in a buffer of all ranks' segments.

        For a shared bucket, `columns` selects those that lie in some columns of the segments.
        """
        num_chunks, split = self.num_ranks, self.params[0].split
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
        padding_numel = buffer.numel() // num_chunks
        for slot, grad, param in zip(self._bucket.slots, grads, self.params, strict=True):
            if not slot.numel or not columns.start <= slot.offset < columns.stop:
                continue
            padding_numel -= slot.numel
            if grad is None:
                grad = like.new_zeros(num_chunks, slot.numel)
            elif not grad.ndim:
                grad = grad.repeat(num_chunks)  # every rank has all of it
            elif isinstance(param.split, Split) and param.split.dim:
                grad = grad.reshape(param.split.num_rows, param.split.inner)
            parts.append(grad)
        if padding_numel:
            parts.append(like.new_zeros(num_chunks, padding_numel))
        if parts:  # none if all parameters are empty
            chunk_cat(parts, dim=0, num_chunks=num_chunks, out=buffer.view(num_chunks, -1))

    def parts_of(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Views of gradients that lie in memory one after another, and of the rest of it."""
        shapes = [param.split.shape for param in self.params]
        sizes = [prod(shape) for shape in shapes]
        parts = memory.split_with_sizes([*sizes, self.numel - sum(sizes)])
        return [*map(torch.Tensor.view, parts, shapes), parts[-1]]


class GradLane:
    """A lane to be reduced. Owns the buffer of its gradients.

    `target` is the flat parameter that receives all of it, if there is one.
    """

    def __init__(
        self,
        layout: UnitLayout,
        lane: Lane,
        params: Sequence[ShardedParam],
        rank: int,
        target: GradTarget | None = None,
    ) -> None:
        self.dtypes = lane.dtypes
        self.shard_numel = lane.shard_numel
        self.buckets: list[GradBucket] = []
        for bucket in lane.buckets:
            slots = [(params[s.param_index], bucket.shard_offset(s, rank)) for s in bucket.slots]
            self.buckets.append(GradBucket(lane, bucket, slots, layout.num_ranks))
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
