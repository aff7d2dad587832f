"""The collectives of sharding, per backend.

All-gather and reduce-scatter take lists: all buckets of a lane go out in one call. They return a
`CollectiveWork`: the outputs hold their values once it has been waited for (for a backend with
streams: on the stream that waits).
"""

from __future__ import annotations

import atexit
import functools
import time
import weakref
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fullshard._torch import (
    AllgatherOptions,
    all_gather_coalesced,
    all_gather_single,
    all_to_all_single,
    backend_name,
    devices_of,
    is_registered,
    lifetime_of,
    local_group,
    reduce_scatter_coalesced,
    reduce_scatter_single,
    timeout_of,
)
from fullshard.api import AllGather, ReduceScatter
from fullshard.comm import guard, shm
from fullshard.comm.mesh import Axis
from fullshard.comm.order import enter_call
from fullshard.comm.two_level import Rail, StagedWork, levels_of, packed_wire, rail_of
from fullshard.comm.work import CollectiveWork, Group, Tensors, is_gloo, issue, issue_each, wait_of
from fullshard.device import simulation
from fullshard.layout import Plain, Wire
from fullshard.trace import Activity, seam

_SMALLEST_SCATTER_BYTES = 64 << 10


class Collectives:
    """The backend's own collectives: NCCL, and backends with the same interface."""

    averages: bool = True
    """Whether `reduce_scatter` can be asked for the mean instead of the sum."""

    custom_all_gather: AllGather | None = None
    custom_reduce_scatter: ReduceScatter | None = None
    """A user's own collective in place of ours, with memory of its own."""

    def all_gather(self, outs: Tensors, ins: Tensors, group: Group) -> CollectiveWork:
        """Fill each output with the inputs of all ranks, in the order of ranks."""
        options = _all_gather_options()
        if len(outs) == 1:
            return CollectiveWork([issue(all_gather_single, group, outs[0], ins[0], options)])
        lists = list(outs), list(ins)
        return CollectiveWork([issue(all_gather_coalesced, group, *lists, options)])

    def reduce_scatter(
        self, outs: Tensors, ins: Tensors, group: Group, *, average: bool, wire: Wire | None = None
    ) -> CollectiveWork:
        """Fill each output with the sum (or mean) over ranks of this rank's segment.

        If the `wire` is another than values in the outputs' dtype, the inputs are messages of its
        `packed_wire`. Ranks exchange them and sum what they receive (rule 6: exchange and local
        sum). Sums of a host cross to another one once, if the wire holds sums.
        """
        if wire is not None and wire != Plain(outs[0].dtype):
            for out, inp in zip(outs, ins, strict=True):
                _exchange_and_sum(out, inp, group, wire, average=average)
            return CollectiveWork()
        _tell(Plain(ins[0].dtype), ins, group)
        options = _reduce_scatter_options(average)
        if len(outs) == 1:
            return CollectiveWork([issue(reduce_scatter_single, group, outs[0], ins[0], options)])
        lists = list(outs), list(ins)
        return CollectiveWork([issue(reduce_scatter_coalesced, group, *lists, options)])

    def all_to_all(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        out_numel: Sequence[int],
        in_numel: Sequence[int],
        group: Group,
    ) -> CollectiveWork:
        """Send a segment of the input to each rank, and fill the output with what they send.

        `in_numel` and `out_numel` have the elements to and from each rank. The device goes on with
        other work until `wait`.
        """
        # As bytes: not every backend knows every dtype.
        sizes = _in_bytes(out, out_numel), _in_bytes(inp, in_numel)
        work = issue(
            all_to_all_single, group, _bytes(out), _bytes(inp), *sizes, dist.AllToAllOptions()
        )
        return CollectiveWork([work], [out, inp], wait=wait_of(group, out.device))

    def allocate_bucket(
        self, numel: int, dtype: torch.dtype, device: torch.device, group: Group | None = None
    ) -> torch.Tensor:
        """Uninitialized memory for an input of `reduce_scatter`, which need not be copied.

        It must not be written to again after the reduce-scatter: other ranks may read it later.
        """
        return torch.empty(numel, dtype=dtype, device=device)


def _tell(wire: Wire, ins: Tensors, group: Group) -> None:
    """Report messages for all ranks that are to be summed."""
    if seam.observers:
        seam.send(Activity.REDUCE, wire, ins, group.size())


# Made once (rule 7: host time). Collectives run on the calling stream, so that what is enqueued
# there next follows without an event.


