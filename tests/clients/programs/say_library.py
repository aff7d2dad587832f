"""Prints whose `fully_shard` a program has; torchtitan imports it on request."""

from torch.distributed.fsdp import fully_shard

print("fully_shard is of", fully_shard.__module__)
