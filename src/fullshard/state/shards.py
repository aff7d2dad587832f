"""Which part of which tensor of a model this rank holds, for state dicts and checkpoints alike.

A model may be sharded through either API, through both, in part, or not at all. Whoever saves or
loads it needs the same of every parameter and buffer: its names and shape in the model as it was
written, and which boxes of it are in this rank's memory. That is a `TensorShard`; `tensor_shards`
lists those of a model without communication.

State dicts of wrapped models are made one `FlatLane` at a time: the parameters of a wrapper that
have one dtype and are trained alike, of which each rank holds a contiguous slice.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard._torch import (
    RemoteDevice,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardedTensorShard,
    ShardMetadata,
    TensorProperties,
    devices_of,
    sharded_tensor_from_local,
    sharded_tensor_group,
    to_local,
)
from fullshard.comm.collectives import all_gather_flat
from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.comm.placement import full_tensor
from fullshard.errors import CheckpointError
from fullshard.layout.split import Box, boxes_of_range, row_chunks, slices
from fullshard.runtime.hooks import ModuleHooks, hooks_of, hooks_of_unit
from fullshard.runtime.names import clean_name
from fullshard.unit.flat_param import FlatParameter, FlatSlice
from fullshard.unit.param import ParamLocation
from fullshard.unit.unit import Unit


@dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """A box of a tensor, and this rank's memory of it in the shape of the box."""

    box: Box
    values: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard(ABC):
    """One parameter or persistent buffer of a model. `names` are all its names, canonical first.

    `tensor` is what the module and an optimizer hold. For a wrapper with `use_orig_params=False`
    it is the flat parameter, which several shards have in common.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    is_buffer: bool

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def is_trainable(self) -> bool:
        return self.tensor.requires_grad

    @property
    @abstractmethod
    def is_writer(self) -> bool:
        """Whether this rank writes its parts, which other ranks may hold as well."""

    @abstractmethod
    def local_parts(self, tensor: torch.Tensor) -> list[LocalPart]:
        """This rank's parts of anything arranged like `self.tensor`: values, gradients, moments."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeTensor(TensorShard):
    """A tensor that every rank holds whole. Buffers may differ: rank 0 writes its own."""

    @property
    def is_writer(self) -> bool:
        if not dist.is_initialized():
            return True
        writer = 0 if self.is_buffer else _writer_of(self.name, dist.get_world_size())
        return dist.get_rank() == writer

    def local_parts(self, tensor: torch.Tensor) -> list[LocalPart]:
        return [LocalPart(Box.whole(tensor.shape), tensor.detach())]


@dataclass(frozen=True, slots=True, eq=False)
class DTensorShard(TensorShard):
    """A DTensor, of `fully_shard` or of any other parallelism."""

    @property
    def is_writer(self) -> bool:
        assert isinstance(self.tensor, DTensor)
        mesh, placements = self.tensor.device_mesh, self.tensor.placements
        coordinate = mesh.get_coordinate()
        return coordinate is not None and all(
            coordinate[axis] == _writer_of(self.name, mesh.size(axis))
            for axis, placement in enumerate(placements)
            if isinstance(placement, Replicate)
        )

    def local_parts(self, tensor: torch.Tensor) -> list[LocalPart]:
        assert isinstance(tensor, DTensor)
        (chunk,) = tensor.__create_chunk_list__()
        local = to_local(tensor).detach()
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if tuple(local.shape) != box.sizes:
            raise CheckpointError(
                f"{self.name}: its part on this rank must have the shape {box.sizes} that its "
                f"placements {tensor.placements} say, found {tuple(local.shape)}; make the DTensor "
                "with distribute_tensor."
            )
        return [LocalPart(box, local)] if local.numel() else []


