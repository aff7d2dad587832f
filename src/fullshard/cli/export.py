"""Export of the model of a checkpoint: a folder that transformers opens, or an adapter of peft."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fullshard.errors import CheckpointError, ConfigError
from fullshard.formatting import listed
from fullshard.ranks import RankGroup
from fullshard.state.checkpoint.index import MODEL
from fullshard.state.checkpoint.load import load
from fullshard.state.checkpoint.reader import StoredCheckpoint, open_checkpoint
from fullshard.state.materialize import give_memory
from fullshard.state.safetensors.export import exported_dtype, require_export, staged
from fullshard.state.safetensors.files import FilePlan, FileWriter, plan_files
from fullshard.state.shards import tensor_shards
from fullshard.state.stored import TensorSource
from fullshard_train.config import TrainConfig
from fullshard_train.output import config_beside, folder_beside

if TYPE_CHECKING:
    from fullshard_train.models.architecture import Architecture

_MODEL_PART = MODEL.removesuffix(".")
_ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Export:
    """The options of an export; `prefix` is the prefix of the model's keys."""

    dtype: torch.dtype | None
    max_bytes: int
    prefix: str | None
    merge: bool


def export(
    path: Path, out: Path, asked: Export, *, progress: Callable[[int, int], None]
) -> list[FilePlan]:
    """Write the model to the folder `out`, completely or not at all.

    Tensors are read and written block by block, unless adapters are merged. Files beside the
    weights are written if the checkpoint is in the folder of a run, whose configuration says what
    the model is.
    """
    require_export(out, asked.dtype, asked.max_bytes)
    opened = open_checkpoint(path)
    config = None if asked.prefix is not None else config_beside(opened.path)
    is_adapter = config is not None and bool(config.model.lora_rank)
    if asked.merge and not is_adapter:
        raise ConfigError(
            f"--merge: {path} contains no adapters, or is not in the folder of its run; leave "
            "out --merge."
        )
    if config is None:
        return _write(out, _stored(opened, asked.prefix), asked, progress, lambda staging: None)
    # Imported here, because other commands need no models.
    from fullshard_train.run_tokenizer import tokenizer_of_run
    from fullshard_train.sharding import architecture_for

    # Adapters are merged into the weights that were quantized.
    section = replace(config.model, lora_base="plain")
    architecture = architecture_for(section, config.data.tokenizer)
    if is_adapter and not asked.merge:
        tensors = {_peft_name(name): each for name, each in _stored(opened, None).items()}
        return _write(out, tensors, asked, progress, lambda to: _save_settings(architecture, to))
    tensors = _merged(opened, architecture, config) if asked.merge else _named(opened, architecture)
    tokenizer = tokenizer_of_run(architecture, config, folder_beside(opened.path))

    def describe(staging: Path) -> None:
        dtypes = [each.dtype for each in tensors.values() if each.dtype.is_floating_point]
        dtype = asked.dtype or max(dtypes, key=lambda each: each.itemsize)
        architecture.write_config(staging, str(dtype).removeprefix("torch."), tokenizer)
        tokenizer.save(staging)

    return _write(out, tensors, asked, progress, describe)


def _write(
    out: Path,
    tensors: Mapping[str, TensorSource],
    asked: Export,
    progress: Callable[[int, int], None],
    describe: Callable[[Path], None],
) -> list[FilePlan]:
    """Write tensors, and what `describe` adds, to a staging folder, then install all in `out`."""
    dtypes = {name: exported_dtype(each.dtype, asked.dtype) for name, each in tensors.items()}
    infos = {name: replace(each, dtype=dtypes[name]) for name, each in tensors.items()}
    is_adapter = any(name.startswith(_peft_name("")) for name in tensors)
    plans = (
        [FilePlan.of(_ADAPTER_FILE, infos)] if is_adapter else plan_files(infos, asked.max_bytes)
    )
    num_done = 0
    with staged(out, plans, RankGroup()) as staging:
        for plan in plans:
            with closing(FileWriter(staging, plan)) as writer:
                for name in plan.entries:
                    for box in tensors[name].boxes:
                        values = tensors[name].read(box).detach().to(dtypes[name])
                        writer.write(name, box, values.contiguous())
                    num_done += 1
                    progress(num_done, len(tensors))
                writer.finish()
        describe(staging)
    return plans


# Tensors


def _stored(opened: StoredCheckpoint, prefix: str | None) -> dict[str, TensorSource]:
    """Return the model's tensors by their names in the checkpoint."""
    prefix = _model_prefix(opened) if prefix is None else prefix
    keys = {key.removeprefix(prefix): key for key in opened.keys if key.startswith(prefix)}
    if not keys:
        raise CheckpointError(
            f"{opened.path} has no tensors under {prefix!r}, but {listed(opened.keys, 3)}; pass "
            "the prefix of the model's keys with --prefix."
        )
    found = {}
    for name, key in keys.items():
        opened.require_tiled(key)
        found[name] = TensorSource.of_stored(opened, key)
    return found


def _named(opened: StoredCheckpoint, architecture: Architecture) -> dict[str, TensorSource]:
    """Return the model's tensors by the names that transformers looks for."""
    others: dict[str, list[str]] = {}
    for alias, name in opened.manifest.aliases.items():
        others.setdefault(name, []).append(alias)
    # A tied tensor gets the name that the model lists first.
    places = {name: place for place, name in enumerate(architecture.build().state_dict())}
    return {
        min([name, *others.get(name, ())], key=lambda each: places.get(each, -1)): tensor
        for name, tensor in _stored(opened, None).items()
    }


def _merged(
    opened: StoredCheckpoint, architecture: Architecture, config: TrainConfig
) -> dict[str, TensorSource]:
    """Return the tensors of the whole model, in host memory, with its adapters merged."""
    from fullshard_train.models.adapters import merge_adapters

    model = architecture.build()
    give_memory(model)
    architecture.fill(model, config.run.seed)
    load(opened.path, model, random_state=False)
    merge_adapters(model)
    order = list(model.state_dict())
    return {
        min(each.names, key=order.index): TensorSource.of_parts(
            each.shape, each.tensor.dtype, each.local_parts(each.tensor)
        )
        for each in tensor_shards(model)
    }


def _peft_name(name: str) -> str:
    """Return the name of an adapter's parameter in a file of peft."""
    return "base_model.model." + name.replace(".default.", ".")


def _save_settings(architecture: Architecture, folder: Path) -> None:
    """Write adapter_config.json."""
    from fullshard_train.models.transformer import SIZES

    model: Any = architecture.build()
    settings, name = model.peft_config["default"], architecture.name
    settings.base_model_name_or_path = None if name in SIZES else os.path.abspath(name)
    settings.task_type, settings.inference_mode = "CAUSAL_LM", True
    settings.save_pretrained(folder)


def _model_prefix(opened: StoredCheckpoint) -> str:
    """Return the prefix of the model's keys.

    A dot in a key may come from nested dicts or from the name of a parameter. The index of a
    checkpoint that torch wrote tells which.
    """
    if opened.manifest.is_ours:
        return MODEL
    levels = [opened.nesting.get(key) for key in opened.keys]
    if any(isinstance(p, tuple) and len(p) > 1 and p[0] == _MODEL_PART for p in levels):
        return MODEL
    if all(isinstance(path, tuple) and len(path) == 1 for path in levels):
        return ""
    raise CheckpointError(
        f"{opened.path} has no model under {_MODEL_PART!r}, where fullshard writes it, but "
        f"{listed(opened.keys, 3)}; pass the prefix of its keys with --prefix."
    )
