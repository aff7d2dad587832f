"""`get_state_dict`, `set_state_dict` and the others of `torch.distributed.checkpoint.state_dict`.

They look for torch's wrapper by its class. Anything else they take for an ordinary module, whose
state dict they would save as it is: with a wrapper of ours, local parts under wrapped names. So the
names that they know the wrapper by are replaced, as soon as their module is imported, by ones that
know both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn

from fullshard.fully_sharded_data_parallel import FullyShardedDataParallel

_HELPERS = "torch.distributed.checkpoint.state_dict"


def follow_import() -> None:
    """Have the helpers know our wrapper, now or when they are imported."""
    module = sys.modules.get(_HELPERS)
    if module is not None:
        _teach(module)
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _HELPERS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_teach(module: ModuleType) -> None:
            load(module)
            _teach(module)

        spec.loader.exec_module = load_and_teach  # type: ignore[method-assign]
        return spec


class _EitherWrapper(type):
    """Stands for torch's wrapper and for ours; what is not about a model is torch's."""

    theirs: Any

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.theirs, FullyShardedDataParallel))

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.theirs, name)

    def fsdp_modules(cls, module: nn.Module, root_only: bool = False) -> list[nn.Module]:
        found: list[nn.Module] = FullyShardedDataParallel.fsdp_modules(module, root_only)  # type: ignore[assignment]
        return found or cls.theirs.fsdp_modules(module, root_only)

    def state_dict_type(cls, module: nn.Module, **settings: Any) -> Any:
        return cls._wrapper_of(module).state_dict_type(module, **settings)

    def optim_state_dict(cls, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls._wrapper_of(model).optim_state_dict(model, *args, **kwargs)

    def optim_state_dict_to_load(cls, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls._wrapper_of(model).optim_state_dict_to_load(model, *args, **kwargs)

    def _wrapper_of(cls, model: nn.Module) -> Any:
        return FullyShardedDataParallel if _has_ours(model) else cls.theirs


def _has_ours(module: nn.Module) -> bool:
    return any(isinstance(each, FullyShardedDataParallel) for each in module.modules())


def _teach(helpers: Any) -> None:
    theirs = getattr(helpers, "FSDP", None)
    if theirs is None or isinstance(theirs, _EitherWrapper):
        return
    helpers.FSDP = _EitherWrapper("FullyShardedDataParallel", (), {"theirs": theirs})
    for name, of_either in _LOOKUPS.items():
        if hasattr(helpers, name):  # not every torch has each
            setattr(helpers, name, partial(of_either, getattr(helpers, name)))


def _state_of(theirs: Callable[..., Any], module: nn.Module) -> Any:
    return module if isinstance(module, FullyShardedDataParallel) else theirs(module)


def _group_of(theirs: Callable[..., Any], model: nn.Module, *rest: Any) -> Any:
    # None: ours knows its groups by itself.
    return None if _has_ours(model) else theirs(model, *rest)


_LOOKUPS: dict[str, Callable[..., Any]] = {
    "_get_module_fsdp_state_if_fully_sharded_module": _state_of,
    "_get_fsdp_process_group": _group_of,
}
