"""Builds a model on the meta device and shards it as the configuration specifies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fullshard import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    auto_shard,
)
from fullshard.errors import ConfigError
from fullshard.state import give_memory
from fullshard.wire import Fp8, Int4, Int8, Plain, Wire
from fullshard.wrap import ModuleWrapPolicy
from fullshard_train.config import ModelSection, ShardingSection, mesh_shape
from fullshard_train.models import architecture_of
from fullshard_train.models.adapters import LoraSettings
from fullshard_train.models.architecture import Architecture
from fullshard_train.models.float8 import PRECISIONS, follow_scales, use_float8
from fullshard_train.world import World

# Without replication, and with it.
STRATEGIES = {
    "full": (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD),
    "grad-op": (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2),
    "none": (ShardingStrategy.NO_SHARD, ShardingStrategy.NO_SHARD),
}
# What selective recomputation saves.
_SAVED = [
    getattr(torch.ops.aten, name).default
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "_flash_attention_forward"),
        *("_efficient_attention_forward", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention"),
        "_scaled_dot_product_efficient_attention",
    )
]


WIRES: dict[str, Wire | None] = {
    "plain": None,
    "bf16": Plain(torch.bfloat16),
    "int8": Int8(),
    "fp8": Fp8(),
    "int4": Int4(),
}


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The compute and reduce dtypes; None is the original dtype of the parameters."""

    param: torch.dtype | None
    reduce: torch.dtype | None

    @classmethod
    def of(cls, precision: str, device: torch.device) -> Dtypes:
        if precision == "auto":
            precision = "float32" if device.type == "cpu" else "bf16"
        return {
            "float32": cls(None, None),
            "bf16": cls(torch.bfloat16, torch.float32),
            "bf16-reduce": cls(torch.bfloat16, torch.bfloat16),
            "fp16": cls(torch.float16, torch.float32),
        }.get(precision, cls(torch.bfloat16, torch.float32))  # beside float8


def architecture_for(section: ModelSection, tokenizer: str = "auto") -> Architecture:
    """Return the architecture that the configuration names, with its adapters."""
    lora = None
    if section.lora_rank:
        rank, alpha, base = section.lora_rank, section.lora_alpha, section.lora_base
        lora = LoraSettings(rank, alpha, section.lora_targets, base)
    return architecture_of(section.name, lora, tokenizer)


def build_sharded_model(
    architecture: Architecture, section: ShardingSection, world: World
) -> nn.Module:
    """Return the sharded model; its memory is allocated but not initialized."""
    model = architecture.build()
    classes = unit_classes(model, architecture, section)
    gathers = section.api == "fully_shard" and world.size > 1 and not section.offload
    if section.precision in PRECISIONS:
        blocks, kind = architecture.block_classes(), section.precision
        use_float8(model, blocks, kind, world.device, gathers=gathers)
    prepare_blocks(model, architecture, section)
    policy = ModuleWrapPolicy(set(classes))
    if section.api == "wrapper":
        return _wrapped(model, policy, section, world)
    dtypes = Dtypes.of(section.precision, world.device)
    auto_shard(
        model,
        policy,
        mesh=mesh_for(section, world),
        # None reshards all units but the root, whose parameters backward needs first.
        reshard_after_forward=section.reshard_to or (None if section.strategy == "full" else False),
        mp_policy=MixedPrecisionPolicy(dtypes.param, dtypes.reduce, **wires_of(section)),
        offload_policy=CPUOffloadPolicy() if section.offload else OffloadPolicy(),
    )
    if section.prefetch > 1:
        _prefetch(model, section.prefetch)
    give_memory(model)
    if section.precision in PRECISIONS and gathers:
        follow_scales(model)
    return model


def _prefetch(model: nn.Module, number: int) -> None:
    """Prefetch `number` units ahead, in the order of the model's modules."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 :][:number])
        unit.set_modules_to_backward_prefetch(units[:index][::-1][:number])


def _wrapped(
    model: nn.Module, policy: ModuleWrapPolicy, section: ShardingSection, world: World
) -> nn.Module:
    mesh = mesh_for(section, world)
    strategy = STRATEGIES[section.strategy][mesh.ndim - 1]
    if world.size == 1:
        strategy = ShardingStrategy.NO_SHARD  # what the wrapper would warn that it does
    if strategy is ShardingStrategy.NO_SHARD and mesh.ndim == 2:
        mesh = init_device_mesh(world.device.type, (world.size,))
    dtypes = Dtypes.of(section.precision, world.device)
    param_device = torch.device("cpu") if section.offload else world.device

    def allocate(module: nn.Module) -> None:
        module.to_empty(device=param_device, recurse=False)

    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=strategy,
        auto_wrap_policy=policy,
        mixed_precision=MixedPrecision(dtypes.param, dtypes.reduce, **wires_of(section)),
        cpu_offload=CPUOffload(offload_params=section.offload),
        param_init_fn=allocate,
        device_id=world.device,
        forward_prefetch=True,
        use_orig_params=True,
    )


def wires_of(section: ShardingSection) -> dict[str, Any]:
    """How parameters and gradients travel, as the precision policies of both APIs take it."""
    found: dict[str, Any] = {
        "gather_wire": WIRES[section.gather_wire],
        "reduce_wire": WIRES[section.reduce_wire],
    }
    if section.replica_wire != "auto":
        # Plain values travel in the dtype that they are summed in, or a narrower one.
        found["replica_wire"] = WIRES[section.replica_wire] or Plain(torch.float32)
    return found


def mesh_for(section: ShardingSection, world: World) -> DeviceMesh:
    """Return a mesh with one axis, for sharding, or two, for replication and sharding."""
    replicas, shards = mesh_shape(section, world.size)
    if section.strategy == "none" and section.mesh == "auto":
        replicas, shards = world.size, 1
    if replicas == 1:
        return init_device_mesh(world.device.type, (shards,))
    names = ("replicate", "shard")
    return init_device_mesh(world.device.type, (replicas, shards), mesh_dim_names=names)


def unit_classes(
    model: nn.Module, architecture: Architecture, section: ShardingSection
) -> tuple[type[nn.Module], ...]:
    """Return the classes whose modules become units."""
    if not section.units:
        return architecture.block_classes()
    known = {type(module).__name__: type(module) for module in model.modules()}
    for name in section.units:
        if name not in known:
            raise ConfigError(
                f"--unit: {architecture.name} has no module class {name!r}; choose one of "
                f"{', '.join(sorted(known))}."
            )
    return tuple(known[name] for name in section.units)


def prepare_blocks(model: nn.Module, architecture: Architecture, section: ShardingSection) -> None:
    """Apply torch.compile and activation checkpointing to each block.

    Replacing `forward` keeps the names of parameters, and keeps the hooks of FSDP out of the
    compiled and recomputed region.
    """
    for module in model.modules():
        if not isinstance(module, architecture.block_classes()):
            continue
        forward: Any = module.forward
        if section.selective_checkpointing:
            contexts = partial(create_selective_checkpoint_contexts, _SAVED)
            forward = partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
        if section.compile:
            forward = torch.compile(forward)
        if section.activation_checkpointing:
            forward = partial(checkpoint, forward, use_reentrant=False)
        if forward is not module.forward:
            module.forward = forward
