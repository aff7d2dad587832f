"""The optimizer of a run and its learning rate."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fullshard.comm.placement import full_tensor
from fullshard.errors import ConfigError
from fullshard.models.optional import optional
from fullshard.optim.by_unit import by_unit
from fullshard.runtime.names import clean_name
from fullshard.state.shards import TensorShard, tensor_shards
from fullshard.training.config import OptimizerSection

_FUSED_ON = ("cpu", "cuda")
# The weights of other norms, such as batch norm, are vectors, which are never decayed.
_UNDECAYED = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)


def build_optimizer(
    model: nn.Module, section: OptimizerSection, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable parameters of a model; AdamW steps unit by unit.

    The model may be sharded with either API, or not at all. Weight decay applies to matrices, but
    not to vectors, biases, norms and embeddings, nor to a head that is tied to an embedding. The
    shape of the unsharded parameter decides. Muon trains the matrices that decay, except heads.
    """
    decayed: dict[torch.Tensor, None] = {}
    others: dict[torch.Tensor, None] = {}
    matrices: dict[torch.Tensor, None] = {}
    kinds = _modules_by_name(model)
    # A matrix with the shape of an embedding is a head.
    heads = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Embedding)]
    for shard in tensor_shards(model):
        if shard.is_buffer or not shard.is_trainable:
            continue
        found = decayed if _is_decayed(shard, kinds) else others
        is_hidden = len(shard.shape) == 2 and tuple(shard.shape) not in heads
        if section.name == "muon" and found is decayed and is_hidden:
            found = matrices
        found[shard.tensor] = None
    if not decayed and not others and not matrices:
        raise ConfigError(
            f"{type(model).__name__}: trainable parameters are expected, found no parameter that "
            "takes a gradient; call requires_grad_() on some."
        )
    groups: Any = [
        {"params": list(params), "weight_decay": decay}
        for params, decay in ((decayed, section.weight_decay), (others, 0.0))
        if params or matrices
    ]
    betas, is_fused = (section.beta1, section.beta2), device.type in _FUSED_ON
    if section.name == "adamw8bit":
        torchao: Any = optional("torchao.optim", "--optimizer adamw8bit", "torchao")
        return cast(torch.optim.Optimizer, torchao.AdamW8bit(groups, lr=section.lr, betas=betas))
    adamw = by_unit(torch.optim.AdamW(groups, lr=section.lr, betas=betas, fused=is_fused))
    return MuonAdamW([*matrices], adamw, section) if matrices else adamw


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer create its quantized state, so that a loaded state is quantized, too."""
    for group in optimizer.param_groups:
        group["lr"].fill_(0.0)
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices, its first group, and another optimizer for the other groups.

    Learning rate and weight decay are those of AdamW (`adjust_lr_fn="match_rms_adamw"`). Whole
    matrices are gathered to be orthogonalized: as many at a time as there are ranks, one per rank.
    """

    def __init__(
        self, matrices: list[torch.Tensor], others: torch.optim.AdamW, section: OptimizerSection
    ) -> None:
        group = {"params": matrices, "weight_decay": section.weight_decay, "lr": section.lr}
        super().__init__([{**group, "momentum": 0.95}, *others.param_groups], {})
        self._others = others

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._others.state, self._others.param_groups = self.state, self.param_groups[1:]
        self._others.step()
        group = self.param_groups[0]
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        params = [param for param in group["params"] if param.grad is not None]
        for first in range(0, len(params), size):
            some = params[first : first + size]
            updates = [self._momentum(param, group["momentum"]) for param in some]
            if rank < len(some):
                updates[rank] = _orthogonalized(updates[rank])
            for owner, (param, update) in enumerate(zip(some, updates, strict=True)):
                if size > 1:
                    dist.broadcast(update, owner)
                if isinstance(param, DTensor):
                    mesh, whole = param.device_mesh, [Replicate()] * param.device_mesh.ndim
                    update = DTensor.from_local(update, mesh, whole, run_check=False)
                    update = update.redistribute(placements=param.placements)
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=group["lr"])

    def _momentum(self, param: torch.Tensor, momentum: float) -> torch.Tensor:
        """Apply Nesterov momentum to the gradient, and return the whole matrix."""
        grad: Any = param.grad
        if "momentum_buffer" not in self.state[param]:
            self.state[param]["momentum_buffer"] = torch.zeros_like(grad)
        buffer = self.state[param]["momentum_buffer"].lerp_(grad, 1 - momentum)
        update: torch.Tensor = grad.lerp(buffer, momentum)
        return full_tensor(update) if isinstance(update, DTensor) else update


def _orthogonalized(update: torch.Tensor) -> torch.Tensor:
    """Return the step that torch's Muon takes from zero, with this gradient and no momentum."""
    param = torch.zeros_like(update, requires_grad=True)
    param.grad = update
    alone: Any = {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    torch.optim.Muon([param], lr=1.0, adjust_lr_fn="match_rms_adamw", **alone).step()
    return param.detach()


def _modules_by_name(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return modules by the name they have without wrappers; a wrapper shares its module's."""
    found: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(clean_name(name), []).append(module)
    return found


def _is_decayed(shard: TensorShard, modules: dict[str, list[nn.Module]]) -> bool:
    if len(shard.shape) < 2:
        return False
    for name in shard.names:
        path, _, own = name.rpartition(".")
        if own == "bias" or any(_is_undecayed(module) for module in modules.get(path, ())):
            return False
    return True


def _is_undecayed(module: nn.Module) -> bool:
    # Norms that a model defines itself are recognized by the name of their class.
    return isinstance(module, _UNDECAYED) or type(module).__name__.endswith("Norm")


def learning_rate(step: int, section: OptimizerSection) -> float:
    """Return the learning rate of step `step`, counted from 0: linear warmup, then the schedule.

    The rate is `lr` in the last step of the warmup and, unless it is constant, `lr * lr_end` in the
    last step of all. If the warmup is longer than the run, it ends with the last step.
    """
    warmup, number = max(1, min(section.warmup, section.steps)), step + 1
    if number <= warmup:
        return section.lr * number / warmup
    progress = min(1.0, (number - warmup) / max(1, section.steps - warmup))
    share = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "constant": 1.0,
        "wsd": min(1.0, max(0, section.steps - number) / max(1.0, section.decay * section.steps)),
    }[section.schedule]
    return section.lr * (section.lr_end + (1 - section.lr_end) * share)