@functools.cache
def _all_gather_options() -> Any:
    options = AllgatherOptions()
    options.asyncOp = False
    return options


@functools.cache
def _reduce_scatter_options(average: bool) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
    options.asyncOp = False
    return options


def _exchange_and_sum(
    out: torch.Tensor, inp: torch.Tensor, group: Group, wire: Wire, *, average: bool
) -> None:
    """Reduce in the dtype of the output, on the calling stream (rule 6: exchange and local sum)."""
    is_direct = not (wire.holds_sums and devices_of(group))
    levels = None if is_direct else levels_of(group, backend_name(group, inp.device))
    if levels is None:
        _sum_exchanged(out, inp, group, packed_wire(wire, group))
    else:
        sent = inp.view(levels.num_hosts, levels.host.size(), -1).transpose(0, 1).contiguous()
        sums = _sums_of_hosts(out, levels.num_hosts, wire)
        _sum_exchanged(sums, sent, levels.host, wire.inside)
        sent = sent.new_empty(levels.num_hosts, wire.message_numel(out.numel()))
        wire.encode(sums, sent)
        _sum_exchanged(out, sent, levels.rail, wire)
    if average:
        out.div_(group.size())


def _sums_of_hosts(out: torch.Tensor, num_hosts: int, wire: Wire) -> torch.Tensor:
    """Memory for sums that a wire is going to round: nothing rounds them before."""
    dtype = out.dtype if wire.is_plain else torch.promote_types(out.dtype, torch.float32)
    return out.new_empty(num_hosts, out.numel(), dtype=dtype)


def _sum_exchanged(out: torch.Tensor, inp: torch.Tensor, group: Group, wire: Wire) -> None:
    """Send each rank its part of the messages, and sum what arrives.

    The received tensor is allocated and freed on the calling stream: what is next may use its
    memory.
    """
    _tell(wire, [inp], group)
    options = dist.AllToAllOptions()
    options.asyncOp = False
    received = torch.empty_like(inp)
    # As bytes: not every backend knows every dtype.
    sent = _bytes(received).view(-1), _bytes(inp).view(-1)
    CollectiveWork([issue(all_to_all_single, group, *sent, [], [], options)]).wait()
    messages = received.view(group.size(), *([-1] if out.ndim == 1 else [len(out), -1]))
    if wire.is_plain:
        torch.sum(messages, 0, dtype=out.dtype, out=out)
    else:
        wire.add_up(messages.unbind(), out)


class PythonCollectives(Collectives):
    """Collectives of a group written in Python, which has what the functions of `dist` call."""

    averages = False

    def all_gather(self, outs: Tensors, ins: Tensors, group: Group) -> CollectiveWork:
        works = issue_each(all_gather_single, group, outs, ins, AllgatherOptions())
        return CollectiveWork(works, buffers=[*outs, *ins])

    def reduce_scatter(
        self, outs: Tensors, ins: Tensors, group: Group, *, average: bool, wire: Wire | None = None
    ) -> CollectiveWork:
        if wire is not None and wire != Plain(outs[0].dtype):
            return super().reduce_scatter(outs, ins, group, average=average, wire=wire)
        _tell(Plain(ins[0].dtype), ins, group)
        works = issue_each(reduce_scatter_single, group, outs, ins, dist.ReduceScatterOptions())
        return CollectiveWork(works, buffers=[*outs, *ins])


class GlooCollectives(Collectives):
    """Collectives on gloo: gloo moves the bytes, sums are done here (rule 6: local sum).

    Each bucket is a collective of its own: gloo's two threads assign the name of the last operation
    to one string without a lock, and free each other's memory if the name has more than 15
    characters, as those of coalesced operations do.
    """

    averages = False

    def all_gather(self, outs: Tensors, ins: Tensors, group: Group) -> CollectiveWork:
        works = issue_each(all_gather_single, group, map(_bytes, outs), map(_bytes, ins))
        return CollectiveWork(works, [*outs, *ins], wait=guard.wait_for)

    def reduce_scatter(
        self, outs: Tensors, ins: Tensors, group: Group, *, average: bool, wire: Wire | None = None
    ) -> CollectiveWork:
        wire = packed_wire(wire or Plain(ins[0].dtype), group)
        return self._exchange(outs, ins, group, wire)

    def _exchange(self, outs: Tensors, ins: Tensors, group: Group, wire: Wire) -> CollectiveWork:
        """Exchange messages of a wire, and sum what arrives."""
        _tell(wire, ins, group)
        received = [torch.empty_like(inp) for inp in ins]
        sent, size = (map(_bytes, received), map(_bytes, ins)), group.size()
        works = issue_each(all_to_all_single, group, *sent, [], [])

        def sum_received() -> None:
            for out, got in zip(outs, received, strict=True):
                wire.add_up(got.view(size, -1).unbind(), out)

        return CollectiveWork(works, ins, sum_received, guard.wait_for)


