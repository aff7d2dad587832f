"""Copies between full tensors and buckets as one Triton kernel per bucket.

A table is divided into tiles, which lie in device memory and are shared by all units with such a
bucket. Tensors are passed as addresses: the kernel can be captured, and nothing is sent to the
device when gradients lie elsewhere than in the last step.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from fullshard.device import ResizableBuffer
from fullshard.layout import NO_TENSOR, Bucket, Copy, CopyTable
from fullshard.unit.context import CommContext

# Elements that one program of the kernel copies, and the bytes that one thread loads at once.
BLOCK = 8192
NUM_WARPS = 4
VECTOR_BYTES = 16
# Addresses are arguments of the kernel; a bucket of more tensors takes more launches.
MAX_TENSORS = 16

_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_FLOATS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@triton.jit
def _move(
    bucket, tensor, tile, divisor, is_present,
    TO_BUCKET: tl.constexpr, DIVIDES: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.multiple_of(tl.load(tile + 1), VECTOR)
    first = tl.multiple_of(tl.load(tile + 2), VECTOR)
    count = tl.multiple_of(tl.load(tile + 3).to(tl.int32), VECTOR)
    numel = tl.multiple_of(tl.load(tile + 4).to(tl.int32), VECTOR)
    in_bucket = tl.multiple_of(tl.load(tile + 5), VECTOR)
    in_tensor = tl.multiple_of(tl.load(tile + 6), VECTOR)
    # A vector lies in one run, so its run is found once for all of its elements.
    vectors = tl.arange(0, BLOCK // VECTOR) * VECTOR
    runs = vectors // numel
    inside = vectors - runs * numel
    elements = tl.arange(0, VECTOR)[None, :]
    is_there = (vectors[:, None] + elements) < count
    is_read = (vectors[:, None] + elements) < count * is_present
    in_run = inside[:, None] + elements
    to = bucket + (at + runs.to(tl.int64) * in_bucket)[:, None] + in_run
    source = tensor + (first + runs.to(tl.int64) * in_tensor)[:, None] + in_run
    if TO_BUCKET:
        values = tl.load(source, mask=is_read, other=0)
        if DIVIDES:
            values = values.to(tl.float32) / divisor
        tl.store(to, values.to(to.dtype.element_ty), mask=is_there)
    else:
        values = tl.load(to, mask=is_there, other=0)
        tl.store(source, values, mask=is_there)


_NAMES = ["bucket", "tiles", "present", "divisor", *(f"a{index}" for index in range(MAX_TENSORS))]


@triton.jit(do_not_specialize=_NAMES)
def _copy(
    bucket, tiles, present, divisor,
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
    BUCKET: tl.constexpr, TENSOR: tl.constexpr, TO_BUCKET: tl.constexpr, DIVIDES: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tiles.to(tl.pointer_type(tl.int64)) + tl.program_id(0) * 8
    slot = tl.load(tile).to(tl.int32)
    address = a0
    address = tl.where(slot == 1, a1, address)
    address = tl.where(slot == 2, a2, address)
    address = tl.where(slot == 3, a3, address)
    address = tl.where(slot == 4, a4, address)
    address = tl.where(slot == 5, a5, address)
    address = tl.where(slot == 6, a6, address)
    address = tl.where(slot == 7, a7, address)
    address = tl.where(slot == 8, a8, address)
    address = tl.where(slot == 9, a9, address)
    address = tl.where(slot == 10, a10, address)
    address = tl.where(slot == 11, a11, address)
    address = tl.where(slot == 12, a12, address)
    address = tl.where(slot == 13, a13, address)
    address = tl.where(slot == 14, a14, address)
    address = tl.where(slot == 15, a15, address)
    is_present = (present >> slot) & 1  # elements of no tensor have the slot above all
    to = tl.multiple_of(bucket.to(tl.pointer_type(BUCKET)), 16 if VECTOR > 1 else 1)
    tensor = tl.multiple_of(address.to(tl.pointer_type(TENSOR)), 16 if VECTOR > 1 else 1)
    if tl.load(tile + 7) != 0:
        _move(to, tensor, tile, divisor, is_present, TO_BUCKET, DIVIDES, VECTOR, BLOCK)
    else:
        _move(to, tensor, tile, divisor, is_present, TO_BUCKET, DIVIDES, 1, BLOCK)


def _tiles_of(copy: Copy, slot: int, vector: int) -> Iterator[tuple[int, ...]]:
    """A copy in tiles: slot, places in bucket and tensor, number of elements, and their runs."""
    *outer, run = copy.dims
    # A tile has many short runs: those of the longest outer dim.
    inner = None
    if outer and run.size < BLOCK:
        inner = max(outer, key=lambda dim: dim.size)
        outer.remove(inner)
    size, step = (run.size, BLOCK) if inner is None else (inner.size, max(1, BLOCK // run.size))
    in_bucket, in_tensor = (1, 1) if inner is None else inner[1:]
    for index in product(*(range(dim.size) for dim in outer)):
        at = copy.at + sum(i * dim.in_bucket for i, dim in zip(index, outer, strict=True))
        first = copy.first + sum(i * dim.in_tensor for i, dim in zip(index, outer, strict=True))
        for begin in range(0, size, step):
            num = min(step, size - begin)
            count, numel = (num, BLOCK) if inner is None else (num * run.size, run.size)
            place = at + begin * in_bucket, first + begin * in_tensor
            # A run by itself has no strides: its elements are consecutive.
            strides = (0, 0) if inner is None else (in_bucket, in_tensor)
            is_aligned = all(each % vector == 0 for each in (*place, count, numel, *strides))
            yield slot, *place, count, numel, *strides, int(is_aligned)


class _Launch:
    """The tiles of at most `MAX_TENSORS` tensors, on the device.

    Slots are those of the addresses that the kernel is given; elements of no tensor have the last
    one, which no address has.
    """

    def __init__(
        self, copies: Sequence[Copy], first: int, vector: int, comm_ctx: CommContext
    ) -> None:
        self.tensors = slice(first, first + MAX_TENSORS)
        rows = [
            row
            for copy in copies
            for row in _tiles_of(
                copy, MAX_TENSORS if copy.tensor == NO_TENSOR else copy.tensor - first, vector
            )
        ]
        self.num_tiles = len(rows)
        device = comm_ctx.device.torch_device
        self._tiles = torch.tensor(rows, dtype=torch.int64).to(device)
        self.address = self._tiles.data_ptr()

    @classmethod
    def all_of(cls, copies: Sequence[Copy], vector: int, comm_ctx: CommContext) -> list[_Launch]:
        """The launches of a table's copies; elements of no tensor are copied by the first."""
        by_launch: dict[int, list[Copy]] = {}
        for copy in copies:
            by_launch.setdefault(max(copy.tensor, 0) // MAX_TENSORS, []).append(copy)
        return [
            cls(each, index * MAX_TENSORS, vector, comm_ctx) for index, each in by_launch.items()
        ]


# Calling a compiled kernel takes half the host time (rule 7: host time) of looking it up by its
# arguments.
_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(
    launch: _Launch,
    bucket: int,
    addresses: Sequence[int],
    present: int,
    divisor: float,
    options: tuple[Any, ...],
) -> None:
    unused = [bucket] * (MAX_TENSORS - len(addresses))
    args = bucket, launch.address, present, divisor, *addresses, *unused, *options, BLOCK
    kernel = _compiled.get(options)
    if kernel is None:
        _compiled[options] = _copy[(launch.num_tiles,)](*args, num_warps=NUM_WARPS)
    else:
        kernel[launch.num_tiles, 1, 1](*args)


class UnpackKernel:
    """Copies gathered buckets into the full buffer, each with one launch.

    `otherwise` copies what a capture is the first to ask for (`CommContext.once`), and dtypes whose
    size no word has.
    """

    def __init__(self, full: ResizableBuffer, comm_ctx: CommContext, otherwise: Any) -> None:
        self._full, self._comm_ctx, self._otherwise = full, comm_ctx, otherwise
        self._buckets: list[tuple[list[_Launch], torch.Tensor, tuple[Any, ...]]] = []

    def add(self, bucket: Bucket, gathered: torch.Tensor) -> None:
        itemsize = gathered.itemsize
        vector = VECTOR_BYTES // itemsize
        # The full buffer is one tensor.
        starts = [slot.full_offset_bytes // itemsize for slot in bucket.slots]
        copies = tuple(
            copy._replace(tensor=0, first=copy.first + starts[copy.tensor])
            for copy in bucket.table.filling
        )
        word = _WORDS.get(itemsize)
        launches = self._comm_ctx.once(
            (copies, vector), lambda: _Launch.all_of(copies, vector, self._comm_ctx)
        )
        if word is None or launches is None:
            self._otherwise.add(bucket, gathered)
        else:
            self._buckets.append((launches, gathered, (word, word, False, False, vector)))

    def run(self) -> None:
        self._otherwise.run()
        full = self._full.address_range[0]
        for launches, gathered, options in self._buckets:
            for launch in launches:
                _launch(launch, gathered.data_ptr(), [full], 1, 1.0, options)


class PackKernel:
    """Copies tensors into a bucket, with a cast and a division, in one launch.

    `otherwise` packs what a capture is the first to ask for, and dtypes that no kernel casts.
    """

    def __init__(self, table: CopyTable, comm_ctx: CommContext, otherwise: Any) -> None:
        self._table, self._comm_ctx, self._otherwise = table, comm_ctx, otherwise
        self._launches: dict[int, list[_Launch]] = {}  # by the elements of a vector

    def pack(
        self, tensors: Sequence[torch.Tensor | None], bucket: torch.Tensor, divisor: float = 1.0
    ) -> None:
        dtypes = {tensor.dtype for tensor in tensors if tensor is not None} or {bucket.dtype}
        if len(dtypes) > 1:  # some are fresh, some were accumulated in the dtype of the reduction
            tensors = [None if each is None else each.to(bucket.dtype) for each in tensors]
            dtypes = {bucket.dtype}
        (dtype,) = dtypes
        is_cast = dtype != bucket.dtype or divisor != 1.0
        types = _FLOATS if is_cast else {dtype: _WORDS.get(dtype.itemsize)}
        to_type, from_type = types.get(bucket.dtype), types.get(dtype)
        vector = VECTOR_BYTES // min(dtype.itemsize, bucket.itemsize)
        launches = self._launches_for(vector)
        if to_type is None or from_type is None or launches is None:
            self._otherwise.pack(tensors, bucket, divisor)
            return
        held = [None if each is None else each.contiguous() for each in tensors]
        addresses = [0 if each is None else each.data_ptr() for each in held]
        to = bucket.data_ptr()
        if any(address % VECTOR_BYTES for address in (*addresses, to)):
            vector = 1
        options = to_type, from_type, True, divisor != 1.0, vector
        for launch in launches:
            part = addresses[launch.tensors]
            present = sum(1 << index for index, address in enumerate(part) if address)
            _launch(launch, to, [address or to for address in part], present, divisor, options)

    def _launches_for(self, vector: int) -> list[_Launch] | None:
        if vector not in self._launches:
            table, comm_ctx = self._table, self._comm_ctx
            made = comm_ctx.once(
                (table, vector), lambda: _Launch.all_of(table.copies, vector, comm_ctx)
            )
            if made is None:
                return None
            self._launches[vector] = made
        return self._launches[vector]