@dataclass(frozen=True, slots=True, eq=False)
class FlatShard(TensorShard):
    """A parameter of a wrapper, of whose flattened form this rank holds a range of elements.

    Attributes:
        lane: The lane that the parameter belongs to.
        locations: The modules that use the parameter.
        index: The position among the parameters of the wrapper.
        full_shape: The shape of the whole parameter.
        start: Where the parameter begins in the gathered lane.
        elements: The elements of the flattened parameter that this rank holds.
        offset: Where those begin in the shard buffer of the lane.
    """

    lane: FlatLane
    locations: Sequence[ParamLocation]
    index: int
    full_shape: torch.Size
    start: int
    elements: range
    offset: int

    @property
    def shape(self) -> torch.Size:
        return self.full_shape

    @property
    def param(self) -> nn.Parameter:
        assert isinstance(self.tensor, nn.Parameter)
        return self.tensor

    @property
    def is_writer(self) -> bool:
        replicate = self.lane.mesh_info.replicate
        return replicate.rank == _writer_of(self.name, replicate.size)

    def local_parts(self, tensor: torch.Tensor) -> list[LocalPart]:
        flat = tensor.detach().reshape(-1)
        if self.lane.flat_param is not None:
            flat = self.slice_of(flat)
        found, begin = [], 0
        for box in boxes_of_range(self.shape, self.elements):
            found.append(LocalPart(box, flat[begin : begin + box.numel].view(box.sizes)))
            begin += box.numel
        return found

    def view_of(self, full: torch.Tensor) -> torch.Tensor:
        """The parameter in its shape, as a view of the gathered lane."""
        return full[self.start : self.start + self.shape.numel()].view(self.shape)

    def slice_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """This rank's elements, as a view of a tensor arranged like the shard buffer."""
        return buffer[self.offset : self.offset + len(self.elements)]

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a tensor that has the parameter's shape."""
        return full.reshape(-1)[self.elements.start : self.elements.stop]


class FlatLane:
    """One lane of one wrapper: parameters of one dtype that are trained alike."""

    def __init__(self, wrapper: nn.Module, unit: Unit, index: int, names: _Names) -> None:
        self.wrapper = wrapper
        self.index = index
        self._unit = unit
        (self._bucket,) = unit.layout.lanes[index].buckets
        self.shards = tuple(self._shards(names))

    def _shards(self, names: _Names) -> Iterator[FlatShard]:
        rank = self.mesh_info.shard.rank
        for slot in self._bucket.slots:
            param = self._unit.params[slot.param_index]
            assert isinstance(param, FlatSlice)
            yield FlatShard(
                names=names.of(param.locations),
                tensor=param.param,
                is_buffer=False,
                lane=self,
                locations=param.locations,
                index=slot.param_index,
                full_shape=param.shape,
                start=slot.offset,
                elements=param.split.elements(rank),
                offset=self._bucket.shard_offset(slot, rank),
            )

    @property
    def mesh_info(self) -> MeshInfo:
        return self._unit.mesh_info

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold different parts of the parameters."""
        return self.mesh_info.shard.size > 1

    @property
    def device(self) -> torch.device:
        """The device that collectives run on; with CPU offload the shard buffer is elsewhere."""
        return self._unit.comm_ctx.device.torch_device

    @property
    def flat_param(self) -> FlatParameter | None:
        """The one parameter of the lane, with `use_orig_params=False`."""
        flat = self._unit.flat
        return flat.holders[self.index].param if flat is not None and flat.holders else None

    @property
    def numel(self) -> int:
        """Elements of all parameters together."""
        return max((shard.start + shard.shape.numel() for shard in self.shards), default=0)

    @property
    def shard_numel(self) -> int:
        """Elements of the shard buffer, which is padded to the same size on every rank."""
        return self._bucket.segment_numel

    def shard_buffer(self) -> torch.Tensor:
        """This rank's values: the memory that is trained."""
        return self._unit.shard_buffers.lanes[self.index]

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor arranged like the shard buffer."""
        return torch.zeros(self.shard_numel, dtype=dtype, device=self.device)

    def gather(self, buffer: torch.Tensor) -> torch.Tensor:
        """The whole lane, of tensors arranged like the shard buffer; a collective."""
        return all_gather_flat(buffer.to(self.device).contiguous(), self.mesh_info.shard)


# The shards of a model


def tensor_shards(model: nn.Module) -> list[TensorShard]:
    """The parameters and persistent buffers of a model, in the order of its modules.

    Gathered parameters are resharded first.
    """
    all_hooks = (hooks_of(module) for module in model.modules())
    for hooks in dict.fromkeys(hooks for hooks in all_hooks if hooks is not None):
        hooks.require_not_computing("save or load")
        for unit in hooks.units:
            unit.reshard_now()
            unit.refresh(plan_training=hooks.scheduler is None)
    flat = [shard for lane in lanes_of(model) for shard in lane.shards]
    order: dict[str, int] = {}
    for name in _names_in_order(model, flat):
        order.setdefault(name, len(order))
    found = [*flat, *other_shards(model, flat)]
    return sorted(found, key=lambda shard: order.get(shard.name, len(order)))


def wrappers_of(model: nn.Module) -> list[nn.Module]:
    """The wrappers at or below a module, outer ones first."""
    return [module for module in model.modules() if _wrapper_hooks(module) is not None]


def wrapper_mesh(wrapper: nn.Module) -> MeshInfo:
    """Where a wrapper's parameters are sharded and replicated."""
    hooks = _wrapper_hooks(wrapper)
    assert hooks is not None  # it is a wrapper
    return hooks.units[0].mesh_info


