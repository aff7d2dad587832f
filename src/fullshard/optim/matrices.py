"""The matrices that an optimizer's parameters consist of, and where this rank's parts of them lie.

An optimizer holds a plain parameter, the shard of one, or a flat parameter, which stands for
several tensors. A `HeldTensor` is one of these tensors, however it is sharded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.tensor import DTensor

from fullshard._torch import to_local
from fullshard.comm.mesh import MeshInfo
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.layout.split import Box, Split
from fullshard.runtime.hooks import hooks_managing, unit_holding
from fullshard.runtime.replaced import replacement_of
from fullshard.unit.flat_param import FlatParameter, FlatParamSlice, FlatSlice
from fullshard.unit.param import ShardedParam
from fullshard.unit.unit import Unit


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """A tensor that a parameter of an optimizer stands for.

    `sharded` refers to what its unit knows of it, weakly: an optimizer does not keep a model.
    `split` says where its parts lie, and `mesh_info` on which ranks; both are None if it is not
    sharded. `device` is where matrices are orthogonalized. `start` is where it begins in the flat
    parameter of this rank that it is part of.
    """

    param: torch.Tensor
    name: str
    shape: tuple[int, ...]
    device: torch.device
    mesh_info: MeshInfo | None = None
    sharded: Callable[[], ShardedParam | None] | None = None
    split: Split | None = None
    start: int | None = None

    @property
    def full_name(self) -> str:
        """Its name in the model, which a unit knows from the first forward on."""
        sharded = None if self.sharded is None else self.sharded()
        return self.name if sharded is None else sharded.name

    @property
    def is_current(self) -> bool:
        """Whether it is still cut as it was."""
        if self.sharded is None:
            return True
        sharded = self.sharded()
        return sharded is not None and sharded.split == self.split

    @property
    def stack_shape(self) -> tuple[int, int, int]:
        """The number of matrices, and their rows and columns."""
        *stack, rows, cols = self.shape
        return prod(stack), rows, cols

    def boxes(self, rank: int) -> list[Box]:
        """What a rank of the shard axis holds: in the order in which it lies in its memory."""
        return boxes_of(self.shape, self.split, rank)

    def parts_of(self, value: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
        """This rank's boxes, as views of a tensor arranged like the parameter: its values, say."""
        local = to_local(value)
        if self.start is None and [tuple(local.shape)] == [box.sizes for box in boxes]:
            return [local]
        flat, begin, found = local.reshape(-1), self.start or 0, []
        for box in boxes:
            found.append(flat[begin : begin + box.numel].view(box.sizes))
            begin += box.numel
        return found


def boxes_of(shape: Sequence[int], split: Split | None, rank: int) -> list[Box]:
    """The boxes of a tensor that a rank of the shard axis holds, in the order of its memory."""
    boxes = [Box.whole(shape)] if split is None else split.boxes(rank)
    return [box for box in boxes if box.numel]


def held_tensors(param: torch.Tensor, name: str) -> list[HeldTensor]:
    """The tensors that a parameter of an optimizer stands for; `name` is for one without any."""
    if isinstance(param, FlatParameter) and (unit := unit_holding(param)) is not None:
        slices = (each for each in unit.params if isinstance(each, FlatParamSlice))
        return [_held(unit, each, param) for each in slices if each.param is param]
    sharded = replacement_of(param)
    if sharded is not None and sharded.shard is param:
        hooks = (hooks_managing(location.module) for location in sharded.locations)
        units = (unit for each in hooks if each is not None for unit in each.reads)
        unit = next((unit for unit in units if sharded in unit.params), None)
        if unit is not None:
            return [_held(unit, sharded, param)]
    if isinstance(param, DTensor):
        raise UnsupportedError(
            f"{name}: Muon does not know how this DTensor is sharded ({param.placements}), "
            "because no fully_shard of fullshard made it; shard the model with "
            "fullshard.fully_shard, or train this parameter with AdamW."
        )
    return [HeldTensor(param, name, tuple(param.shape), param.device)]


def _held(unit: Unit, sharded: ShardedParam, param: torch.Tensor) -> HeldTensor:
    full = sharded.full_spec
    if full is not None and any(not each.is_replicate() for each in full.placements):
        raise UnsupportedError(
            f"{sharded.name}: tensor parallelism splits this matrix ({full.placements}), and "
            "Muon needs it whole on the data-parallel mesh; train it with AdamW."
        )
    is_flat = isinstance(sharded, FlatSlice)
    return HeldTensor(
        param,
        sharded.name,
        tuple(sharded.split.shape if is_flat else sharded.shape),
        unit.comm_ctx.device.torch_device,
        unit.mesh_info,
        weakref.ref(sharded),
        sharded.split,
        int(sharded.local.storage_offset()) if isinstance(param, FlatParameter) else None,
    )


def require_matrices(param: torch.Tensor, name: str) -> list[HeldTensor]:
    """The tensors of a parameter; raises if one is no matrix."""
    held = held_tensors(param, name)
    for each in held:
        if len(each.shape) not in (2, 3):
            also = "; wrap with use_orig_params=True, so that" if len(held) > 1 else ": let"
            raise ConfigError(
                f"{each.name}: Muon trains matrices and stacks of them, not a parameter of shape "
                f"{each.shape}{also} AdamW trains it, in a group that has 'betas'."
            )
        if param.is_complex():
            raise ConfigError(
                f"{each.name}: Muon trains real parameters, not {param.dtype}; let AdamW train "
                "it, in a group that has 'betas'."
            )
    return held
