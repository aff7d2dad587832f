"""Every parameter and buffer of a model, however it is sharded: its name, and who has which block.

A model may be sharded by either door, by both, in part, or not at all. What checkpoints need to
know of a tensor is always the same: its names and shape in the model as it was written, and which
blocks of it lie in this rank's memory. Nothing here communicates.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fullshard.errors import CheckpointError
from fullshard.layout.split import Box, boxes_of_range
from fullshard.runtime.hooks import ModuleHooks, hooks_of
from fullshard.runtime.names import clean_name
from fullshard.state.shards import FlatLane, FlatShard, lanes_of


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block of a tensor, and this rank's memory of it, in the block's shape."""

    where: Box
    values: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Site(ABC):
    """One parameter or buffer. `names` are all that it has in the model, the first canonical.

    `tensor` is what the module, and an optimizer, hold: of a wrapper with `use_orig_params=False`
    the flat parameter, which several sites share.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    is_buffer: bool

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
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
        """Whether this rank writes what it has; another rank may have the same."""

    @abstractmethod
    def blocks(self, tensor: torch.Tensor) -> list[Block]:
        """This rank's blocks of anything that is arranged like `tensor`: values, moments."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeSite(Site):
    """What every rank has whole. Buffers may differ between ranks: the first rank's are written."""

    @property
    def is_writer(self) -> bool:
        if not dist.is_initialized():
            return True
        writer = 0 if self.is_buffer else _share(self.name, dist.get_world_size())
        return dist.get_rank() == writer

    def blocks(self, tensor: torch.Tensor) -> list[Block]:
        return [Block(Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor.detach())]


@dataclass(frozen=True, slots=True, eq=False)
class RowsSite(Site):
    """A DTensor."""

    @property
    def is_writer(self) -> bool:
        tensor = self.tensor
        assert isinstance(tensor, DTensor)
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return False
        for axis, placement in enumerate(tensor.placements):
            size = tensor.device_mesh.size(axis)
            if isinstance(placement, Replicate) and coordinate[axis] != _share(self.name, size):
                return False
        return True

    def blocks(self, tensor: torch.Tensor) -> list[Block]:
        assert isinstance(tensor, DTensor)
        (chunk,) = tensor.__create_chunk_list__()
        local = tensor._local_tensor.detach()
        where = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if tuple(local.shape) != where.sizes:
            raise CheckpointError(
                f"{self.name}: its part on this rank must have the shape {where.sizes} that its "
                f"placements {tensor.placements} say, found {tuple(local.shape)}; make the DTensor "
                "with distribute_tensor."
            )
        return [Block(where, local)] if local.numel() else []


@dataclass(frozen=True, slots=True, eq=False)
class FlatSite(Site):
    """A parameter of a wrapper: a run of its elements."""

    lane: FlatLane
    part: FlatShard

    @property
    def shape(self) -> torch.Size:
        return self.part.shape

    @property
    def is_writer(self) -> bool:
        replicate = self.lane.mesh_info.replicate
        return replicate.rank == _share(self.name, replicate.size)

    def blocks(self, tensor: torch.Tensor) -> list[Block]:
        flat = tensor.detach().reshape(-1)
        if self.lane.flat_param is not None:
            flat = self.part.slice_of(flat)
        found, begin = [], 0
        for where in boxes_of_range(self.shape, self.part.elements):
            found.append(Block(where, flat[begin : begin + where.numel].view(where.sizes)))
            begin += where.numel
        return found


def sites_of(model: nn.Module) -> list[Site]:
    """The parameters and persistent buffers of a model, in the order of its modules.

    Resharding is done first: nothing that is gathered is looked at.
    """
    _settle(model)
    lanes = lanes_of(model)
    found: list[Site] = [
        FlatSite(part.names, part.param, False, lane, part)
        for lane in lanes
        for part in lane.shards
    ]
    managed = {id(site.tensor) for site in found}
    found += _others(model, managed)
    order: dict[str, int] = {}
    for name in _registered_names(model):
        order.setdefault(name, len(order))
    return sorted(found, key=lambda site: order.get(site.name, len(order)))


def _others(model: nn.Module, managed: set[int]) -> Iterator[Site]:
    """What no wrapper has."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, tuple[torch.Tensor, bool]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor, is_buffer in _registered(module):
            if id(tensor) not in managed:
                known = names.setdefault(id(tensor), [])
                known.append(clean_name(f"{path}.{name}" if path else name))
                tensors[id(tensor)] = (tensor, is_buffer)
    for key, (tensor, is_buffer) in tensors.items():
        kind = RowsSite if isinstance(tensor, DTensor) else WholeSite
        yield kind(tuple(dict.fromkeys(names[key])), tensor, is_buffer)


def _registered(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, param in module._parameters.items():
        if param is not None:
            yield name, param, False
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer, True


def _registered_names(model: nn.Module) -> Iterator[str]:
    """Names in the order of modules; of flat wrappers, those that their modules would have."""
    hidden: dict[nn.Module, list[str]] = {}
    for lane in lanes_of(model):
        for part in lane.shards:
            for place in part.locations:
                hidden.setdefault(place.module, []).append(place.name)
    for path, module in model.named_modules(remove_duplicate=False):
        before = f"{path}." if path else ""
        for name in (*hidden.get(module, ()), *module._parameters, *module._buffers):
            yield clean_name(before + name)


def _settle(model: nn.Module) -> None:
    for hooks in _hooks_of_all(model):
        hooks.require_not_computing("save or load")
        for unit in hooks.units:
            unit.reshard_now()
            unit.refresh(plan_training=hooks.scheduler is None)


def _hooks_of_all(model: nn.Module) -> Iterator[ModuleHooks]:
    found = (hooks_of(module) for module in model.modules())
    yield from dict.fromkeys(hooks for hooks in found if hooks is not None)


def _share(name: str, num_ranks: int) -> int:
    """Which of the ranks that have the same writes it: each has its share of the work."""
    return zlib.crc32(name.encode()) % num_ranks
