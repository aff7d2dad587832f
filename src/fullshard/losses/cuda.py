"""What the loss does with a chunk of logits on CUDA, as operations that torch.compile knows."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_MOST_PER_PASS = 8192
_NUM_WARPS = 16


@triton.jit
def _softmax(
    logits, targets, norms, num_words, ignore,
    WANTS_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_words
    inside = tl.arange(0, BLOCK)
    # Each lane keeps a maximum and a sum of its own; the row's are made of them at the end.
    most = tl.full((BLOCK,), -1.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_words, BLOCK):
        at = first + inside
        x = tl.load(logits + at, mask=at < num_words, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, x)
        total = total * tl.exp(most - higher) + tl.exp(x - higher)
        most = higher
    highest = tl.max(most, 0)
    norm = highest + tl.log(tl.sum(total * tl.exp(most - highest), 0))
    tl.store(norms + row, norm)
    if WANTS_GRAD:
        target = tl.load(targets + row)
        counts = tl.where(target == ignore, 0.0, 1.0)
        for first in range(0, num_words, BLOCK):
            at = first + inside
            x = tl.load(logits + at, mask=at < num_words, other=0.0).to(tl.float32)
            grad = (tl.exp(x - norm) - tl.where(at == target, 1.0, 0.0)) * counts
            tl.store(logits + at, grad.to(logits.dtype.element_ty), mask=at < num_words)


@torch.library.custom_op("fullshard::softmax_grad", mutates_args=("logits", "norms"))
def softmax_grad(
    logits: Tensor, words: Tensor, norms: Tensor, ignore: int, wants_grad: bool
) -> None:
    """Write the log of each row's sum of exponentials, and the gradient in place of the logits."""
    num_rows, num_words = logits.shape
    block = min(_MOST_PER_PASS, triton.next_power_of_2(num_words))
    _softmax[(num_rows,)](
        logits, words, norms, num_words, ignore, wants_grad, block, num_warps=_NUM_WARPS
    )
