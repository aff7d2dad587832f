"""`FullyShardedDataParallel` with mixed precision, gradient clipping and a full state dict.

torchrun --standalone --nproc-per-node 2 examples/own_model_wrapper.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from fullshard.wrap import ModuleWrapPolicy

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


def build() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 1))


def main() -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))  # also sets the GPU
    rank, size = dist.get_rank(), dist.get_world_size()

    computed = torch.bfloat16 if device_type == "cuda" else torch.float32
    torch.manual_seed(0)  # the same initial model on every rank
    model = FullyShardedDataParallel(
        build(),
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy({Block}),  # one unit per block
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(param_dtype=computed, reduce_dtype=torch.float32),
        use_orig_params=True,
    )
    held = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    generator = torch.Generator().manual_seed(rank)  # each rank draws its own batches
    first = last = 0.0
    for step in range(STEPS):
        inputs = torch.randn(BATCH, WIDTH, generator=generator).to(device_type)
        targets = inputs[:, :8].sum(dim=1)
        loss = F.mse_loss(model(inputs).squeeze(-1).float(), targets)
        loss.backward()
        norm = model.clip_grad_norm_(10.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach(), op=dist.ReduceOp.SUM)
        last = loss.item() / size
        first = first or last
        if rank == 0 and step % 10 == 0:
            print(f"step {step:2d}  loss {last:.3f}  gradient norm {norm.item():.2f}")

    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
    ):
        state = model.state_dict()  # full tensors, on rank 0 only
    if rank == 0:
        plain = build()
        plain.load_state_dict(state)  # keys are those of the unwrapped model
        whole = sum(parameter.numel() for parameter in plain.parameters())
        print(f"{whole:,} parameters in a plain model, {held:,} on each of {size} ranks")
        print(f"loss {first:.3f} -> {last:.3f}")
        if not held < whole / size + 1024:
            raise SystemExit(f"a rank holds {held:,} of {whole:,} parameters")
    elif state:
        raise SystemExit(f"rank {rank} was given a state dict with rank0_only")
    dist.destroy_process_group()
    if not last < 0.5 * first:
        raise SystemExit(f"the loss should have halved, found {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
