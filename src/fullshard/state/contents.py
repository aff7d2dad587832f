"""Which checkpoint a path stands for, and which tensors are stored in it."""

from __future__ import annotations

from pathlib import Path

from torch import Size

from fullshard.state.checkpoint.folder import is_ours, located
from fullshard.state.checkpoint.index import INDEX
from fullshard.state.checkpoint.reader import latest, open_checkpoint
from fullshard.state.safetensors.files import open_tensors


def checkpoint_at(path: str | Path) -> Path | None:
    """The checkpoint of this name, or the newest whole one in the folder; None if there is none.

    The folder may also be one that has its checkpoints in `checkpoints`, as that of a run.
    """
    path = Path(path)
    found = located(path)
    if is_ours(found) or (found / INDEX).is_file():
        return path if path.exists() else found
    return latest(path / "checkpoints") or latest(path)


def stored_shapes(path: str | Path) -> dict[str, Size]:
    """The tensors of a checkpoint, or of safetensors files, by their keys; reads no values.

    In a checkpoint that `save` wrote, those of the model have keys that begin with "model.".
    """
    path = Path(path)
    found = located(path)
    if is_ours(found) or (found / INDEX).is_file():
        opened = open_checkpoint(path)
        return {key: Size(opened.shape(key)) for key in opened.keys}
    return {key: Size(file.entries[key].shape) for key, file in open_tensors(path).items()}
