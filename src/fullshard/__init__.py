"""Fully sharded data parallel training for PyTorch."""

from fullshard.api import (
    AllGather,
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    OptimStateKeyType,
    ReduceScatter,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    ShardPlacementResult,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
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
from fullshard.runtime.hooks import GradientReductionHandle, UnshardHandle
from fullshard.torch_helpers import follow_import
from fullshard.unit.flat_param import FlatParameter

__version__ = "0.1.0"

follow_import()

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
    "ReduceScatter",
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
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
