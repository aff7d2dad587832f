"""Conversion of checkpoints: resharding, import of weights, export as safetensors."""

from __future__ import annotations

import uuid
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from fullshard.cli.console import listed
from fullshard.errors import CheckpointError, ConfigError, UnsupportedError
from fullshard.layout.split import Box
from fullshard.runtime.names import clean_name
from fullshard.state.dcp_format import read_index
from fullshard.state.extras import rank_file, unpacked
from fullshard.state.folder import discard, staging_folder
from fullshard.state.inventory import MODEL
from fullshard.state.opened import Opened, open_checkpoint
from fullshard.state.safetensors_files import FilePlan, FileWriter, complete, install, plan_files
from fullshard.state.safetensors_format import (
    INDEX_SUFFIX,
    Described,
    TensorFile,
    cut_out,
    open_tensors,
)
from fullshard.state.writing import Description, LazyTensor, write_checkpoint

Report = Callable[[int, int], None]

_MODEL_PART = MODEL.removesuffix(".")


def reshard(path: Path, out: Path, num_files: int, *, tensors_only: bool, progress: Report) -> None:
    """Copy a checkpoint, with its tensors in `num_files` files."""
    opened = open_checkpoint(path)
    if opened.object_keys and not tensors_only:
        raise UnsupportedError(
            f"{path}: only tensors can be resharded, found other entries "
            f"({listed(opened.object_keys)}); drop them with --tensors-only."
        )
    manifest = opened.manifest
    tensors = {key: LazyTensor.of(opened, key) for key in opened.keys}
    write_checkpoint(
        out,
        _reported(tensors, progress),
        None if manifest is None else Description.of(manifest),
        num_files=num_files,
        rank_states=_rank_states(opened),
        checksums=None
        if manifest is None
        else {key: stored.checksum for key, stored in manifest.tensors.items()},
    )


def _rank_states(opened: Opened) -> list[dict[str, Any]]:
    """Return the state that each rank of the run saved for itself."""
    manifest = opened.manifest
    if manifest is None:
        return []
    found = [
        unpacked(opened.path / rank_file(rank), manifest.id) for rank in range(manifest.num_ranks)
    ]
    return [{name: value for name, value in state.items() if name != "id"} for state in found]


def import_weights(
    path: Path, out: Path, num_files: int, *, key: str | None, progress: Report
) -> None:
    """Import the weights of safetensors files, or of a state dict, as a checkpoint."""
    if path.is_dir() or path.name.endswith((".safetensors", INDEX_SUFFIX)):
        if key is not None:
            raise ConfigError(
                f"{path}: a file of torch.save is expected with --key, found safetensors; leave "
                "out --key."
            )
        tensors, aliases = _of_safetensors(path), dict[str, str]()
    else:
        tensors, aliases = _of_state_dict(path, key)
    write_checkpoint(
        out,
        _reported({MODEL + name: tensor for name, tensor in tensors.items()}, progress),
        Description(aliases=aliases, selection="model only"),
        num_files=num_files,
    )


def _reported(tensors: Mapping[str, LazyTensor], progress: Report) -> dict[str, LazyTensor]:
    """Return the same tensors; reading them reports the number of bytes to `progress`."""
    total = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    num_done = 0

    def reading(tensor: LazyTensor) -> LazyTensor:
        def read(where: Box) -> torch.Tensor:
            nonlocal num_done
            values = tensor.read(where)
            num_done += where.numel * tensor.dtype.itemsize
            progress(num_done, total)
            return values

        return replace(tensor, read=read)

    return {key: reading(tensor) for key, tensor in tensors.items()}


# Safetensors


def _of_safetensors(path: Path) -> dict[str, LazyTensor]:
    files = open_tensors(path)
    _require_distinct(path, list(files))
    return {clean_name(name): _of_file(path, file, name) for name, file in files.items()}


def _of_file(path: Path, file: TensorFile, name: str) -> LazyTensor:
    entry, dtype = file.entries[name], file.dtype(name)
    if dtype is None:
        raise UnsupportedError(
            f"{path}: {name} must have a dtype that torch has, found {entry.dtype}; convert it "
            "with the program that wrote it."
        )

    def read(where: Box) -> torch.Tensor:
        values = file.view(name, where).clone(memory_format=torch.contiguous_format)
        file.forget(name, where)
        return values

    return LazyTensor(entry.shape, dtype, read)


# State dicts


