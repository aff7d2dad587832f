"""How each library shards a model: the same units, the same dtypes, nothing else alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import wrap as torch_wrap

import fullshard
from fullshard import wrap as own_wrap
from fullshard.wire import Int4, Int8, Plain, Wire

UNSHARDED = "unsharded"
AUTOCAST = "unsharded, float32 under autocast"
MASTER = "unsharded, bf16 with float32 master weights"
TORCH_FSDP2 = "torch fully_shard"
TORCH_FSDP1 = "torch wrapper"
OURS = "fullshard fully_shard"
WRAPPER = "fullshard wrapper"
FLAT_WRAPPER = "fullshard wrapper, use_orig_params=False"

EACH_PARAMETER = "fullshard fully_shard, not by unit"
"""As `OURS`, with an optimizer that steps each parameter by itself, as torch's does."""

BF16_WIRE = "fullshard fully_shard, bf16 wire"
INT8_GATHER = "fullshard fully_shard, parameters in int8, gradients in bf16"
INT8 = "fullshard fully_shard, both in int8"
INT4 = "fullshard fully_shard, parameters in int8, gradients in int4"
INT8_REPLICAS = "fullshard fully_shard, int8 between replicas"
WIRES: dict[str, dict[str, Wire]] = {
    BF16_WIRE: {"reduce_wire": Plain(torch.bfloat16)},
    INT8_GATHER: {"gather_wire": Int8(), "reduce_wire": Plain(torch.bfloat16)},
    INT8: {"gather_wire": Int8(), "reduce_wire": Int8()},
    INT4: {"gather_wire": Int8(), "reduce_wire": Int4()},
    INT8_REPLICAS: {"replica_wire": Int8()},
}

MEGATRON = "Megatron-FSDP"
"""Where `megatron_fsdp` can be imported (its wheel, `einops` and `packaging` are pure Python)."""

DEEPSPEED = "DeepSpeed ZeRO-3"
"""Where `deepspeed` can be imported: its wheel with `DS_BUILD_OPS=0`, torch's fused AdamW."""

PEERS = [
    name
    for name, package in ((MEGATRON, "megatron_fsdp"), (DEEPSPEED, "deepspeed"))
    if find_spec(package)
]

CAPTURED = ", CUDA graph"
"""Ends the name of a variant whose whole step is replayed as a CUDA graph."""

SHARDED = (TORCH_FSDP2, TORCH_FSDP1, OURS, WRAPPER, FLAT_WRAPPER)
BASE = TORCH_FSDP2
"""The variant that ratios are relative to."""


@dataclass(frozen=True)
class Sharding:
    """How any variant shards a model: it computes in `dtype` and reduces in float32."""

    unit_class: type[nn.Module]
    mesh: DeviceMesh
    device: torch.device
    dtype: torch.dtype = torch.float32

    @property
    def precision(self) -> dict[str, torch.dtype]:
        if self.dtype == torch.float32:
            return {}
        return {"param_dtype": self.dtype, "reduce_dtype": torch.float32}


class MasterWeights(torch.optim.AdamW):
    """Fused AdamW over float32 copies of a model's bf16 parameters, which follow them."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self._held = list(model.parameters())
        masters = [nn.Parameter(param.detach().float()) for param in self._held]
        super().__init__(masters, lr=learning_rate, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        masters = self.param_groups[0]["params"]
        for master, param in zip(masters, self._held, strict=True):
            master.grad = param.grad.float()
        super().step()
        torch._foreach_copy_(self._held, masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for param in self._held:
            param.grad = None


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """The step of a DeepSpeed engine, which holds its optimizer and clears gradients itself."""

    def __init__(self, engine: Any) -> None:
        super().__init__([torch.zeros(1)], {})
        self._engine = engine

    def step(self, closure: Any = None) -> Any:
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Done by the engine's step."""


