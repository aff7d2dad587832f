"""The two collectives of sharding, per backend.

Both take lists: all messages of a lane go out in one call. What comes back is a `CollectiveWork`: the
outputs hold their values once it has been waited for (for a backend with streams: on the stream
that waits).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceOp,
    ReduceScatterOptions,
)

from fullshard.api import AllGather, ReduceScatter
from fullshard.comm.exiting import pause_at_exit
from fullshard.comm.handshake import link_of
from fullshard.comm.mesh import Axis
from fullshard.comm.shared_memory import ShmCollectives, all_reduce_through
from fullshard.comm.transfer import Collectives, CollectiveWork

__all__ = [
    "BackendCollectives",
    "CollectiveWork",
    "Collectives",
    "CustomCollectives",
    "GlooCollectives",
    "all_gather_flat",
    "all_reduce",
    "collectives_for",
]


class BackendCollectives(Collectives):
    """The collectives that the backend brings: NCCL, and everything shaped like it."""

    averages = True

    def all_gather(
        self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> CollectiveWork:
        options = AllgatherOptions()
        # On the stream that calls, so that what is enqueued next there follows without an event.
        options.asyncOp = False
        if len(outs) == 1:
            return CollectiveWork([group._allgather_base(outs[0], ins[0], options)])
        return CollectiveWork(
            [group.allgather_into_tensor_coalesced(list(outs), list(ins), options)]
        )

    def reduce_scatter(
        self,
        outs: Sequence[torch.Tensor],
        ins: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        *,
        average: bool,
    ) -> CollectiveWork:
        if outs[0].dtype != ins[0].dtype:
            for out, inp in zip(outs, ins, strict=True):
                _exchange_and_add_up(out, inp, group, average=average)
            return CollectiveWork()
        options = ReduceScatterOptions()
        options.reduceOp = ReduceOp(ReduceOp.AVG if average else ReduceOp.SUM)
        options.asyncOp = False
        if len(outs) == 1:
            return CollectiveWork([group._reduce_scatter_base(outs[0], ins[0], options)])
        return CollectiveWork(
            [group.reduce_scatter_tensor_coalesced(list(outs), list(ins), options)]
        )


def _exchange_and_add_up(
    out: torch.Tensor, inp: torch.Tensor, group: dist.ProcessGroup, *, average: bool
) -> None:
    """Reduce in the wider dtype of the output, on the stream that calls (rule 6).

    What is received is allocated and freed on that stream, so the next message may have its memory.
    """
    options = AllToAllOptions()
    options.asyncOp = False
    received = torch.empty_like(inp)
    # As bytes: not every backend knows every dtype.
    work = group.alltoall_base(received.view(torch.uint8), inp.view(torch.uint8), [], [], options)
    CollectiveWork([work]).wait()
    segments = received.view(group.size(), -1)
    torch.sum(segments, 0, dtype=out.dtype, out=out)
    if average:
        out.div_(group.size())


class GlooCollectives(Collectives):
    """On gloo: bytes are moved by gloo, sums are done here (rule 6)."""

    def all_gather(
        self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> CollectiveWork:
        return CollectiveWork(
            [
                group._allgather_base(out.view(torch.uint8), inp.view(torch.uint8))
                for out, inp in zip(outs, ins, strict=True)
            ]
        )

    def reduce_scatter(
        self,
        outs: Sequence[torch.Tensor],
        ins: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        *,
        average: bool,
    ) -> CollectiveWork:
        received = [torch.empty_like(inp) for inp in ins]
        works = [
            group.alltoall_base(got.view(torch.uint8), inp.view(torch.uint8), [], [])
            for got, inp in zip(received, ins, strict=True)
        ]
        return _Summing(works, received, outs, group.size(), keep=ins)


class _Summing(CollectiveWork):
    """An exchange of segments whose sum is still to be done."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        received: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        num_ranks: int,
        keep: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(works)
        self._sums = list(zip(outs, received, strict=True))
        self._num_ranks = num_ranks
        self._keep = list(keep)

    def wait(self) -> None:
        super().wait()
        self._keep.clear()
        for out, received in self._sums:
            segments = received.view(self._num_ranks, -1)
            if out.dtype in (torch.bfloat16, torch.float16):
                out.copy_(torch.sum(segments, 0, dtype=torch.float32))
            else:
                torch.sum(segments, 0, dtype=out.dtype, out=out)
        self._sums.clear()


class CustomCollectives(Collectives):
    """Collectives that the user brought, over those that they do not replace."""

    def __init__(
        self, default: Collectives, gather: AllGather | None, reduce: ReduceScatter | None
    ) -> None:
        self._default = default
        self.custom_all_gather = gather
        self.custom_reduce_scatter = reduce
        self.averages = default.averages

    @property
    def replaced(self) -> list[AllGather | ReduceScatter]:
        return [
            comm
            for comm in (self.custom_all_gather, self.custom_reduce_scatter)
            if comm is not None
        ]

    def all_gather(
        self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> CollectiveWork:
        if self.custom_all_gather is None:
            return self._default.all_gather(outs, ins, group)
        pairs = zip(outs, ins, strict=True)
        return CollectiveWork(
            [self.custom_all_gather(output_tensor=o, input_tensor=i, group=group) for o, i in pairs]
        )

    def reduce_scatter(
        self,
        outs: Sequence[torch.Tensor],
        ins: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        *,
        average: bool,
    ) -> CollectiveWork:
        if self.custom_reduce_scatter is None:
            return self._default.reduce_scatter(outs, ins, group, average=average)
        op = ReduceOp.AVG if average else ReduceOp.SUM
        pairs = zip(outs, ins, strict=True)
        return CollectiveWork(
            [
                self.custom_reduce_scatter(output_tensor=o, input_tensor=i, group=group, op=op)
                for o, i in pairs
            ]
        )

    def allocate_bucket(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.custom_reduce_scatter is None:
            return self._default.allocate_bucket(numel, dtype, device)
        return super().allocate_bucket(numel, dtype, device)


def collectives_for(group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
    """The collectives that suit a group's backend for tensors on `device`."""
    if group is None or not _is_gloo(group, device):
        return BackendCollectives()
    pause_at_exit()
    return ShmCollectives(group, otherwise=GlooCollectives())


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on a CPU go through gloo."""
    if device.type != "cpu":
        return False
    name: str = group._get_backend(device).name()
    return name == "gloo"


def all_gather_flat(segment: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The segments of all ranks of an axis, one after another; waits for them."""
    if axis.group is None or axis.is_single:
        return segment
    out = segment.new_empty(axis.size * segment.numel())
    # As bytes: not every backend knows every dtype.
    axis.group._allgather_base(out.view(torch.uint8), segment.view(torch.uint8)).wait()
    return out


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, *, average: bool) -> None:
    """Sum (or average) a tensor over the replicate axis, in place."""
    if not average and _is_gloo(group, tensor.device):
        link = link_of(group)
        if link is not None:
            all_reduce_through(link, tensor)
            return
    options = AllreduceOptions()
    options.reduceOp = ReduceOp(ReduceOp.AVG if average else ReduceOp.SUM)
    options.asyncOp = False
    CollectiveWork([group.allreduce([tensor], options)]).wait()
