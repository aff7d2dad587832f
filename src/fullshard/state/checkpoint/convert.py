"""Conversion of checkpoints: resharding and import of weights."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import CheckpointError, ConfigError, UnsupportedError
from fullshard.formatting import listed
from fullshard.layout.split import Box, slices
from fullshard.runtime.names import clean_name
from fullshard.state.checkpoint.index import MODEL
from fullshard.state.checkpoint.manifest import Manifest
from fullshard.state.checkpoint.reader import open_checkpoint
from fullshard.state.checkpoint.save import write_checkpoint
from fullshard.state.safetensors.files import INDEX_SUFFIX, SafetensorsReader
from fullshard.state.stored import TensorSource

Report = Callable[[int, int], None]


def reshard(path: Path, out: Path, num_files: int, *, tensors_only: bool, progress: Report) -> None:
    """Copy a checkpoint, with its tensors in `num_files` files."""
    opened = open_checkpoint(path)
    if opened.object_keys and not tensors_only:
        raise UnsupportedError(
            f"{path}: entries that are not tensors cannot be resharded "
            f"({listed(opened.object_keys)}); drop them with --tensors-only."
        )
    manifest = opened.manifest
    tensors = {key: TensorSource.of_stored(opened, key) for key in opened.keys}
    write_checkpoint(
        out,
        _reported(tensors, progress),
        manifest,
        num_files=num_files,
        rank_states=[opened.rank_state(r) for r in range(manifest.num_ranks)],
    )


def import_weights(
    path: Path, out: Path, num_files: int, *, key: str | None, progress: Report
) -> None:
    """Import the weights of safetensors files, or of a state dict, as a checkpoint."""
    if path.is_dir() or path.name.endswith((".safetensors", INDEX_SUFFIX)):
        if key is not None:
            raise ConfigError(f"{path}: safetensors have no key to select; leave out --key.")
        tensors, aliases = _of_safetensors(path), dict[str, str]()
    else:
        tensors, aliases = _of_state_dict(path, key)
    write_checkpoint(
        out,
        _reported({MODEL + name: tensor for name, tensor in tensors.items()}, progress),
        Manifest(aliases=aliases, selection="model only"),
        num_files=num_files,
    )


def _reported(tensors: Mapping[str, TensorSource], progress: Report) -> dict[str, TensorSource]:
    """The same tensors, cut anew; reading them reports the number of bytes to `progress`."""
    total = sum(tensor.num_bytes for tensor in tensors.values())
    num_done = 0

    def reading(tensor: TensorSource) -> TensorSource:
        def read(box: Box) -> torch.Tensor:
            nonlocal num_done
            values = tensor.read(box)
            num_done += box.numel * tensor.dtype.itemsize
            progress(num_done, total)
            return values

        return replace(tensor, boxes=(), read=read)

    return {key: reading(tensor) for key, tensor in tensors.items()}


def _of_safetensors(path: Path) -> dict[str, TensorSource]:
    reader = SafetensorsReader(path)
    _require_distinct(path, reader.keys)
    return {clean_name(name): TensorSource.of_stored(reader, name) for name in reader.keys}


# State dicts


def _of_state_dict(path: Path, key: str | None) -> tuple[dict[str, TensorSource], dict[str, str]]:
    """Return the tensors of a state dict, and the aliases of tied tensors."""
    state = _loaded(path)
    if key is not None:
        if not isinstance(state, dict) or key not in state:
            keys = listed(map(str, state)) if isinstance(state, dict) else "none"
            raise ConfigError(f"{path}: there is no key {key!r}; its keys are {keys}.")
        state = state[key]
    if not isinstance(state, dict) or not state:
        raise CheckpointError(
            f"{path} contains a {type(state).__name__}, not a state dict; save "
            "model.state_dict() with torch.save."
        )
    wrong = [f"{name} ({type(value).__name__})" for name, value in state.items()
             if not _is_dense(name, value)]  # fmt: skip
    if wrong:
        raise CheckpointError(
            f"{path}: not all of it are dense tensors by name ({listed(wrong)}); select the "
            "model's key with --key, or save only its state dict."
        )
    _require_distinct(path, list(state))
    found: dict[str, TensorSource] = {}
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
        raise CheckpointError(f"{path} does not exist; pass safetensors or a file of torch.save.")
    try:
        return torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{path} cannot be read without running code in it ({reason}); it is damaged, or "
            "contains more than tensors."
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


def _of_memory(values: torch.Tensor) -> TensorSource:
    def read(box: Box) -> torch.Tensor:
        return values[slices(box, Box.whole(values.shape))]

    return TensorSource(tuple(values.shape), values.dtype, (), read)


def _require_distinct(path: Path, names: list[str]) -> None:
    """Raise if two names are the same without the prefixes of wrappers."""
    cleaned: dict[str, str] = {}
    for name in names:
        other = cleaned.setdefault(clean_name(name), name)
        if other != name:
            raise CheckpointError(
                f"{path}: {other} and {name} are the same name without the prefixes of wrappers; "
                "rename one."
            )
