"""Gradient accumulation: several micro-batches per step, reduced once with the last one.

The program compares the accumulated gradients with those of the whole batch.

torchrun --standalone --nproc-per-node 2 examples/gradient_accumulation.py
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import auto_shard

WIDTH, BATCH, NUM_MICRO_BATCHES, STEPS = 64, 16, 4, 5


def build(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(WIDTH, 1)).to(mesh.device_type)
    return auto_shard(model, mesh=mesh)


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(inputs).squeeze(-1), inputs[:, :8].sum(dim=1))


def main() -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))  # also sets the GPU
    rank = dist.get_rank()

    accumulated, whole = build(mesh), build(mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (accumulated, whole)]
    generator = torch.Generator().manual_seed(rank)
    worst = 0.0
    for step in range(STEPS):
        inputs = torch.randn(BATCH, WIDTH, generator=generator).to(device_type)

        micro_batches = inputs.chunk(NUM_MICRO_BATCHES)
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == NUM_MICRO_BATCHES - 1
            # No communication: each rank accumulates its own full gradients.
            with nullcontext() if is_last else accumulated.no_sync():
                (loss_of(accumulated, micro_batch) / NUM_MICRO_BATCHES).backward()
            if not is_last and any(p.grad is not None for p in accumulated.parameters()):
                raise SystemExit("gradients should be reduced with the last micro-batch only")

        loss = loss_of(whole, inputs)
        loss.backward()

        pairs = list(zip(accumulated.parameters(), whole.parameters(), strict=True))
        differences = [(a.grad - b.grad).to_local().norm().item() for a, b in pairs]
        difference = max(differences)  # on this rank's shards
        worst = max(worst, difference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}  loss {loss.item():.4f}  gradients differ by {difference:.1e}")
    if rank == 0:
        print(f"{NUM_MICRO_BATCHES} micro-batches and one batch agree within {worst:.1e}")
    dist.destroy_process_group()
    if not worst < 1e-4:
        raise SystemExit(f"gradients of micro-batches add up to something else: {worst}")


if __name__ == "__main__":
    main()