class ShmCollectives(GlooCollectives):
    """Collectives of CPU ranks: through shared memory on one host, otherwise over gloo.

    If several hosts have several ranks each, every byte crosses to another host once.
    """

    def all_gather(self, outs: Tensors, ins: Tensors, group: Group) -> CollectiveWork:
        link = shm.link_of(group)
        if link is not None:
            return CollectiveWork([issue(shm.HostWork, link, list(outs), list(ins), None)])
        if levels_of(group) is not None:
            work = issue(self._gather_by_levels, group, list(outs), list(ins))
        elif rail_of(group) is not None:
            work = issue(self._gather_by_rail, group, list(outs), list(ins))
        else:
            return super().all_gather(outs, ins, _channel_of(group))
        return CollectiveWork([work], [*outs, *ins], wait=guard.wait_for)

    def reduce_scatter(
        self, outs: Tensors, ins: Tensors, group: Group, *, average: bool, wire: Wire | None = None
    ) -> CollectiveWork:
        link, wire = shm.link_of(group), wire or Plain(ins[0].dtype)
        if link is not None:
            _tell(wire.inside, ins, group)
            return CollectiveWork([issue(shm.HostWork, link, list(outs), list(ins), wire.inside)])
        if wire.holds_sums and levels_of(group) is not None:
            work = issue(self._reduce_by_levels, group, list(outs), list(ins), wire)
        elif rail_of(group) is not None:
            work = issue(self._reduce_by_rail, group, list(outs), list(ins), wire)
        else:
            return self._exchange(outs, ins, _channel_of(group), packed_wire(wire, group))
        return CollectiveWork([work], [*outs, *ins], wait=guard.wait_for)

    def _gather_by_rail(self, group: Group, outs: Tensors, ins: Tensors) -> StagedWork:
        rail = rail_of(group)
        assert rail is not None
        return rail.start(lambda: _gather_over(rail, outs, ins))

    def _reduce_by_rail(self, group: Group, outs: Tensors, ins: Tensors, wire: Wire) -> StagedWork:
        rail = rail_of(group)
        assert rail is not None
        return rail.start(lambda: _reduce_over(rail, outs, ins, wire))

    def _gather_by_levels(self, group: Group, outs: Tensors, ins: Tensors) -> StagedWork:
        """Gather the segments of a rail between hosts, then those of all rails inside the host."""
        levels = levels_of(group)
        assert levels is not None

        def stages() -> None:
            of_rail = [each.new_empty(levels.num_hosts * each.numel()) for each in ins]
            _gather_over(levels, of_rail, ins)
            self.all_gather(
                [part for out in outs for part in out.view(-1).chunk(levels.num_hosts)],
                [part for each in of_rail for part in each.chunk(levels.num_hosts)],
                levels.host,
            ).wait()

        return levels.start(stages)

    def _reduce_by_levels(
        self, group: Group, outs: Tensors, ins: Tensors, wire: Wire
    ) -> StagedWork:
        """Sum what goes to each host inside this one, then exchange the sums along the rail."""
        levels = levels_of(group)
        assert levels is not None

        def stages() -> None:
            sums = [_sums_of_hosts(out, levels.num_hosts, wire) for out in outs]
            self.reduce_scatter(
                [part for each in sums for part in each.unbind()],
                [part for each in ins for part in each.view(-1).chunk(levels.num_hosts)],
                levels.host,
                average=False,
                wire=wire.inside,
            ).wait()
            sent = []
            for each in sums:
                shape = levels.num_hosts, wire.message_numel(each.size(1))
                sent.append(each.new_empty(shape, dtype=wire.dtype))
                wire.encode(each, sent[-1])
            _reduce_over(levels, outs, sent, wire)

        return levels.start(stages)

    def all_to_all(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        out_numel: Sequence[int],
        in_numel: Sequence[int],
        group: Group,
    ) -> CollectiveWork:
        link = shm.link_of(group)
        if link is None:
            return super().all_to_all(out, inp, out_numel, in_numel, _channel_of(group))
        sizes = _in_bytes(out, out_numel), _in_bytes(inp, in_numel)
        return CollectiveWork([issue(shm.HostExchange, link, out, inp, *sizes)])

    def allocate_bucket(
        self, numel: int, dtype: torch.dtype, device: torch.device, group: Group | None = None
    ) -> torch.Tensor:
        link = shm.known_link(group)
        shared = None if link is None else link.allocate(numel, dtype)
        return super().allocate_bucket(numel, dtype, device) if shared is None else shared


