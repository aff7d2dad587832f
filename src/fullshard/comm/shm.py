"""Collectives between the ranks of one host, through shared memory.

Each rank of a group has a heap: an anonymous file (`memfd_create`) that all ranks map when they
connect. It is larger than anything that will be in flight, and takes memory only where it was
written, so later on only memory itself can run out. A rank copies its input into a block of its
heap, announces it to all others, and goes on: starting never waits for another rank. A rank that
waits copies the blocks of the others straight into its output, and acknowledges them. So an
all-gather costs each rank one copy of what it sends and one of what it receives.

Announcements and acknowledgments go through a pipe from each rank to each other one. The pipe also
orders memory between two processes: what was copied before a record was written is visible to the
rank that has read the record. When a process ends, its pipes are closed.

Values are summed in the order of ranks, bfloat16 and float16 in float32 at least: the result does
not depend on which rank computes it.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist

from fullshard._torch import is_registered, lifetime_of, timeout_of
from fullshard.comm import guard
from fullshard.comm.agreement import Agreement
from fullshard.comm.heap import SWITCH, Block, copy_bytes, tensor_at
from fullshard.comm.link import ALL_GATHER, ALL_TO_ALL, NAMES, REDUCE_SCATTER, Link, Terms
from fullshard.comm.mesh import Axis
from fullshard.comm.topology import Topology
from fullshard.errors import ConfigError
from fullshard.layout import Wire

_PROMPT_BYTES = 1 << 20  # from here on, having memory back at once is worth a system call

_CPU = torch.device("cpu")
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)

Tensors = Sequence[torch.Tensor]

_log = logging.getLogger(__name__)


class HostWork:
    """A gather or sum in flight, with what CollectiveWork uses of a `dist.Work`.

    With a `wire`, its messages are summed, otherwise bytes are gathered.
    """

    _is_over = True  # until it has a number
    _is_sum = False

    def __init__(self, link: Link, outs: Tensors, ins: Tensors, wire: Wire | None) -> None:
        self._link = link
        self._outs = list(outs)
        self._ins = list(ins)
        self._wire, is_sum = wire, wire is not None
        self._is_sum = is_sum
        self._future: torch.futures.Future[object] | None = None
        kind = REDUCE_SCATTER if is_sum else ALL_GATHER
        self._require_matching(NAMES[kind])
        # Ranks may gather as bytes what others gather as numbers, but they cannot sum it so.
        self._terms: Terms = [
            (kind, len(ins), inp.nbytes, inp.itemsize if is_sum else 1) for inp in ins
        ]
        if not ins:
            return
        with link.lock:
            self._sequence = link.announce(self._terms, [self._place(inp) for inp in ins])
            self._is_over = False
        for out, inp in () if is_sum else zip(outs, ins, strict=True):
            own = out.data_ptr() + link.rank * inp.nbytes
            if own != inp.data_ptr():
                copy_bytes(own, inp.data_ptr(), inp.nbytes)

    def get_future(self) -> torch.futures.Future[object]:
        if self._future is None:
            self._future = torch.futures.Future()
            if self._is_over:
                self._future.set_result(None)
        return self._future

    def wait(self) -> None:
        with self._link.lock:
            if self._is_over:
                return
            try:
                with guard.waiting() as self._link.keep_waiting:
                    if self._is_sum:
                        self._sum()
                    else:
                        self._gather()
            finally:
                self._end()
                self._ins.clear()
                self._link.settle(at_once=sum(each[2] for each in self._terms) >= _PROMPT_BYTES)

    def _end(self) -> None:
        self._is_over = True
        self._link.ended.append(self._sequence)
        if self._future is not None:
            self._future.set_result(None)

    def __del__(self) -> None:
        if not self._is_over:
            self._end()

    def _require_matching(self, name: str) -> None:
        """Copies by address are unchecked: sizes must match, or we corrupt memory."""
        size = self._link.size
        for inp, out in zip(self._ins, self._outs, strict=True):
            full, part = (inp, out) if self._is_sum else (out, inp)
            # A sum may have another dtype than what is added up.
            part_bytes = part.nbytes
            if self._wire is not None:
                part_bytes = self._wire.message_numel(part.numel()) * full.itemsize
            is_contiguous = full.is_contiguous() and part.is_contiguous()
            if full.nbytes != size * part_bytes or not is_contiguous:
                raise ConfigError(
                    f"{name}: the tensor for all {size} ranks has {full.nbytes} bytes and strides "
                    f"{full.stride()}, the one for this rank {part_bytes} and {part.stride()}; "
                    f"pass contiguous ones, the first {size} times as large as the second."
                )

    def _place(self, inp: torch.Tensor) -> tuple[int, Block]:
        """Where other ranks can read an input; it is copied there unless it was allocated there."""
        heap, start = self._link.heap, inp.data_ptr()
        block = heap.find(inp) if self._is_sum else None
        if block is not None:
            return start - heap.address, block
        block = heap.take(inp.nbytes, self._link.drain)
        address = heap.address + block.offset
        if self._is_sum:  # nobody else reads this rank's segment
            segment_bytes = inp.nbytes // self._link.size
            before = self._link.rank * segment_bytes
            after = before + segment_bytes
            copy_bytes(address, start, before)
            copy_bytes(address + after, start + after, inp.nbytes - after)
        else:
            copy_bytes(address, start, inp.nbytes)
        return block.offset, block

    def _gather(self) -> None:
        for other, addresses in self._link.receive(self._sequence, lambda _: self._terms):
            for out, address in zip(self._outs, addresses, strict=True):
                num_bytes = out.nbytes // self._link.size
                copy_bytes(out.data_ptr() + other * num_bytes, address, num_bytes)

    def _sum(self) -> None:
        """Sum once all ranks have announced, so that the order is that of ranks."""
        rank, size, wire = self._link.rank, self._link.size, self._wire
        assert wire is not None
        found = dict(self._link.receive(self._sequence, lambda _: self._terms))
        found[rank] = [inp.data_ptr() for inp in self._ins]
        for number, (out, inp) in enumerate(zip(self._outs, self._ins, strict=True)):
            numel, dtype = out.numel(), inp.dtype
            if numel:
                num_sent = wire.message_numel(numel)
                own = rank * num_sent * dtype.itemsize
                starts = [found[other][number] + own for other in range(size)]
                messages = [tensor_at(start, num_sent, dtype) for start in starts]
                wire.add_up(messages, tensor_at(out.data_ptr(), numel, out.dtype))


class HostExchange(HostWork):
    """An all-to-all in flight, of bytes: each rank copies its segments out of the others' inputs.

    `out_bytes` and `in_bytes` are the sizes of the segments from and to each rank.
    """

    def __init__(
        self,
        link: Link,
        out: torch.Tensor,
        inp: torch.Tensor,
        out_bytes: Sequence[int],
        in_bytes: Sequence[int],
    ) -> None:
        self._link = link
        self._outs, self._ins = [out], [inp]
        self._future = None
        for tensor, sizes in ((out, out_bytes), (inp, in_bytes)):
            if tensor.nbytes != sum(sizes) or not tensor.is_contiguous():
                raise ConfigError(
                    f"all-to-all: a tensor has {tensor.nbytes} bytes for segments of {sum(sizes)}, "
                    "or is not contiguous; pass contiguous tensors as large as their segments."
                )
        self._terms = [(ALL_TO_ALL, 1, inp.nbytes, 1)]
        self._out_bytes, rank = out_bytes, link.rank
        self._out_starts, starts = _starts(out_bytes), _starts(in_bytes)

        def to_peer(other: int) -> tuple[Terms, list[tuple[int, Block]]]:
            return [(ALL_TO_ALL, 1, in_bytes[other], 1)], [(place + starts[other], block)]

        with link.lock:
            place, block = self._place(inp)
            self._sequence = link.announce(self._terms, [(place, block)], to_peer)
            self._is_over = False
        copy_bytes(
            out.data_ptr() + self._out_starts[rank], inp.data_ptr() + starts[rank], in_bytes[rank]
        )

    def _gather(self) -> None:
        def terms_of(other: int) -> Terms:
            return [(ALL_TO_ALL, 1, self._out_bytes[other], 1)]

        (out,) = self._outs
        for other, (address,) in self._link.receive(self._sequence, terms_of):
            copy_bytes(out.data_ptr() + self._out_starts[other], address, self._out_bytes[other])


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][: len(sizes)]


# Connecting the ranks of a group

# A group cannot have attributes. None for a group whose ranks have agreed to use gloo.
_links: weakref.WeakKeyDictionary[dist.ProcessGroup, Link | None] = weakref.WeakKeyDictionary()


# Groups of which a rank has run out of descriptors or memory: no further groups are made for them.
exhausted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def known_link(group: dist.ProcessGroup | None) -> Link | None:
    """The link between the ranks of a group, if `link_of` has found one."""
    return None if group is None else _links.get(group)


def link_of(group: dist.ProcessGroup) -> Link | None:
    """The link between the ranks of a group, None if they use gloo.

    The first call for a group is a collective over it.
    """
    if group not in _links:
        link = _links[group] = _connect(group)
        if link is not None:
            weakref.finalize(lifetime_of(group), _close, link, weakref.ref(group)).atexit = False
    return _links[group]


def _close(link: Link, group: weakref.ref[dist.ProcessGroup]) -> None:
    link.close()
    destroyed = group()
    if destroyed is not None:
        _links.pop(destroyed, None)


def _connect(group: dist.ProcessGroup) -> Link | None:
    """Exchange over the group what to open, open it, and exchange whether that worked."""
    size = group.size()
    if not Topology.of(group).is_one_host:
        _log.debug("process group %s: no shared memory: several hosts", group.group_name)
        return None
    ranks = dist.get_process_group_ranks(group) if is_registered(group) else list(range(size))
    link = Link(group.rank(), ranks, timeout_of(group).total_seconds())
    token = secrets.randbits(62)
    exchange = partial(Agreement.exchanged, axis=Axis(group), device=_CPU)
    is_willing = size > 1 and os.environ.get(SWITCH) != "0" and hasattr(os, "memfd_create")
    is_connected = False
    try:
        error = _error_of(partial(link.open, token)) if is_willing else 0
        said = exchange([int(is_willing), error, os.getpid(), token, *link.offer])
        unwilling = [other for other, card in enumerate(said) if not card[0]]
        obstacle = f"ranks {unwilling} of the group cannot, or {SWITCH}=0 is set there"
        if not unwilling and not any(card[1] for card in said):
            error = _error_of(partial(link.connect, [card[2:] for card in said]))
            said = exchange([1, error])
            obstacle = "its ranks are of several users"
            is_connected = not any(card[1] for card in said)
    finally:
        if not is_connected:
            link.close()
    if is_connected:
        link.withdraw_offer()
        return link
    _log.debug("process group %s: no shared memory: %s", group.group_name, obstacle)
    errors = [(r, card[1]) for r, card in zip(ranks, said, strict=True) if card[1] in _EXHAUSTED]
    if errors:
        exhausted.add(group)
    for rank, error in errors[:1]:
        warnings.warn(
            f"process group {group.group_name}: rank {rank} has no memory or file descriptor left "
            f"for shared memory ({os.strerror(error)}), so all ranks use gloo, which is slower. "
            "Raise the limits (ulimit -n, ulimit -v) or free memory.",
            stacklevel=2,
        )
    return None


def _error_of(call: Callable[[], None]) -> int:
    """The `errno` of the error that a call raises; 0 for none."""
    try:
        call()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _after_fork() -> None:
    """Close the pipes in a child: while it has them open, the end of this rank is not noticed."""
    for link in list(_links.values()):
        if link is not None:
            link.close()
    _links.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
