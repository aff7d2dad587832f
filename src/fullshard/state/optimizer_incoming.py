"""Optimizer state dicts as they come in: read, checked against a model, fetched piece by piece."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from fullshard.errors import ConfigError
from fullshard.state.lanes import StateLane, StatePart
from fullshard.state.optimizer_keys import Roster
from fullshard.state.sharded import as_full

Fetch = Callable[[Any, StateLane], Any]
"""Turns a value of incoming state into the whole value on this rank; may be a collective."""


@dataclass(slots=True)
class Incoming:
    """State by the canonical names of a model's original parameters, and what belongs to none."""

    states: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    loose: dict[Any, Any] = field(default_factory=dict)
    groups: list[Mapping[str, Any]] | None = None

    def fingerprint(self) -> str:
        """The same on ranks that will have to fetch the same values."""
        lines = [*_described(self.states), *_described(self.loose)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Awaited:
    """A tensor that another rank has."""

    shape: torch.Size
    dtype: torch.dtype


def is_cut(value: Any) -> bool:
    """Whether each rank has a piece of a value."""
    return isinstance(value, DTensor | ShardedTensor)


def is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | Awaited) or is_cut(value)


def shape_of(value: Any) -> torch.Size:
    # A ShardedTensor warns about itself when it is asked directly.
    size = value.metadata().size if isinstance(value, ShardedTensor) else value.shape
    return torch.Size(size)


def dtype_of(value: Any) -> torch.dtype:
    if isinstance(value, ShardedTensor):
        return value.metadata().tensor_properties.dtype
    dtype: torch.dtype = value.dtype
    return dtype


def _described(value: Any, name: str = "") -> Iterator[str]:
    """What is where in nested state, in any order that it may come in."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _described(value[key], f"{name} {key}")
    elif is_array(value):
        kind = type(value).__name__ if is_cut(value) else "Tensor"
        yield f"{name}: {kind} {tuple(shape_of(value))} {dtype_of(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def read(state_dict: Mapping[str, Any] | None, roster: Roster) -> Incoming:
    """Find out which parameter every entry belongs to, by any of its names."""
    if not isinstance(state_dict, Mapping) or "state" not in state_dict:
        found = list(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ConfigError(
            f"optim_state_dict: a dict with the key 'state' expected, found {found}; pass what "
            "optim_state_dict returned, on every rank that it was saved for."
        )
    incoming = Incoming(groups=state_dict.get("param_groups"))
    canonical: set[str] = set()
    for key, state in state_dict["state"].items():
        if not isinstance(key, str):
            raise ConfigError(
                f"optim_state_dict: parameters must be called by name, found the key {key!r}; "
                "call rekey_optim_state_dict with OptimStateKeyType.PARAM_NAME and the model that "
                "the state dict belongs to."
            )
        name, holding = roster.named(key) or (key, None)
        if holding is None:
            incoming.loose[key] = state
        elif not isinstance(state, Mapping):
            raise ConfigError(
                f"optim_state_dict: the state of {key!r} must be a dict, found "
                f"{type(state).__name__}; pass what optim_state_dict returned."
            )
        elif name not in canonical:
            # Tied parameters may come under each of their names: the first name has the last word.
            incoming.states[name] = state
            canonical |= {name} & {key}
    return incoming


class Broadcast:
    """Sends a state dict that one rank has to all others, one tensor at a time."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self._device = device
        self._is_source = dist.get_rank(group) == 0

    def outline(self, state_dict: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The source's state dict, with its tensors still to be awaited on the other ranks."""
        sent: list[Any] = [None]
        if self._is_source:
            sent[0] = _outlined(state_dict)
        dist.broadcast_object_list(sent, group=self.group, group_src=0)
        return state_dict if self._is_source else sent[0]

    def fetch(self, value: Any, lane: StateLane) -> Any:
        if not is_array(value) or not shape_of(value):
            return value
        if isinstance(value, Awaited):
            tensor = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        else:
            tensor = value.detach().to(self._device).contiguous()
        if tensor.numel():
            # As bytes: gloo does not know every dtype.
            dist.broadcast(tensor.view(torch.uint8), group=self.group, group_src=0)
        return tensor


def _outlined(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _outlined(inner) for key, inner in value.items()}
    if not is_array(value):
        return value
    shape = shape_of(value)
    return Awaited(shape, dtype_of(value)) if shape or is_cut(value) else value.detach().cpu()


def fetch_here(value: Any, lane: StateLane) -> Any:
    """What every rank has, or has a piece of."""
    return as_full(value, lane) if is_cut(value) else value


class Checked:
    """Which state has a value for each element of its parameter, and that all of it fits.

    Some state has a shape of its own, the same for all parameters; it is kept whole on every
    rank, as a number of steps is. A shape that fits neither its parameter nor this is a mistake.
    """

    def __init__(self, incoming: Incoming, roster: Roster, *, may_be_cut: bool) -> None:
        self._elementwise: set[str] = set()
        arrays: dict[str, list[tuple[StatePart, Any]]] = {}
        lanes = {part: lane for lane in roster.lanes for part in lane.parts}
        for part in lanes:
            for key, value in incoming.states.get(part.names[0], {}).items():
                if not is_array(value):
                    continue
                if is_cut(value) and not may_be_cut:
                    raise ConfigError(
                        "optim_state_dict: whole tensors expected where one rank has them all, "
                        f"found a {type(value).__name__} in state {key!r} of {part.names[0]!r}; "
                        "load it without rank0_only."
                    )
                if shape_of(value):
                    arrays.setdefault(key, []).append((part, value))
        for key, entries in arrays.items():
            odd = [(part, value) for part, value in entries if shape_of(value) != part.shape]
            if not odd:
                self._elementwise.add(key)
                continue
            has_own_shape = len({shape_of(value) for _, value in entries}) == 1
            # A parameter that nothing is cut of may have any state, such as factors of moments.
            cut = [
                part
                for part, _ in odd
                if lanes[part].num_ranks > 1 or lanes[part].flat_param is not None
            ]
            is_rule = 2 * len(odd) > len(entries)
            if not is_rule or (cut and not has_own_shape):
                part, value = odd[0]
                raise ConfigError(
                    f"optim_state_dict: state {key!r} of {part.names[0]!r} must have the "
                    f"parameter's shape {tuple(part.shape)}, found {tuple(shape_of(value))}; pass "
                    "the state of an optimizer of this model."
                )

    def is_elementwise(self, part: StatePart, key: str, value: Any) -> bool:
        if not is_array(value) or shape_of(value) != part.shape:
            return False
        # A parameter without dims: only the state of the others tells its elements from numbers.
        return key in self._elementwise or not (part.shape or self._elementwise or key == "step")
