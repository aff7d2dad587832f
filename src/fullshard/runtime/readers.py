"""Who reads a full parameter in backward, as the graph of a forward tells (rule 15).

The backward of an embedding needs its indices and not its weight: a weight that nothing else uses
need not be there in backward. What autograd has saved is seen by its references (`Unit.is_saved`);
what activation checkpointing will read again is not, but its nodes are in the graph.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from fullshard._torch import saves_through_hooks
from fullshard.runtime.trees import map_tensors
from fullshard.unit.unit import Unit

_READS_INDICES_ONLY = "EmbeddingBackward0"
_HIDES_READERS = "CheckpointFunctionBackward"


class Readers(Enum):
    """Who reads the parameter of a large unit in backward."""

    NONE = "nobody"
    SEEN = "nodes of the graph, before its gradient is complete"
    HIDDEN = "somebody who may be out of sight"


def readers_of(unit: Unit, output: Any) -> Readers:
    """Who reads a large unit in the backward of a module's output."""
    full = unit.params[0].full
    nodes: dict[Any, None] = {}

    def take(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is not None:
            nodes[tensor.grad_fn] = None
        return tensor

    map_tensors(take, output)
    waiting, readers = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node.name() == _HIDES_READERS:
            return Readers.HIDDEN
        for following, _ in node.next_functions:
            if following is None:
                continue
            if getattr(following, "variable", None) is full:
                readers.add(node.name())
                if node.name() == _READS_INDICES_ONLY and saves_through_hooks(node):
                    return Readers.HIDDEN  # a recomputation would run the embedding again
            elif following not in nodes:
                nodes[following] = None
                waiting.append(following)
    if not readers or len(unit.params[0].locations) > 1:
        return Readers.HIDDEN
    return Readers.NONE if readers == {_READS_INDICES_ONLY} else Readers.SEEN
