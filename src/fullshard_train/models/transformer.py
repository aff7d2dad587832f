"""The built-in transformer, with the architecture of Llama: RMSNorm, RoPE, GQA and SwiGLU.

Modules have the names of Hugging Face's Llama, so that exported weights load there and adapters are
selected by the same names. There are no buffers, so nothing is lost on the meta device.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from fullshard.errors import UnknownNameError
from fullshard.losses import LinearCrossEntropyHead
from fullshard.state import TensorShard, draw_into, tensor_shards
from fullshard_train.models.adapters import (
    LoraSettings,
    add_adapters,
    base_name,
    fill_adapters,
    fill_base,
)
from fullshard_train.models.architecture import Architecture, token_ids, write_json
from fullshard_train.models.document_attention import attend, documents_of
from fullshard_train.models.elementwise import rotated, swiglu
from fullshard_train.models.initialization import Draw, constant, normal
from fullshard_train.models.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    bpe_vocabulary,
    is_path,
    tokenizer_at,
)

# 256 bytes and the end-of-document token, rounded up to a multiple of 8.
BYTE_VOCABULARY = 264

_INIT_STD = 0.02
# These projections write to the residual stream, two in each block.
_RESIDUAL = ("o_proj.weight", "down_proj.weight")
_NORM = "norm.weight"


@dataclass(frozen=True, slots=True)
class Size:
    """The dimensions of a transformer.

    `is_tied` shares the weight of the output head with the embedding: in small models, a separate
    head would be a large part of the parameters.
    """

    name: str
    vocabulary: int
    width: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    mlp_width: int
    rope_theta: float
    max_sequence: int
    is_tied: bool = True
    norm_eps: float = 1e-5

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def kv_width(self) -> int:
        """The width of the keys, or values, of all heads."""
        return self.num_kv_heads * self.head_width


_ALL = (
    # name, vocabulary, width, blocks, heads, KV heads, MLP width, RoPE theta, longest sequence
    Size("tiny", BYTE_VOCABULARY, 128, 4, 4, 2, 512, 10_000.0, 2048),
    Size("10m", BYTE_VOCABULARY, 384, 6, 6, 2, 1024, 10_000.0, 2048),
    Size("30m", BYTE_VOCABULARY, 512, 10, 8, 4, 1408, 10_000.0, 2048),
    Size("150m", 32_000, 768, 20, 12, 4, 2048, 10_000.0, 4096),
    Size("350m", 32_000, 1024, 28, 16, 8, 2688, 10_000.0, 4096),
    Size("1b", 128_256, 2048, 16, 32, 8, 8192, 500_000.0, 8192),
    Size("3b", 128_256, 3072, 28, 24, 8, 8192, 500_000.0, 8192),
    Size("8b", 128_256, 4096, 32, 32, 8, 14_336, 500_000.0, 8192, is_tied=False),
    Size("70b", 128_256, 8192, 80, 64, 8, 28_672, 500_000.0, 8192, is_tied=False),
    Size("405b", 128_256, 16_384, 126, 128, 8, 53_248, 500_000.0, 8192, is_tied=False),
)
SIZES = {size.name: size for size in _ALL}


def size_named(name: str) -> Size:
    """Return the built-in size of this name; raise with the closest name if there is none."""
    if name in SIZES:
        return SIZES[name]
    known = ", ".join(SIZES)
    if "/" in name or "." in name or os.path.exists(name):
        raise UnknownNameError(
            f"model {name!r} {'is a file' if os.path.exists(name) else 'does not exist'}; pass a "
            f"folder in Hugging Face's layout, or one of the built-in sizes {known}."
        )
    close = difflib.get_close_matches(name.lower(), SIZES, n=1, cutoff=0.3)
    meant = f"; did you mean {close[0]!r}?" if close else "."
    raise UnknownNameError(
        f"model {name!r} is neither a built-in size ({known}) nor a folder in Hugging Face's "
        f"layout{meant}"
    )


def size_for(size: Size, tokenizer: str) -> Size:
    """Return a size with the vocabulary of a kind of tokenizer, rounded up to a multiple of 8."""
    if tokenizer in ("auto", "model"):
        return size
    trained = bpe_vocabulary(tokenizer)
    if trained is None:
        own = tokenizer_at(Path(tokenizer)) if is_path(tokenizer) else ByteTokenizer()
        trained = own.vocabulary
    return replace(size, vocabulary=-(-trained // 8) * 8)


class KVCache:
    """The keys and values of the tokens that every layer has already processed.

    One cache serves a whole model. A forward with a cache takes only the tokens that follow.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def append(self, layer: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values, [.., tokens, width], and return those of all tokens."""
        if layer in self._kept:
            before = self._kept[layer]
            keys = torch.cat((before[0], keys), dim=-2)
            values = torch.cat((before[1], values), dim=-2)
        self._kept[layer] = (keys, values)
        return keys, values


# [batch, 1, length, length]: which tokens each one sees, by default those before it. Or the offsets
# of documents in a flattened batch.
Mask = Tensor | None


class Attention(nn.Module):
    """Causal grouped-query attention with rotary position embeddings."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.head_width
        self.rope_theta = size.rope_theta
        self.q_proj = nn.Linear(size.width, size.width, bias=False)
        self.k_proj = nn.Linear(size.width, size.kv_width, bias=False)
        self.v_proj = nn.Linear(size.width, size.kv_width, bias=False)
        self.o_proj = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, cache: KVCache | None = None, mask: Mask = None) -> Tensor:
        queries, keys, values = (
            projection(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        first = 0 if cache is None else cache.num_tokens
        angles = rotary_angles(first, x.shape[1], self.head_width, self.rope_theta, x.device)
        cos, sin = angles.cos(), angles.sin()
        queries, keys = rotated(queries, cos, sin), rotated(keys, cos, sin)
        if cache is not None:
            keys, values = cache.append(self, keys, values)
            seen = torch.ones(x.shape[1], keys.shape[2], dtype=torch.bool, device=x.device)
            mask = seen.tril(first)
        mixed = attend(queries, keys, values, mask)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.width, size.mlp_width, bias=False)
        self.up_proj = nn.Linear(size.width, size.mlp_width, bias=False)
        self.down_proj = nn.Linear(size.mlp_width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return out


class Block(nn.Module):
    """A transformer block: attention, then the feed-forward layer, each with a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(size.width, size.norm_eps)
        self.self_attn = Attention(size)
        self.post_attention_layernorm = nn.RMSNorm(size.width, size.norm_eps)
        self.mlp = SwiGLU(size)

    def forward(self, x: Tensor, cache: KVCache | None = None, mask: Mask = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cache, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """The model without its output head: tokens in, hidden states out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.num_blocks))
        self.norm = nn.RMSNorm(size.width, size.norm_eps)

    def forward(self, tokens: Tensor, cache: KVCache | None = None, mask: Mask = None) -> Tensor:
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x, cache, mask)
        if cache is not None:
            cache.num_tokens += tokens.shape[1]
        out: Tensor = self.norm(x)
        return out


