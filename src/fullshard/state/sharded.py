"""Whole tensors to the sharded tensors of state dicts, and back.

A sharded state dict splits every parameter along its first dim, like `torch.chunk` does: as a
`DTensor` on the wrapper's mesh, or as a `ShardedTensor` over the ranks of its shard axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardDim

from fullshard.comm.mesh import Axis
from fullshard.errors import CheckpointError
from fullshard.state.lanes import StateLane

State = torch.Tensor | ShardedTensor
"""A value of a state dict. (A `DTensor` is a tensor; a `ShardedTensor` only behaves like one.)"""


def as_sharded(full: torch.Tensor, lane: StateLane, *, use_dtensor: bool, to_cpu: bool) -> State:
    """This rank's rows of a full tensor, in memory of their own. A 0-dim tensor stays whole."""
    if full.dim() == 0:
        return own_copy(full, to_cpu=to_cpu)
    axis = lane.mesh_info.shard
    rows = _chunk_rows(full.size(0), axis.size)
    mine = rows[axis.rank] if axis.rank < len(rows) else range(0)
    local = full[mine.start : mine.stop]
    if use_dtensor:
        mesh = lane.mesh_info.mesh
        placements: list[Placement] = [Replicate()] * (mesh.ndim - 1) + [ShardDim(0)]
        made = DTensor.from_local(
            own_copy(local, to_cpu=False),
            mesh,
            placements,
            run_check=False,
            shape=full.shape,
            stride=full.contiguous().stride(),
        )
        # Afterwards: from_local puts what it is given on the mesh's device.
        return made.cpu() if to_cpu else made
    local = own_copy(local, to_cpu=to_cpu)
    shapes = [(len(r), *full.shape[1:]) for r in rows]
    return sharded_tensor(local, shapes, [r.start for r in rows], full.shape, axis)


def sharded_tensor(
    local: torch.Tensor,
    shapes: Sequence[Sequence[int]],
    starts: Sequence[int],
    size: torch.Size,
    axis: Axis,
) -> ShardedTensor:
    """A ShardedTensor of which rank r of an axis has the shape and start (in dim 0) at r.

    Ranks beyond the end of the lists have nothing. No communication.
    """
    ranks = axis.global_ranks()
    metadata = [
        ShardMetadata(
            shard_offsets=[start, *([0] * (len(shape) - 1))],
            shard_sizes=list(shape),
            placement=_placement(ranks[r], local.device, is_local=r == axis.rank),
        )
        for r, (shape, start) in enumerate(zip(shapes, starts, strict=True))
    ]
    shards = [Shard(local, metadata[axis.rank])] if axis.rank < len(metadata) else []
    properties = TensorProperties(
        dtype=local.dtype,
        layout=local.layout,
        requires_grad=False,
        memory_format=torch.contiguous_format,
        pin_memory=local.is_pinned(),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        ShardedTensorMetadata(metadata, size, properties),
        process_group=_group_of(axis),
    )


def as_full(value: State, lane: StateLane) -> torch.Tensor:
    """The full tensor, on the lane's device. A collective for what is sharded."""
    return made_whole(value).to(lane.device)


def made_whole(value: State) -> torch.Tensor:
    """The full tensor. A collective for what is sharded."""
    if isinstance(value, ShardedTensor):
        return _gathered(value)
    if isinstance(value, DTensor):
        # State that was offloaded has its local tensor on the host; collectives of the mesh do not.
        on_mesh = value.detach().to(value.device_mesh.device_type)
        assert isinstance(on_mesh, DTensor)
        return on_mesh.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.detach()
    raise CheckpointError(
        f"state dict: a tensor, DTensor or ShardedTensor expected, found {type(value)}; "
        "pass a state dict of a model."
    )


def own_copy(tensor: torch.Tensor, *, to_cpu: bool) -> torch.Tensor:
    """A contiguous copy with a storage of its own, of no more than its size."""
    device = torch.device("cpu") if to_cpu else tensor.device
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return copied.copy_(tensor.detach())


def _chunk_rows(num_rows: int, num_ranks: int) -> list[range]:
    """The rows of each rank that has any, as `torch.chunk` cuts them; one empty chunk of none."""
    per_rank = max(-(-num_rows // num_ranks), 1)
    starts = range(0, max(num_rows, 1), per_rank)
    return [range(start, min(start + per_rank, num_rows)) for start in starts]


def _placement(rank: int, device: torch.device, *, is_local: bool) -> _remote_device:
    if device.type == "cpu":
        return _remote_device(f"rank:{rank}/cpu")
    # Of the other ranks' devices nobody asks for more than the type; this is the usual number.
    num_devices = torch.get_device_module(device.type).device_count()
    index = device.index if is_local else rank % num_devices
    return _remote_device(f"rank:{rank}/{device.type}:{index}")


def _rank_of(shard: ShardMetadata) -> int:
    rank = None if shard.placement is None else shard.placement.rank()
    assert rank is not None  # a ShardedTensor places all its shards
    return rank


def _group_of(axis: Axis) -> dist.ProcessGroup:
    if axis.group is not None:
        return axis.group
    raise CheckpointError(
        "sharded state dict: a shard axis of more than one rank expected, found one rank and no "
        "process group; use FULL_STATE_DICT."
    )


def _working_device(group: dist.ProcessGroup, shard: ShardMetadata) -> torch.device:
    """A device that a group can gather on: where the shards are, if it can there."""
    types = [device.type for device in group._device_types]
    found = "cpu" if shard.placement is None else shard.placement.device().type
    if found not in types:
        found = next((each for each in types if each != "cpu"), "cpu")
    if found == "cpu":
        return torch.device("cpu")
    return torch.device(found, torch.get_device_module(found).current_device())


def _gathered(value: ShardedTensor) -> torch.Tensor:
    """All shards of a ShardedTensor, on the device that its process group works on."""
    group = value._process_group
    metadata = value.metadata()
    device = _working_device(group, metadata.shards_metadata[0])
    places, num_elements = [], [0] * group.size()
    for shard in metadata.shards_metadata:
        rank = dist.get_group_rank(group, _rank_of(shard))
        numel = torch.Size(shard.shard_sizes).numel()
        places.append((shard, rank, num_elements[rank], numel))
        num_elements[rank] += numel
    longest = max(num_elements)
    dtype = metadata.tensor_properties.dtype
    sent = torch.zeros(longest, dtype=dtype, device=device)
    if value.local_shards():
        mine = torch.cat([shard.tensor.detach().reshape(-1) for shard in value.local_shards()])
        sent[: mine.numel()].copy_(mine)
    received = torch.empty(longest * group.size(), dtype=dtype, device=device)
    # As bytes: gloo does not know every dtype.
    if longest:
        group._allgather_base(received.view(torch.uint8), sent.view(torch.uint8)).wait()
    full = torch.empty(metadata.size, dtype=dtype, device=device)
    for shard, rank, offset, numel in places:
        start = rank * longest + offset
        region = tuple(
            slice(begin, begin + length)
            for begin, length in zip(shard.shard_offsets, shard.shard_sizes, strict=True)
        )
        full[region].copy_(received[start : start + numel].view(shard.shard_sizes))
    return full
