"""Which part of which tensor of a model this rank holds, for state dicts and checkpoints alike.

A model may be sharded through either API, through both, in part, or not at all. Saving and loading
it take the same facts about every parameter and buffer: its names and shape in the model as it was
written, and which boxes of it are in this rank's memory. A `TensorShard` has these facts;
`tensor_shards` lists those of a model without communication.

State dicts of wrapped models are made one `FlatLane` at a time. A lane is the parameters of a
wrapper that have one dtype and are trained alike; each rank holds a contiguous slice of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fullshard._torch import (
    DTensorSpec,
    spec_of,
    to_local,
)
from fullshard.comm.collectives import all_gather_flat
from fullshard.comm.mesh import MeshInfo
from fullshard.comm.placement import as_dtensor, own_box, with_dtype
from fullshard.errors import (
    CheckpointError,
    ConfigError,
    DisagreementError,
    FullshardError,
    LifecycleError,
)
from fullshard.layout.plan import Slot
from fullshard.layout.split import Box, boxes_of_range, slices
from fullshard.runtime.hooks import ModuleHooks, hooks_below, hooks_of, hooks_of_unit
from fullshard.runtime.names import clean_name
from fullshard.unit.flat_param import FlatParamHolder, FlatSlice, flat_name
from fullshard.unit.unit import Unit

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """A box of a tensor, and this rank's memory of it in the shape of the box."""

    box: Box
    values: torch.Tensor


@dataclass(slots=True, eq=False)
class TensorShard:
    """One parameter or persistent buffer of a model: a DTensor, or whole on every rank.

    `names` are all its names, canonical first; `tensor` is what the module and an optimizer hold;
    `shape` is that of the whole tensor.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    shape: torch.Size

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def is_buffer(self) -> bool:
        return not isinstance(self.tensor, nn.Parameter)

    @property
    def is_trainable(self) -> bool:
        return self.tensor.requires_grad

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes its parts, which other ranks may hold as well."""
        if isinstance(self.tensor, DTensor):
            return self._writes(spec_of(self.tensor))
        if not dist.is_initialized():
            return True
        # Buffers may differ: rank 0 writes its own.
        return dist.get_rank() == (0 if self.is_buffer else self._writer(dist.get_world_size()))

    def _writes(self, spec: DTensorSpec) -> bool:
        coordinate = spec.mesh.get_coordinate()
        return coordinate is not None and all(
            coordinate[axis] == self._writer(spec.mesh.size(axis))
            for axis, placement in enumerate(spec.placements)
            if isinstance(placement, Replicate)
        )

    def _writer(self, num_ranks: int) -> int:
        """Which of the ranks that hold the same part writes it: the work is spread over them."""
        return zlib.crc32(self.name.encode()) % num_ranks

    def local_parts(self, tensor: torch.Tensor) -> list[LocalPart]:
        """This rank's parts of anything arranged like `self.tensor`: values, gradients, moments."""
        if not isinstance(tensor, DTensor):
            return [LocalPart(Box.whole(tensor.shape), tensor.detach())]
        (chunk,) = tensor.__create_chunk_list__()
        local = _unwrapped(to_local(tensor).detach())
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if tuple(local.shape) != box.sizes:
            raise CheckpointError(
                f"{self.name}: its part on this rank has the shape {tuple(local.shape)}, but its "
                f"placements {tensor.placements} say {box.sizes}; make the DTensor with "
                "distribute_tensor."
            )
        return [LocalPart(box, local)] if local.numel() else []

    def written_parts(self, tensor: torch.Tensor) -> list[LocalPart]:
        """The parts of anything arranged like `self.tensor` that this rank writes."""
        if self.shape.numel() == 0:
            # No rank has a part; the first rank records that the tensor exists.
            is_first = not dist.is_initialized() or dist.get_rank() == 0
            empty = torch.empty(self.shape, dtype=tensor.dtype)
            return [LocalPart(Box.whole(self.shape), empty)] if is_first else []
        return self.local_parts(tensor) if self.is_writer else []


