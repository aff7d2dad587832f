"""What training needs to know of a model before and while it is sharded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from fullshard.models.tokenizers import Tokenizer


class Architecture(ABC):
    """A kind of model: how it is built without memory, filled once it is sharded, and called.

    `max_sequence` is the longest sequence that it was made for, None if it does not say.
    """

    name: str
    vocabulary: int
    max_sequence: int | None

    @abstractmethod
    def build(self) -> nn.Module:
        """The model on meta, ties tied, with its adapters if there are to be any."""

    @abstractmethod
    def block_classes(self) -> tuple[type[nn.Module], ...]:
        """The classes of the blocks that it repeats: units, unless others are asked for."""

    @abstractmethod
    def fill(self, model: nn.Module, seed: int) -> None:
        """Give every parameter and buffer its first value; all ranks call it.

        The model is sharded by either door, or not, and has memory without values. The values are
        the same on any number of ranks; each rank makes or reads those of its shards only.
        """

    @abstractmethod
    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """[batch, length] tokens -> [batch, length, vocabulary]."""

    def reader(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """What gives the logits [vocabulary] of the token after a sequence [1, length].

        It is called with sequences that begin like the one before, or with a window that moves on
        and has the same length; a model may keep what it computed for the beginning.
        """
        return lambda tokens: self.logits(model, tokens)[0, -1]

    @abstractmethod
    def tokenizer(self, kind: str) -> Tokenizer:
        """ "bytes", "model" (its own), or "auto": its own if it has one, otherwise bytes."""
