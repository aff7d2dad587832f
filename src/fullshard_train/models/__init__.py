"""Models that `fullshard train` can train: built-in transformers and Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fullshard_train.models.adapters import LoraSettings
    from fullshard_train.models.architecture import Architecture


def architecture_of(
    name: str, lora: LoraSettings | None = None, tokenizer: str = "auto"
) -> Architecture:
    """Return the architecture of a built-in size, or of a folder in Hugging Face's layout.

    The vocabulary of a built-in size follows a tokenizer that is asked for. A built-in size takes
    precedence over a folder of the same name; `./10m` selects the folder.
    """
    # Imported here, because what tokenizes text does without torch.
    from fullshard_train.models.huggingface import FolderArchitecture
    from fullshard_train.models.transformer import SIZES, BuiltinArchitecture, size_for, size_named

    if name not in SIZES and Path(name).is_dir():
        return FolderArchitecture(Path(name), lora)
    return BuiltinArchitecture(size_for(size_named(name), tokenizer), lora)
