"""`FullyShardedDataParallel` wraps a module and shards its parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import api
from fullshard._torch import devices_of
from fullshard.api import *  # noqa: F403
from fullshard.api import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    own_precision,
    own_value,
)
from fullshard.comm.mesh import current_device, mesh_info_for_strategy
from fullshard.compat.framework_attributes import (
    TrainingState,
    WrapperAttributes,
    training_state_of,
)
from fullshard.compat.torch_helpers import follow_import
from fullshard.errors import ConfigError, FullshardError, LifecycleError, MisuseError
from fullshard.fully_shard import settings_scope
from fullshard.optim.clip import Groups, clip_grads
from fullshard.runtime.build import build_hooks, join, managed_modules
from fullshard.runtime.hooks import (
    ShardRequest,
    UnshardHandle,
    hooks_of,
    require_hooks,
    units_below,
)
from fullshard.runtime.names import WRAPPED, clean_name
from fullshard.runtime.sharded_module import ShardedModule
from fullshard.runtime.trees import map_tensors
from fullshard.state import module_state, optim_state, summon
from fullshard.state.materialize import broadcast_states, initialize
from fullshard.state.shards import wrappers_of
from fullshard.unit.flat_param import FlatParameter, FlatSlice, ParamForm
from fullshard.unit.grad_lane import require_plain_wires
from fullshard.unit.settings import UnitSettings
from fullshard.wrap import Chosen, CustomPolicy, ModuleWrapPolicy, choose, wrap_chosen

__all__ = [
    "CustomPolicy",
    "FlatParameter",
    "FullyShardedDataParallel",
    "ModuleWrapPolicy",
    "TrainingState",
]
__all__ += api.__all__


class FullyShardedDataParallel(ShardedModule, WrapperAttributes, nn.Module):
    """Shards a module's parameters over ranks: gathered to compute, reduced, freed.

    The parameters of the module that do not belong to an inner wrapper form one unit. Wrap inner
    modules first, or let `auto_wrap_policy` choose them. Names, arguments, defaults and meaning are
    those of `torch.distributed.fsdp.FullyShardedDataParallel`.

    Args:
        module: The module to wrap.
        process_group: The ranks to shard over, by default all; for hybrid strategies a pair: those
            to shard over, and those to replicate over.
        sharding_strategy: What is sharded, and how long it stays unsharded.
        cpu_offload: Whether shards and their gradients live in host memory.
        auto_wrap_policy: Which modules inside become units of their own: see `fullshard.wrap`.
        backward_prefetch: When backward gathers the next unit; with None, when it is reached.
        mixed_precision: The dtypes to compute, reduce and keep buffers in.
        ignored_modules: Like `ignored_states`, but only modules.
        param_init_fn: Gives memory and values to a module's parameters and buffers on meta; called
            on each module that has any, for its own only. By default `reset_parameters`.
        device_id: The device that computes. By default the mesh's, the parameters', or the
            current one of the process group.
        sync_module_states: Let all ranks start with the first rank's parameters and buffers.
        forward_prefetch: Before a unit computes, gather the unit that ran after it in the last
            forward.
        limit_all_gathers: Accepted for compatibility with torch. The memory of all-gathers is
            bounded either way: it is returned to the stream that gathers.
        use_orig_params: Whether the optimizer sees the original parameters (as slices) or one
            `FlatParameter` per unit (one more for every further dtype, and for frozen ones).
        ignored_states: Parameters to ignore, and modules to ignore with everything in them. Those
            that are not in `module` have no effect.
        device_mesh: The ranks as a mesh: one axis, or two (replicate, shard) for hybrid.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[Any] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        if mixed_precision:
            mixed_precision = own_precision(MixedPrecision, mixed_precision)
        backward_prefetch = own_value(BackwardPrefetch, backward_prefetch)
        options = {key: value for key, value in locals().items() if key not in _OWN}
        super().__init__()
        strategy = _checked_strategy(module, sharding_strategy, backward_prefetch)
        ignored, ignored_params = _ignored(module, ignored_modules or (), ignored_states or ())
        if auto_wrap_policy is not None:
            _wrap_by_policy(module, auto_wrap_policy, type(self), ignored, ignored_params, options)
        device = _compute_device(module, device_id, process_group, device_mesh)
        mesh_info = mesh_info_for_strategy(strategy, process_group, device_mesh, device.type)
        own = [inner for _, inner in managed_modules([module], ignored)]
        initialize(own, param_init_fn, device, ignored_params)
        if sync_module_states:
            broadcast_states(own, ignored_params, mesh_info, device)
        if mesh_info.main.size == 1 and strategy is not ShardingStrategy.NO_SHARD:
            # As in torch, a group of one rank shards nothing.
            warnings.warn(
                f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size "
                "is 1; give more ranks, or pass NO_SHARD.",
                stacklevel=2,
            )
            strategy = ShardingStrategy.NO_SHARD
        self.sharding_strategy = strategy
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self.compute_device = device
        self.mixed_precision = precision = mixed_precision or MixedPrecision()
        self._fsdp_wrapped_module = module
        self._device_mesh = device_mesh
        self._buffer_dtypes: dict[str, torch.dtype] = {}
        self._is_summoned = False
        request = ShardRequest(
            modules=(self,),
            mesh_info=mesh_info,
            device=device,
            policy=_policy_of(precision),
            offload=CPUOffloadPolicy() if self.cpu_offload.offload_params else OffloadPolicy(),
            settings=UnitSettings(
                reshard_after_forward=False if strategy in _KEEPS_FULL else None,
                keep_low_precision_grads=precision.keep_low_precision_grads,
            ),
            ignored=ignored_params,
            ignored_modules=ignored,
            form=ParamForm.ORIG_PARAMS if use_orig_params else ParamForm.FLAT_PARAM,
            owner=module,
            prefetches_forward=forward_prefetch,
            backward_prefetch=backward_prefetch,
            casts_root_inputs=precision.cast_root_forward_inputs,
        )
        build_hooks(request)
        module_state.install_state_dict_hooks(self)

    # What was asked for, besides the attributes that are set above

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that parameters are sharded over; with NO_SHARD, replicated over."""
        return require_hooks(self).request.mesh_info.main.group

    @property
    def rank(self) -> int:
        """This rank in `process_group`."""
        return require_hooks(self).request.mesh_info.main.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in `process_group`."""
        return require_hooks(self).request.mesh_info.main.size

    @property
    def training_state(self) -> TrainingState:
        """What this wrapper is doing."""
        return training_state_of(self)

    @property
    def params(self) -> list[FlatParameter]:
        """The flat parameter of this wrapper, if it has parameters."""
        return [] if self._flat_param is None else [self._flat_param]

    # The module inside

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without an activation-checkpointing wrapper around it."""
        inner: nn.Module = self._fsdp_wrapped_module
        return getattr(inner, "_checkpoint_wrapped_module", inner)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: int) -> Any:
        return self.module.__getitem__(key)  # type: ignore[operator]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; before its first forward, cast buffers as was asked for."""
        dtype = self.mixed_precision.buffer_dtype
        if dtype is not None and not self._buffer_dtypes:
            for path, module in managed_modules([self]):
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.is_floating_point():
                        self._buffer_dtypes[clean_name(join(path, name))] = buffer.dtype
                        module._buffers[name] = buffer.to(dtype)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module."""
        return self._fsdp_wrapped_module(*args, **kwargs)

    def check_is_root(self) -> bool:
        """Whether this is the outermost wrapper."""
        hooks = require_hooks(self)
        return hooks.ensure_scheduler().root is hooks

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers at or below a module; with `root_only`, the outermost ones."""
        found = [m for m in wrappers_of(module) if isinstance(m, FullyShardedDataParallel)]
        return [each for each in found if each.check_is_root()] if root_only else found

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply a function to every module inside; it sees full parameters and may change them."""
        state = self.training_state
        if state is not TrainingState.IDLE:
            raise MisuseError(
                f"{require_hooks(self).name}: apply is expected to be in states "
                f"[{TrainingState.IDLE!r}] but current state is {state}; call "
                "it outside of forward, backward and summon_full_params."
            )
        with summon.summon_full_params(self, recurse=False, writeback=True):
            super().apply(fn)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As for any module; inside `summon_full_params`, without what wrapping adds to names."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield name.replace(f"{WRAPPED}.", "") if self._is_summoned else name, param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As for any module; inside `summon_full_params`, without what wrapping adds to names."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield name.replace(f"{WRAPPED}.", "") if self._is_summoned else name, buffer

    # Training

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication inside this scope. Only on the root."""
        self._require_root("`no_sync()` on inner FSDP instances is not supported")
        units = units_below(self)
        return settings_scope(units, requires_gradient_sync=False, requires_all_reduce=False)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm.

        Only on the root, on all ranks; counts sharded and unsharded parameters alike.
        """
        self._require_root("`clip_grad_norm_()` should only be called on the root FSDP instance")
        managed: set[nn.Parameter] = set()
        sharded: list[tuple[Iterable[torch.Tensor], Groups]] = []
        for unit in units_below(self):
            params = dict.fromkeys(member.param for member in unit.params)
            managed.update(params)
            axis = unit.mesh_info.shard
            groups: Groups = () if axis.is_single else (axis.group,)
            slices = [member for member in unit.params if isinstance(member, FlatSlice)]
            if not any(member.full_spec for member in slices):
                sharded.append((params, groups))
                continue
            # One by one: parts of a flat parameter may be split over further axes.
            sharded += [([each.with_own_grad], (*groups, *each.tp_groups)) for each in slices]
        others = [param for param in self.parameters() if param not in managed]
        request = require_hooks(self).request
        require_hooks(self).enter_call("clip_grad_norm_")
        total = clip_grads(sharded, others, max_norm, norm_type, request.device)
        return total.cpu() if isinstance(request.offload, CPUOffloadPolicy) else total

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Reduce gradients by `hook(state, gradients, shard)` instead, which also scales them.

        With NO_SHARD it is called as `hook(state, gradients)`. Only on the root, once.
        """
        if not callable(hook):
            raise ConfigError(
                f"register_comm_hook: The communication hook must be callable but got {hook}; "
                "pass a function of (state, gradients, shard)."
            )
        self._require_root("register_comm_hook can only be called on a root instance", MisuseError)
        units = units_below(self)
        if any(unit.mesh_info.shard.group and unit.mesh_info.replicate.group for unit in units):
            raise MisuseError(
                "register_comm_hook: Communication hook is not supported for hybrid strategies, "
                f"such as {self.sharding_strategy}; hooks do not know of replicas."
            )
        if any(unit.comm.comm_hook is not None for unit in units):
            raise MisuseError(
                "register_comm_hook: A communication hook is already registered; build the "
                "model anew to register another."
            )
        for unit in units:
            require_plain_wires("register_comm_hook", unit.name, unit.layout)
        for unit in units:
            unit.comm.comm_hook = partial(hook, state)

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this wrapper's parameters; with `async_op`, returns a handle to wait for."""
        return require_hooks(self).unshard(async_op)

    def _require_root(self, rule: str, kind: type[FullshardError] = LifecycleError) -> None:
        if not self.check_is_root():
            raise kind(
                f"{require_hooks(self).name}: {rule}; call it on the outermost wrapper, not on one "
                "inside it."
            )

    # State

    summon_full_params = staticmethod(summon.summon_full_params)
    set_state_dict_type = staticmethod(module_state.set_settings)
    get_state_dict_type = staticmethod(module_state.settings_of)
    state_dict_type = staticmethod(module_state.settings_scope)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As for any module, but what does not fit is refused before anything is written."""
        with module_state.strict_loading(self, strict):
            return super().load_state_dict(state_dict, strict, assign)

    optim_state_dict = staticmethod(optim_state.optim_state_dict)
    full_optim_state_dict = staticmethod(optim_state.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optim_state.sharded_optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_state.optim_state_dict_to_load)
    shard_full_optim_state_dict = staticmethod(optim_state.shard_full_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optim_state.scatter_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optim_state.flatten_sharded_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optim_state.rekey_optim_state_dict)


# Arguments of the outermost wrapper that the wrappers which a policy makes do not share.
_OWN = {"self", "__class__", "module", "auto_wrap_policy", "ignored_modules", "ignored_states"}
_KEEPS_FULL = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


# What was asked for


def _checked_strategy(module: Any, strategy: Any, backward_prefetch: Any) -> ShardingStrategy:
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"FullyShardedDataParallel takes an nn.Module, not a {type(module).__name__}; pass "
            "the module itself."
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        warnings.warn(
            "FSDP will not all-gather parameters for containers that do not implement forward, "
            f"such as a {type(module).__name__}; wrap the modules inside, or the module around it.",
            stacklevel=3,
        )
    strategy = own_value(ShardingStrategy, strategy)
    strategy = ShardingStrategy.FULL_SHARD if strategy is None else strategy
    prefetch = BackwardPrefetch.BACKWARD_PRE if backward_prefetch is None else backward_prefetch
    for name, given, kind in (
        ("sharding_strategy", strategy, ShardingStrategy),
        ("backward_prefetch", prefetch, BackwardPrefetch),
    ):
        if not isinstance(given, kind):
            raise ConfigError(
                f"{name} must be one of {[str(each) for each in kind]}, not {given!r}; import "
                f"{kind.__name__} from fullshard."
            )
    return cast(ShardingStrategy, strategy)


def _policy_of(precision: MixedPrecision) -> MixedPrecisionPolicy:
    """What units take of a wrapper's precision; the wrapper does the rest."""
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
        cast_forward_inputs=precision.cast_forward_inputs,
        wire_dtype=precision.wire_dtype,
        gather_wire=precision.gather_wire,
        reduce_wire=precision.reduce_wire,
        replica_wire=precision.replica_wire,
    )