def lanes_of(model: nn.Module, *, recurse: bool = True) -> list[FlatLane]:
    """The lanes of all wrappers at or below a module; without `recurse`, of the module itself."""
    names = _Names(model)
    lanes: list[FlatLane] = []
    for wrapper in wrappers_of(model) if recurse else [model]:
        hooks = _wrapper_hooks(wrapper)
        if hooks is not None:
            hooks.require_not_computing("state_dict")
            lanes += _lanes_of_unit(wrapper, hooks.units[0], names)
    return lanes


def borrowed_lanes_of(wrapper: nn.Module) -> list[FlatLane]:
    """Lanes of wrappers elsewhere that own parameters which modules in this wrapper use.

    They are limited to those tied parameters, which have their names in this wrapper.
    """
    hooks = _wrapper_hooks(wrapper)
    if hooks is None or not hooks.lenders:
        return []
    names = _Names(wrapper)
    inside = set(wrappers_of(wrapper))
    found: list[FlatLane] = []
    for unit in hooks.lenders:
        owner = hooks_of_unit(unit)
        if owner is not None and owner.modules[0] not in inside:
            found += _lanes_of_unit(owner.modules[0], unit, names)
    for lane in found:
        lane.shards = tuple(shard for shard in lane.shards if shard.names)
    return [lane for lane in found if lane.shards]


def _lanes_of_unit(wrapper: nn.Module, unit: Unit, names: _Names) -> list[FlatLane]:
    if not unit.is_summoned:  # else its parameters have their full shapes, and stay so
        unit.reshard_now()
        unit.refresh()
    return [FlatLane(wrapper, unit, index, names) for index in range(len(unit.layout.lanes))]


def _wrapper_hooks(module: nn.Module) -> ModuleHooks | None:
    hooks = hooks_of(module)
    return hooks if hooks is not None and hooks.units[0].flat is not None else None


class _Names:
    """What the parameters of a model are called in it."""

    def __init__(self, model: nn.Module) -> None:
        self._paths: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(module, []).append(path)
        self._order = {module: index for index, module in enumerate(self._paths)}

    def of(self, locations: Iterable[ParamLocation]) -> tuple[str, ...]:
        """All names of a parameter, in the order of modules; none outside of the model."""
        inside = [location for location in locations if location.module in self._order]
        inside.sort(key=lambda location: self._order[location.module])
        names = [
            clean_name(f"{path}.{location.name}" if path else location.name)
            for location in inside
            for path in self._paths[location.module]
        ]
        return tuple(dict.fromkeys(names))


