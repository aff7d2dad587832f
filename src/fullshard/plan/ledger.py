"""What a simulated device holds: every storage, its size and its kind, as the host makes them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from fullshard._torch import storage_key

_ALIGNMENT = 512


class Kind(Enum):
    """What memory is for. The engine names the kinds of its own buffers by their values."""

    PARAMETERS = "parameter shards"
    GRADIENTS = "gradient shards"
    OPTIMIZER = "optimizer state"
    FULL = "full parameters"
    STAGING = "staging"
    FULL_GRADIENTS = "full gradients"
    ACTIVATIONS = "activations"
    LOSS = "logits and loss"
    WORKSPACE = "matmul workspace"
    OTHER = "other"


@dataclass(slots=True, eq=False)
class Block:
    """Allocated memory: `owner` is the unit that was running, `start` is its address."""

    num_bytes: int
    kind: Kind
    owner: str
    start: int
    pool: _Pool
    storage: weakref.ref[torch.UntypedStorage]
    is_on_host: bool


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that was held at once, by kind, and its activations by owner."""

    num_bytes: int
    at_s: float
    where: str
    kinds: dict[Kind, int]
    activations: dict[str, int]


class _Pool:
    """The addresses of one stream's memory: the free range that fits best is allocated."""

    def __init__(self, base: int) -> None:
        self._end = base
        self._free: list[tuple[int, int]] = []

    def allocate(self, size: int) -> int:
        fitting = [(hi - lo, lo) for lo, hi in self._free if hi - lo >= size]
        if not fitting:
            self._end += size
            return self._end - size
        found, start = min(fitting)
        self._free.remove((start, start + found))
        if found > size:
            self._free.append((start + size, start + found))
        return start

    def free(self, start: int, size: int) -> None:
        end = start + size
        for lo, hi in [each for each in self._free if each[1] == start or each[0] == end]:
            self._free.remove((lo, hi))
            start, end = min(start, lo), max(end, hi)
        self._free.append((start, end))


class Ledger:
    """Tracks a device's memory, with the caching allocator's rounding.

    `changes` has (time, kind, owner, bytes) since `begin_step`; `now` is the time and what the step
    is doing. `held` is by kind and owner. Host memory is counted separately, in `host_bytes`.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._pools: dict[str, _Pool] = {}
        self.held: Counter[tuple[Kind, str]] = Counter()
        self.num_bytes = 0
        self.host_bytes = self.host_peak_bytes = 0
        self.now: tuple[float, str, str] = (0.0, "", "")
        self.changes: list[tuple[float, Kind, str, int]] = []
        self._before: dict[tuple[Kind, str], int] = {}
        self._peak = (0, 0, self.now)

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return storage_key(storage) in self._blocks

    def block_of(self, storage: torch.UntypedStorage) -> Block | None:
        return self._blocks.get(storage_key(storage))

    def allocated(
        self,
        storage: torch.UntypedStorage,
        kind: Kind,
        owner: str,
        stream: str,
        *,
        is_on_host: bool = False,
    ) -> None:
        """Record a storage that is new or was resized."""
        key = storage_key(storage)
        before = self._blocks.pop(key, None)
        if before is not None:
            self._freed(before)
        num_bytes = -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        pool = self._pools.setdefault(stream, _Pool(len(self._pools) << 50))
        start = pool.allocate(num_bytes) if num_bytes else 0

        def died(_: object) -> None:
            block = self._blocks.pop(key, None)
            if block is not None:
                self._freed(block)

        block = Block(num_bytes, kind, owner, start, pool, weakref.ref(storage, died), is_on_host)
        self._blocks[key] = block
        self._count(block, num_bytes)

    def _freed(self, block: Block) -> None:
        if block.num_bytes:
            block.pool.free(block.start, block.num_bytes)
        self._count(block, -block.num_bytes)

    def _count(self, block: Block, num_bytes: int) -> None:
        if not num_bytes:
            return
        if block.is_on_host:
            self.host_bytes += num_bytes
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
            return
        self.num_bytes += num_bytes
        self._change(block.kind, block.owner, num_bytes)
        if self.num_bytes > self._peak[0]:
            self._peak = (self.num_bytes, len(self.changes), self.now)

    def _change(self, kind: Kind, owner: str, num_bytes: int) -> None:
        self.held[kind, owner] += num_bytes
        self.changes.append((self.now[0], kind, owner, num_bytes))

    def set_kind(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        """Correct the kind of memory that was recorded as another kind when it was allocated."""
        block = self._blocks.get(storage_key(storage))
        if block is None or block.kind is kind or block.is_on_host:
            return
        self._change(block.kind, block.owner, -block.num_bytes)
        self._change(kind, block.owner, block.num_bytes)
        block.kind = kind

    def begin_step(self) -> None:
        """Forget changes and peak."""
        self.changes.clear()
        self._before = dict(self.held)
        self._peak = (self.num_bytes, 0, self.now)
        self.host_peak_bytes = self.host_bytes

    def peak(self) -> Peak:
        """The peak since `begin_step`."""
        num_bytes, num_changes, (at_s, phase, unit) = self._peak
        held = Counter(self._before)
        for _, kind, owner, change in self.changes[:num_changes]:
            held[kind, owner] += change
        kinds: Counter[Kind] = Counter()
        for (kind, _), size in held.items():
            kinds[kind] += size
        saved = {o: size for (k, o), size in held.items() if k is Kind.ACTIVATIONS and size}
        where = f"{phase} of {unit}" if unit else phase
        return Peak(num_bytes, at_s, where, dict(kinds), saved)

    def over_time(self) -> Iterator[tuple[float, dict[Kind, int]]]:
        """Yield what is held, by kind, at each time it changes; the most if it changes twice."""
        held = dict.fromkeys(Kind, 0)
        for (kind, _), size in self._before.items():
            held[kind] += size
        at_s, total = 0.0, sum(held.values())
        most, shown = total, dict(held)
        for time_s, kind, _, num_bytes in self.changes:
            if time_s > at_s:
                yield at_s, shown
                at_s, most = time_s, -1
            held[kind] += num_bytes
            total += num_bytes
            if total >= most:
                most, shown = total, dict(held)
        yield at_s, shown
