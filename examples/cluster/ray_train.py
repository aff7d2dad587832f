"""Trains with Ray Train: sharded by fullshard, saved in a folder, resumed after a worker failure.

pip install 'ray[train]'
python examples/cluster/ray_train.py --workers 2 --folder runs/ray
"""

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import fully_shard
from fullshard.state import latest, load, save

WIDTH, BATCH = 64, 16


def build() -> nn.Module:
    torch.manual_seed(0)  # the same initial model on every rank
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def batch(step: int) -> torch.Tensor:
    """Return the batch of this rank; it depends on the step alone, so that a resumed run agrees."""
    seed = step * dist.get_world_size() + dist.get_rank()
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(config: dict[str, Any]) -> dict[str, float]:
    """Train on one worker. Ray has initialized the process group, and set the GPU."""
    device, folder = get_device(), Path(config["folder"]) / "checkpoints"
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = build().to(device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    path = latest(folder)  # on a file system that all workers share
    start = 0 if path is None else load(path, model, optimizer).step or 0
    metrics: dict[str, float] = {"resumed_at": start}
    for step in range(start, config["steps"]):
        inputs = batch(step).to(device)
        loss = F.mse_loss(model(inputs).squeeze(-1), inputs[:, :8].sum(dim=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % config["save_every"] == 0:
            save(folder / f"step_{step + 1}", model, optimizer, step=step + 1, keep=2)
            dist.all_reduce(loss := loss.detach())
            metrics |= {"step": step + 1, "loss": loss.item() / dist.get_world_size()}
            ray.train.report(metrics)
    return metrics


def fit(config: dict[str, Any], num_workers: int, loop: Any = train) -> Result:
    """Train on workers of a Ray cluster; after a failure all workers are started again."""
    trainer = TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name="ray",
            storage_path=str(config["folder"]),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    return trainer.fit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/ray"))
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    config = {"folder": str(asked.folder.absolute()), "steps": asked.steps, "save_every": 10}
    metrics = fit(config, asked.workers).return_value
    print(f"step {metrics['step']}  loss {metrics['loss']:.4f}  resumed at {metrics['resumed_at']}")


if __name__ == "__main__":
    main()
