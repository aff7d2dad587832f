"""LoRA adapters on a frozen transformers model: only the adapters are trained and saved.

torchrun --standalone --nproc-per-node 2 examples/lora.py
"""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard import auto_shard
from fullshard.state import load, save

STEPS, BATCH, LENGTH, VOCABULARY = 16, 4, 32, 64


def build(mesh: DeviceMesh, adapter_seed: int) -> nn.Module:
    """Build the same base model on every rank, add adapters, and shard it."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    base = LlamaForCausalLM(config)
    torch.manual_seed(adapter_seed)
    adapters = LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj", "lm_head"])
    model = get_peft_model(base, adapters).to(mesh.device_type)
    return auto_shard(model, mesh=mesh)  # frozen and trained parameters share units


def main() -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))  # also sets the GPU
    rank = dist.get_rank()
    shared = [tempfile.mkdtemp(prefix="lora_") if rank == 0 else None]
    dist.broadcast_object_list(shared)
    folder = Path(str(shared[0]))

    model = build(mesh, adapter_seed=1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_trained = sum(parameter.numel() for parameter in trained)
    num_all = sum(parameter.numel() for parameter in model.parameters())
    if rank == 0:
        print(f"{num_trained:,} of {num_all:,} parameters are trained")

    optimizer = torch.optim.AdamW(trained, lr=2e-2)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(STEPS):
        starts = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        tokens = ((starts + torch.arange(LENGTH)) % VOCABULARY).to(device_type)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0 and step % 5 == 0:
            print(f"step {step:2d}  loss {losses[-1]:.3f}")
    with_gradient = [name for name, p in model.named_parameters() if p.grad is not None]

    path = save(folder / "adapters", model, optimizer, only="trainable", step=STEPS)
    other = build(mesh, adapter_seed=2)  # the same base model with different adapters
    tokens = torch.arange(LENGTH, device=device_type)[None]
    with torch.no_grad():
        before = other(input_ids=tokens).logits
        load(path, other)  # the frozen parameters are not reported as missing
        after = other(input_ids=tokens).logits
        expected = model(input_ids=tokens).logits
    if rank == 0:
        saved = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        print(f"checkpoint of adapters and their optimizer: {saved / 1024:.0f} KiB")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"loaded into another model: same logits {torch.equal(after, expected)}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()

    if with_gradient:
        raise SystemExit(f"zero_grad should have freed all gradients, found {with_gradient}")
    if torch.equal(before, expected) or not torch.equal(after, expected):
        raise SystemExit("the adapters that were saved are not the ones that were loaded")
    if not losses[-1] < 0.9 * losses[0]:
        raise SystemExit(f"the loss should have fallen, found {losses}")


if __name__ == "__main__":
    main()
