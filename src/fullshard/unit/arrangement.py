"""How the shards of a unit lie in memory: planned from the shards as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fullshard.api import MixedPrecisionPolicy
from fullshard.comm.mesh import MeshInfo
from fullshard.device import has_no_memory, type_of
from fullshard.errors import ConfigError
from fullshard.layout import CostModel, DtypePlan, ParamSpec, UnitLayout, Wire, plan_unit
from fullshard.layout.wire import Wires, require_for_params
from fullshard.unit.all_gather import ExtensionAllGather, UnitAllGather
from fullshard.unit.context import CommContext
from fullshard.unit.extensions import Extension
from fullshard.unit.flat_param import FlatParams
from fullshard.unit.grad_lane import GradLane
from fullshard.unit.param import ShardBuffers, ShardedParam
from fullshard.unit.store import Store


class Arrangement:
    """The layout of a unit's parameters, its shard buffers, and the all-gather made for both.

    Parameters with an `Extension` have a layout of their own and no shard buffers. There are no
    `shard_buffers` while parameters are on meta. `is_held` says that a state dict may hold the
    shards, so that they must stay where they are.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        flat: FlatParams | None,
        mesh_info: MeshInfo,
        policy: MixedPrecisionPolicy,
        store: Store,
        device: torch.device,
    ) -> None:
        """Plan, and move the shards into new shard buffers."""
        self._params, self._flat, self._policy = params, flat, policy
        self._axis, self._mesh_info, self._store = mesh_info.shard, mesh_info, store
        self._device = device
        self.is_held = False
        self.all_gather: UnitAllGather | None = None
        for param in params if flat is None else ():
            extension = Extension.of(param.name, param.current_local)
            if (extension is None) != (param.extension is None):
                param.extension = extension
        self.plain = plain = [param for param in params if param.extension is None]
        self.extended = [param for param in params if param.extension is not None]
        self.annotated = [param for param in params if param.annotations is not None]
        if flat is not None:
            flat.detach()
        self.layout = self._plan(plain)
        if flat is not None:
            flat.follow_layout(self.layout, plain)
        self.extension_layout = self._plan(self.extended)
        for param in self.extended:
            param.set_local(param.current_local)
        for param in params:
            param.full = None
        self.shard_buffers: ShardBuffers | None = None
        if not any(has_no_memory(param.current_local) for param in plain):
            self.shard_buffers = ShardBuffers(self.layout, plain, store, self._axis.rank)
            if flat is not None:
                flat.attach(self.layout, plain, self.shard_buffers)
        self._facts = self._facts_now()

    def _plan(self, params: Sequence[ShardedParam]) -> UnitLayout:
        policy, specs = self._policy, []
        is_flat = self._flat is not None
        trained = [
            param.grad_dtype or self._param_dtype(param) or param.dtype
            for param in self._params
            if param.is_trainable
        ]
        reduce_dtype = DtypePlan.unit_reduce_dtype(policy.reduce_dtype, trained, is_flat=is_flat)
        for param in params:
            wires = self._wires_of(param)
            plan = DtypePlan.of(param.dtype, self._param_dtype(param), reduce_dtype, *wires)
            if param.grad_dtype != param.dtype:
                plan = replace(plan, grad=param.grad_dtype)
            param.dtypes = plan
            specs.append(ParamSpec(param.name, param.split, param.dtypes, param.is_trainable))
        cost = CostModel.of_device(type_of(self._device))
        return plan_unit(specs, self._axis.size, cost, is_flat=is_flat)

    def _wires_of(self, param: ShardedParam) -> list[Wire | None]:
        """How a parameter, its gradient and sums of it travel; one rank sends nothing.

        Those of a flat layout travel together.
        """
        gather, reduce, between = self._policy.wires
        if self._axis.is_single:
            gather = reduce = None
        found = [self._wire_of(param, given) for given in (gather, reduce, between)]
        if found[0] is not None:
            require_for_params(param.name, found[0])
        return found

    def _wire_of(self, param: ShardedParam, given: Wires) -> Wire | None:
        shape = torch.Size(param.split.shape)
        wire = given if given is None or isinstance(given, Wire) else given(param.name, shape)
        if wire is None:
            return None
        if not isinstance(wire, Wire):
            raise ConfigError(
                f"{param.name}: a function that chooses wires must return one, such as "
                f"fullshard.wire.Int8(), or None, not {wire!r}."
            )
        if wire is not given and not param.dtype.is_floating_point:
            raise ConfigError(
                f"{param.name}: wires are for floating-point parameters, and this one is "
                f"{param.dtype}; let the function that chooses wires return None for it, not "
                f"{wire}."
            )
        return wire if self._flat is not None or wire.suits(shape) else None

    def _param_dtype(self, param: ShardedParam) -> torch.dtype | None:
        return None if param.keeps_dtype else self._policy.param_dtype

    def _facts_now(self) -> list[tuple[bool, torch.dtype | None, bool]]:
        """What users may change that the plan depends on, beside the shards' memory."""
        return [
            (p.is_trainable, p.grad_dtype, hasattr(p.current_local, "fsdp_pre_all_gather"))
            for p in self._params
        ]

    def has_shards(self) -> bool:
        """Whether the shards still lie where they were put."""
        flat, buffers = self._flat, self.shard_buffers
        return flat is None or buffers is None or flat.are_current(buffers)

    def is_planned_alike(self) -> bool:
        """Whether the same would be planned now."""
        return self._facts == self._facts_now()

    def make_all_gather(self, comm_ctx: CommContext) -> UnitAllGather:
        """The all-gather into the full parameters, made once."""
        if self.all_gather is None:
            assert self.shard_buffers is not None
            extensions = ExtensionAllGather(self.extended, self._mesh_info, self._policy)
            self.all_gather = UnitAllGather(
                self.layout,
                self.shard_buffers,
                self.plain,
                self._axis,
                self._store,
                comm_ctx,
                extensions,
            )
        return self.all_gather

    def forget_full(self) -> None:
        """Drop the full parameters; the next all-gather makes them anew."""
        self.all_gather = None
        for param in self._params:
            param.full = None

    def grad_lanes(self) -> Iterator[GradLane]:
        """How gradients are reduced, lane by lane."""
        axis = self._axis
        flat = {} if self._flat is None else dict(enumerate(self._flat.holders))
        for index, lane in enumerate(self.layout.lanes):
            yield GradLane(lane, self.plain, axis, flat.get(index))
        for lane in self.extension_layout.lanes:
            yield GradLane(lane, self.extended, axis)
