"""The second door: `FullyShardedDataParallel` wraps a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.api import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
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
from fullshard.comm.mesh import HYBRID, mesh_info_for_strategy
from fullshard.errors import ConfigError, LifecycleError, MisuseError
from fullshard.optim.clipping import clip_grads
from fullshard.runtime.build import ShardRequest, build_hooks, managed_modules
from fullshard.runtime.hooks import ModuleHooks, UnshardHandle, hooks_of
from fullshard.runtime.names import WRAPPED, clean_name
from fullshard.state import optimizer, optimizer_keys, optimizer_loading
from fullshard.state.lanes import wrappers_of
from fullshard.state.loading import install_load_hooks, strict_loading
from fullshard.state.model import install_state_hooks
from fullshard.state.settings import set_settings, settings_of, settings_scope
from fullshard.state.summon import summon_full_params
from fullshard.unit.flat_param import ParamForm
from fullshard.unit.reduce_scatter import CommHook, require_no_wire_dtype
from fullshard.unit.unit import Unit
from fullshard.wrapping import (
    Ignored,
    broadcast_states,
    checked_strategy,
    compute_device,
    hook_options,
    materialize,
    offload_of,
    policy_of,
    unit_settings,
    wrap_by_policy,
)

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
        install_state_hooks(self)
        install_load_hooks(self)

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
        """Move or convert the shards, and find them a new home."""
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
                f"register_comm_hook: a function is expected, found {hook!r}; pass for example "
                "torch.distributed.algorithms._comm_hooks.default_hooks.reduce_scatter_hook."
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
            unit.comm.comm_hook = CommHook(hook, state)

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

    optim_state_dict = staticmethod(optimizer.optim_state_dict)
    full_optim_state_dict = staticmethod(optimizer.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optimizer.sharded_optim_state_dict)
    optim_state_dict_to_load = staticmethod(optimizer_loading.optim_state_dict_to_load)
    shard_full_optim_state_dict = staticmethod(optimizer_loading.shard_full_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optimizer_loading.scatter_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(
        optimizer_loading.flatten_sharded_optim_state_dict
    )
    rekey_optim_state_dict = staticmethod(optimizer_keys.rekey_optim_state_dict)


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
