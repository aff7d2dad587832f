"""Streams a transformers model from safetensors into shards, trains it, and exports it.

No rank ever holds the whole model: it is built on the meta device, sharded, and then loaded.

torchrun --standalone --nproc-per-node 2 examples/huggingface_model.py
"""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fullshard import auto_shard
from fullshard.state import export_safetensors, load_safetensors

STEPS, BATCH, LENGTH = 12, 4, 32
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    use_cache=False,
)


def batch(generator: torch.Generator, device_type: str) -> torch.Tensor:
    """Return sequences that count up from a random token."""
    starts = torch.randint(CONFIG.vocab_size, (BATCH, 1), generator=generator)
    return ((starts + torch.arange(LENGTH)) % CONFIG.vocab_size).to(device_type)


def main() -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))  # also sets the GPU
    rank = dist.get_rank()
    shared = [tempfile.mkdtemp(prefix="huggingface_") if rank == 0 else None]
    dist.broadcast_object_list(shared)
    folder = Path(str(shared[0]))

    if rank == 0:  # in place of a downloaded model
        torch.manual_seed(0)
        LlamaForCausalLM(CONFIG).save_pretrained(folder / "original", max_shard_size="200KB")
        files = sorted(file.name for file in (folder / "original").glob("*.safetensors"))
        print(f"made a Llama of {len(files)} files")
    dist.barrier()

    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    model.tie_weights()
    auto_shard(model, mesh=mesh)  # one unit per decoder layer
    found = load_safetensors(folder / "original", model)  # each rank reads its own shards
    if rank == 0:
        print(f"streamed into shards; tied: {dict(found.tied)}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(STEPS):
        tokens = batch(generator, device_type)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0 and step % 4 == 0:
            print(f"step {step:2d}  loss {losses[-1]:.3f}")

    export_safetensors(folder / "trained", model)
    tokens = batch(torch.Generator().manual_seed(0), device_type)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits.float().cpu()  # all-gathers, so on all ranks
    if rank == 0:
        CONFIG.save_pretrained(folder / "trained")
        opened = AutoModelForCausalLM.from_pretrained(folder / "trained", dtype=torch.float32)
        with torch.no_grad():
            logits = opened(input_ids=tokens.cpu()).logits
        difference = (logits - expected).abs().max().item()
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"opened with transformers; largest difference of a logit: {difference:.1e}")
        if not difference < (1e-1 if device_type == "cuda" else 1e-4):
            raise SystemExit(f"the exported model computes something else: {difference}")
        shutil.rmtree(folder)
    dist.destroy_process_group()
    if not losses[-1] < 0.7 * losses[0]:
        raise SystemExit(f"the loss should have fallen, found {losses}")


if __name__ == "__main__":
    main()
