"""`FullyShardedDataParallel` wraps a module and shards its parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard._torch import broadcast_coalesced, devices_of
from fullshard.api import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    own_precision,
)
from fullshard.comm.mesh import HYBRID, MeshInfo, device_of, mesh_info_for_strategy
from fullshard.errors import ConfigError, LifecycleError, MisuseError
from fullshard.optim.clip import clip_grads
from fullshard.runtime.build import ShardRequest, build_hooks, managed_modules
from fullshard.runtime.hooks import ModuleHooks, UnshardHandle, hooks_of
from fullshard.runtime.names import WRAPPED, clean_name
from fullshard.runtime.replaced import replacement_of
from fullshard.runtime.scheduler import HookOptions
from fullshard.runtime.trees import map_tensors
from fullshard.state import optim_state
from fullshard.state.module_state import (
    install_state_dict_hooks,
    set_settings,
    settings_of,
    settings_scope,
    strict_loading,
)
from fullshard.state.shards import wrappers_of
from fullshard.state.summon import summon_full_params
from fullshard.unit.flat_param import ParamForm
from fullshard.unit.reduce_scatter import require_no_wire_dtype
from fullshard.unit.settings import UnitSettings
from fullshard.unit.unit import Unit
from fullshard.wrap import Chosen, choose, wrap_chosen

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class FullyShardedDataParallel(nn.Module):
    """Shards a module's parameters over ranks: gathered to compute, reduced, freed.

    The parameters of the module that no wrapper inside it has become one unit. Wrap inner modules
    first, or let `auto_wrap_policy` choose them. Names, arguments, defaults and meaning are those
    of `torch.distributed.fsdp.FullyShardedDataParallel`.

    Args:
        module: The module to wrap.
        process_group: The ranks to shard over, by default all; for hybrid strategies a pair: to
            shard in, to replicate over.
        sharding_strategy: What is split, and what is made whole for how long.
        cpu_offload: Whether shards and their gradients live in host memory.
        auto_wrap_policy: Which modules inside become units of their own: see `fullshard.wrap`.
        backward_prefetch: When backward gathers the next unit; None: when it is reached.
        mixed_precision: The dtypes to compute, reduce and keep buffers in.
        ignored_modules: Modules to leave alone, with everything in them.
        param_init_fn: Gives a module whose parameters or buffers are on meta memory and values;
            called on each such module, for its own only. By default `reset_parameters`.
        device_id: The device that computes. By default the mesh's, the parameters', or the
            current one of the process group.
        sync_module_states: Let all ranks start with the first rank's parameters and buffers.
        forward_prefetch: Gather the unit that ran next in the last forward before this one
            computes.
        limit_all_gathers: Accepted for torch's sake. What gathers may hold is bounded either way:
            memory is given back to the stream that gathers.
        use_orig_params: Whether the optimizer sees the original parameters (as slices) or one
            `FlatParameter` per unit (one more for every further dtype, and for frozen ones).
        ignored_states: Parameters, or modules, to leave alone.
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
        options = {key: value for key, value in locals().items() if key in _INHERITED}
        super().__init__()
        strategy = checked_strategy(module, sharding_strategy, backward_prefetch)
        ignored = Ignored.of(module, ignored_modules, ignored_states)
        if auto_wrap_policy is not None:
            wrap_by_policy(module, auto_wrap_policy, type(self), ignored, options)
        device = compute_device(module, device_id, process_group, device_mesh)
        mesh_info = mesh_info_for_strategy(strategy, process_group, device_mesh, device.type)
        materialize(module, param_init_fn, device, ignored)
        if sync_module_states:
            broadcast_states(module, ignored, mesh_info, device)
        self.sharding_strategy = strategy
        self.mixed_precision = mixed_precision or MixedPrecision()
        self._fsdp_wrapped_module = module
        self._device_mesh = device_mesh
        self._buffer_dtypes: dict[str, torch.dtype] = {}
        self._is_summoned = False
        request = ShardRequest(
            modules=(self,),
            mesh_info=mesh_info,
            device=device,
            policy=policy_of(self.mixed_precision),
            offload=offload_of(cpu_offload),
            settings=unit_settings(strategy, self.mixed_precision),
            ignored=ignored.params,
            ignored_modules=ignored.modules,
            form=ParamForm.ORIG_PARAMS if use_orig_params else ParamForm.FLAT_PARAM,
            owner=module,
            options=hook_options(forward_prefetch, backward_prefetch, self.mixed_precision),
        )
        build_hooks(request)
        install_state_dict_hooks(self)

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
        """Run the module. Hooks see what it returns, but not all that it may raise."""
        self._cast_buffers()
        return _hooks(self).guarded(super().__call__, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module."""
        return self._fsdp_wrapped_module(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise MisuseError(
            f"{type(self).__name__}: a wrapped module must not be copied object by object, found "
            "copy.deepcopy on it; copy before wrapping, or build a second model, wrap it alike and "
            "load the state dict of this one."
        )

    def check_is_root(self) -> bool:
        """Whether this is the outermost wrapper."""
        return _hooks(self).ensure_scheduler().root is _hooks(self)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers at or below a module; with `root_only`, the outermost ones."""
        found = [m for m in wrappers_of(module) if isinstance(m, FullyShardedDataParallel)]
        return [each for each in found if each.check_is_root()] if root_only else found

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply a function to every module inside; it sees full parameters and may change them."""
        with summon_full_params(self, recurse=False, writeback=True):
            super().apply(fn)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; inside `summon_full_params` the names are those of the model."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield clean_name(name) if self._is_summoned else name, param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As of any module; inside `summon_full_params` the names are those of the model."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean_name(name) if self._is_summoned else name, buffer

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or convert the shards, and plan the units again."""
        hooks = _hooks(self)
        for unit in hooks.reads:
            unit.reshard_now()
        result = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        for unit in hooks.units:
            unit.refresh()
        return result

    def _cast_buffers(self) -> None:
        """Before the first forward: buffers in the dtype that was asked for."""
        dtype = self.mixed_precision.buffer_dtype
        if dtype is None or self._buffer_dtypes:
            return
        for path, module in managed_modules([self], ()):
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    key = clean_name(f"{path}.{name}" if path else name)
                    self._buffer_dtypes[key] = buffer.dtype
                    module._buffers[name] = buffer.to(dtype)

    # Training

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication inside this scope. Only on the root."""
        self._require_root("no_sync")
        units = _units_below(self)
        before = [unit.settings for unit in units]
        try:
            for unit in units:
                unit.set(requires_gradient_sync=False, requires_all_reduce=False)
            yield
        finally:
            for unit, settings in zip(units, before, strict=True):
                unit.settings = settings

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm.

        Only on the root, on all ranks; counts sharded and unsharded parameters alike.
        """
        self._require_root("clip_grad_norm_")
        managed: set[nn.Parameter] = set()
        sharded: list[tuple[list[nn.Parameter], dist.ProcessGroup | None]] = []
        for unit in _units_below(self):
            params = list(dict.fromkeys(member.param for member in unit.params))
            managed.update(params)
            axis = unit.mesh_info.shard
            sharded.append((params, None if axis.is_single else axis.group))
        others = [param for param in self.parameters() if param not in managed]
        total = clip_grads(sharded, others, max_norm, norm_type, _hooks(self).device)
        is_offloaded = isinstance(_hooks(self).units[0].offload, CPUOffloadPolicy)
        return total.cpu() if is_offloaded else total

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Reduce gradients by `hook(state, gradients, shard)` instead; scaling is the hook's, too.

        With NO_SHARD it is called as `hook(state, gradients)`. Only on the root, once.
        """
        if not callable(hook):
            raise ConfigError(
                f"register_comm_hook: a function is expected, found {hook!r}; pass one that takes "
                "(state, gradients, shard)."
            )
        if not self.check_is_root():
            raise MisuseError(
                "register_comm_hook: it must be called on the root, found a wrapper inside another "
                "one; call it on the outermost wrapper."
            )
        units = _units_below(self)
        if any(wrapper.sharding_strategy in HYBRID for wrapper in self.fsdp_modules(self)):
            raise MisuseError(
                "register_comm_hook: a strategy with one process group is expected, found "
                f"{self.sharding_strategy}; hooks do not know of replicas."
            )
        if any(unit.comm.comm_hook is not None for unit in units):
            raise MisuseError(
                "register_comm_hook: one hook can be registered, found one already; build the "
                "model anew to register another."
            )
        for unit in units:
            require_no_wire_dtype("register_comm_hook", unit.name, unit.mesh_info, unit.policy)
        for unit in units:
            unit.comm.comm_hook = partial(hook, state)

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this wrapper's parameters; with `async_op`, returns a handle to wait for."""
        return _hooks(self).unshard(async_op)

    def _require_root(self, what: str) -> None:
        if not self.check_is_root():
            raise LifecycleError(
                f"{_hooks(self).name}: {what}() must be called on the root, found a wrapper "
                "inside another one; call it on the outermost wrapper."
            )

    # State

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Show full parameters under their original names inside this scope.

        With `writeback`, what is changed inside stays. `rank0_only` shows them on the first rank
        alone, `offload_to_cpu` in host memory, `with_grads` together with their gradients.
        """
        return summon_full_params(
            module, recurse, writeback, rank0_only, offload_to_cpu, with_grads
        )

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose what state dicts hold, for all wrappers at or below a module."""
        return set_settings(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """What state dicts hold."""
        return settings_of(module)

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> AbstractContextManager[None]:
        """Choose what state dicts hold inside a scope."""
        return settings_scope(module, state_dict_type, state_dict_config, optim_state_dict_config)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As of any module, but what does not fit is refused before anything is written."""
        with strict_loading(self, strict):
            return super().load_state_dict(state_dict, strict, assign)

    optim_state_dict = staticmethod(optim_state.optim_state_dict)
    full_optim_state_dict = staticmethod(optim_state.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optim_state.sharded_optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_state.optim_state_dict_to_load)
    shard_full_optim_state_dict = staticmethod(optim_state.shard_full_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optim_state.scatter_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optim_state.flatten_sharded_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optim_state.rekey_optim_state_dict)


# What wrappers that a policy makes have in common with the outermost one.
_INHERITED = frozenset(
    {
        "process_group",
        "sharding_strategy",
        "cpu_offload",
        "backward_prefetch",
        "mixed_precision",
        "param_init_fn",
        "device_id",
        "sync_module_states",
        "forward_prefetch",
        "limit_all_gathers",
        "use_orig_params",
        "device_mesh",
    }
)


def _hooks(module: nn.Module) -> ModuleHooks:
    hooks = hooks_of(module)
    assert hooks is not None  # the constructor made it
    return hooks


def _units_below(module: nn.Module) -> list[Unit]:
    hooks_list = [hooks for inner in module.modules() if (hooks := hooks_of(inner)) is not None]
    return [unit for hooks in dict.fromkeys(hooks_list) for unit in hooks.units]


_BUCKET_BYTES = 250 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Ignored:
    """What a wrapper leaves alone: modules with all that is in them, and parameters."""

    modules: frozenset[nn.Module]
    params: frozenset[nn.Parameter]
    given: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls,
        module: nn.Module,
        ignored_modules: Iterable[nn.Module] | None,
        ignored_states: Iterable[Any] | None,
    ) -> Ignored:
        if ignored_modules is not None and ignored_states is not None:
            raise ConfigError(
                "FullyShardedDataParallel: ignored_modules or ignored_states is expected, found "
                "both; pass ignored_states alone."
            )
        name = "ignored_states" if ignored_modules is None else "ignored_modules"
        given = _as_tuple(name, ignored_states if ignored_modules is None else ignored_modules)
        params = [each for each in given if isinstance(each, nn.Parameter)]
        modules = [each for each in given if isinstance(each, nn.Module)]
        if len(params) + len(modules) < len(given) or (params and modules):
            kinds = sorted({type(each).__name__ for each in given})
            raise ConfigError(
                f"{name}: only modules, or only parameters, are expected, found {kinds}; pass one "
                "kind."
            )
        if name == "ignored_modules" and params:
            raise TypeError(
                f"{name}: modules are expected, found a parameter; pass it as ignored_states."
            )
        _require_inside(name, module, params, modules)
        inside = frozenset(inner for each in modules for inner in each.modules())
        found = {p for each in modules for p in each.parameters()}
        return cls(inside, frozenset([*params, *found]), given)

    def within(self, module: nn.Module) -> tuple[Any, ...]:
        """What of it is in a module."""
        inside: set[Any] = {*module.modules(), *module.parameters()}
        return tuple(each for each in self.given if each in inside)


def _as_tuple(name: str, given: Iterable[Any] | None) -> tuple[Any, ...]:
    if given is None:
        return ()
    try:
        return tuple(given)
    except TypeError:
        raise TypeError(
            f"{name}: an iterable is expected, found {type(given).__name__}; pass a list."
        ) from None


def _require_inside(
    name: str, module: nn.Module, params: list[nn.Parameter], modules: list[nn.Module]
) -> None:
    inside = set(module.modules())
    held = set(module.parameters())
    for each in modules:
        if hooks_of(each) is not None:
            raise ConfigError(
                f"{name}: modules that are not wrapped are expected, found a "
                f"{type(each).__name__}; ignore it when it would be wrapped."
            )
        if each not in inside:
            raise ConfigError(
                f"{name}: a module of {type(module).__name__} is expected, found a "
                f"{type(each).__name__} that is not in it; pass modules of the model itself."
            )
    for param in params:
        if param not in held:
            raise ConfigError(
                f"{name}: a parameter of {type(module).__name__} is expected, found one of shape "
                f"{tuple(param.shape)} that is not in it; pass parameters of the model itself."
            )


# What was asked for


def checked_strategy(module: Any, strategy: Any, backward_prefetch: Any) -> ShardingStrategy:
    """The sharding strategy: FULL_SHARD unless another is given."""
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"FullyShardedDataParallel: an nn.Module is expected, found {type(module).__name__}; "
            "pass the module itself."
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        warnings.warn(
            f"FullyShardedDataParallel: a module that is called is expected, found "
            f"{type(module).__name__}, which has no forward: its parameters will not be gathered "
            "when the modules inside run. Wrap those, or the module around it.",
            stacklevel=3,
        )
    if backward_prefetch is not None and not isinstance(backward_prefetch, BackwardPrefetch):
        raise ConfigError(
            f"backward_prefetch: one of {[str(each) for each in BackwardPrefetch]} or None is "
            f"expected, found {backward_prefetch!r}; import BackwardPrefetch from fullshard."
        )
    if strategy is None:
        return ShardingStrategy.FULL_SHARD
    if not isinstance(strategy, ShardingStrategy):
        raise ConfigError(
            f"sharding_strategy: one of {[str(each) for each in ShardingStrategy]} is expected, "
            f"found {strategy!r}; import ShardingStrategy from fullshard."
        )
    return strategy


def compute_device(
    module: nn.Module,
    device_id: int | torch.device | str | None,
    process_group: Any,
    device_mesh: DeviceMesh | None,
) -> torch.device:
    """Where a wrapper computes: as asked for, as its mesh or its parameters say, or the best."""
    if isinstance(device_id, int):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            raise ConfigError(
                f"device_id: a number names an accelerator, found {device_id} and no accelerator; "
                "pass torch.device('cpu') or leave it out."
            )
        return torch.device(accelerator.type, device_id)
    if device_id is not None:
        return _indexed(torch.device(device_id))
    if isinstance(device_mesh, DeviceMesh):
        return device_of(device_mesh)
    for param in module.parameters():
        if param.device.type not in ("cpu", "meta"):
            return param.device
    group = process_group[0] if isinstance(process_group, (tuple, list)) else process_group
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not dist.is_initialized():
        return torch.device("cpu")
    group = dist.group.WORLD if group is None else group
    if isinstance(group, dist.ProcessGroup) and accelerator.type in {
        device.type for device in devices_of(group)
    }:
        return _indexed(accelerator)
    return torch.device("cpu")


def _indexed(device: torch.device) -> torch.device:
    """The device with its number: the current one, unless one is given."""
    if device.type == "cpu" or ":" in str(device):
        return device
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


_RESHARDS = {
    # None: unless it is the root, which backward starts with.
    ShardingStrategy.FULL_SHARD: None,
    ShardingStrategy.HYBRID_SHARD: None,
    ShardingStrategy.SHARD_GRAD_OP: False,
    ShardingStrategy._HYBRID_SHARD_ZERO2: False,
    ShardingStrategy.NO_SHARD: None,
}


def policy_of(precision: MixedPrecision) -> MixedPrecisionPolicy:
    """The dtypes, in the engine's words."""
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
        cast_forward_inputs=precision.cast_forward_inputs,
        wire_dtype=precision.wire_dtype,
    )


def unit_settings(strategy: ShardingStrategy, precision: MixedPrecision) -> UnitSettings:
    """How a unit behaves under a strategy."""
    return UnitSettings(
        reshard_after_forward=_RESHARDS[strategy],
        keep_low_precision_grads=precision.keep_low_precision_grads,
    )


def hook_options(
    forward: bool, backward: BackwardPrefetch | None, precision: MixedPrecision
) -> HookOptions:
    """When a wrapper prefetches, and what it casts."""
    return HookOptions(
        prefetches_forward=forward,
        backward_prefetch=backward,
        casts_root_inputs=precision.cast_root_forward_inputs,
    )


def offload_of(offload: CPUOffload | None) -> OffloadPolicy:
    """Where the shards live."""
    return CPUOffloadPolicy() if offload is not None and offload.offload_params else OffloadPolicy()


# Wrapping by a policy


def wrap_by_policy(
    module: nn.Module,
    policy: Any,
    wrapper_cls: Callable[..., nn.Module],
    ignored: Ignored,
    options: dict[str, Any],
) -> None:
    """Wrap what a policy chooses inside a module."""
    choice = choose(
        module,
        policy,
        ignored_modules=ignored.modules,
        ignored_params=ignored.params,
        options=options,
    )
    units = list(choice.units)
    precision = options.get("mixed_precision")
    if isinstance(precision, MixedPrecision) and precision != MixedPrecision():
        units = _in_full_precision(module, units, precision, ignored)
    units = [
        replace(
            unit,
            overrides={**unit.overrides, "ignored_states": ignored.within(unit.module) or None},
        )
        for unit in units
    ]
    wrap_chosen(module, units, wrapper_cls, **options)


def _in_full_precision(
    module: nn.Module, units: list[Chosen], precision: MixedPrecision, ignored: Ignored
) -> list[Chosen]:
    """Give modules that must not compute in low precision a unit of their own."""
    kinds = tuple(precision._module_classes_to_ignore)
    found = [
        (name, inner)
        for name, inner in module.named_modules()
        if kinds and isinstance(inner, kinds) and inner not in ignored.modules
    ]
    if not found:
        return units
    names = sorted({type(inner).__name__ for _, inner in found})
    warnings.warn(
        f"Both mixed precision and an auto_wrap_policy were given, and the model has {names}: "
        "these become units of their own without mixed precision. Pass "
        "_module_classes_to_ignore=() to MixedPrecision to change that.",
        stacklevel=4,
    )
    overrides = {"mixed_precision": None}
    kept = {inner for _, inner in found}
    own = [
        Chosen(name, inner, (), overrides, "computes in full precision")
        for name, inner in found
        if inner is not module
    ]
    for _, inner in found:
        _cast_around(inner)
    return [*own, *(unit for unit in units if unit.module not in kept)]


def _cast_around(module: nn.Module) -> None:
    """Give a module its inputs in float32, and its outputs the dtype that its inputs had."""
    seen: list[torch.dtype] = []

    def widen(_: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.clear()

        def widened(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point() or tensor.dtype == torch.float32:
                return tensor
            seen.append(tensor.dtype)
            return tensor.float()

        return map_tensors(widened, (args, kwargs))

    def narrow(_: nn.Module, args: Any, output: Any) -> Any:
        if not seen:
            return output
        dtype = seen[-1]

        def narrowed(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor

        return map_tensors(narrowed, output)

    module.register_forward_pre_hook(widen, with_kwargs=True)
    module.register_forward_hook(narrow)


# Values


def materialize(
    module: nn.Module,
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
    ignored: Ignored,
) -> None:
    """Give what is on meta memory and values; parameters that were tied stay tied."""
    own = [inner for _, inner in managed_modules([module], ignored.modules)]
    if not any(state.is_meta for inner in own for state in _states(inner, ignored)):
        return
    if param_init_fn is not None and not callable(param_init_fn):
        raise ConfigError(
            f"param_init_fn: a function of a module is expected, found {param_init_fn!r}; pass a "
            "function that gives the module's own parameters and buffers values."
        )
    ties: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for inner in own:
        for name, param in inner._parameters.items():
            if param is not None:
                ties.setdefault(param, []).append((inner, name))
    for inner in own:
        if not any(state.is_meta for state in _states(inner, ignored)):
            continue
        if param_init_fn is not None:
            param_init_fn(inner)
        else:
            _reset(inner, device)
    for places in ties.values():
        first, first_name = places[0]
        for inner, name in places[1:]:
            inner._parameters[name] = first._parameters[first_name]
    for inner in own:
        for state in _states(inner, ignored):
            if state.is_meta:
                raise LifecycleError(
                    f"{type(inner).__name__}: parameters and buffers must have values after "
                    f"param_init_fn, found one of shape {tuple(state.shape)} on meta; call "
                    "module.to_empty(device=..., recurse=False) and initialise it there."
                )


def _reset(module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise LifecycleError(
            f"{type(module).__name__}: a module with parameters or buffers on meta must have a "
            "reset_parameters method, found none; pass param_init_fn."
        )
    with torch.no_grad():
        module.to_empty(device=device, recurse=False)
        reset()


def _states(module: nn.Module, ignored: Ignored) -> Iterator[torch.Tensor]:
    for param in module._parameters.values():
        if param is not None and param not in ignored.params:
            yield param
    yield from (buffer for buffer in module._buffers.values() if buffer is not None)


def broadcast_states(
    module: nn.Module, ignored: Ignored, mesh_info: MeshInfo, device: torch.device
) -> None:
    """Let all ranks start with the values of the first: parameters and buffers."""
    states: dict[int, torch.Tensor] = {}
    for _, inner in managed_modules([module], ignored.modules):
        for buffers in (inner._parameters, inner._buffers):
            for state in buffers.values():
                if state is None or state in ignored.params:
                    continue
                if replacement_of(state) is not None:
                    continue  # tied to what an inner wrapper has sent already
                if state.device != device:
                    state.data = state.data.to(device)
                states.setdefault(id(state), state.detach())
    for axis in (mesh_info.shard, mesh_info.replicate):
        if axis.group is not None and not axis.is_single and states:
            broadcast_coalesced(axis.group, list(states.values()), _BUCKET_BYTES, 0)
