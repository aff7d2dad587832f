"""A transformer like Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Modules have the names that Llama has in Hugging Face's layout, so that exported weights open there,
and adapters are asked for by the same names. There are no buffers: nothing is lost on meta.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.models.drawing import Draw, normal, ones
from fullshard.models.sizes import Size

_DEVIATION = 0.02
# What is added to the stream of activations, twice in each block.
_RESIDUAL = ("o_proj.weight", "down_proj.weight")
_NORM = "norm.weight"


class Past:
    """The keys and values of tokens that were read before: they need not be computed again.

    One for a whole model. A forward that is given it reads the tokens that come after.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def extended(self, layer: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of all tokens, with these, [.., tokens, width], at the end."""
        if layer in self._kept:
            before = self._kept[layer]
            keys = torch.cat((before[0], keys), dim=-2)
            values = torch.cat((before[1], values), dim=-2)
        self._kept[layer] = (keys, values)
        return keys, values


class Attention(nn.Module):
    """Causal, with fewer heads of keys and values than of queries."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.head_width
        self.rope_theta = size.rope_theta
        self.q_proj = nn.Linear(size.width, size.width, bias=False)
        self.k_proj = nn.Linear(size.width, size.kv_width, bias=False)
        self.v_proj = nn.Linear(size.width, size.kv_width, bias=False)
        self.o_proj = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        queries, keys, values = (
            projection(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        first = 0 if past is None else past.num_tokens
        angles = rotary_angles(first, x.shape[1], self.head_width, self.rope_theta, x.device)
        cos, sin = angles.cos(), angles.sin()
        queries, keys = rotated(queries, cos, sin), rotated(keys, cos, sin)
        mask = None
        if past is not None:
            keys, values = past.extended(self, keys, values)
            seen = torch.ones(x.shape[1], keys.shape[2], dtype=torch.bool, device=x.device)
            mask = seen.tril(first)
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """Two layers, the inner one gated."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.width, size.mlp_width, bias=False)
        self.up_proj = nn.Linear(size.width, size.mlp_width, bias=False)
        self.down_proj = nn.Linear(size.mlp_width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """What the model repeats."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(size.width, size.norm_eps)
        self.self_attn = Attention(size)
        self.post_attention_layernorm = nn.RMSNorm(size.width, size.norm_eps)
        self.mlp = SwiGLU(size)

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), past)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Tokens in, activations out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.num_blocks))
        self.norm = nn.RMSNorm(size.width, size.norm_eps)

    def forward(self, tokens: Tensor, past: Past | None = None) -> Tensor:
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x, past)
        if past is not None:
            past.num_tokens += tokens.shape[1]
        out: Tensor = self.norm(x)
        return out


class Transformer(nn.Module):
    """[batch, length] tokens in, [batch, length, vocabulary] logits out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = Trunk(size)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)
        if size.is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_output_embeddings(self) -> nn.Module:
        """The head, under the name that transformers' models have for it."""
        return self.lm_head

    def forward(self, tokens: Tensor, past: Past | None = None) -> Tensor:
        logits: Tensor = self.lm_head(self.model(tokens, past))
        return logits


def rotary_angles(
    first: int, length: int, head_width: int, theta: float, device: torch.device
) -> Tensor:
    """[length, head_width / 2] from a position on; in float32, since positions are large."""
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    positions = torch.arange(first, first + length, device=device, dtype=torch.float32)
    return torch.outer(positions, theta**-exponents)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (of the two halves of a head) by the angle of its position."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def initial_values(name: str, size: Size) -> Draw:
    """The rule by which a parameter of a transformer gets its first values."""
    if name.endswith(_NORM):
        return ones
    if name.endswith(_RESIDUAL):
        return normal(_DEVIATION / (2 * size.num_blocks) ** 0.5)
    return normal(_DEVIATION)