def _gather_over(rail: Rail, outs: Tensors, ins: Tensors) -> None:
    size = rail.rail.size()
    rail.exchange(
        [_bytes(out.view(-1)).chunk(size) for out in outs], [[_bytes(i)] * size for i in ins]
    )


def _reduce_over(rail: Rail, outs: Tensors, ins: Tensors, wire: Wire) -> None:
    """Exchange messages of a wire, and sum what arrives."""
    _tell(wire, ins, rail.rail)
    received, size = [torch.empty_like(inp) for inp in ins], rail.rail.size()
    parts = ([_bytes(each.view(-1)).chunk(size) for each in tensors] for tensors in (received, ins))
    rail.exchange(*parts)
    for out, got in zip(outs, received, strict=True):
        wire.add_up(got.view(size, -1).unbind(), out)


class CustomCollectives(Collectives):
    """A user's own collectives, over those that they do not replace."""

    def __init__(
        self, default: Collectives, gather: AllGather | None, reduce: ReduceScatter | None
    ) -> None:
        self._default = default
        self.custom_all_gather = gather
        self.custom_reduce_scatter = reduce
        self.averages = default.averages

    def all_gather(self, outs: Tensors, ins: Tensors, group: Group) -> CollectiveWork:
        comm = self.custom_all_gather
        if comm is None:
            return self._default.all_gather(outs, ins, group)
        pairs = zip(outs, ins, strict=True)
        return CollectiveWork(comm(output_tensor=o, input_tensor=i, group=group) for o, i in pairs)

    def reduce_scatter(
        self, outs: Tensors, ins: Tensors, group: Group, *, average: bool, wire: Wire | None = None
    ) -> CollectiveWork:
        comm = self.custom_reduce_scatter
        if comm is None:
            return self._default.reduce_scatter(outs, ins, group, average=average, wire=wire)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        pairs = zip(outs, ins, strict=True)
        return CollectiveWork(
            comm(output_tensor=o, input_tensor=i, group=group, op=op) for o, i in pairs
        )

    def allocate_bucket(
        self, numel: int, dtype: torch.dtype, device: torch.device, group: Group | None = None
    ) -> torch.Tensor:
        return self._default.allocate_bucket(numel, dtype, device, group)


def collectives_for(group: Group | None, device: torch.device) -> Collectives:
    """The collectives that suit a group's backend for tensors on `device`."""
    simulated = simulation()
    if simulated is not None:
        collectives: Collectives = simulated.collectives
        return collectives
    if group is not None and is_gloo(group, device):
        pause_at_exit()
        return ShmCollectives() if device.type == "cpu" else GlooCollectives()
    return Collectives() if group is None or devices_of(group) else PythonCollectives()


# gloo ends a process that receives more than it expects. So groups of our own stand in for gloo
# groups that programs use as well: our collectives never meet those of the program, and order.py
# prevents that different ones of ours meet.
_channels: WeakKeyDictionary[Group, Group] = WeakKeyDictionary()


def _channel_of(group: Group) -> Group:
    """The group to use in the place of a gloo group; the first call is a collective."""
    if group not in _channels and is_registered(group) and group not in shm.exhausted:
        ranks = dist.get_process_group_ranks(group)
        made = _channels[group] = local_group(ranks, timeout_of(group), "gloo")
        weakref.finalize(lifetime_of(group), _destroy, weakref.ref(made)).atexit = False
    return _channels.get(group, group)


def _destroy(group: weakref.ref[Group]) -> None:
    found = group()
    if found is not None and is_registered(found):
        dist.destroy_process_group(found)


