"""Memory of this rank that the other ranks of its host can read.

A region is a file without a name (`memfd_create`) that its owner maps, and every rank that was sent
its descriptor. It is freed with the last mapping, and no limit of /dev/shm applies to it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

# A page takes memory once it was written, so a region that is too large costs nothing.
_SMALLEST_BITS = 16
# More than a step of a large model has, for a region that is used once a step.
IDLE_COLLECTIVES = 4096
_COLLECTIVES_PER_SWEEP = 256

_numbers = itertools.count()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Mapped:
    """A file in this process's memory, until this object goes.

    (Python's `mmap` would keep a file descriptor open for each.)
    """

    __slots__ = ("address", "num_bytes")

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, num_bytes, access, mmap.MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self.address: int = address
        self.num_bytes = num_bytes

    def __del__(self) -> None:
        if hasattr(self, "address"):
            _libc.munmap(self.address, self.num_bytes)


class Region:
    """A file of this rank that holds buckets of one collective at a time.

    `num_uses` counts who still needs its content: the tensor that lies in it, and every rank that
    has not read it yet.
    """

    __slots__ = (
        "__weakref__",
        "descriptor",
        "is_retired",
        "last_used",
        "lease",
        "mapped",
        "num_uses",
        "number",
    )

    def __init__(self, num_bytes: int) -> None:
        self.number = next(_numbers)
        self.descriptor = os.memfd_create("fullshard")
        try:
            os.ftruncate(self.descriptor, num_bytes)
            self.mapped = Mapped(self.descriptor, num_bytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.num_uses = 0
        self.last_used = 0
        self.is_retired = False
        self.lease: weakref.ref[Any] | None = None


class Regions:
    """The regions of this process, for all groups.

    Sizes are powers of two. There are as many of each size as were in use at once; one that was not
    used for 4096 collectives is freed. So they take less than twice the bytes of the buckets that
    were in flight or leased at once, counted size by size.

    Any thread may call. `_lapsed` and `_discarded` are filled by callbacks that may run at any
    point, and therefore take no lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Region]] = {}
        self._by_address: dict[int, Region] = {}
        self._lapsed: deque[Region] = deque()
        self._discarded: deque[Region] = deque()
        self._num_taken = 0
        self.num_made = 0
        self.num_retired = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of all regions, in use or free."""
        with self._lock:
            self._settle()
            return sum(region.mapped.num_bytes for region in self._by_address.values())

    def take(self, num_bytes: int, look_for_free: Callable[[], None] | None = None) -> Region:
        """A region in one use, the caller's; `look_for_free` is called before one is made.

        Raises OSError where there is no memory or file descriptor for another one.
        """
        size = 1 << max(_SMALLEST_BITS, (num_bytes - 1).bit_length())
        region = self._taken(size)
        if region is None and look_for_free is not None:
            look_for_free()
            region = self._taken(size)
        if region is None:
            try:
                region = Region(size)
            except OSError:
                self.retire_free()
                region = Region(size)
            with self._lock:
                self.num_made += 1
                self._by_address[region.mapped.address] = region
        region.num_uses = 1
        self._num_taken += 1
        region.last_used = self._num_taken
        if self._num_taken % _COLLECTIVES_PER_SWEEP == 0:
            with self._lock:
                self._sweep(self._num_taken - IDLE_COLLECTIVES)
        return region

    def _taken(self, size: int) -> Region | None:
        with self._lock:
            self._settle()
            free = self._free.get(size)
            # The one that became free last: it is in the caches.
            return free.pop() if free else None

    def lease(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in a region, which is in use until the tensor and all views of it are gone."""
        region = self.take(numel * dtype.itemsize)
        memory: Any = (ctypes.c_char * (numel * dtype.itemsize)).from_address(region.mapped.address)
        memory.mapped = region.mapped  # as long as the tensor
        lapsed = self._lapsed
        region.lease = weakref.ref(memory, lambda _: lapsed.append(region))
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=dtype)

    def find(self, tensor: torch.Tensor) -> Region | None:
        """The region that a tensor lies in."""
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def hold(self, held: Iterable[Region], num_uses: int) -> None:
        with self._lock:
            for region in held:
                region.num_uses += num_uses

    def release(self, held: Iterable[Region]) -> None:
        """One use less of each."""
        with self._lock:
            for region in held:
                self._release(region)

    def discard(self, held: Iterable[Region]) -> None:
        """Never use these again: a rank may still read them that can no longer acknowledge."""
        self._discarded.extend(held)

    def retire_free(self) -> None:
        """Free all regions that are not in use, unless another call is at work."""
        if self._lock.acquire(blocking=False):  # in a callback, this very thread may hold it
            try:
                self._settle()
                self._sweep(self._num_taken + 1)
            finally:
                self._lock.release()

    def _release(self, region: Region) -> None:
        region.num_uses -= 1
        if region.num_uses == 0 and not region.is_retired:
            self._free.setdefault(region.mapped.num_bytes, []).append(region)

    def _settle(self) -> None:
        while self._lapsed:
            region = self._lapsed.popleft()
            region.lease = None
            self._release(region)
        while self._discarded:
            region = self._discarded.popleft()
            if not region.is_retired:
                self._retire(region)

    def _sweep(self, since: int) -> None:
        for free in self._free.values():
            for region in [region for region in free if region.last_used < since]:
                free.remove(region)
                self._retire(region)

    def _retire(self, region: Region) -> None:
        region.is_retired = True
        os.close(region.descriptor)  # the memory goes with the last tensor and the last mapping
        self.num_retired += 1
        del self._by_address[region.mapped.address]


regions = Regions()
