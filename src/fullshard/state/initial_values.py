"""Initial values of parameters that do not depend on how the model is sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from fullshard.layout.split import Box, intersection, pieces, slices
from fullshard.state.shards import TensorShard

# The most elements drawn at once, so that no rank materializes a large parameter.
_PIECE_NUMEL = 2**22


@torch.no_grad()
def draw_into(
    shard: TensorShard,
    name: str,
    seed: int,
    draw: Callable[[torch.Tensor, torch.Generator], object],
) -> None:
    """Give this rank's parts of a parameter values that depend on its name and shape and the seed.

    They are the same on any number of ranks: a parameter is cut into pieces by its shape alone, and
    each piece is drawn in float32 on the CPU, with a generator of its own. A rank draws only those
    pieces that it has a part of.

    Args:
        shard: The parameter, as `tensor_shards` lists it.
        name: What makes its values differ from those of other parameters.
        seed: Another seed gives other values.
        draw: Fills a tensor in place with values of a generator.
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
