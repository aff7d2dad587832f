"""Values of state dicts: tensors, whole or sharded, numbers, and mappings of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from fullshard._torch import (
    DTensorSpec,
    RemoteDevice,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardedTensorShard,
    ShardMetadata,
    TensorProperties,
    devices_of,
    sharded_tensor_from_local,
    sharded_tensor_group,
)
from fullshard.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    StateDictConfig,
)
from fullshard.comm.collectives import all_gather_flat
from fullshard.comm.mesh import Axis
from fullshard.comm.placement import as_dtensor, full_tensor, own_box, place, with_dtype
from fullshard.layout.split import Box, RowSplit, row_chunks, slices
from fullshard.state.shards import FlatShard

StateValue: TypeAlias = torch.Tensor | ShardedTensor
"""A tensor of a state dict. (A `DTensor` is a tensor; a `ShardedTensor` only behaves like one.)"""


def is_sharded(value: Any) -> bool:
    """Whether each rank has a part of a value."""
    return isinstance(value, DTensor | ShardedTensor)


def shape_of(value: Any) -> torch.Size:
    # A ShardedTensor warns that it is deprecated when it is asked directly.
    return torch.Size(value.metadata().size if isinstance(value, ShardedTensor) else value.shape)


def on_meta(value: Any) -> torch.Tensor:
    """A tensor of the shape and dtype of a value that may be sharded, without memory."""
    is_old = isinstance(value, ShardedTensor)
    dtype = value.metadata().tensor_properties.dtype if is_old else value.dtype
    return torch.empty(shape_of(value), dtype=dtype, device="meta")


@dataclass(frozen=True, slots=True)
class StateForm:
    """The form of tensors in a state dict: whole or sharded, and where."""

    is_sharded: bool
    use_dtensor: bool = False
    to_cpu: bool = False

    @classmethod
    def of(cls, config: StateDictConfig | OptimStateDictConfig) -> StateForm:
        """The form that the settings of a wrapper ask for."""
        kinds = FullStateDictConfig | LocalStateDictConfig | FullOptimStateDictConfig
        is_sharded = not isinstance(config, kinds)
        return cls(is_sharded, getattr(config, "_use_dtensor", False), config.offload_to_cpu)

    def copy(self, full: torch.Tensor, shard: FlatShard) -> StateValue:
        """Copy a full tensor of a parameter into this form.

        Sharded tensors are split along the first dim as by `torch.chunk`: a `DTensor` on the
        wrapper's mesh, or a `ShardedTensor` over the ranks of its shard axis. A parameter that is
        itself a `DTensor` becomes one on the mesh of all axes, split along its own axes after that.
        """
        lane = shard.lane
        device = torch.device("cpu") if self.to_cpu else full.device
        if not self.is_sharded or not lane.is_sharded or full.dim() == 0:
            return _compact(full, device)
        axis = lane.mesh_info.shard
        if not self.use_dtensor:
            rows = RowSplit(tuple(full.shape), 0, axis.size).rows(axis.rank)
            local = _compact(full[rows.start : rows.stop], device)
            return sharded_tensor(local, row_chunks(full.shape, axis.size), full.shape, axis)
        spec = shard.param.placed or place("", full, None, lane.mesh_info).shard_spec
        placements = list(spec.placements)
        placements[lane.mesh_info.mesh.ndim - 1] = Shard(0)
        spec = with_dtype(DTensorSpec(spec.mesh, tuple(placements), spec.tensor_meta), full.dtype)
        local = full[slices(own_box(spec, full.shape), Box.whole(full.shape))]
        return as_dtensor(_compact(local, device), spec)


def _compact(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A contiguous copy with a storage of its own, of no more than its size."""
    return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def sharded_tensor(
    local: torch.Tensor, boxes: Sequence[Box], shape: torch.Size, axis: Axis
) -> ShardedTensor:
    """A ShardedTensor whose box r is held by rank r of an axis; further ranks hold nothing."""
    kind = local.device.type
    num_devices = torch.get_device_module(kind).device_count()

    def placed(rank: int, global_rank: int) -> RemoteDevice:
        # Only the type of another rank's device is ever used; this is its usual number.
        index = local.device.index if rank == axis.rank else global_rank % num_devices
        return RemoteDevice(f"rank:{global_rank}/{kind if kind == 'cpu' else f'{kind}:{index}'}")

    metadata = [
        ShardMetadata(list(box.offsets), list(box.sizes), placed(rank, global_rank))
        for rank, (box, global_rank) in enumerate(zip(boxes, axis.global_ranks(), strict=False))
    ]
    own = metadata[axis.rank : axis.rank + 1]
    properties = TensorProperties.create_from_tensor(local)
    return sharded_tensor_from_local(
        [ShardedTensorShard(local, each) for each in own],
        ShardedTensorMetadata(metadata, shape, properties),
        axis.group,
    )


