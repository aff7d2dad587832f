"""Products of matrices with their own transposes, by halves: the other half is the same, mirrored.

One Triton kernel computes the tiles on and below the diagonal, and writes those below it twice.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

# From so many rows on it is faster than cuBLAS's whole product: on an H200 by a third for eight
# matrices of 2048 x 2048 (benchmarks/bench_muon.py products).
SMALLEST_ROWS = 768
_TILE, _DEPTH = 128, 64


@triton.jit
def _lower_tiles(
    x, addend, out, rows, depth, x_batch, x_row, x_col, alpha, beta,
    ADDS: tl.constexpr, IS_EVEN: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # Tiles are numbered row by row: i * (i + 1) / 2 come before row i. The root may be rounded.
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    j = tile - i * (i + 1) // 2
    at_i, at_j = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    at_k = tl.arange(0, DEPTH)
    left = x + matrix * x_batch + at_i[:, None] * x_row + at_k[None, :] * x_col
    right = x + matrix * x_batch + at_j[None, :] * x_row + at_k[:, None] * x_col
    total = tl.zeros((TILE, TILE), tl.float32)
    for k in range(tl.cdiv(depth, DEPTH)):
        if IS_EVEN:
            total = tl.dot(tl.load(left), tl.load(right), total)
        else:
            is_there = at_k + k * DEPTH < depth
            in_left = (at_i[:, None] < rows) & is_there[None, :]
            in_right = (at_j[None, :] < rows) & is_there[:, None]
            lefts = tl.load(left, mask=in_left, other=0.0)
            total = tl.dot(lefts, tl.load(right, mask=in_right, other=0.0), total)
        left += DEPTH * x_col
        right += DEPTH * x_col
    total *= alpha
    place = matrix * rows * rows + at_i[:, None].to(tl.int64) * rows + at_j[None, :]
    is_inside = (at_i[:, None] < rows) & (at_j[None, :] < rows)
    if ADDS:
        total += beta * tl.load(addend + place, mask=is_inside, other=0.0).to(tl.float32)
    values = total.to(out.dtype.element_ty)
    tl.store(out + place, values, mask=is_inside)
    if i != j:
        mirrored = matrix * rows * rows + at_j[:, None].to(tl.int64) * rows + at_i[None, :]
        is_inside = (at_j[:, None] < rows) & (at_i[None, :] < rows)
        tl.store(out + mirrored, tl.trans(values), mask=is_inside)


def product(
    batch: torch.Tensor,
    addend: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> torch.Tensor:
    """`alpha X X^T + beta C` of each matrix, where `C` is symmetric, too."""
    num, rows, depth = batch.shape
    out = torch.empty(num, rows, rows, dtype=batch.dtype, device=batch.device)
    num_tiles = -(-rows // _TILE)
    is_even = rows % _TILE == 0 and depth % _DEPTH == 0
    shape = (num_tiles * (num_tiles + 1) // 2, num)
    adds = addend is not None
    sizes = (rows, depth, *batch.stride(), alpha, beta, adds, is_even, _TILE, _DEPTH)
    _lower_tiles[shape](batch, addend, out, *sizes, num_warps=8, num_stages=3)
    return out
