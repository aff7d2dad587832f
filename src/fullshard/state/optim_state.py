"""Optimizer state dicts of wrapped models, saved and loaded by the names of parameters.

An optimizer holds this rank's slices, or flat parameters, and numbers them. A saved state dict is
keyed by the names of the original parameters and holds whole tensors or shards of them, so that it
can be loaded into a model that is wrapped in another way, over another number of ranks, or not at
all.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.api import OptimStateKeyType, StateDictType
from fullshard.errors import ConfigError, DisagreementError, FullshardError, UnknownNameError
from fullshard.runtime.names import clean_name
from fullshard.state.module_state import settings_of
from fullshard.state.shards import (
    FlatLane,
    FlatShard,
    TensorShard,
    dtype_of,
    full_tensor_of,
    is_sharded,
    lanes_of,
    other_shards,
    shape_of,
    sharded_copy,
)

Key: TypeAlias = int | str
OptimInput: TypeAlias = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None
State: TypeAlias = dict[str, Any]
_T = TypeVar("_T")


# Parameters of an optimizer, and what they stand for


@dataclass(frozen=True, slots=True, eq=False)
class OptimParam:
    """One parameter as an optimizer holds it, and the tensors of the model that it stands for.

    That is one tensor, or all those of a lane where the optimizer holds a flat parameter.
    """

    param: torch.Tensor
    shards: tuple[TensorShard, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical names of its tensors."""
        return tuple(shard.name for shard in self.shards)

    @property
    def lane(self) -> FlatLane | None:
        """The lane that it belongs to; None if no wrapper shards it."""
        shard = self.shards[0] if self.shards else None
        return shard.lane if isinstance(shard, FlatShard) else None

    @property
    def is_flat(self) -> bool:
        return self.lane is not None and self.lane.flat_param is not None

    @property
    def is_whole(self) -> bool:
        """Whether an optimizer's state of it is what it would be without any wrapper."""
        return self.lane is None or not (self.lane.is_sharded or self.is_flat)

    @property
    def flat_shards(self) -> tuple[FlatShard, ...]:
        return tuple(shard for shard in self.shards if isinstance(shard, FlatShard))

    @property
    def local_numel(self) -> int:
        """How many elements this rank has; a flat parameter's include its padding."""
        if self.lane is None:
            return self.param.numel()
        return self.lane.shard_numel if self.is_flat else len(self.flat_shards[0].elements)

    def slice_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its elements, as a view of a tensor arranged like the shard buffer of its lane."""
        return buffer if self.is_flat else self.flat_shards[0].slice_of(buffer)


def optim_params(
    groups: Iterable[Iterable[torch.Tensor]], shards: Iterable[TensorShard]
) -> list[list[OptimParam]]:
    """The parameters of an optimizer, group by group, each with the shards that it stands for.

    A parameter that no shard belongs to stands for none.
    """
    by_tensor: dict[torch.Tensor, list[TensorShard]] = {}
    for shard in shards:
        by_tensor.setdefault(shard.tensor, []).append(shard)
    return [[OptimParam(p, tuple(by_tensor.get(p, ()))) for p in group] for group in groups]


def saved_options(
    groups: Sequence[Iterable[OptimParam]],
    saved: Sequence[Mapping[str, Any]],
    error: type[FullshardError] = ConfigError,
) -> list[State | None]:
    """For each group of an optimizer, the options that its parameters were saved with.

    `saved` are parameter groups with names as "params". None stands for a group of which no
    parameter was saved. Parameters of one group must have been saved with the same options.
    """
    group_of = {clean_name(name): i for i, group in enumerate(saved) for name in group["params"]}
    result: list[State | None] = []
    for index, group in enumerate(groups):
        names = [name for param in group for shard in param.shards for name in shard.names]
        sources = sorted({group_of[name] for name in names if name in group_of})
        options = [
            {k: v for k, v in saved[source].items() if k not in ("params", "param_names")}
            for source in sources
        ]
        for other in options[1:]:
            if different := [
                k for k in {*options[0], *other} if not _has_same(options[0], other, k)
            ]:
                raise error(
                    f"optimizer: the parameters of group {index} must have been saved with the "
                    f"same options, found different {sorted(different)} in the saved groups "
                    f"{sources}; build the optimizer with the groups that were saved."
                )
        result.append(copy.deepcopy(options[0]) if options else None)
    return result


def _has_same(left: Mapping[str, Any], right: Mapping[str, Any], key: str) -> bool:
    return key in left and key in right and is_same(left[key], right[key])


def is_same(left: Any, right: Any) -> bool:
    """Whether two values of an optimizer's state are equal; nan is equal to itself."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and torch.allclose(left.cpu(), right.cpu(), rtol=0, atol=0, equal_nan=True)
        )
    return type(left) is type(right) and pickle.dumps(left) == pickle.dumps(right)
