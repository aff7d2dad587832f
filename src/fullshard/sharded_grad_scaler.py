"""`ShardedGradScaler`, where programs written for `torch.distributed.fsdp` look for it."""

from fullshard.optim.grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