def _unwrapped(local: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that only defines its all-gather, as torchao's float8 weights do."""
    if not hasattr(local, "fsdp_pre_all_gather") or not hasattr(local, "__tensor_flatten__"):
        return local
    names, _ = local.__tensor_flatten__()
    inner = [getattr(local, name) for name in names]
    is_same = len(inner) == 1 and (inner[0].shape, inner[0].dtype) == (local.shape, local.dtype)
    return inner[0].detach() if is_same else local


@dataclass(slots=True, eq=False)
class FlatShard(TensorShard):
    """A parameter of a wrapper. This rank holds a range of elements of its flattened form.

    If the parameter is a DTensor (tensor parallelism), its local tensor is flattened. With
    `use_orig_params=False`, its `tensor` is the flat parameter, which it shares with the other
    parameters of its lane.

    Attributes:
        lane: The lane that the parameter belongs to.
        param: The parameter as its unit knows it.
        slot: Where it lies in the bucket of the lane.
        elements: The elements of the flattened parameter that this rank holds.
    """

    lane: FlatLane
    param: FlatSlice
    slot: Slot
    elements: range

    @property
    def is_writer(self) -> bool:
        replicate, spec = self.lane.mesh_info.replicate, self.param.full_spec
        is_writer = replicate.rank == self._writer(replicate.size)
        return is_writer and (spec is None or self._writes(spec))

    @property
    def own(self) -> Box:
        """The part of the whole parameter that is flattened."""
        spec = self.param.full_spec
        return Box.whole(self.shape) if spec is None else own_box(spec, self.shape)

    def local_parts(self, tensor: torch.Tensor) -> list[LocalPart]:
        flat = tensor.detach().reshape(-1)
        if self.lane.is_flat:
            flat = self.slice_of(flat)
        found, begin, own = [], 0, self.own
        for box in boxes_of_range(own.sizes, self.elements):
            values = flat[begin : begin + box.numel].view(box.sizes)
            offsets = tuple(map(add, own.offsets, box.offsets))
            found.append(LocalPart(Box(offsets, box.sizes), values))
            begin += box.numel
        return found

    def view_of(self, full: torch.Tensor) -> torch.Tensor:
        """The parameter as a module sees it, as a view of the gathered lane."""
        split = self.param.split
        view, spec = full[split.start : split.start + split.numel], self.param.full_spec
        view = view.view(split.shape)
        return view if spec is None else as_dtensor(view, with_dtype(spec, view.dtype))

    def slice_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """This rank's elements, as a view of a tensor arranged like the shard buffer."""
        begin = self.slot.in_segment(self.lane.mesh_info.shard.rank)
        return buffer[begin : begin + len(self.elements)]

    def local_of(self, full: torch.Tensor) -> torch.Tensor:
        """The flattened part of a tensor that has the parameter's shape, or is placed like it."""
        is_cut = isinstance(full, DTensor) or self.param.full_spec is None
        return to_local(full) if is_cut else full[slices(self.own, Box.whole(self.shape))]

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a tensor that has the parameter's shape, or is placed like it."""
        return self.local_of(full).reshape(-1)[self.elements.start : self.elements.stop]


class FlatLane:
    """One lane of a wrapper's unit: parameters of one dtype that are trained alike.

    Attributes:
        name: That of its flat parameter in state dicts; set by `lanes_of`, which knows all units.
        mesh_info: Where the parameters are sharded and replicated.
        is_sharded: Whether ranks hold different parts of them.
        is_flat: Whether they are one `FlatParameter` (`use_orig_params=False`), that of `holder`.
        device: Where collectives run; with CPU offload the shard buffer is elsewhere.
        numel: Elements of all parameters together.
        shard_numel: Elements of the shard buffer, which is padded to one size on all ranks.
    """

    def __init__(self, wrapper: nn.Module, unit: Unit, index: int) -> None:
        self.wrapper = wrapper
        self.unit = unit
        self.index = index
        self.name = flat_name(index)
        self.mesh_info: MeshInfo = unit.mesh_info
        self.is_sharded = self.mesh_info.shard.size > 1
        self.device: torch.device = unit.comm_ctx.device.torch_device
        holders = [] if unit.flat is None else unit.flat.holders
        self.holder: FlatParamHolder | None = holders[index] if holders else None
        self.is_flat = self.holder is not None
        (self.bucket,) = unit.layout.lanes[index].buckets
        slots = self.bucket.slots
        self.numel: int = sum(slot.split.numel for slot in slots)
        self.shard_numel: int = self.bucket.segment_numel
        self.shards: list[FlatShard] = []
        for slot in slots:
            param = unit.params[slot.param_index]
            assert isinstance(param, FlatSlice)
            own = param.split.elements(self.mesh_info.shard.rank)
            # `lanes_of`, which knows the model, adds the names.
            self.shards.append(FlatShard((), param.param, param.shape, self, param, slot, own))

    def shard_buffer(self) -> torch.Tensor:
        """This rank's values: the memory that is trained."""
        return self.unit.shard_buffers.lanes[self.index]

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor arranged like the shard buffer."""
        return torch.zeros(self.shard_numel, dtype=dtype, device=self.device)

    def gather(self, buffer: torch.Tensor) -> torch.Tensor:
        """Gather the whole lane from tensors arranged like the shard buffer; a collective."""
        return all_gather_flat(buffer.to(self.device).contiguous(), self.mesh_info.shard)


# The shards of a model

Named: TypeAlias = FlatLane | FlatShard | torch.Tensor


def tensor_shards(model: nn.Module) -> list[TensorShard]:
    """The parameters and persistent buffers of a model, in the order of its modules.

    Gathered parameters are resharded first.
    """
    for hooks in hooks_below(model):
        hooks.require_not_computing("save or load")
        for unit in hooks.units:
            unit.reshard_now()
            unit.refresh(plan_training=hooks.scheduler is None)
    return all_shards(model, lanes_of(model))


def all_shards(model: nn.Module, lanes: Sequence[FlatLane]) -> list[TensorShard]:
    """The parameters and persistent buffers of a model, given all of its lanes."""
    return [
        found if isinstance(found, FlatShard) else TensorShard(names, found, found.shape)
        for found, names in _grouped(model, lanes).items()
        if not isinstance(found, FlatLane)
    ]


def _grouped(model: nn.Module, lanes: Sequence[FlatLane]) -> dict[Named, tuple[str, ...]]:
    """All names of every tensor and lane, in the order of modules."""
    names: dict[Named, list[str]] = {}
    for name, found in walk(model, lanes):
        names.setdefault(found, []).append(name)
    return {found: tuple(dict.fromkeys(each)) for found, each in names.items()}


def walk(model: nn.Module, lanes: Sequence[FlatLane]) -> Iterator[tuple[str, Named]]:
    """What a state dict may hold, by name, in the order of modules.

    A tied parameter comes under each of its names, and a lane under that of its flat parameter.
    """
    lanes_at: dict[nn.Module, list[FlatLane]] = {}
    shards_at: dict[nn.Module, dict[str, FlatShard]] = {}
    for lane in lanes:
        lanes_at.setdefault(lane.wrapper, []).append(lane)
    shards = (shard for lane in lanes for shard in lane.shards)
    for shard in sorted(shards, key=lambda shard: shard.slot.param_index):
        for location in shard.param.locations:
            shards_at.setdefault(location.module, {})[location.name] = shard
    flat_params = {lane.holder.param for lane in lanes if lane.holder is not None}
    for path, module in model.named_modules(remove_duplicate=False):
        before = clean_name(f"{path}.") if path else ""
        for lane in lanes_at.get(module, ()):
            yield before + lane.name, lane
        registered: dict[str, Any] = {**module._parameters, **module._buffers}
        for name in module._non_persistent_buffers_set:
            registered.pop(name, None)
        own = shards_at.get(module, {})
        others = {name: shard for name, shard in own.items() if name not in registered}
        for name, found in {**others, **registered, **own}.items():
            if found is not None and found not in flat_params:
                yield before + name, found


def _wrapper_hooks(module: nn.Module) -> ModuleHooks | None:
    hooks = hooks_of(module)
    return hooks if hooks is not None and hooks.units[0].flat is not None else None


def wrappers_of(model: nn.Module) -> list[nn.Module]:
    """The wrappers at or below a module, outer ones first."""
    return [module for module in model.modules() if _wrapper_hooks(module) is not None]


def units_of(wrapper: nn.Module) -> list[Unit]:
    """The units of a wrapper: one, and one for each large parameter (rule 15: large units)."""
    hooks = _wrapper_hooks(wrapper)
    assert hooks is not None  # it is a wrapper
    return hooks.units


def lanes_of(model: nn.Module, *, recurse: bool = True, what: str = "state_dict") -> list[FlatLane]:
    """The lanes of all wrappers at or below a module; without `recurse`, of the module itself.

    `what` is the call that needs them, for messages.
    """
    lanes: list[FlatLane] = []
    for wrapper in wrappers_of(model) if recurse else [model]:
        hooks = _wrapper_hooks(wrapper)
        if hooks is not None:
            hooks.require_not_computing(what)
            own = [lane for unit in hooks.units for lane in _lanes_of_unit(wrapper, unit)]
            for number, lane in enumerate(own):
                lane.name = flat_name(number)
            lanes += own
    return _with_names(model, lanes)


def borrowed_lanes_of(wrapper: nn.Module) -> list[FlatLane]:
    """Lanes of wrappers elsewhere that own parameters which modules in this wrapper use.

    They are limited to those tied parameters, which have their names in this wrapper.
    """
    hooks = _wrapper_hooks(wrapper)
    if hooks is None or not hooks.lenders:
        return []
    inside = set(wrappers_of(wrapper))
    lanes: list[FlatLane] = []
    for unit in hooks.lenders:
        owner = hooks_of_unit(unit)
        if owner is not None and owner.modules[0] not in inside:
            lanes += _lanes_of_unit(owner.modules[0], unit)
    for lane in _with_names(wrapper, lanes):
        lane.shards = [shard for shard in lane.shards if shard.names]
    return [lane for lane in lanes if lane.shards]


def _lanes_of_unit(wrapper: nn.Module, unit: Unit) -> list[FlatLane]:
    if not unit.is_summoned:  # else its parameters have their full shapes, and stay so
        unit.reshard_now()
        unit.refresh()
    return [FlatLane(wrapper, unit, index) for index in range(len(unit.layout.lanes))]


def tp_groups_of(lanes: Sequence[FlatLane]) -> list[dist.ProcessGroup | None]:
    """The process groups over which parameters are parts of DTensors."""
    groups = (g for lane in lanes for shard in lane.shards for g in shard.param.tp_groups)
    return list(dict.fromkeys(groups))


def _with_names(model: nn.Module, lanes: list[FlatLane]) -> list[FlatLane]:
    names = _grouped(model, lanes)
    for shard in (shard for lane in lanes for shard in lane.shards):
        shard.names = names.get(shard, ())
    return lanes


def exchange(
    groups: Sequence[dist.ProcessGroup | None], value: _T, problem: Exception | None = None
) -> list[list[_T]]:
    """Return, for each group, the values of its ranks; raise if any of them has a problem.

    A rank that has a problem takes part, so that the others learn of it and do not wait forever.
    """
    # As text: not every exception can be sent.
    kind = type(problem) if isinstance(problem, FullshardError) else DisagreementError
    said = None if problem is None else (kind, f"rank {dist.get_rank()}: {problem}")
    values: list[list[_T]] = []
    for group in groups:
        answers: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, (said, value), group=group)
        said = next((other for other, _ in answers if other is not None), None)
        values.append([each for _, each in answers])
    if problem is not None:
        raise problem
    if said is not None:
        raise said[0](said[1])
    return values


# What is chosen of a model


def selection(
    only: str | Callable[[str], bool] | None,
) -> tuple[Callable[[TensorShard], bool], str]:
    """Return a function that tells whether a tensor was chosen, and what was chosen in words."""
    if only is None:
        return lambda _: True, "all"
    if only == "trainable":
        return lambda shard: shard.is_trainable, "trainable parameters"
    if callable(only):
        name = getattr(only, "__name__", type(only).__name__)
        return lambda shard: bool(only(shard.name)), f"names that {name} accepts"
    raise ConfigError(
        f"only: pass 'trainable' or a function of a name, not {only!r}; leave it out to save "
        "everything."
    )


def require_values(shard: TensorShard, purpose: str) -> None:
    if shard.tensor.is_meta:
        raise LifecycleError(
            f"{shard.name} is on meta and has no values to be {purpose}; load or initialize the "
            "model first, or call model.to_empty(device=...)."
        )