def _of_state_dict(path: Path, key: str | None) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Return the tensors of a state dict, and the aliases of tied tensors."""
    state = _loaded(path)
    if key is not None:
        if not isinstance(state, dict) or key not in state:
            keys = listed(map(str, state)) if isinstance(state, dict) else "none"
            raise ConfigError(
                f"{path}: one of its keys is expected with --key, found {key!r}; its keys are "
                f"{keys}."
            )
        state = state[key]
    if not isinstance(state, dict) or not state:
        raise CheckpointError(
            f"{path}: a state dict is expected, found {type(state).__name__}; save "
            "model.state_dict() with torch.save."
        )
    wrong = [f"{name} ({type(value).__name__})" for name, value in state.items()
             if not _is_dense(name, value)]  # fmt: skip
    if wrong:
        raise CheckpointError(
            f"{path}: dense tensors by name are expected, found {listed(wrong)}; select the "
            "model's key with --key, or save only its state dict."
        )
    _require_distinct(path, list(state))
    found: dict[str, LazyTensor] = {}
    aliases: dict[str, str] = {}
    known: dict[tuple[Any, ...], str] = {}
    for full_name, values in state.items():
        name = clean_name(full_name)
        first = known.setdefault(_memory(name, values), name)
        if first != name:
            aliases[name] = first
            continue
        found[name] = _of_memory(values.detach())
    return found, aliases


def _loaded(path: Path) -> Any:
    """Load a file of torch.save, memory-mapped, so that unused tensors are not read."""
    if not path.is_file():
        raise CheckpointError(
            f"{path}: safetensors or a file of torch.save is expected, found nothing."
        )
    try:
        return torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{path}: tensors that torch.save wrote are expected, found a file that cannot be read "
            f"without running code in it ({reason}); it is damaged, or contains more than tensors."
        ) from error


def _is_dense(name: Any, value: Any) -> bool:
    return (
        isinstance(name, str)
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_meta
    )


def _memory(name: str, values: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is the same for names that share memory, as tied parameters do."""
    if not values.numel():
        return (name,)
    return values.data_ptr(), values.dtype, values.shape, values.stride()


def _of_memory(values: torch.Tensor) -> LazyTensor:
    shape = tuple(values.shape)
    whole = Box((0,) * len(shape), shape)

    def read(where: Box) -> torch.Tensor:
        return cut_out(values, whole, where).clone(memory_format=torch.contiguous_format)

    return LazyTensor(shape, values.dtype, read)


def _require_distinct(path: Path, names: list[str]) -> None:
    """Raise if two names are the same without the prefixes of wrappers."""
    cleaned: dict[str, str] = {}
    for name in names:
        other = cleaned.setdefault(clean_name(name), name)
        if other != name:
            raise CheckpointError(
                f"{path}: names must differ without the prefixes of wrappers, found {other} and "
                f"{name}; rename one."
            )


# Export


@dataclass(frozen=True, slots=True)
class Export:
    """The options of an export; `prefix` is the prefix of the model's keys."""

    dtype: torch.dtype | None
    max_bytes: int
    prefix: str | None


def export(
    path: Path, out: Path, asked: Export, *, progress: Callable[[int, int], None]
) -> list[FilePlan]:
    """Write the model as safetensors to the folder `out`, completely or not at all.

    Tensors are read and written block by block.
    """
    if out.suffix == ".safetensors" or out.is_file():
        raise ConfigError(
            f"{out}: a folder is expected, found the name of a file; pass the folder, in which "
            "model.safetensors will be written."
        )
    opened = open_checkpoint(path)
    prefix = _model_prefix(opened) if asked.prefix is None else asked.prefix
    keys = {key.removeprefix(prefix): key for key in opened.keys if key.startswith(prefix)}
    if not keys:
        raise CheckpointError(
            f"{path}: tensors of a model are expected under {prefix!r}, found {_some(opened)}; "
            "pass the prefix of the model's keys with --prefix."
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
        complete(staging, plans)
        install(staging, out)
    except BaseException:
        discard(staging)
        raise
    return plans


def _described(opened: Opened, name: str, key: str, dtype: torch.dtype | None) -> Described:
    opened.require_tiled(key)
    return Described(name, _target(opened.dtype(key), dtype), opened.shape(key))


def _target(kept: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    return asked if asked is not None and kept.is_floating_point else kept


def _write(
    writer: FileWriter, opened: Opened, name: str, key: str, dtype: torch.dtype | None
) -> None:
    for where, values in opened.blocks(key):
        writer.write(name, where, values.to(_target(values.dtype, dtype)).contiguous())


def _model_prefix(opened: Opened) -> str:
    """Return the prefix of the model's keys.

    A dot in a key may come from nested dicts or from the name of a parameter. The index of a
    checkpoint that torch wrote tells which.
    """
    if opened.manifest is not None:
        return MODEL
    paths = read_index(opened.path).planner_data
    nested = paths if isinstance(paths, dict) else {}
    levels = [nested.get(key) for key in opened.keys]
    if any(isinstance(p, tuple) and len(p) > 1 and p[0] == _MODEL_PART for p in levels):
        return MODEL
    if all(isinstance(path, tuple) and len(path) == 1 for path in levels):
        return ""
    raise CheckpointError(
        f"{opened.path}: a model is expected under {_MODEL_PART!r}, as fullshard writes it, found "
        f"{_some(opened)}; pass the prefix of its keys with --prefix."
    )


def _some(opened: Opened) -> str:
    keys = opened.keys[:3]
    return ", ".join(keys) + (", ..." if len(opened.keys) > len(keys) else "")