def all_gather_flat(segment: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The segments of all ranks of an axis, one after another; waits for them."""
    if axis.group is None or axis.is_single:
        return segment
    enter_call(axis.group, f"all-gather of {segment.nbytes} bytes")
    group = _channels.get(axis.group, axis.group)
    out = segment.new_empty(axis.size * segment.numel())
    # As bytes: not every backend knows every dtype.
    work = all_gather_single(group, _bytes(out), _bytes(segment))
    CollectiveWork([work], wait=wait_of(group, out.device)).wait()
    return out


def all_reduce(
    tensor: torch.Tensor, group: Group, *, average: bool, wire: Wire | None = None
) -> None:
    """Sum (or average) a tensor over the replicate axis, in place.

    With another `wire` than values in its dtype, messages of that are exchanged, summed in the
    tensor's dtype, and the sums gathered as messages, too: all replicas have equal values.
    """
    is_plain = wire is None or wire == Plain(tensor.dtype)
    simulated = simulation()
    if simulated is not None:
        sent = 2 * tensor.nbytes
        if wire is not None and not is_plain:
            wires = packed_wire(wire, group), wire.inside
            sent = sum(w.message_numel(tensor.numel()) * w.dtype.itemsize for w in wires)
        simulated.all_reduce(sent // 2, group)
        return
    if wire is not None and not is_plain:
        _all_reduce_messages(tensor.detach().view(-1), group, wire, average=average)
        return
    is_on_host = tensor.device.type == "cpu" and is_gloo(group, tensor.device)
    is_on_host = is_on_host and not average and shm.link_of(group) is not None
    if wire is not None:  # twice: what is summed, and sums; on a host, the first tells of itself
        _tell(wire, [tensor] if is_on_host else [tensor, tensor], group)
    if is_on_host:
        _all_reduce_on_host(tensor.detach().view(-1), group)
        return
    all_reduce_any(tensor, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM, group)


def _all_reduce_messages(tensor: torch.Tensor, group: Group, wire: Wire, *, average: bool) -> None:
    size, collectives = group.size(), collectives_for(group, tensor.device)
    multiple = size * wire.alignment_numel
    segments = tensor.new_zeros(-(-tensor.numel() // multiple) * multiple)
    segments[: tensor.numel()] = tensor
    segments = segments.view(size, -1)
    numel = segments.size(1)
    messages = _encoded(segments, packed_wire(wire, group))
    own = tensor.new_empty(1, numel)
    outs = [own.view(-1)]
    collectives.reduce_scatter(outs, [messages.view(-1)], group, average=average, wire=wire).wait()
    said = _encoded(own, wire.inside)
    messages = said.new_empty(size, said.numel())
    _tell(wire.inside, [messages], group)
    collectives.all_gather([messages.view(-1)], [said.view(-1)], group).wait()
    wire.inside.decode(messages, segments)
    tensor.copy_(segments.view(-1)[: tensor.numel()])


def _encoded(segments: torch.Tensor, wire: Wire) -> torch.Tensor:
    shape = len(segments), wire.message_numel(segments.size(1))
    messages = segments.new_empty(shape, dtype=wire.dtype)
    wire.encode(segments, messages)
    return messages


def all_reduce_any(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: Group) -> None:
    """Reduce a tensor in place by any operation; waits for it."""
    group = _channels.get(group, group)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    options.asyncOp = False
    work = issue(_all_reduce, group, [tensor], [], options)
    CollectiveWork([work], wait=wait_of(group, tensor.device)).wait()


def _all_reduce(group: Group, outs: list[torch.Tensor], ins: Tensors, options: Any) -> Any:
    return group.allreduce(outs, options)


def _all_reduce_on_host(flat: torch.Tensor, group: Group) -> None:
    collectives, size = ShmCollectives(), group.size()
    # If there are few bytes, every rank sums all of them: one exchange instead of two.
    segment_numel = flat.numel() // size if flat.nbytes > _SMALLEST_SCATTER_BYTES else 0
    head, tail = flat.tensor_split([size * segment_numel])
    if segment_numel:
        own = head.view(size, -1)[group.rank()]
        collectives.reduce_scatter([own], [head], group, average=False).wait()
        collectives.all_gather([head], [own], group).wait()
    if tail.numel():
        received = tail.new_empty(size * tail.numel())
        collectives.all_gather([received], [tail], group).wait()
        Plain(tail.dtype).add_up(received.view(size, -1).unbind(), tail)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _in_bytes(tensor: torch.Tensor, numel: Sequence[int]) -> list[int]:
    return [each * tensor.itemsize for each in numel]


# The end of a process that has used gloo

_PAUSE_S = 0.02


@functools.cache
def pause_at_exit() -> None:
    """Let gloo's threads release tensors before the interpreter ends.

    A gloo thread drops the tensors it sent after the collective has been waited for, and needs the
    interpreter's lock to do so. Python ends threads that ask for the lock too late, and C++ ends
    the process for that: "terminate called without an active exception".
    """
    atexit.register(time.sleep, _PAUSE_S)
