"""The interface between training and a kind of model."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.errors import ConfigError
from fullshard_train.models.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    bpe_vocabulary,
    is_path,
    tokenizer_at,
)


class Architecture(ABC):
    """How a model is built on the meta device, initialized once it is sharded, and called.

    `max_sequence` is the longest sequence that the model supports, or None if it is unknown.
    `default_tokenizer` is "bytes", "model" (its own), or "bpe:N" (to be trained on the data).
    """

    name: str
    vocabulary: int
    max_sequence: int | None
    default_tokenizer: str

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the model on the meta device, with tied parameters and with its adapters."""

    @abstractmethod
    def block_classes(self) -> tuple[type[nn.Module], ...]:
        """Return the classes of the repeated blocks, which become units by default."""

    @abstractmethod
    def fill(self, model: nn.Module, seed: int) -> None:
        """Initialize every parameter and buffer. All ranks must call this method.

        The model may be sharded with either API, or not at all, and its memory is uninitialized.
        The values do not depend on the number of ranks; each rank computes or reads only its
        shards.
        """

    @abstractmethod
    def logits(self, model: nn.Module, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map [batch, length] tokens to [batch, length, vocabulary] logits.

        `positions`, of the same shape, begin at 0 in each document; no document sees another.
        """

    def loss(
        self, model: nn.Module, tokens: Tensor, targets: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        """Return the sum of the losses of tokens; those whose target is -100 have none."""
        logits = self.logits(model, tokens, positions)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")

    def next_token_logits(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return a function from a sequence [1, length] to the logits [vocabulary] after it.

        Each call passes the previous sequence with more tokens, or a window of the same length
        that has moved on. An architecture may cache what it computed for the earlier tokens.
        """
        return lambda tokens: self.logits(model, tokens)[0, -1]

    def tokenizer_kind(self, kind: str) -> str:
        """Return the kind of tokenizer that "auto" stands for, or the kind itself."""
        return self.default_tokenizer if kind == "auto" else kind

    def tokenizer(self, kind: str, stored: Path | None = None) -> Tokenizer:
        """Return the tokenizer of a kind: "auto", "bytes", "model", or the path of one.

        A tokenizer that was trained, "bpe:N", is read from `stored`.
        """
        kind = self.tokenizer_kind(kind)
        if stored is not None or is_path(kind):
            tokenizer = tokenizer_at(stored or Path(kind))
        elif bpe_vocabulary(kind):
            raise ConfigError(
                f"--tokenizer: {kind} is trained on the data of a run, and its folder contains no "
                "such tokenizer; pass the folder of the run as it was written."
            )
        else:
            tokenizer = ByteTokenizer() if kind == "bytes" else self.own_tokenizer()
        if tokenizer.vocabulary > self.vocabulary:
            raise ConfigError(
                f"model {self.name}: its vocabulary of {self.vocabulary:,} is too small for the "
                f"tokenizer {kind!r}, which has {tokenizer.vocabulary:,} tokens; choose another "
                "tokenizer or model."
            )
        return tokenizer

    def own_tokenizer(self) -> Tokenizer:
        """Return the tokenizer that comes with the model."""
        raise ConfigError(
            f"model {self.name!r}: a built-in size has no tokenizer of its own; choose 'bytes', "
            "'bpe:N' or the path of a tokenizer, not 'model'."
        )

    @abstractmethod
    def write_config(self, folder: Path, dtype: str, tokenizer: Tokenizer) -> None:
        """Write config.json and generation_config.json for weights of this dtype."""


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens of a config; the token that ends documents also begins them."""
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.end)
