"""The parameters of an optimizer, and the tensors of the model that they stand for."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._torch import to_local
from fullshard.errors import ConfigError, FullshardError, UnknownNameError
from fullshard.runtime.names import clean_name
from fullshard.state.plain import as_json, dequantized
from fullshard.state.shards import (
    FlatLane,
    FlatShard,
    TensorShard,
    all_shards,
    lanes_of,
    tp_groups_of,
)

Key: TypeAlias = int | str
OptimInput: TypeAlias = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None
State: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class OptimParam:
    """One parameter as an optimizer holds it, and the tensors of the model that it stands for.

    It stands for one tensor, or for all tensors of a lane if the optimizer holds a flat parameter.
    """

    param: torch.Tensor
    shards: tuple[TensorShard, ...]

    @property
    def names(self) -> list[str]:
        """The canonical names of its tensors."""
        return [shard.name for shard in self.shards]

    @property
    def flat_shards(self) -> list[FlatShard]:
        """Its tensors, if a wrapper shards them."""
        return [shard for shard in self.shards if isinstance(shard, FlatShard)]

    @property
    def lane(self) -> FlatLane | None:
        return next((shard.lane for shard in self.flat_shards), None)

    @property
    def local_numel(self) -> int:
        """How many elements this rank has; a flat parameter's include its padding."""
        if self.lane is None:
            return self.param.numel()
        return self.lane.shard_numel if self.lane.is_flat else len(self.flat_shards[0].elements)


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


class OptimValue(NamedTuple):
    """State of a parameter that is not sharded, and whether this rank trains the parameter."""

    name: str
    state: str
    value: Any
    is_trained: bool


@dataclass(frozen=True, slots=True)
class OptimState:
    """What a checkpoint holds of an optimizer.

    Attributes:
        groups: Its parameter groups, with names as "params".
        sharded: State that is sharded like its parameter, with its own name.
        values: Other state. What is not a tensor has the form that JSON holds, as in groups.
    """

    groups: list[Any] = field(default_factory=list)
    sharded: list[tuple[TensorShard, str, torch.Tensor]] = field(default_factory=list)
    values: list[OptimValue] = field(default_factory=list)


def optim_state(
    optimizer: Optimizer, shards: Sequence[TensorShard], choose: Callable[[TensorShard], bool]
) -> OptimState:
    """The state of an optimizer for the tensors that are chosen."""
    found = OptimState()
    params = optim_params([group["params"] for group in optimizer.param_groups], shards)
    for group, its_params in zip(optimizer.param_groups, params, strict=True):
        names = []
        for each in its_params:
            if not each.shards:
                raise ConfigError(
                    f"optimizer: it has a parameter of shape {tuple(each.param.shape)} that "
                    "is not the model's; pass the optimizer of this model."
                )
            for shard in filter(choose, each.shards):
                names.append(shard.name)
                for state, value in optimizer.state.get(each.param, {}).items():
                    if _is_like(value, each.param):
                        found.sharded.append((shard, state, dequantized(value)))
                        continue
                    if isinstance(value, torch.Tensor):
                        # A DTensor without dims is replicated. Copy: optimizers count in place.
                        value = to_local(value).detach().to("cpu", copy=True)
                    else:
                        value = as_json(f"{shard.name}.{state}", value)
                    is_trained = bool(shard.local_parts(shard.tensor))
                    found.values.append(OptimValue(shard.name, state, value, is_trained))
        subject = f"param_groups[{len(found.groups)}]"
        found.groups.append(as_json(subject, {**group, "params": names})["value"])
    return found


def _is_like(value: Any, param: torch.Tensor) -> bool:
    """Whether optimizer state is sharded like its parameter."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() > 0
        and isinstance(value, DTensor) == isinstance(param, DTensor)
        and value.shape == param.shape
    )


def saved_options(
    groups: Sequence[Iterable[OptimParam]],
    saved: Sequence[Mapping[str, Any]],
    error: type[FullshardError] = ConfigError,
) -> list[State | None]:
    """For each group of an optimizer, the options that its parameters were saved with.

    `saved` are parameter groups with names as "params". The options of a group are None if none of
    its parameters were saved. Parameters of one group must have been saved with the same options.
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
        different = sorted(
            {k for each in options for k in each if not is_same(each[k], options[0].get(k))}
            | {k for each in options for k in options[0] if k not in each}
        )
        if different:
            raise error(
                f"optimizer: the parameters of group {index} were saved with different "
                f"{different}, in the groups {sources}; build the optimizer with the groups that "
                "were saved."
            )
        result.append(copy.deepcopy(options[0]) if options else None)
    return result


