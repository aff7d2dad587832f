"""accelerate's FSDP plugins."""

import sys
from pathlib import Path
from typing import Any

import accelerate_on_cpu
import cases
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import merge_fsdp_weights
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

STEPS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def accelerator(version: int, precision: str = "no", **settings: Any) -> Accelerator:
    accelerate_on_cpu.pretend_gpus()
    if version == 1:
        settings.setdefault("use_orig_params", True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **{"state_dict_type": "SHARDED_STATE_DICT", **settings},
    )
    return Accelerator(
        cpu=True, mixed_precision=precision, fsdp_plugin=plugin, gradient_accumulation_steps=2
    )


def prepared(acc: Accelerator) -> tuple[nn.Module, Any]:
    plugin, model = acc.state.fsdp_plugin, Net()
    if plugin.fsdp_version == 1 and not plugin.use_orig_params:
        model = acc.prepare(model)
        return model, acc.prepare(torch.optim.AdamW(model.parameters(), lr=0.05))
    return acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))


def steps(acc: Accelerator, model: nn.Module, optimizer: Any, which: range) -> dict[str, Any]:
    losses, norms = [], []
    for step in which:
        with acc.accumulate(model):
            loss = model(cases.batch(step, 4, 8)).float().square().mean()
            acc.backward(loss)
            if acc.sync_gradients:
                norms.append(float(acc.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(acc.reduce(loss.detach(), "mean")))
    return {
        "losses": losses,
        "norms": norms,
        "units": cases.num_units(model),
        "model": weights(acc, model),
    }


def weights(acc: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    if acc.is_fsdp2 or acc.state.fsdp_plugin.state_dict_type == StateDictType.FULL_STATE_DICT:
        return acc.get_state_dict(model) or {}
    with FullyShardedDataParallel.summon_full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def train(version: int, precision: str = "no", **settings: Any) -> Any:
    def case(folder: Path) -> Any:
        acc = accelerator(version, precision, **settings)
        model, optimizer = prepared(acc)
        found = steps(acc, model, optimizer, range(STEPS))
        acc.save_state(str(folder / "state"))
        acc.wait_for_everyone()
        resumed = steps(acc, model, optimizer, range(STEPS, 2 * STEPS))
        if settings.get("state_dict_type") != "FULL_STATE_DICT":
            merge_fsdp_weights(str(folder / "state/pytorch_model_fsdp_0"), str(folder / "merged"))
        return {"first": found, "then": resumed}

    return case


def resume(version: int, precision: str = "no", **settings: Any) -> Any:
    """Resume from the state that another run saved in the folder beside this one."""

    def case(folder: Path) -> Any:
        acc = accelerator(version, precision, **settings)
        torch.manual_seed(1)
        model, optimizer = prepared(acc)
        if version == 1:
            # accelerate loads a sharded optimizer state only over an existing one.
            steps(acc, model, optimizer, range(2))
        acc.load_state(str(folder.with_name(folder.name.removeprefix("resume_")) / "state"))
        return steps(acc, model, optimizer, range(STEPS, 2 * STEPS))

    return case


VARIANTS: dict[str, tuple[Any, ...]] = {
    "fsdp2": (2, "no", {}),
    "fsdp2_bf16": (2, "bf16", {}),
    "fsdp2_checkpointed": (2, "no", {"activation_checkpointing": True}),
    "fsdp2_full": (2, "no", {"state_dict_type": "FULL_STATE_DICT"}),
    "fsdp2_kept": (2, "no", {"reshard_after_forward": False}),
    "fsdp2_offload": (2, "no", {"cpu_offload": True}),
    "fsdp1": (1, "no", {}),
    "fsdp1_flat": (1, "no", {"use_orig_params": False}),
    "fsdp1_bf16": (1, "bf16", {}),
    "fsdp1_checkpointed": (1, "no", {"activation_checkpointing": True}),
    "fsdp1_full": (1, "no", {"state_dict_type": "FULL_STATE_DICT"}),
    "fsdp1_grad_op": (1, "no", {"reshard_after_forward": "SHARD_GRAD_OP"}),
}
ALL = {
    name: kind(version, precision, **settings)
    for make, kind in (("{}", train), ("resume_{}", resume))
    for variant, (version, precision, settings) in VARIANTS.items()
    for name in [make.format(variant)]
}

if __name__ == "__main__":
    sys.argv[2:] = sys.argv[2:] or list(ALL)
    cases.run(ALL)
