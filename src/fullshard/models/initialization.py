"""Initial values of parameters, which depend on a seed and a name but not on the sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from fullshard.layout.split import Box
from fullshard.state.safetensors_format import cut_out, pieces
from fullshard.state.sites import Site

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


def ones(values: Tensor, generator: torch.Generator) -> None:
    values.fill_(1.0)


def zeros(values: Tensor, generator: torch.Generator) -> None:
    values.zero_()


@torch.no_grad()
def draw_into(site: Site, name: str, seed: int, draw: Draw) -> None:
    """Give this rank's blocks of a parameter their values.

    A parameter is cut into pieces by its shape alone, and each piece is drawn in float32 on the
    CPU with a generator of its own, seeded by (seed, name, piece). So the values are the same
    however the parameter is sharded, and a rank draws only those pieces that it has a part of.
    """
    whole = Box((0,) * len(site.shape), tuple(site.shape))
    blocks = site.blocks(site.tensor)
    for number, piece in enumerate(pieces(whole, _PIECE_NUMEL)):
        shared = [(block, _shared(block.where, piece)) for block in blocks]
        if not any(where.numel for _, where in shared):
            continue
        values = torch.empty(piece.sizes, dtype=torch.float32)
        draw(values, torch.Generator().manual_seed(_mixed(seed, name, number)))
        for block, where in shared:
            if where.numel:
                target = cut_out(block.values, block.where, where)
                target.copy_(cut_out(values, piece, where))


def _shared(one: Box, other: Box) -> Box:
    """What lies in both; empty if nothing does."""
    offsets, sizes = [], []
    for a, a_size, b, b_size in zip(
        one.offsets, one.sizes, other.offsets, other.sizes, strict=True
    ):
        begin = max(a, b)
        offsets.append(begin)
        sizes.append(max(0, min(a + a_size, b + b_size) - begin))
    return Box(tuple(offsets), tuple(sizes))


def _mixed(seed: int, name: str, number: int) -> int:
    """Return a seed for one piece of a parameter; Python's `hash` differs between ranks."""
    digest = hashlib.blake2b(f"{seed} {name} {number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")  # torch's CPU generator takes 32 bits