def other_shards(model: nn.Module, flat: Iterable[FlatShard]) -> Iterator[TensorShard]:
    """The parameters and persistent buffers besides those that wrappers shard."""
    managed = {shard.tensor for shard in flat}
    names: dict[torch.Tensor, list[str]] = {}
    is_buffer: dict[torch.Tensor, bool] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        persistent = {
            name: buffer
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }
        for name, tensor in (*module._parameters.items(), *persistent.items()):
            if tensor is not None and tensor not in managed:
                known = names.setdefault(tensor, [])
                known.append(clean_name(f"{path}.{name}" if path else name))
                is_buffer[tensor] = name in persistent
    for tensor, found in names.items():
        kind = DTensorShard if isinstance(tensor, DTensor) else WholeTensor
        yield kind(tuple(dict.fromkeys(found)), tensor, is_buffer[tensor])


def _names_in_order(model: nn.Module, flat: Iterable[FlatShard]) -> Iterator[str]:
    """Names in the order of modules; parameters of wrappers come first in their modules."""
    unregistered: dict[nn.Module, list[str]] = {}
    for shard in flat:
        for location in shard.locations:
            unregistered.setdefault(location.module, []).append(location.name)
    for path, module in model.named_modules(remove_duplicate=False):
        before = f"{path}." if path else ""
        for name in (*unregistered.get(module, ()), *module._parameters, *module._buffers):
            yield clean_name(before + name)


def _writer_of(name: str, num_ranks: int) -> int:
    """Which of the ranks that hold the same part writes it: the work is spread over them."""
    return zlib.crc32(name.encode()) % num_ranks


# Sharded tensors in state dicts

StateValue: TypeAlias = torch.Tensor | ShardedTensor
"""A tensor of a state dict. (A `DTensor` is a tensor; a `ShardedTensor` only behaves like one.)"""


def is_sharded(value: Any) -> bool:
    """Whether each rank has a part of a value."""
    return isinstance(value, DTensor | ShardedTensor)


def shape_of(value: Any) -> torch.Size:
    # A ShardedTensor warns that it is deprecated when it is asked directly.
    return torch.Size(value.metadata().size if isinstance(value, ShardedTensor) else value.shape)


def dtype_of(value: Any) -> torch.dtype:
    if isinstance(value, ShardedTensor):
        return value.metadata().tensor_properties.dtype
    dtype: torch.dtype = value.dtype
    return dtype


def own_copy(tensor: torch.Tensor, *, to_cpu: bool) -> torch.Tensor:
    """A contiguous copy with a storage of its own, of no more than its size."""
    device = torch.device("cpu") if to_cpu else tensor.device
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return copied.copy_(tensor.detach())


@dataclass(frozen=True, slots=True)
class StateForm:
    """The form of tensors in a state dict: whole or sharded, and where."""

    is_sharded: bool
    use_dtensor: bool = False
    to_cpu: bool = False

    def copy(self, full: torch.Tensor, lane: FlatLane) -> StateValue:
        """A full tensor of a lane in this form, in memory of its own.

        Sharded tensors are split along the first dim like `torch.chunk` does it: a `DTensor` on
        the wrapper's mesh, or a `ShardedTensor` over the ranks of its shard axis.
        """
        if not self.is_sharded or not lane.is_sharded or full.dim() == 0:
            return own_copy(full, to_cpu=self.to_cpu)
        axis = lane.mesh_info.shard
        boxes = row_chunks(full.shape, axis.size)
        empty = Box((full.size(0),), (0,))
        own = boxes[axis.rank] if axis.rank < len(boxes) else empty
        local = full[own.offsets[0] : own.offsets[0] + own.sizes[0]]
        if not self.use_dtensor:
            return sharded_tensor(own_copy(local, to_cpu=self.to_cpu), boxes, full.shape, axis)
        mesh = lane.mesh_info.mesh
        placements: list[Placement] = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        made = DTensor.from_local(
            own_copy(local, to_cpu=False),
            mesh,
            placements,
            run_check=False,
            shape=full.shape,
            stride=full.contiguous().stride(),
        )
        # Afterwards: from_local moves its argument to the mesh's device.
        return made.cpu() if self.to_cpu else made


