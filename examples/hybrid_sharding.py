"""Hybrid sharding: shards within a group of ranks and replicates across groups.

All-gathers stay inside a group, such as the GPUs of one host; only reduced gradients are sent
between groups. The program compares the losses with those of one unsharded process and checks that
the replicas stay equal.

torchrun --standalone --nproc-per-node 4 examples/hybrid_sharding.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import fully_shard

WIDTH, GLOBAL_BATCH, STEPS, NUM_REPLICAS = 64, 16, 10, 2


def build(device_type: str) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1)).to(device_type)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor
) -> torch.Tensor:
    loss = F.mse_loss(model(inputs).squeeze(-1), inputs[:, :8].sum(dim=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main() -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if size % NUM_REPLICAS:
        raise SystemExit(f"{size} ranks do not make two equal replicas; start an even number")
    mesh = init_device_mesh(
        device_type, (NUM_REPLICAS, size // NUM_REPLICAS), mesh_dim_names=("replicate", "shard")
    )

    model = build(device_type)
    for block in model[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = build(device_type)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    weight = model[0][0].weight
    if rank == 0:
        print(f"{NUM_REPLICAS} replicas of {size // NUM_REPLICAS} shards: {weight.placements}")
        print(f"a weight of {tuple(weight.shape)}, {tuple(weight.to_local().shape)} on each rank")

    # Every rank of every replica takes its own part of a batch.
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        whole = torch.randn(GLOBAL_BATCH, WIDTH, generator=generator).to(device_type)
        loss = train_step(model, optimizer, whole.chunk(size)[rank])
        reference = train_step(plain, plain_optimizer, whole)
        dist.all_reduce(loss)
        loss /= size
        if rank == 0 and step % 3 == 0:
            print(f"step {step}  loss {loss.item():.4f}  unsharded {reference.item():.4f}")
        if not torch.isclose(loss, reference, rtol=1e-2):
            raise SystemExit(f"step {step}: {loss.item()} differs from {reference.item()}")

    # Corresponding ranks of the replicas must have identical shards.
    shards = torch.cat([parameter.to_local().flatten() for parameter in model.parameters()])
    twins = [torch.empty_like(shards) for _ in range(NUM_REPLICAS)]
    dist.all_gather(twins, shards.detach(), group=mesh.get_group("replicate"))
    same = all(torch.equal(twin, twins[0]) for twin in twins)
    if rank == 0:
        print(f"replicas are the same: {same}")
    dist.destroy_process_group()
    if not same:
        raise SystemExit("the replicas have come apart")


if __name__ == "__main__":
    main()