def copied_sharded_tensor(
    value: ShardedTensor, to_host: Callable[[torch.Tensor], torch.Tensor]
) -> ShardedTensor:
    """A copy of which this rank's part is in host memory."""
    metadata = value.metadata()
    shards_metadata = []
    for each in metadata.shards_metadata:
        assert each.placement is not None  # a ShardedTensor places all its shards
        place = RemoteDevice(f"rank:{each.placement.rank()}/cpu")
        shards_metadata.append(ShardMetadata(each.shard_offsets, each.shard_sizes, place))
    own = {tuple(each.shard_offsets): each for each in shards_metadata}
    return sharded_tensor_from_local(
        [
            ShardedTensorShard(to_host(shard.tensor), own[tuple(shard.metadata.shard_offsets)])
            for shard in value.local_shards()
        ],
        ShardedTensorMetadata(shards_metadata, metadata.size, metadata.tensor_properties),
        sharded_tensor_group(value),
    )


def full_tensor_of(value: Any) -> torch.Tensor:
    """The full tensor of a value of a state dict: a collective if it is sharded."""
    if isinstance(value, DTensor):
        return full_tensor(value)
    if not isinstance(value, ShardedTensor):
        return torch.detach(value)  # a lazy value has no methods
    group, metadata = sharded_tensor_group(value), value.metadata()
    types = [device.type for device in devices_of(group)]
    boxes: list[list[Box]] = [[] for _ in range(group.size())]  # of each rank
    for shard in metadata.shards_metadata:
        assert shard.placement is not None  # a ShardedTensor places all its shards
        rank = dist.get_group_rank(group, shard.placement.rank() or 0)
        boxes[rank].append(Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes)))
        kind = shard.placement.device().type
    # Gathered where the shards are, if the group works there.
    device = kind if kind in types or not types else types[0]
    dtype = metadata.tensor_properties.dtype
    segment_numel = max(sum(box.numel for box in own) for own in boxes)
    sent = torch.zeros(segment_numel, dtype=dtype, device=device)
    begin = 0
    for local in (shard.tensor.detach() for shard in value.local_shards()):
        sent[begin : begin + local.numel()].copy_(local.reshape(-1))
        begin += local.numel()
    received = all_gather_flat(sent, Axis(group)) if segment_numel else sent
    full = torch.empty(metadata.size, dtype=dtype, device=device)
    for rank, own in enumerate(boxes):
        begin = rank * segment_numel
        for box in own:
            values = received[begin : begin + box.numel].view(box.sizes)
            full[slices(box, Box.whole(full.shape))].copy_(values)
            begin += box.numel
    return full


# State of optimizers


def copied(value: Any, *, to_cpu: bool = False) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.detach().cpu() if to_cpu and not value.is_cpu else value.detach().clone()


def is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_sharded(value)


def has_dims(value: Any) -> bool:
    return is_array(value) and len(shape_of(value)) > 0


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested state with `change` applied to each value, in the same order on all ranks."""
    if isinstance(value, Mapping):
        changed = {key: mapped(value[key], change) for key in sorted(value, key=str)}
        return {key: changed[key] for key in value}
    return change(value)


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of nested state, each with the keys that lead to it."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in value.items():
        yield from leaves(inner, (*path, str(key)))


def outline(value: Any) -> Any:
    """A value without its elements; numbers stay."""
    if not is_array(value):
        return value
    return on_meta(value) if has_dims(value) or is_sharded(value) else value.detach().cpu()