def _ignored(
    module: nn.Module, ignored_modules: Iterable[Any], ignored_states: Iterable[Any]
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """The modules and parameters to leave alone, with everything that is in the modules."""
    modules: set[nn.Module] = set()
    params: set[nn.Parameter] = set()
    for name, kinds, given in (
        ("ignored_modules", (nn.Module,), ignored_modules),
        ("ignored_states", (nn.Module, nn.Parameter), ignored_states),
    ):
        for each in given:
            if not isinstance(each, kinds):
                wanted = " or all ".join(f"nn.{kind.__name__}" for kind in reversed(kinds))
                raise ConfigError(
                    f"{name} expects {'all ' * (len(kinds) > 1)}{wanted} list elements but got "
                    f"types [{type(each)}]; pass modules of the model itself, and "
                    "parameters as ignored_states."
                )
            if isinstance(each, nn.Module) and hooks_of(each) is not None:
                raise ConfigError(
                    f"{name}: `{name}` should not include FSDP modules, such as this "
                    f"{type(each).__name__}; pass modules of the model itself."
                )
            if isinstance(each, nn.Module):
                modules.update(each.modules())
                params.update(each.parameters())
            else:
                params.add(each)
    if module in modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will "
            "result in all parameters being ignored; ignore modules inside the "
            f"{type(module).__name__}.",
            stacklevel=3,
        )
    return modules, params


