"""The learning rate of a step."""

from __future__ import annotations

import math

from fullshard.training.config import OptimizerSection


def learning_rate(step: int, section: OptimizerSection) -> float:
    """Of the step that follows `step` others: a line up to `lr`, half a cosine down.

    `lr` is reached after `warmup` steps, with the last of them, and its share `lr_end` with the
    last of all.
    Where there are fewer steps than the warm-up takes, the line ends with the last step.
    """
    warmup = max(1, min(section.warmup, section.steps))
    number = step + 1
    if number <= warmup:
        return section.lr * number / warmup
    if number >= section.steps:
        return section.lr * section.lr_end
    progress = (number - warmup) / (section.steps - warmup)
    share = (1 + math.cos(math.pi * progress)) / 2
    return section.lr * (section.lr_end + (1 - section.lr_end) * share)