def is_same(left: Any, right: Any) -> bool:
    """Whether two values of an optimizer's state are equal; nan is equal to itself."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and torch.allclose(left.cpu(), right.cpu(), rtol=0, atol=0, equal_nan=True)
        )
    return type(left) is type(right) and pickle.dumps(left) == pickle.dumps(right)


class ModelParams:
    """All parameters of a wrapped model as its optimizers see them, in the same order on all ranks.

    Attributes:
        params: All of them.
        by_tensor: The same, keyed by the tensor that the optimizer holds.
        by_key: The same, keyed by the name in `named_parameters`, which lists flat parameters.
        by_name: The shards of the original parameters, keyed by any of their names.
        shard_groups: The process groups that they are sharded over.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.lanes = lanes_of(model, what="optim_state_dict")
        if not self.lanes:
            raise ConfigError(
                f"{type(model).__name__} has no FullyShardedDataParallel module with parameters; "
                "use the state dict of the optimizer as it is."
            )
        shards = [shard for shard in all_shards(model, self.lanes) if not shard.is_buffer]
        (self.params,) = optim_params([dict.fromkeys(s.tensor for s in shards)], shards)
        self.by_tensor = {param.param: param for param in self.params}
        self.by_name = {name: shard for shard in shards for name in shard.names}
        listed = list(model.named_parameters(remove_duplicate=False))
        self.by_key: dict[Key, OptimParam] = {
            clean_name(key): self.by_tensor[tensor] for key, tensor in listed
        }
        self._keys = {tensor: key for key, tensor in reversed(listed)}
        sharded = [lane.mesh_info.shard for lane in self.lanes if lane.is_sharded]
        groups = [axis.group for axis in sharded] + tp_groups_of(self.lanes)
        self.shard_groups = list(dict.fromkeys(groups))

    def groups_of(
        self, optim: Optimizer | None, optim_input: OptimInput, *, by_name: bool = False
    ) -> list[dict[Key, OptimParam]]:
        """The parameters of each group of an optimizer, by the keys of its own state dict."""
        groups: list[dict[Key, OptimParam]] = []
        number = 0
        for tensors in param_groups(self.model, optim, optim_input):
            groups.append({})
            for tensor in tensors:
                if (param := self.by_tensor.get(tensor)) is None:
                    raise UnknownNameError(
                        f"optimizer: parameter {number}, of shape {tuple(tensor.shape)}, is none "
                        "of the model's; pass the optimizer of this model, built from its "
                        "parameters after it was wrapped."
                    )
                groups[-1][self._keys.get(tensor, param.names[0]) if by_name else number] = param
                number += 1
        return groups


def param_groups(
    model: nn.Module, optim: Optimizer | None, optim_input: OptimInput
) -> list[list[nn.Parameter]]:
    """The parameters of an optimizer, group by group.

    They are `optim_input`, which it was built with, if that is given, and otherwise those of
    `optim`. Without either, the optimizer is assumed to have all parameters of the model.
    """
    if optim_input is None:
        groups = [{"params": model.parameters()}] if optim is None else optim.param_groups
        return [list(group["params"]) for group in groups]
    entries: list[Any] = list(optim_input)
    if entries and all(isinstance(entry, torch.Tensor) for entry in entries):
        return [entries]
    if entries and all(isinstance(entry, Mapping) and "params" in entry for entry in entries):
        given = [entry["params"] for entry in entries]
        return [[each] if isinstance(each, nn.Parameter) else list(each) for each in given]
    raise (TypeError if entries else ConfigError)(
        "optim_input must be tensors, or dicts that each have 'params', not "
        f"{sorted({type(entry).__name__ for entry in entries}) or 'nothing'}; leave it out."
    )
