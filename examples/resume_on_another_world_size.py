"""Resumes a run on a different number of ranks, with the same losses.

Run it twice with different numbers of ranks. The first run trains to the end and saves a checkpoint
halfway. Later runs resume from the checkpoint and must reproduce the losses of the first run.

torchrun --standalone --nproc-per-node 2 examples/resume_on_another_world_size.py
torchrun --standalone --nproc-per-node 3 examples/resume_on_another_world_size.py
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import auto_shard
from fullshard.state import latest, load, save

WIDTH, GLOBAL_BATCH, MIDDLE, STEPS = 64, 12, 8, 16


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(WIDTH, 1))


def batch(step: int) -> torch.Tensor:
    """Return the rows of this rank. The global batch does not depend on the number of ranks."""
    rows = torch.randn(GLOBAL_BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return rows[dist.get_rank() :: dist.get_world_size()]


def main() -> None:
    default = Path(tempfile.gettempdir()) / "fullshard_resume"
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=default)
    folder = parser.parse_args().folder

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if GLOBAL_BATCH % size:
        raise SystemExit(f"{size} ranks do not divide the batch of {GLOBAL_BATCH}; start 2, 3 or 4")
    mesh = init_device_mesh(device_type, (size,))  # also sets the GPU
    model = build().to(device_type)
    auto_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    start, path = 0, latest(folder)
    if path is not None:
        start = load(path, model, optimizer, extra={"schedule": schedule}).step or 0
    if rank == 0:
        print(f"{'resumed at' if start else 'starts at'} step {start} on {size} ranks")

    losses = {}
    for step in range(start, STEPS):
        if step == MIDDLE and path is None:
            save(folder / f"step_{step}", model, optimizer, extra={"schedule": schedule}, step=step)
        inputs = batch(step).to(device_type)
        loss = F.mse_loss(model(inputs).squeeze(-1), inputs[:, :8].sum(dim=1))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        losses[step] = loss.item() / size
        if rank == 0:
            print(f"step {step:2d}  loss {losses[step]:.5f}")
    dist.destroy_process_group()
    if rank == 0:
        compare(losses, folder / "losses.pt", is_first=path is None)


def compare(losses: dict[int, float], file: Path, is_first: bool) -> None:
    """Save the losses of the first run, and compare those of later runs with them."""
    if is_first:
        torch.save(losses, file)
        return
    expected = torch.load(file, weights_only=True)
    worst = max(abs(losses[step] - expected[step]) for step in losses)
    print(f"largest difference to the first run: {worst:.1e}")
    if not worst < 1e-3:
        raise SystemExit(f"the losses should continue those of the first run, found {losses}")


if __name__ == "__main__":
    main()
