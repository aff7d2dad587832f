"""Memory of one rank that all ranks of its host can read, in blocks; copies by address."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

SWITCH = "FULLSHARD_SHARED_MEMORY"

# A block that stays free for more collectives than a large model's step has gives its memory back.
IDLE_COLLECTIVES = 4096
_COLLECTIVES_PER_SWEEP = 256
_SMALLEST_BLOCK_BITS = 16
_PLAIN_COPY_BYTES = 256 << 10  # above, torch may use its threads


def mapped(descriptor: int) -> tuple[mmap.mmap, int]:
    """Map a file into memory, until the first result is deleted; return it and its address."""
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    memory.madvise(mmap.MADV_DONTDUMP)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


@dataclass(slots=True, eq=False)
class Block:
    """A part of this rank's heap that holds one bucket at a time.

    `num_uses` counts what still needs its content: the tensor that lies in it, and every rank that
    has not read it yet.
    """

    offset: int
    num_bytes: int
    num_uses: int = 0
    last_used: int = 0


class Heap:
    """The memory of this rank in one group. Blocks have sizes that are powers of two."""

    def __init__(self, memory: mmap.mmap, address: int) -> None:
        self.address = address
        self.num_bytes = 0  # of all blocks, in use or free
        self.memory = memory
        self._blocks: dict[int, Block] = {}  # by address
        self._free: dict[int, list[Block]] = {}  # by size
        # Blocks whose tensors are gone. Finalizers run at any time: they append without the lock.
        self.lapsed: deque[Block] = deque()
        self._num_taken = 0

    def take(self, num_bytes: int, look_for_free: Callable[[], None]) -> Block:
        """A block that is not in use; `look_for_free` is called before one is made."""
        size = 1 << max(_SMALLEST_BLOCK_BITS, (num_bytes - 1).bit_length())
        while self.lapsed:
            self.release(self.lapsed.popleft())
        free = self._free.setdefault(size, [])
        if not free:
            look_for_free()
        if free:
            block = free.pop()  # the one that became free last is in the caches
        elif self.num_bytes + size > len(self.memory):
            raise MemoryError(
                f"shared memory: {num_bytes} more bytes in flight do not fit, because "
                f"{self.num_bytes} of {len(self.memory)} are in use; wait for collectives earlier, "
                f"or set {SWITCH}=0."
            )
        else:
            block = self._blocks[self.address + self.num_bytes] = Block(self.num_bytes, size)
            self.num_bytes += size
        self._num_taken += 1
        block.last_used = self._num_taken
        if self._num_taken % _COLLECTIVES_PER_SWEEP == 0:
            for idle in [each for blocks in self._free.values() for each in blocks]:
                if idle.last_used < self._num_taken - IDLE_COLLECTIVES:
                    self.memory.madvise(mmap.MADV_REMOVE, idle.offset, idle.num_bytes)
        return block

    def find(self, tensor: torch.Tensor) -> Block | None:
        """The block that a tensor was allocated in."""
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def release(self, block: Block) -> None:
        """Drop one use of a block."""
        block.num_uses -= 1
        if block.num_uses == 0:
            self._free[block.num_bytes].append(block)


def copy_bytes(to: int, start: int, num_bytes: int) -> None:
    """Copy between addresses; large copies use torch's threads."""
    if num_bytes <= _PLAIN_COPY_BYTES:
        ctypes.memmove(to, start, num_bytes)
    else:
        source = tensor_at(start, num_bytes, torch.uint8)
        tensor_at(to, num_bytes, torch.uint8).copy_(source)


def tensor_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory that is kept elsewhere; cheaper than a view, and without a history."""
    memory = array_type(numel * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


@lru_cache(maxsize=1024)
def array_type(num_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * num_bytes
