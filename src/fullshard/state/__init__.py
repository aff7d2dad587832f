"""Checkpoints of models that are sharded in any way, and the state dicts of wrapped models.

The names below are imported when they are asked for: a program that saves no checkpoint does not
pay for `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.state.checkpoint.folder import checkpoints, prune
    from fullshard.state.checkpoint.load import Loaded, load
    from fullshard.state.checkpoint.reader import (
        Problem,
        checkpoint_at,
        latest,
        stored_shapes,
        verify,
    )
    from fullshard.state.checkpoint.save import Handle, save, save_async
    from fullshard.state.materialize import draw_into, give_memory, recreate_buffers
    from fullshard.state.safetensors.export import export_safetensors
    from fullshard.state.safetensors.load import LoadedWeights, load_safetensors, row_reader
    from fullshard.state.shards import TensorShard, tensor_shards

__all__ = [
    "Handle",
    "Loaded",
    "LoadedWeights",
    "Problem",
    "TensorShard",
    "checkpoint_at",
    "checkpoints",
    "draw_into",
    "export_safetensors",
    "give_memory",
    "latest",
    "load",
    "load_safetensors",
    "prune",
    "recreate_buffers",
    "row_reader",
    "save",
    "save_async",
    "stored_shapes",
    "tensor_shards",
    "verify",
]

_FILES = {
    "checkpoint.folder": ("checkpoints", "prune"),
    "checkpoint.load": ("Loaded", "load"),
    "checkpoint.reader": ("Problem", "checkpoint_at", "latest", "stored_shapes", "verify"),
    "checkpoint.save": ("Handle", "save", "save_async"),
    "materialize": ("draw_into", "give_memory", "recreate_buffers"),
    "safetensors.export": ("export_safetensors",),
    "safetensors.load": ("LoadedWeights", "load_safetensors", "row_reader"),
    "shards": ("TensorShard", "tensor_shards"),
}


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