def _compute_device(
    module: nn.Module,
    device_id: int | torch.device | str | None,
    process_group: Any,
    device_mesh: Any,
) -> torch.device:
    """The device of a wrapper: the given one, that of its mesh or parameters, or the best one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device_id, int):
        if accelerator is None:
            raise ConfigError(
                f"device_id: {device_id} names an accelerator, and there is none; pass "
                "torch.device('cpu') or leave it out."
            )
        return torch.device(accelerator.type, device_id)
    if device_id is not None:
        given = torch.device(device_id)
        return current_device(given.type) if given.index is None else given
    if isinstance(device_mesh, DeviceMesh):
        return current_device(device_mesh.device_type)
    for param in module.parameters():
        if param.device.type not in ("cpu", "meta"):
            return param.device
    group = process_group[0] if isinstance(process_group, (tuple, list)) else process_group
    group = dist.group.WORLD if group is None else group
    types = {device.type for device in devices_of(group)} if group is not None else set()
    # A group that is written in Python does not tell its devices.
    if accelerator is not None and (accelerator.type in types or (group and not types)):
        return current_device(accelerator.type)
    return torch.device("cpu")


# Wrapping by a policy


def _wrap_by_policy(
    module: nn.Module,
    policy: Any,
    wrapper_cls: Callable[..., nn.Module],
    ignored: set[nn.Module],
    ignored_params: set[nn.Parameter],
    options: dict[str, Any],
) -> None:
    *units, _ = choose(
        module, policy, ignored_modules=ignored, ignored_params=ignored_params, options=options
    )
    precision = options["mixed_precision"] or MixedPrecision()
    if precision != MixedPrecision():
        units = _in_full_precision(module, units, precision, ignored)
    for unit in units:
        inside = {*unit.module.modules(), *unit.module.parameters()}
        unit.overrides["ignored_states"] = inside & (ignored | ignored_params)
    wrap_chosen(module, units, wrapper_cls, **options)


def _in_full_precision(
    module: nn.Module, units: list[Chosen], precision: MixedPrecision, ignored: set[nn.Module]
) -> list[Chosen]:
    """Give modules that must not compute in low precision a unit of their own."""
    kinds = tuple(precision._module_classes_to_ignore)
    found = {
        inner: name
        for name, inner in module.named_modules()
        if isinstance(inner, kinds) and inner not in ignored
    }
    if not found:
        return units
    names = sorted({type(inner).__name__ for inner in found})
    warnings.warn(
        f"Both mixed precision and an auto_wrap_policy were given, and the model has {names}: "
        "these become units of their own without mixed precision. Pass "
        "_module_classes_to_ignore=() to MixedPrecision to change that.",
        stacklevel=4,
    )
    for inner in found:
        _cast_around(inner)
    own = [
        Chosen(name, inner, (), {"mixed_precision": None}, "computes in full precision")
        for inner, name in found.items()
        if inner is not module
    ]
    return [*own, *(unit for unit in units if unit.module not in found)]


def _cast_around(module: nn.Module) -> None:
    """Give a module its inputs in float32, and its outputs the dtype that its inputs had."""
    seen: list[torch.dtype] = []

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            seen.append(tensor.dtype)
            return tensor.float()
        return tensor

    def narrowed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(seen[-1]) if seen and tensor.dtype == torch.float32 else tensor

    def widen(_: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.clear()
        return map_tensors(widened, (args, kwargs))

    module.register_forward_pre_hook(widen, with_kwargs=True)
    module.register_forward_hook(lambda _, args, output: map_tensors(narrowed, output))


follow_import(FullyShardedDataParallel)