class Transformer(nn.Module):
    """A causal language model: [batch, length] tokens to [batch, length, vocabulary] logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = Trunk(size)
        self.lm_head: nn.Module = LinearCrossEntropyHead(size.width, size.vocabulary, bias=False)
        if size.is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_output_embeddings(self) -> nn.Module:
        """Return the output head; models of `transformers` have the same method."""
        return self.lm_head

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        mask: Mask = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Return the logits, or with targets the sum of the losses."""
        hidden = self.model(tokens, cache, mask)
        found: Tensor
        if targets is None:
            found = self.lm_head(hidden)
        else:
            found = self.lm_head(hidden, targets, reduction="sum")
        return found


def rotary_angles(
    first: int, length: int, head_width: int, theta: float, device: torch.device
) -> Tensor:
    """Return the angles of `length` positions from `first` on, [length, head_width / 2].

    The angles are float32, because positions are too large for lower precision.
    """
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    positions = torch.arange(first, first + length, device=device, dtype=torch.float32)
    return torch.outer(positions, theta**-exponents)


def initial_values(name: str, size: Size) -> Draw:
    """Return the function that initializes the parameter of this name."""
    if name.endswith(_NORM):
        return constant(1.0)
    if name.endswith(_RESIDUAL):
        return normal(_INIT_STD / (2 * size.num_blocks) ** 0.5)
    return normal(_INIT_STD)


