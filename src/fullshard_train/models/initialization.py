"""Initial values of parameters, which depend on a seed and a name but not on the sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from fullshard.layout.split import Box, intersection, pieces, slices
from fullshard.state.shards import TensorShard

Draw = Callable[[Tensor, torch.Generator], object]
"""Initializes a tensor in place."""

# The most elements drawn at once, so that no rank materializes a large parameter.
_PIECE_NUMEL = 2**22


def normal(deviation: float) -> Draw:
    """Draw from a normal distribution with mean 0."""
    return lambda values, generator: values.normal_(0.0, deviation, generator=generator)


def uniform(bound: float) -> Draw:
    """Draw from a uniform distribution over [-bound, bound]."""
    return lambda values, generator: values.uniform_(-bound, bound, generator=generator)


def constant(value: float) -> Draw:
    return lambda values, generator: values.fill_(value)


@torch.no_grad()
def draw_into(shard: TensorShard, name: str, seed: int, draw: Draw) -> None:
    """Give this rank's parts of a parameter their values.

    A parameter is cut into pieces by its shape alone, and each piece is drawn in float32 on the
    CPU with a generator of its own, seeded by (seed, name, piece). So the values are the same
    however the parameter is sharded, and a rank draws only those pieces that it has a part of.
    """
    parts = shard.local_parts(shard.tensor)
    for number, piece in enumerate(pieces(Box.whole(shard.shape), _PIECE_NUMEL)):
        shared = [(part, box) for part in parts if (box := intersection(part.box, piece))]
        if not shared:
            continue
        values = torch.empty(piece.sizes, dtype=torch.float32)
        draw(values, torch.Generator().manual_seed(_mixed(seed, name, number)))
        for part, box in shared:
            part.values[slices(box, part.box)].copy_(values[slices(box, piece)])


def _mixed(seed: int, name: str, number: int) -> int:
    """Return a seed for one piece of a parameter; Python's `hash` differs between ranks."""
    digest = hashlib.blake2b(f"{seed} {name} {number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")  # torch's CPU generator takes 32 bits