def sharded_tensor(
    local: torch.Tensor, boxes: Sequence[Box], shape: torch.Size, axis: Axis
) -> ShardedTensor:
    """A ShardedTensor whose box r is held by rank r of an axis; further ranks hold nothing.

    No communication.
    """
    if axis.group is None:
        raise CheckpointError(
            "sharded state dict: a shard axis of more than one rank expected, found one rank and "
            "no process group; use FULL_STATE_DICT."
        )
    ranks = axis.global_ranks()
    metadata = [
        ShardMetadata(
            shard_offsets=list(box.offsets),
            shard_sizes=list(box.sizes),
            placement=_remote_device(ranks[rank], local.device, is_local=rank == axis.rank),
        )
        for rank, box in enumerate(boxes)
    ]
    own = metadata[axis.rank : axis.rank + 1]
    properties = TensorProperties(
        dtype=local.dtype,
        layout=local.layout,
        requires_grad=False,
        memory_format=torch.contiguous_format,
        pin_memory=local.is_pinned(),
    )
    return sharded_tensor_from_local(
        [ShardedTensorShard(local, each) for each in own],
        ShardedTensorMetadata(metadata, shape, properties),
        process_group=axis.group,
    )


def _remote_device(rank: int, device: torch.device, *, is_local: bool) -> RemoteDevice:
    if device.type == "cpu":
        return RemoteDevice(f"rank:{rank}/cpu")
    # Only the type of another rank's device is ever used; this is its usual number.
    num_devices = torch.get_device_module(device.type).device_count()
    index = device.index if is_local else rank % num_devices
    return RemoteDevice(f"rank:{rank}/{device.type}:{index}")


def full_tensor_of(value: Any) -> torch.Tensor:
    """The full tensor of a value of a state dict: a collective if it is sharded."""
    if isinstance(value, ShardedTensor):
        return _gathered(value)
    if isinstance(value, DTensor):
        return full_tensor(value)
    if isinstance(value, torch.Tensor):
        return value.detach()
    raise CheckpointError(
        f"state dict: a tensor, DTensor or ShardedTensor expected, found {type(value)}; "
        "pass a state dict of a model."
    )


def _gathered(value: ShardedTensor) -> torch.Tensor:
    """All shards of a ShardedTensor, on a device that its process group works on."""
    group, metadata = sharded_tensor_group(value), value.metadata()
    device = _gather_device(group, metadata.shards_metadata[0])
    boxes = [Box(tuple(s.shard_offsets), tuple(s.shard_sizes)) for s in metadata.shards_metadata]
    places, rank_numel = [], [0] * group.size()
    for box, shard in zip(boxes, metadata.shards_metadata, strict=True):
        assert shard.placement is not None  # a ShardedTensor places all its shards
        global_rank = shard.placement.rank()
        assert global_rank is not None
        rank = dist.get_group_rank(group, global_rank)
        places.append((box, rank, rank_numel[rank]))
        rank_numel[rank] += box.numel
    segment_numel = max(rank_numel)
    dtype = metadata.tensor_properties.dtype
    sent = torch.zeros(segment_numel, dtype=dtype, device=device)
    local = [shard.tensor.detach().reshape(-1) for shard in value.local_shards()]
    if local:
        sent[: sum(each.numel() for each in local)].copy_(torch.cat(local))
    received = all_gather_flat(sent, Axis(group)) if segment_numel else sent
    full = torch.empty(metadata.size, dtype=dtype, device=device)
    for box, rank, offset in places:
        start = rank * segment_numel + offset
        values = received[start : start + box.numel].view(box.sizes)
        full[slices(box, Box.whole(full.shape))].copy_(values)
    return full


def _gather_device(group: dist.ProcessGroup, shard: ShardMetadata) -> torch.device:
    """A device that a group can gather on: the shards' own, if it can there."""
    types = [device.type for device in devices_of(group)]
    found = "cpu" if shard.placement is None else shard.placement.device().type
    if found not in types:
        found = next((each for each in types if each != "cpu"), "cpu")
    if found == "cpu":
        return torch.device("cpu")
    return torch.device(found, torch.get_device_module(found).current_device())
