"""The built-in sizes as an architecture."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fullshard.errors import ConfigError
from fullshard.models.adapters import LoraSettings, add_adapters, base_name, fill_adapters
from fullshard.models.architecture import Architecture
from fullshard.models.drawing import draw_into
from fullshard.models.sizes import Size
from fullshard.models.tokenizers import ByteTokenizer, Tokenizer
from fullshard.models.transformer import Block, Past, Transformer, initial_values
from fullshard.state.shards import tensor_shards


class BuiltinArchitecture(Architecture):
    """A `Transformer`, filled with values that follow from the seed."""

    def __init__(self, size: Size, lora: LoraSettings | None = None) -> None:
        self.name = size.name
        self.vocabulary = size.vocabulary
        self.max_sequence = size.max_sequence
        self.size = size
        self.lora = lora

    def build(self) -> nn.Module:
        with torch.device("meta"):
            model = Transformer(self.size)
        return model if self.lora is None else add_adapters(model, self.lora)

    def block_classes(self) -> tuple[type[nn.Module], ...]:
        return (Block,)

    def fill(self, model: nn.Module, seed: int) -> None:
        shards = tensor_shards(model)
        for shard in fill_adapters(shards, seed):
            # Which of tied names comes first depends on the door.
            name = min(base_name(name) for name in shard.names)
            draw_into(shard, name, seed, initial_values(name, self.size))

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        logits: Tensor = model(tokens)
        return logits

    def reader(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        past = Past()

        def read(tokens: Tensor) -> Tensor:
            nonlocal past
            if tokens.shape[1] <= past.num_tokens:  # the window moved: all positions changed
                past = Past()
            logits: Tensor = model(tokens[:, past.num_tokens :], past)
            return logits[0, -1]

        return read

    def tokenizer(self, kind: str) -> Tokenizer:
        if kind in ("auto", "bytes"):
            return ByteTokenizer()
        raise ConfigError(
            f"model {self.name!r}: the tokenizer 'bytes' or 'auto' was expected, found {kind!r}; "
            "a built-in size has no tokenizer of its own."
        )
