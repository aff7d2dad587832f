"""The model of a checkpoint as safetensors files, read and written a block at a time."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fullshard.errors import CheckpointError
from fullshard.state.dcp import MODEL
from fullshard.state.safetensors import (
    ExportedTensor,
    FilePlan,
    FileWriter,
    exported_dtype,
    install,
    plan_files,
    require_export,
)
from fullshard.state.store import StoredCheckpoint, discard, open_checkpoint, staging_folder

_MODEL_PART = MODEL.removesuffix(".")


@dataclass(frozen=True, slots=True)
class Export:
    """What is to be exported, and how: `prefix` is what the keys of the model begin with."""

    dtype: torch.dtype | None
    max_bytes: int
    prefix: str | None


def export(
    path: Path, out: Path, asked: Export, *, progress: Callable[[int, int], None]
) -> list[FilePlan]:
    """Write the folder `out`, which appears when all its files are whole."""
    require_export(out, asked.dtype, asked.max_bytes)
    opened = open_checkpoint(path)
    prefix = _model_prefix(opened) if asked.prefix is None else asked.prefix
    keys = {key.removeprefix(prefix): key for key in opened.keys if key.startswith(prefix)}
    if not keys:
        raise CheckpointError(
            f"{path}: tensors of a model are expected under {prefix!r}, found none; say with "
            f"--prefix what they begin with, as {_some(opened)} do."
        )
    plans = plan_files([_described(opened, n, k, asked.dtype) for n, k in keys.items()],
                       asked.max_bytes)  # fmt: skip
    staging = staging_folder(out, uuid.uuid4().hex)
    staging.mkdir(parents=True)
    try:
        num_done = 0
        for plan in plans:
            writer = FileWriter(staging, plan)
            try:
                for name in plan.entries:
                    _write(writer, opened, name, keys[name], asked.dtype)
                    num_done += 1
                    progress(num_done, len(keys))
                writer.finish()
            finally:
                writer.close()
        install(staging, out, plans)
    except BaseException:
        discard(staging)
        raise
    return plans


def _described(
    opened: StoredCheckpoint, name: str, key: str, dtype: torch.dtype | None
) -> ExportedTensor:
    opened.require_tiled(key)
    return ExportedTensor(name, exported_dtype(opened.dtype(key), dtype), opened.shape(key))


def _write(
    writer: FileWriter, opened: StoredCheckpoint, name: str, key: str, dtype: torch.dtype | None
) -> None:
    for box, values in opened.load_all(key):
        writer.write(name, box, values.to(exported_dtype(values.dtype, dtype)).contiguous())


def _model_prefix(opened: StoredCheckpoint) -> str:
    """What the keys of the model begin with.

    Of checkpoints that torch wrote, the index says how its dicts were nested: a dot in a key may
    come from a level of these, or from a name of the model.
    """
    if opened.manifest is not None:
        return MODEL
    levels = [opened.nesting.get(key) for key in opened.keys]
    if any(isinstance(p, tuple) and len(p) > 1 and p[0] == _MODEL_PART for p in levels):
        return MODEL
    if all(isinstance(path, tuple) and len(path) == 1 for path in levels):
        return ""
    raise CheckpointError(
        f"{opened.path}: a model is expected under {_MODEL_PART!r}, as fullshard writes it, found "
        f"{_some(opened)}; say with --prefix what its keys begin with."
    )


def _some(opened: StoredCheckpoint) -> str:
    keys = opened.keys[:3]
    return ", ".join(keys) + (", ..." if len(opened.keys) > len(keys) else "")
