"""Losses that do not hold what they are made of: cross-entropy without logits."""

from fullshard.losses.linear_cross_entropy import (
    LinearCrossEntropyHead,
    head_loss,
    linear_cross_entropy,
)

__all__ = ["LinearCrossEntropyHead", "head_loss", "linear_cross_entropy"]
