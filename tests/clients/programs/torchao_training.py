"""torchao's optimizers with quantized states, its int8 and NF4 weights, its float8 all-gather."""

import sys
from pathlib import Path
from typing import Any

import cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchao import optim, quantize_
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.prototype.quantized_training import (
    Int8MixedPrecisionTrainingConfig,
    bitnet_training,
    int8_weight_only_quantized_training,
)
from torchao.quantization import NF4Tensor

STEPS = 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class LowRank(nn.Module):
    """A frozen weight of 4 bits, and an adapter that is trained."""

    def __init__(self, linear: nn.Linear, block_size: int, scaler_block_size: int) -> None:
        super().__init__()
        weight = NF4Tensor.from_tensor(linear.weight.detach(), block_size, scaler_block_size)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.down = nn.Linear(linear.in_features, 4, bias=False)
        self.up = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + self.up(self.down(x))


def sharded(convert: Any = None, **settings: Any) -> nn.Module:
    model = nn.Sequential(Block(), Block())
    if convert is not None:
        model = convert(model) or model
    for block in model:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def train(model: nn.Module, optimizer: Any, which: range, after_step: Any = None) -> list[float]:
    losses = []
    for step in which:
        loss = model(cases.batch(step, 16, 64)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses


def full(value: torch.Tensor) -> torch.Tensor:
    """Gather a parameter whose local tensor may be a quantized one."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(local, NF4Tensor):
        local = local.get_original_weight()
    elif hasattr(local, "dequantize"):
        local = local.dequantize()
    parts = [torch.empty_like(local.float()) for _ in range(cases.WORLD_SIZE)]
    dist.all_gather(parts, local.float().contiguous())
    return torch.cat(parts)


def optimizer_case(make: Any) -> Any:
    """Train, save with DCP, load into another model and optimizer, and go on."""

    def case(folder: Path) -> Any:
        model = sharded()
        optimizer = make(model.parameters(), lr=1e-2)
        losses = train(model, optimizer, range(STEPS))
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        states = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
        kinds = {type(state.to_local()).__name__ for state in states}
        found = {
            "losses": losses,
            "model": weights,
            "states": [full(state) for state in states],
            "quantized": int(kinds != {"Tensor"}),
        }
        saved = get_state_dict(model, optimizer)
        dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=folder)
        found["then"] = train(model, optimizer, range(STEPS, 2 * STEPS))
        model = sharded()
        optimizer = make(model.parameters(), lr=1e-2)
        into = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(into, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=into["model"],
            optim_state_dict=into["optimizer"],
        )
        return found | {"loaded": train(model, optimizer, range(STEPS, 2 * STEPS))}

    return case


def weight_case(
    convert: Any, optimizer: Any = torch.optim.SGD, after_step: Any = None, **settings: Any
) -> Any:
    def case(folder: Path) -> Any:
        model = sharded(convert, **settings)
        torch.manual_seed(cases.RANK)
        losses = train(model, optimizer(model.parameters(), lr=1e-2), range(STEPS), after_step)
        return {
            "losses": losses,
            "model": {name: full(param.detach()) for name, param in model.named_parameters()},
        }

    return case


def float8(all_gathered: bool) -> Any:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=all_gathered, emulate=True)
    return lambda model: convert_to_float8_training(model, config=config)


def quantized(config: Any) -> Any:
    return lambda model: quantize_(model, config)


def nf4(block_size: int, scaler_block_size: int) -> Any:
    def convert(model: nn.Module) -> None:
        for block in model:
            block.up = LowRank(block.up, block_size, scaler_block_size)
            block.down = LowRank(block.down, block_size, scaler_block_size)

    return convert


ALL = {
    "adam_8bit": optimizer_case(optim.AdamW8bit),
    "adam_4bit": optimizer_case(optim.AdamW4bit),
    "adam_fp8": optimizer_case(optim.AdamWFp8),
    "int8_weights": weight_case(quantized(int8_weight_only_quantized_training()), optim._AdamW),
    "int8_weights_bf16": weight_case(
        quantized(int8_weight_only_quantized_training()), optim._AdamW, mp_policy=BF16
    ),
    "int8_mixed": weight_case(quantized(Int8MixedPrecisionTrainingConfig()), mp_policy=BF16),
    "bitnet": weight_case(quantized(bitnet_training()), mp_policy=BF16),
    "nf4": weight_case(nf4(64, 64)),
    "nf4_small_blocks": weight_case(nf4(16, 32)),
    "nf4_bf16": weight_case(nf4(32, 64), mp_policy=BF16),
    "nf4_offloaded": weight_case(nf4(64, 32), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "float8_after": weight_case(float8(all_gathered=False)),
    "float8_after_bf16": weight_case(float8(all_gathered=False), mp_policy=BF16),
    "float8": weight_case(float8(all_gathered=True)),
    "float8_bf16": weight_case(float8(all_gathered=True), mp_policy=BF16),
    "float8_precomputed": weight_case(
        float8(all_gathered=True), after_step=precompute_float8_dynamic_scale_for_fsdp
    ),
}

if __name__ == "__main__":
    sys.argv[2:] = sys.argv[2:] or list(ALL)
    # torchao compiles the step of its optimizers, which takes longer than all cases.
    torch.compile = lambda function, **settings: function
    dist.init_process_group("gloo")
    cases.run(ALL)
    dist.destroy_process_group()