def optimizer_for(variant: str, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Fused AdamW over what the library hands out as parameters."""
    if variant == DEEPSPEED:
        return DeepSpeedOptimizer(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, fused=True
    )
    if variant == MASTER:
        return MasterWeights(model, learning_rate)
    if variant == MEGATRON:
        from megatron_fsdp import fully_shard_optimizer

        return fully_shard_optimizer(optimizer)
    if variant == EACH_PARAMETER:
        fullshard.by_unit(optimizer, enabled=False)
    return optimizer


def shard(variant: str, model: nn.Module, how: Sharding) -> nn.Module:
    """Shard `model` as `variant` names it, and return the module to call in its place."""
    return _WAYS[variant.removesuffix(CAPTURED)](model, how)


def _fully_sharded(
    package: Any, **more_precision: Any
) -> Callable[[nn.Module, Sharding], nn.Module]:
    def apply(model: nn.Module, how: Sharding) -> nn.Module:
        policy = package.MixedPrecisionPolicy(**how.precision, **more_precision)
        units = [module for module in model.modules() if isinstance(module, how.unit_class)]
        for module in [*units, model]:
            package.fully_shard(module, mesh=how.mesh, mp_policy=policy)
        return model

    return apply


def _wrapped(
    package: Any, wrap: Any, use_orig_params: bool
) -> Callable[[nn.Module, Sharding], nn.Module]:
    def apply(model: nn.Module, how: Sharding) -> nn.Module:
        wrapper: nn.Module = package.FullyShardedDataParallel(
            model,
            process_group=how.mesh.get_group(),
            auto_wrap_policy=wrap.ModuleWrapPolicy({how.unit_class}),
            mixed_precision=package.MixedPrecision(**how.precision) if how.precision else None,
            device_id=how.device,
            use_orig_params=use_orig_params,
        )
        return wrapper

    return apply


def _unsharded(model: nn.Module, how: Sharding) -> nn.Module:
    """The model as it is, kept in the dtype that it computes in."""
    return model.to(how.dtype)


def _autocast(model: nn.Module, how: Sharding) -> nn.Module:
    """The model in float32, computed in the dtype of the others by `torch.autocast`."""
    forward = model.forward

    def cast_forward(*args: Any) -> Any:
        with torch.autocast(how.device.type, how.dtype):
            return forward(*args)

    model.forward = cast_forward
    return model


def _megatron(model: nn.Module, how: Sharding) -> nn.Module:
    """The same dtypes as the others: float32 kept and reduced, computed in bf16."""
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model

    kept = {"main_params_dtype": torch.float32, "main_grads_dtype": torch.float32}
    mesh = init_device_mesh(how.device.type, (how.mesh.size(), 1), mesh_dim_names=("dp", "tp"))
    sharded: nn.Module = fully_shard_model(
        model.to(how.dtype),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[how.unit_class],
        mixed_precision_policy=MixedPrecisionPolicy(**kept),
    )
    return sharded


def _deepspeed(model: nn.Module, how: Sharding) -> nn.Module:
    """The same dtypes as the others; its optimizer is given to it at once."""
    import deepspeed

    os.environ.setdefault("LOCAL_RANK", str(how.device.index or 0))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine: nn.Module = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )[0]
    return engine


_WAYS: dict[str, Callable[[nn.Module, Sharding], nn.Module]] = {
    UNSHARDED: _unsharded,
    AUTOCAST: _autocast,
    MASTER: _unsharded,
    TORCH_FSDP2: _fully_sharded(torch_fsdp),
    TORCH_FSDP1: _wrapped(torch_fsdp, torch_wrap, use_orig_params=True),
    OURS: _fully_sharded(fullshard),
    EACH_PARAMETER: _fully_sharded(fullshard),
    **{name: _fully_sharded(fullshard, **wires) for name, wires in WIRES.items()},
    WRAPPER: _wrapped(fullshard, own_wrap, use_orig_params=True),
    FLAT_WRAPPER: _wrapped(fullshard, own_wrap, use_orig_params=False),
    MEGATRON: _megatron,
    DEEPSPEED: _deepspeed,
}
