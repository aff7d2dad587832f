"""What `torch.distributed.checkpoint` does with a wrapper's state.

`get_state_dict`, `set_state_dict` and the others of its module `state_dict` look for torch's
wrapper by its class and take anything else for an ordinary module. They would save the state dict
of our wrapper as it is: local parts under wrapped names. So the names by which they find the
wrapper are replaced by ones that know both. `async_save` copies a state dict in memory, but cannot
copy a `ShardedTensor`, so it learns to. Both happen as soon as these modules are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn

from fullshard._torch import STAGER, STAGER_COPY, ShardedTensor
from fullshard.state.values import copied_sharded_tensor


def follow_import(ours: type[nn.Module]) -> None:
    """Make torch's checkpoints know our wrapper, now or when they are imported."""
    teach_helpers: Callable[[Any], None] = partial(_teach, ours=ours)
    for name, teach in {
        "torch.distributed.checkpoint.state_dict": teach_helpers,
        STAGER: _teach_stager,
    }.items():
        module = sys.modules.get(name)
        if module is not None:
            teach(module)
        else:
            sys.meta_path.insert(0, _Finder(name, teach))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, teach: Callable[[Any], None]) -> None:
        self._name, self._teach = name, teach

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_teach(module: ModuleType) -> None:
            load(module)
            self._teach(module)

        spec.loader.exec_module = load_and_teach  # type: ignore[method-assign]
        return spec


class _EitherWrapper(type):
    """Stands for torch's wrapper and for ours; attributes not about a model are torch's."""

    ours: Any
    theirs: Any

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.theirs, cls.ours))

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.theirs, name)

    def fsdp_modules(cls, module: nn.Module, root_only: bool = False) -> list[nn.Module]:
        found: list[nn.Module] = cls.ours.fsdp_modules(module, root_only)
        return found or cls.theirs.fsdp_modules(module, root_only)

    def state_dict_type(cls, module: nn.Module, **settings: Any) -> Any:
        return cls._wrapper_of(module).state_dict_type(module, **settings)

    def optim_state_dict(cls, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls._wrapper_of(model).optim_state_dict(model, *args, **kwargs)

    def optim_state_dict_to_load(cls, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls._wrapper_of(model).optim_state_dict_to_load(model, *args, **kwargs)

    def _wrapper_of(cls, model: nn.Module) -> Any:
        return cls.ours if _has_any(cls.ours, model) else cls.theirs


def _has_any(ours: type[nn.Module], model: nn.Module) -> bool:
    return any(isinstance(each, ours) for each in model.modules())


def _teach(helpers: Any, ours: type[nn.Module]) -> None:
    theirs = getattr(helpers, "FSDP", None)
    if theirs is None or isinstance(theirs, _EitherWrapper):
        return
    both = {"ours": ours, "theirs": theirs}
    helpers.FSDP = _EitherWrapper("FullyShardedDataParallel", (), both)
    for name, of_either in _LOOKUPS.items():
        if hasattr(helpers, name):  # not every version of torch has each
            setattr(helpers, name, partial(of_either, ours, getattr(helpers, name)))


def _state_of(ours: type[nn.Module], theirs: Callable[..., Any], module: nn.Module) -> Any:
    return module if isinstance(module, ours) else theirs(module)


def _group_of(
    ours: type[nn.Module], theirs: Callable[..., Any], model: nn.Module, *rest: Any
) -> Any:
    # None: our wrapper knows its groups by itself.
    return None if _has_any(ours, model) else theirs(model, *rest)


_LOOKUPS: dict[str, Callable[..., Any]] = {
    "_get_module_fsdp_state_if_fully_sharded_module": _state_of,
    "_get_fsdp_process_group": _group_of,
}


def _teach_stager(stager: Any) -> None:
    cls = stager.StateDictStager
    theirs = getattr(cls, STAGER_COPY)

    @wraps(theirs)
    def copy(self: Any, value: Any, memo: dict[int, Any], **options: Any) -> Any:
        if not isinstance(value, ShardedTensor):
            return theirs(self, value, memo, **options)
        to_host = partial(self.deepcopy_with_tensor_offload, memo=memo, **options)
        memo[id(value)] = copied_sharded_tensor(value, to_host)
        return memo[id(value)]

    setattr(cls, STAGER_COPY, copy)
