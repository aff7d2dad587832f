"""The built-in models: their shapes, by name."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass

from fullshard.errors import UnknownNameError

# 256 bytes and the end of a document, rounded up to a multiple of 8.
BYTE_VOCABULARY = 264


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The shape of a transformer like Llama.

    `is_tied` says whether the output head is the embedding: in small models a head of its own
    would be a large part of the parameters.
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
        """Of all keys, or all values, of a token."""
        return self.num_kv_heads * self.head_width

    @property
    def num_parameters(self) -> int:
        """Each tied one counted once."""
        attention = 2 * self.width * self.width + 2 * self.width * self.kv_width
        mlp = 3 * self.width * self.mlp_width
        norms = 2 * self.width
        embeddings = self.vocabulary * self.width * (1 if self.is_tied else 2)
        return self.num_blocks * (attention + mlp + norms) + self.width + embeddings


_ALL = (
    Size(
        name="tiny",
        vocabulary=BYTE_VOCABULARY,
        width=128,
        num_blocks=4,
        num_heads=4,
        num_kv_heads=2,
        mlp_width=512,
        rope_theta=10_000.0,
        max_sequence=2048,
    ),
    Size(
        name="10m",
        vocabulary=BYTE_VOCABULARY,
        width=384,
        num_blocks=6,
        num_heads=6,
        num_kv_heads=2,
        mlp_width=1024,
        rope_theta=10_000.0,
        max_sequence=2048,
    ),
    Size(
        name="30m",
        vocabulary=BYTE_VOCABULARY,
        width=512,
        num_blocks=10,
        num_heads=8,
        num_kv_heads=4,
        mlp_width=1408,
        rope_theta=10_000.0,
        max_sequence=2048,
    ),
    Size(
        name="150m",
        vocabulary=32_000,
        width=768,
        num_blocks=20,
        num_heads=12,
        num_kv_heads=4,
        mlp_width=2048,
        rope_theta=10_000.0,
        max_sequence=4096,
    ),
    Size(
        name="350m",
        vocabulary=32_000,
        width=1024,
        num_blocks=28,
        num_heads=16,
        num_kv_heads=8,
        mlp_width=2688,
        rope_theta=10_000.0,
        max_sequence=4096,
    ),
    Size(
        name="1b",
        vocabulary=128_256,
        width=2048,
        num_blocks=16,
        num_heads=32,
        num_kv_heads=8,
        mlp_width=8192,
        rope_theta=500_000.0,
        max_sequence=8192,
    ),
    Size(
        name="3b",
        vocabulary=128_256,
        width=3072,
        num_blocks=28,
        num_heads=24,
        num_kv_heads=8,
        mlp_width=8192,
        rope_theta=500_000.0,
        max_sequence=8192,
    ),
    Size(
        name="8b",
        vocabulary=128_256,
        width=4096,
        num_blocks=32,
        num_heads=32,
        num_kv_heads=8,
        mlp_width=14_336,
        rope_theta=500_000.0,
        max_sequence=8192,
        is_tied=False,
    ),
)
SIZES = {size.name: size for size in _ALL}


def size_named(name: str) -> Size:
    """The built-in size of this name; the error for another says what was probably meant."""
    if name in SIZES:
        return SIZES[name]
    known = ", ".join(SIZES)
    if "/" in name or "." in name or os.path.exists(name):
        raise UnknownNameError(
            f"model {name!r}: a folder in Hugging Face's layout was expected there, found "
            f"{'a file' if os.path.exists(name) else 'none'}; give such a folder, or one of the "
            f"built-in sizes {known}."
        )
    close = difflib.get_close_matches(name.lower(), SIZES, n=1, cutoff=0.3)
    meant = f"; did you mean {close[0]!r}?" if close else "."
    raise UnknownNameError(
        f"model {name!r}: one of the built-in sizes {known}, or a folder in Hugging Face's layout, "
        f"was expected, found neither{meant}"
    )
