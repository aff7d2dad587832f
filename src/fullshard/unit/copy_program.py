"""Copies between full tensors and buckets: the only code that moves elements from one to the other.

A program follows the `CopyTable` of a bucket in one direction. There are two executors. The one of
this file copies through strided views: on CPUs, and on devices without Triton. `copy_kernel.py`
copies a whole bucket with one kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Protocol

import torch

from fullshard._torch import foreach_copy_, triton_kernels
from fullshard.device import ResizableBuffer, Simulation, simulation
from fullshard.layout import NO_TENSOR, Bucket, Copy, CopyTable, DtypePlan, Wire
from fullshard.layout.copies import Dim
from fullshard.unit.context import CommContext


class Unpacker(Protocol):
    """Copies gathered buckets into the full buffer. All memory stays where it was at the start."""

    def add(self, bucket: Bucket, gathered: torch.Tensor) -> None:
        """Include a bucket; `gathered` and the full buffer have their memory."""

    def run(self) -> None:
        """Copy all buckets, on the current stream."""


class Packer(Protocol):
    """Copies full tensors into what is sent of a bucket, or of some columns of its segments."""

    def pack(
        self, tensors: Sequence[torch.Tensor | None], bucket: torch.Tensor, divisor: float = 1.0
    ) -> None:
        """Copy, cast and divide; fill with zeros what is missing, and elements of no tensor."""


def unpacker(full: ResizableBuffer, comm_ctx: CommContext) -> Unpacker:
    """A program from buckets to the full buffer."""
    kernel, simulated = _kernel(comm_ctx), simulation()
    if simulated is not None:
        return SimulatedCopies(simulated)
    views = UnpackViews(full)
    return views if kernel is None else kernel.UnpackKernel(full, comm_ctx, views)


def packer(
    table: CopyTable, dtypes: DtypePlan, wire: Wire, num_ranks: int, comm_ctx: CommContext
) -> Packer:
    """A program from tensors to what is sent of a bucket."""
    kernel, simulated = _kernel(comm_ctx), simulation()
    if simulated is not None:
        return SimulatedCopies(simulated)
    program: Packer = PackViews(table, num_ranks)
    if kernel is not None:
        program = kernel.PackKernel(table, comm_ctx, program)
    if wire.is_plain:
        return program
    # In the dtype of the reduction, or a wider one: what a wire rounds was not rounded before.
    dtype = torch.promote_types(dtypes.reduced, torch.float32)
    return PackEncoded(program, table, dtype, wire, num_ranks)


def _kernel(comm_ctx: CommContext) -> ModuleType | None:
    is_cuda = comm_ctx.device.torch_device.type == "cuda"
    return triton_kernels("fullshard.unit.copy_kernel") if is_cuda else None


class UnpackViews:
    """Copies through views that are made once."""

    def __init__(self, full: ResizableBuffer) -> None:
        self._full = full
        self._to: list[torch.Tensor] = []
        self._from: list[torch.Tensor] = []

    def add(self, bucket: Bucket, gathered: torch.Tensor) -> None:
        itemsize = gathered.itemsize
        starts = [slot.full_offset_bytes // itemsize for slot in bucket.slots]
        for copy in _stacked(
            copy._replace(first=copy.first + starts[copy.tensor]) for copy in bucket.table.filling
        ):
            sizes, in_bucket, in_tensor = _strides(copy)
            to = self._full.view(copy.first * itemsize, sizes, gathered.dtype, in_tensor)
            self._to.append(to)
            begin = gathered.storage_offset() + copy.at
            self._from.append(gathered.as_strided(sizes, in_bucket, begin))

    def run(self) -> None:
        if self._to:
            foreach_copy_(self._to, self._from)


class PackViews:
    """Copies through views that are made for each tensor.

    If every tensor has as many elements on each rank, which is the usual case, the bucket is a
    concatenation: one call instead of two views and a copy for each tensor (rule 7: host time).
    """

    def __init__(self, table: CopyTable, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._copies = [(copy, *_strides(copy)) for copy in table.copies]
        self._in_order: list[int] | None = [copy.tensor for copy in table.copies]
        for copy, sizes, _, _ in self._copies:
            is_even = len(sizes) == 2 and copy.dims[0].in_tensor == sizes[1]
            if copy.tensor == NO_TENSOR or not is_even or sizes[0] != num_ranks:
                self._in_order = None

    def pack(
        self, tensors: Sequence[torch.Tensor | None], bucket: torch.Tensor, divisor: float = 1.0
    ) -> None:
        rows = self._num_ranks, -1
        if self._in_order is not None:
            parts = [part for index in self._in_order if (part := tensors[index]) is not None]
            if len(parts) == len(tensors):
                parts = [part.reshape(rows) for part in parts]
                torch.cat(parts, 1, out=bucket.view(rows))
                if divisor != 1.0:
                    bucket.div_(divisor)
                return
        start = bucket.storage_offset()
        outs: list[torch.Tensor] = []
        ins: list[torch.Tensor] = []
        for copy, sizes, in_bucket, in_tensor in self._copies:
            tensor = None if copy.tensor == NO_TENSOR else tensors[copy.tensor]
            if tensor is None:
                bucket.as_strided(sizes, in_bucket, start + copy.at).zero_()
            elif copy.is_consecutive and copy.numel == tensor.numel():
                # As it is, also if it is not contiguous.
                outs.append(bucket[copy.at : copy.at + copy.numel].view(tensor.shape))
                ins.append(tensor)
            else:
                tensor = tensor.contiguous()
                outs.append(bucket.as_strided(sizes, in_bucket, start + copy.at))
                first = tensor.storage_offset() + copy.first
                ins.append(tensor.as_strided(sizes, in_tensor, first))
        if outs:
            foreach_copy_(outs, ins)
        if divisor != 1.0:
            bucket.div_(divisor)


class PackEncoded:
    """Copies tensors into segments of their own, and encodes these."""

    def __init__(
        self, program: Packer, table: CopyTable, dtype: torch.dtype, wire: Wire, num_ranks: int
    ) -> None:
        self._program, self._dtype, self._wire, self._num_ranks = program, dtype, wire, num_ranks
        self._numel = sum(copy.numel for copy in table.copies)

    def pack(
        self, tensors: Sequence[torch.Tensor | None], bucket: torch.Tensor, divisor: float = 1.0
    ) -> None:
        segments = torch.empty(self._numel, dtype=self._dtype, device=bucket.device)
        self._program.pack(tensors, segments, divisor)
        rows = self._num_ranks, -1
        self._wire.encode(segments.view(rows), bucket.view(rows))


def allocates(wire: Wire, segment: torch.Tensor) -> bool:
    """Whether `encode` takes memory of its own."""
    return simulation() is None and wire.allocates(segment)


def encode(wire: Wire, segment: torch.Tensor, message: torch.Tensor) -> None:
    """Write this rank's segment of a bucket as what is sent of it."""
    simulated = simulation()
    if simulated is None:
        wire.encode(segment.view(1, -1), message.view(1, -1))
    else:
        simulated.copied(segment.nbytes + message.nbytes)


