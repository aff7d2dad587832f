"""A byte-level transformer learns Python from the standard library, sharded over the ranks.

torchrun --standalone --nproc-per-node 2 examples/demo.py
"""

import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import fully_shard

WIDTH, NUM_HEADS, NUM_BLOCKS, CONTEXT = 160, 5, 4, 64
BATCH, STEPS, PEAK_LEARNING_RATE = 8, 80, 4e-3
PROMPT, SAMPLE_BYTES = "def __init__(self, ", 80


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, NUM_HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.mlp_norm(x))


class ByteTransformer(nn.Module):
    """Predicts each byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.logits = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        return self.logits(self.norm(self.blocks(self.bytes(text) + self.positions(positions))))


def standard_library() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)


def draw_batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def sample(model: nn.Module) -> str:
    """Continue the prompt. Every rank draws the same bytes, so every rank gathers alike."""
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([list(PROMPT.encode())])
    for _ in range(SAMPLE_BYTES):
        odds = (model(text[:, -CONTEXT:])[0, -1] / 0.5).softmax(0)
        text = torch.cat([text, torch.multinomial(odds, 1, generator=generator)[None]], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same initial model on every rank
    model = ByteTransformer()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, STEPS + 1)
    text, generator = standard_library(), torch.Generator().manual_seed(rank)
    if rank == 0:
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        print(f"{num_parameters:,} parameters, {held:,} on each of {size} ranks", flush=True)

    began = time.perf_counter()
    for step in range(STEPS + 1):
        inputs, targets = draw_batch(text, generator)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            seconds = time.perf_counter() - began
            print(f"step {step:3d}  loss {loss:.2f}  {seconds:4.1f} s", flush=True)

    written = sample(model)
    if rank == 0:
        print("\n" + written)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
