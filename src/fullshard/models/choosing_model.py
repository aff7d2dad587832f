"""From the name of a model to its architecture."""

from __future__ import annotations

from pathlib import Path

from fullshard.models.adapters import LoraSettings
from fullshard.models.architecture import Architecture
from fullshard.models.builtin import BuiltinArchitecture
from fullshard.models.huggingface import FolderArchitecture
from fullshard.models.sizes import SIZES, size_named


def architecture_of(name: str, lora: LoraSettings | None = None) -> Architecture:
    """The architecture of a built-in size, or of a folder in Hugging Face's layout.

    A size goes before a folder of the same name, which `./10m` would name.
    """
    if name not in SIZES and Path(name).is_dir():
        return FolderArchitecture(Path(name), lora)
    return BuiltinArchitecture(size_named(name), lora)
