"""Fully sharded data parallel training for PyTorch."""

from fullshard.api import (
    AllGather,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
    ShardPlacementResult,
)
from fullshard.auto_shard import auto_shard, explain
from fullshard.errors import (
    ConfigError,
    DisagreementError,
    FullshardError,
    LifecycleError,
    TopologyError,
)
from fullshard.fsdp_module import FSDPModule, UnshardHandle
from fullshard.fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "ConfigError",
    "DataParallelMeshDims",
    "DisagreementError",
    "FSDPModule",
    "FullshardError",
    "LifecycleError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "ShardPlacementResult",
    "TopologyError",
    "UnshardHandle",
    "auto_shard",
    "explain",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