class Decoder:
    """Decodes what was gathered of a bucket; afterwards it is as if its values had been sent."""

    def __init__(
        self, wire: Wire, messages: torch.Tensor, values: torch.Tensor, num_ranks: int
    ) -> None:
        self._wire = wire
        self._messages, self._values = (each.view(num_ranks, -1) for each in (messages, values))

    def run(self) -> None:
        simulated = simulation()
        if simulated is None:
            self._wire.decode(self._messages, self._values)
        else:
            simulated.copied(self._messages.nbytes + self._values.nbytes)


class SimulatedCopies:
    """Takes the time of one kernel for each bucket, on a device that exists in numbers only."""

    def __init__(self, simulated: Simulation) -> None:
        self._simulated = simulated
        self._num_bytes: list[int] = []

    def add(self, bucket: Bucket, gathered: torch.Tensor) -> None:
        self._num_bytes.append(2 * gathered.nbytes)

    def run(self) -> None:
        for num_bytes in self._num_bytes:
            self._simulated.copied(num_bytes)

    def pack(
        self, tensors: Sequence[torch.Tensor | None], bucket: torch.Tensor, divisor: float = 1.0
    ) -> None:
        num_read = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        self._simulated.copied(num_read + bucket.nbytes)


def _stacked(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Copies, with equal and equally spaced ones made one (rule 7: host time)."""
    group: list[Copy] = []
    for copy in copies:
        if len(group) > 1:
            steps = (copy.at - group[-1].at, copy.first - group[-1].first)
            is_next = steps == (group[1].at - group[0].at, group[1].first - group[0].first)
        else:
            is_next = not group or copy.first > group[0].first
        if group and (copy.dims != group[0].dims or not is_next):
            yield _as_one(group)
            group = []
        group.append(copy)
    if group:
        yield _as_one(group)


def _as_one(group: Sequence[Copy]) -> Copy:
    first = group[0]
    if len(group) == 1:
        return first
    step = Dim(len(group), group[1].at - first.at, group[1].first - first.first)
    return first._replace(dims=(step, *first.dims))


def _strides(copy: Copy) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The sizes of a copy, and its strides in the bucket and in the tensor."""
    sizes, in_bucket, in_tensor = zip(*copy.dims, strict=True)
    return sizes, in_bucket, in_tensor
