"""Lightning's Fabric and Trainer with FSDPStrategy and with ModelParallelStrategy."""

import sys
import warnings
from pathlib import Path
from typing import Any

import cases
import torch
from lightning import Fabric, LightningModule, Trainer
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def net() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(8, 3))


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


class WrapperOnCPU(FullyShardedDataParallel):
    """torch's wrapper must be told that there is no GPU; Lightning leaves it to find one."""

    def __init__(self, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, device_id=torch.device("cpu"), **kwargs)


if fully_shard.__module__.startswith("torch."):
    torch.distributed.fsdp.FullyShardedDataParallel = WrapperOnCPU


# Without a GPU, Lightning refuses its own FSDPStrategy but not classes derived from it.
class FabricFSDPOnCPU(FabricFSDP):
    pass


class FSDPOnCPU(FSDPStrategy):
    pass


def strategy(kind: str, settings: dict[str, Any], fabric: bool) -> Any:
    if kind == "fsdp":
        make = FabricFSDPOnCPU if fabric else FSDPOnCPU
        return make(auto_wrap_policy={Block}, **settings)
    if fabric:
        return FabricModelParallel(
            shard, data_parallel_size=cases.WORLD_SIZE, tensor_parallel_size=1, **settings
        )
    return ModelParallelStrategy(cases.WORLD_SIZE, 1, **settings)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: param.detach().clone() for name, param in model.named_parameters()}
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


# Fabric


def fabric_steps(fabric: Fabric, model: Any, optimizer: Any, which: range) -> dict[str, Any]:
    losses, norms = [], []
    for step in which:
        for part in range(2):
            with fabric.no_backward_sync(model, enabled=part == 0):
                loss = model(cases.batch(2 * step + part, 4, 8)).float().square().mean()
                fabric.backward(loss)
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
    sharded = model._forward_module
    return {
        "losses": losses,
        "norms": norms,
        "units": cases.num_units(sharded),
        "model": weights(sharded),
    }


def fabric_case(kind: str, precision: str, settings: dict[str, Any], resumes: bool) -> Any:
    def case(folder: Path) -> Any:
        fabric = Fabric(
            accelerator="cpu",
            devices=cases.WORLD_SIZE,
            strategy=strategy(kind, settings, fabric=True),
            precision=precision,
        )
        fabric.launch()
        torch.manual_seed(int(resumes))
        model = fabric.setup_module(net())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
        if resumes:
            state = {"model": model, "optimizer": optimizer, "step": 0}
            fabric.load(folder.with_name(folder.name.removeprefix("resume_")) / "state", state)
            return fabric_steps(fabric, model, optimizer, range(state["step"], 2 * STEPS))
        found = fabric_steps(fabric, model, optimizer, range(STEPS))
        state = {"model": model, "optimizer": optimizer, "step": STEPS}
        folder.mkdir(exist_ok=True)
        fabric.save(folder / "state", state)
        return {"first": found, "then": fabric_steps(fabric, model, optimizer, range(STEPS, 8))}

    return case


# Trainer


class Module(LightningModule):
    def __init__(self, shards_itself: bool) -> None:
        super().__init__()
        self.shards_itself = shards_itself
        self.losses: list[float] = []
        self.model = net()

    def configure_model(self) -> None:
        if self.shards_itself and not cases.num_units(self.model):
            shard(self.model, self.device_mesh)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(batch).float().square().mean()
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def trainer_case(kind: str, precision: str, settings: dict[str, Any], resumes: bool) -> Any:
    def case(folder: Path) -> Any:
        first = folder.with_name(folder.name.removeprefix("resume_"))
        trainer = Trainer(
            accelerator="cpu",
            devices=cases.WORLD_SIZE,
            strategy=strategy(kind, settings, fabric=False),
            precision=precision,
            max_steps=2 * STEPS,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5 if kind == "model_parallel" else None,
            callbacks=[ModelCheckpoint(first, every_n_train_steps=STEPS, save_top_k=-1)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        module = Module(kind == "model_parallel")
        batches = DataLoader(
            [cases.batch(step, 4, 8) for step in range(4 * STEPS)], batch_size=None
        )
        path = next(first.glob(f"*step={STEPS}.ckpt")) if resumes else None
        trainer.fit(module, batches, ckpt_path=path)
        sharded = trainer.strategy.model
        return {
            "losses": module.losses,
            "units": cases.num_units(sharded),
            "model": weights(sharded),
        }

    return case


CHECKPOINTED = {"activation_checkpointing_policy": {Block}}
VARIANTS: dict[str, tuple[Any, ...]] = {
    "fabric_fsdp": (fabric_case, "fsdp", "32-true", {}),
    "fabric_fsdp_bf16": (fabric_case, "fsdp", "bf16-mixed", {}),
    "fabric_fsdp_checkpointed": (fabric_case, "fsdp", "32-true", CHECKPOINTED),
    "fabric_fsdp_flat": (fabric_case, "fsdp", "32-true", {"use_orig_params": False}),
    "fabric_fsdp_full": (fabric_case, "fsdp", "32-true", {"state_dict_type": "full"}),
    "fabric_model_parallel": (fabric_case, "model_parallel", "32-true", {}),
    "fabric_model_parallel_full": (
        fabric_case,
        "model_parallel",
        "32-true",
        {"save_distributed_checkpoint": False},
    ),
    "trainer_fsdp": (trainer_case, "fsdp", "32-true", {"state_dict_type": "sharded"}),
    "trainer_fsdp_bf16": (trainer_case, "fsdp", "bf16-mixed", {"state_dict_type": "sharded"}),
    "trainer_fsdp_full": (trainer_case, "fsdp", "32-true", {"state_dict_type": "full"}),
    "trainer_model_parallel": (trainer_case, "model_parallel", "32-true", {}),
}
ALL = {
    name: make(*settings, resumes)
    for resumes, form in ((False, "{}"), (True, "resume_{}"))
    for variant, (make, *settings) in VARIANTS.items()
    for name in [form.format(variant)]
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.argv[2:] = sys.argv[2:] or list(ALL)
    cases.run(ALL)
