"""Fully sharded data parallel training for PyTorch.

Names are imported when they are asked for: `fullshard --help` does not load torch.
"""

# ruff: noqa: F405 (names of `api`, of which only type checkers see the import)

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "AllGather",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "ConfigError",
    "DataParallelMeshDims",
    "DisagreementError",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullshardError",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "LifecycleError",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "OutOfMemoryError",
    "RankFailedError",
    "ReduceScatter",
    "ReplicaGroup",
    "ShardPlacementResult",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TopologyError",
    "UnshardHandle",
    "auto_shard",
    "by_unit",
    "capture",
    "explain",
    "fully_shard",
    "oom_guard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

if TYPE_CHECKING:
    from fullshard.api import *  # noqa: F403
    from fullshard.auto_shard import auto_shard, explain
    from fullshard.captured_step import capture
    from fullshard.errors import (
        ConfigError,
        DisagreementError,
        FullshardError,
        LifecycleError,
        TopologyError,
    )
    from fullshard.fully_shard import (
        FSDPModule,
        fully_shard,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from fullshard.fully_sharded_data_parallel import FullyShardedDataParallel
    from fullshard.optim.by_unit import by_unit
    from fullshard.resilience.elastic import ReplicaGroup
    from fullshard.resilience.oom_guard import OutOfMemoryError, oom_guard
    from fullshard.resilience.watcher import RankFailedError
    from fullshard.runtime.hooks import UnshardHandle
    from fullshard.runtime.step import GradientReductionHandle
    from fullshard.unit.flat_param import FlatParameter
else:
    _MODULES = ("errors", "api", "unit.flat_param", "runtime.hooks", "runtime.step", "fully_shard")
    _MODULES += ("fully_sharded_data_parallel", "optim.by_unit", "auto_shard", "captured_step")
    _MODULES += ("resilience.watcher", "resilience.oom_guard", "resilience.elastic")

    def __getattr__(name: str) -> Any:
        if name in __all__:
            for module in _MODULES:
                found = import_module(f"{__name__}.{module}")
                value = getattr(found, name, None)
                # A module may have imported something else of that name.
                if value is not None and value.__module__ == found.__name__:
                    return globals().setdefault(name, value)
        elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # An import of the modules `fully_shard` and `auto_shard` does not hide their functions.
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
