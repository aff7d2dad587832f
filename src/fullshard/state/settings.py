"""What the state dicts of a wrapped model hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from fullshard.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard.errors import LifecycleError
from fullshard.state.lanes import wrappers_of

_ATTRIBUTE = "_fullshard_state_settings"

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}

_DEFAULT = StateDictSettings(
    StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
)


def settings_of(module: nn.Module) -> StateDictSettings:
    """The settings of all wrappers at or below a module, which must have the same."""
    found = {own_settings(wrapper) for wrapper in wrappers_of(module)}
    if len(found) > 1:
        raise LifecycleError(
            f"{type(module).__name__}: all wrappers below it must have the same state-dict type, "
            f"found {sorted(str(each) for each in found)}; call set_state_dict_type on the root."
        )
    return found.pop() if found else _DEFAULT


def set_settings(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Change the settings of all wrappers at or below a module; returns what was set before."""
    if state_dict_type not in _CONFIGS:
        raise LifecycleError(
            f"state_dict_type: one of {[str(each) for each in StateDictType]} is expected, found "
            f"{state_dict_type!r}; import StateDictType from fullshard."
        )
    before = settings_of(module)
    config_cls, optim_config_cls = _CONFIGS[state_dict_type]
    config = config_cls() if state_dict_config is None else state_dict_config
    optim_config = (
        optim_config_cls() if optim_state_dict_config is None else optim_state_dict_config
    )
    for given, wanted in ((config, config_cls), (optim_config, optim_config_cls)):
        if type(given) is not wanted:
            raise LifecycleError(
                f"state_dict_type: {state_dict_type} goes with a {wanted.__name__}, found "
                f"{type(given).__name__}; pass a {wanted.__name__}."
            )
    for wrapper in wrappers_of(module):
        settings = StateDictSettings(state_dict_type, config, optim_config)
        wrapper.__dict__[_ATTRIBUTE] = _for_mesh(wrapper, settings)
    return before


@contextmanager
def settings_scope(module: nn.Module, *given: object) -> Iterator[None]:
    """The settings inside a scope; what each wrapper had before is put back at its end."""
    before = [(wrapper, own_settings(wrapper)) for wrapper in wrappers_of(module)]
    try:
        set_settings(module, *given)  # type: ignore[arg-type]
        yield
    finally:
        for wrapper, settings in before:
            wrapper.__dict__[_ATTRIBUTE] = settings


def own_settings(wrapper: nn.Module) -> StateDictSettings:
    """The settings of one wrapper."""
    found = wrapper.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, StateDictSettings) else _DEFAULT


def _for_mesh(wrapper: nn.Module, settings: StateDictSettings) -> StateDictSettings:
    """With a mesh, sharded tensors are DTensors."""
    if wrapper.__dict__.get("_device_mesh") is None:
        return settings
    config, optim_config = settings.state_dict_config, settings.optim_state_dict_config
    if isinstance(config, ShardedStateDictConfig):
        config = replace(config, _use_dtensor=True)
    if isinstance(optim_config, ShardedOptimStateDictConfig):
        optim_config = replace(optim_config, _use_dtensor=True)
    return StateDictSettings(settings.state_dict_type, config, optim_config)
