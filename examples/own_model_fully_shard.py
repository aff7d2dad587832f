"""Shards a model in place with `fully_shard`, trains it, and prints what each rank holds.

torchrun --standalone --nproc-per-node 2 examples/own_model_fully_shard.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import fully_shard

WIDTH, NUM_BLOCKS, BATCH, STEPS = 128, 4, 16, 30


class Block(nn.Module):
    """Two layers with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).squeeze(-1)


def main() -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))  # also sets the GPU
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same initial model on every rank
    model = Model().to(device_type)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)  # one unit per block
    fully_shard(model, mesh=mesh)  # the remaining parameters: the head

    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    if rank == 0:
        print(f"{num_parameters:,} parameters, {held:,} on each of {size} ranks")
        print(f"head.weight is {model.head.weight.placements} of {tuple(model.head.weight.shape)}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(rank)  # each rank draws its own batches
    first = last = 0.0
    for step in range(STEPS):
        inputs = torch.randn(BATCH, WIDTH, generator=generator).to(device_type)
        targets = inputs[:, :8].sum(dim=1)
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach(), op=dist.ReduceOp.SUM)
        last = loss.item() / size
        first = first or last
        if rank == 0 and step % 10 == 0:
            print(f"step {step:2d}  loss {last:.3f}")
    if rank == 0:
        print(f"loss {first:.3f} -> {last:.3f}")
    dist.destroy_process_group()

    # Parameters that do not divide evenly add up to one row each.
    if not held <= num_parameters / size + NUM_BLOCKS * 8 * WIDTH:
        raise SystemExit(f"a rank holds {held:,} of {num_parameters:,} parameters")
    if not last < 0.5 * first:
        raise SystemExit(f"the loss should have halved, found {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