class BuiltinArchitecture(Architecture):
    """A `Transformer` of one of the built-in sizes, initialized from a seed."""

    def __init__(self, size: Size, lora: LoraSettings | None = None) -> None:
        self.name = size.name
        self.vocabulary = size.vocabulary
        self.max_sequence = size.max_sequence
        is_of_bytes = size.vocabulary == BYTE_VOCABULARY
        self.default_tokenizer = "bytes" if is_of_bytes else f"bpe:{size.vocabulary}"
        self.size = size
        self.lora = lora
        self._has_plain_head = True

    def build(self) -> nn.Module:
        with torch.device("meta"):
            model = Transformer(self.size)
        built = model if self.lora is None else add_adapters(model, self.lora, (Block,))
        self._has_plain_head = isinstance(model.lm_head, LinearCrossEntropyHead)
        return built

    def block_classes(self) -> tuple[type[nn.Module], ...]:
        return (Block,)

    def fill(self, model: nn.Module, seed: int) -> None:
        @lru_cache(maxsize=1)  # of a large matrix, some rows are asked for after others
        def drawn(name: str) -> Tensor:
            whole = torch.empty(plain.get_parameter(name).shape)
            shard = TensorShard((name,), whole, whole.shape)
            draw_into(shard, name, seed, initial_values(name, self.size))
            return whole

        with torch.device("meta"):
            plain = Transformer(self.size)

        def rows_of(name: str, rows: range) -> Tensor:
            return drawn(name)[rows.start : rows.stop]

        for shard in fill_base(fill_adapters(tensor_shards(model), seed), self.lora, rows_of):
            # The two APIs list the names of a tied parameter in different orders.
            name = min(base_name(name) for name in shard.names)
            draw_into(shard, name, seed, initial_values(name, self.size))

    def logits(self, model: nn.Module, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        logits: Tensor = model(tokens, None, documents_of(positions))
        return logits

    def loss(
        self, model: nn.Module, tokens: Tensor, targets: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        if not self._has_plain_head:
            return super().loss(model, tokens, targets, positions)
        total: Tensor = model(tokens, None, documents_of(positions), targets)
        return total

    def next_token_logits(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        cache = KVCache()

        def read(tokens: Tensor) -> Tensor:
            nonlocal cache
            if tokens.shape[1] <= cache.num_tokens:  # the window moved: all positions changed
                cache = KVCache()
            logits: Tensor = model(tokens[:, cache.num_tokens :], cache)
            return logits[0, -1]

        return read

    def write_config(self, folder: Path, dtype: str, tokenizer: Tokenizer) -> None:
        size, ids = self.size, token_ids(tokenizer)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": dtype,
            "vocab_size": size.vocabulary,
            "hidden_size": size.width,
            "num_hidden_layers": size.num_blocks,
            "num_attention_heads": size.num_heads,
            "num_key_value_heads": size.num_kv_heads,
            "head_dim": size.head_width,
            "intermediate_size": size.mlp_width,
            "max_position_embeddings": size.max_sequence,
            "rms_norm_eps": size.norm_eps,
            "rope_theta": size.rope_theta,
            "tie_word_embeddings": size.is_tied,
            **ids,
        }
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", ids)
