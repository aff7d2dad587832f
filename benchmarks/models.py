"""The models that the benchmarks train."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullshard_train.models.transformer import Block as LlamaBlock
from fullshard_train.models.transformer import Size, Transformer

__all__ = ["GPT", "GPTBlock", "GPTSize", "Linear", "Linears", "Llama", "LlamaBlock"]


class Linears(nn.Sequential):
    """A unit of small Linears: little to compute, 16 parameters to look after."""

    def __init__(self, width: int, num_linears: int = 8) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(num_linears)))


def many_units(num_units: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(Linears(width) for _ in range(num_units)))


@dataclass(frozen=True)
class GPTSize:
    num_blocks: int
    width: int
    vocabulary: int = 256


GPT_SIZES = {
    "tiny": GPTSize(2, 64),
    "10m": GPTSize(6, 384),
    "150m": GPTSize(12, 1024),
}


def multiplies_bf16() -> bool:
    """Whether this CPU has bf16 instructions; without, bf16 takes 250 times as long as float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear(nn.Linear):
    """Multiplies in float32 where the CPU cannot in bf16; its parameters keep their dtype."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == torch.float32 or x.is_cuda or multiplies_bf16():
            return super().forward(x)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias)


class GPTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        x = x.to(self.norm_1.weight.dtype)
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, width // 64, 64)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width)).to(x.dtype)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x)))).to(x.dtype)
        return out


class GPT(nn.Module):
    """Tokens in, loss out."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(GPTBlock(size.width) for _ in range(size.num_blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return F.cross_entropy(logits, tokens.flatten())


class Llama(nn.Module):
    """The transformer of `fullshard train`, with its loss. Tokens in, loss out.

    20 blocks of width 2048 are 1.03 billion parameters.
    """

    def __init__(self, num_blocks: int = 20, width: int = 2048, vocabulary: int = 32_000) -> None:
        super().__init__()
        head_width = 64 if width >= 512 else 16
        self.transformer = Transformer(
            Size(
                name=f"{num_blocks} x {width}",
                vocabulary=vocabulary,
                width=width,
                num_blocks=num_blocks,
                num_heads=width // head_width,
                num_kv_heads=max(width // head_width // 4, 1),
                mlp_width=width * 11 // 4,
                rope_theta=10_000.0,
                max_sequence=8192,
                is_tied=False,
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.transformer(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def tokens_for(
    batch: int, length: int, vocabulary: int, device: torch.device, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (batch, length), generator=generator).to(device)
