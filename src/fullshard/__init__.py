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
from fullshard.runtime.hooks import UnshardHandle
from fullshard.unit.flat_param import FlatParameter

__version__ = "0.1.0"

__all__ = ["AllGather", "BackwardPrefetch", "CPUOffload", "CPUOffloadPolicy", "ConfigError"]
__all__ += ["DataParallelMeshDims", "DisagreementError", "FSDPModule", "FlatParameter"]
__all__ += ["FullOptimStateDictConfig", "FullStateDictConfig", "FullshardError"]
__all__ += ["FullyShardedDataParallel", "LifecycleError", "LocalOptimStateDictConfig"]
__all__ += ["LocalStateDictConfig", "MixedPrecision", "MixedPrecisionPolicy", "OffloadPolicy"]
__all__ += ["OptimStateDictConfig", "OptimStateKeyType", "ReduceScatter", "ShardPlacementResult"]
__all__ += ["ShardedOptimStateDictConfig", "ShardedStateDictConfig", "ShardingStrategy"]
__all__ += ["StateDictConfig", "StateDictSettings", "StateDictType", "TopologyError"]
__all__ += ["UnshardHandle", "auto_shard", "by_unit", "explain", "fully_shard"]
__all__ += ["register_fsdp_forward_method", "share_comm_ctx"]
