"""The learning rate of a step."""

from __future__ import annotations

import math

from fullshard.training.config import OptimizerSection


def learning_rate(step: int, section: OptimizerSection) -> float:
    """Of the step that follows `step` others: a line up to `lr`, half a cosine down to `min_lr`.

    `lr` is reached after `warmup` steps, with the last of them, and `min_lr` with the last of all.
    Where there are fewer steps than the warm-up takes, the line ends with the last step.
    """
    warmup = max(1, min(section.warmup, section.steps))
    number = step + 1
    if number <= warmup:
        return section.lr * number / warmup
    if number >= section.steps:
        return section.min_lr
    progress = (number - warmup) / (section.steps - warmup)
    return section.min_lr + (section.lr - section.min_lr) * (1 + math.cos(math.pi * progress)) / 2
