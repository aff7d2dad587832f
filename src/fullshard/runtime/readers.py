"""What reads a full parameter, according to the graph of a forward (rule 15: large ones alone).

The backward of an embedding needs its indices and not its weight, and that of a linear
cross-entropy (`losses`) only gradients: a weight that nothing else uses is not needed in backward.
That of an embedding is not needed in forward either, once the embedding has run. References tell
what autograd has saved (`Unit.is_saved`). A frozen weight is in no graph, and that of an embedding
is assumed to be used for lookups only. If something reads a released parameter after all, as a
recomputation does, it is gathered again.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import nn

from fullshard.runtime.trees import map_tensors
from fullshard.unit.unit import Unit

# Nodes whose backward does not read the weight that they are connected to.
_DO_NOT_READ = ("EmbeddingBackward0", "_LinearCrossEntropyBackward")
_HIDES_READERS = "CheckpointFunctionBackward"


class Readers(Enum):
    """What reads the parameter of a large unit in backward."""

    NONE = "nobody"
    NONE_AFTER_LOOKUP = "nobody, nor forward after the first module inside has begun"
    SEEN = "nodes of the graph, before its gradient is complete"
    HIDDEN = "somebody who may be out of sight"

    @property
    def is_nobody(self) -> bool:
        return self in (Readers.NONE, Readers.NONE_AFTER_LOOKUP)


def readers_of(unit: Unit, output: Any, num_lookups: int) -> Readers:
    """What reads a large unit in the backward of a module's output.

    `num_lookups` is how many nodes had read it in forward when the first module inside began.
    """
    nodes = nodes_reading(unit, output)
    first, *others = unit.params[0].locations
    if unit.has_frozen and isinstance(first.module, nn.Embedding) and not others:
        return Readers.NONE_AFTER_LOOKUP
    if not nodes or others:
        return Readers.HIDDEN
    if any(node.name() not in _DO_NOT_READ for node in nodes):
        return Readers.SEEN
    return Readers.NONE_AFTER_LOOKUP if len(nodes) == num_lookups else Readers.NONE


def nodes_reading(unit: Unit, output: Any) -> list[Any]:
    """The nodes of a graph that read a large unit in forward; empty if some may be hidden."""
    full = unit.params[0].full
    nodes: dict[Any, None] = {}

    def take(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is not None:
            nodes[tensor.grad_fn] = None
        return tensor

    map_tensors(take, output)
    waiting, reading = list(nodes), []
    while waiting:
        node = waiting.pop()
        if node.name() == _HIDES_READERS:
            return []
        for following, _ in node.next_functions:
            if following is None:
                continue
            if getattr(following, "variable", None) is full:
                reading.append(node)
            elif following not in nodes:
                nodes[following] = None
                waiting.append(following)
    return reading
