"""`load_safetensors`: safetensors files into a model's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from fullshard.errors import CheckpointError
from fullshard.layout.split import Box
from fullshard.ranks import RankGroup
from fullshard.state.materialize import give_memory, recreate_buffers
from fullshard.state.safetensors.files import SafetensorsReader, TensorFile, as_bytes
from fullshard.state.shards import TensorShard, tensor_shards
from fullshard.state.stored import NameMatch, TensorSource


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What a load found.

    `missing` are names of the model that the files do not have, and `unexpected` are names of the
    files that the model does not have. `mismatched` maps names of both that do not fit to the
    reason. `tied` maps further names of tied parameters to those whose values they share.
    `recreated` are buffers that are not part of files.
    """

    path: Path
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    recreated: tuple[str, ...] = ()


def load_safetensors(
    path: str | Path,
    model: nn.Module,
    *,
    strict: bool = True,
    init_buffers: Callable[[nn.Module], object] | None = None,
    rename: Callable[[str], str] = str,
) -> LoadedWeights:
    """Load safetensors files into a model; all ranks call it.

    Each rank reads the bytes of its own shards, and no others, straight from the files. Values are
    converted to the model's dtypes. Parameters on meta are given memory, for this rank's shards
    only. Everything is checked before anything is written: one error names all that does not fit,
    on all ranks.

    Args:
        path: A file, a folder with one, or a folder with an index of several.
        model: Sharded through either API, in part, or not at all. It may be on meta.
        strict: Whether names that are missing, unexpected or do not fit are an error. If not,
            they are reported, and the model keeps its values for them.
        init_buffers: Called with each module that has buffers on meta which are not part of
            files, to compute them in place. Without it, a module's `reset_non_persistent_buffers`
            or `reset_parameters`, or the `_init_weights` of a module around it, is called.
        rename: Maps a name of the model to its name in the files.
    """
    path, ranks = Path(path), RankGroup.world()
    subject = f"load {path}"
    reader, shards = ranks.run(
        subject, lambda: (SafetensorsReader(path), tensor_shards(model)), "nothing was loaded."
    )
    files = reader.files
    found = NameMatch(shards, files, rename, lambda name, shard: _misfit(files[name], name, shard))
    for mismatched in ranks.all_gather(_differing_ties(files, shards, found, rename)):
        found.mismatched.update(mismatched)

    def prepared() -> tuple[str, ...]:
        found.require(subject, "files", missing=strict, unexpected=strict, mismatched=strict)
        on_meta = [shard.name for shard in shards if shard.tensor.is_meta]
        without = [name for name in on_meta if name not in found.sources]
        if without:
            raise CheckpointError(
                f"{subject}: some parameters on meta are not in the files in a form that fits: "
                f"{without}; nothing was loaded. Call model.to_empty(device=...) and initialize "
                "the model before it is loaded."
            )
        return recreate_buffers(model, init_buffers)

    recreated = ranks.run(subject, prepared)
    if any(shard.tensor.is_meta for shard in shards):
        give_memory(model)
        shards = tensor_shards(model)
    with torch.no_grad():
        for shard in (shard for shard in shards if shard.name in found.sources):
            reader.read_into({found.sources[shard.name]: shard.local_parts(shard.tensor)})
    tied = {name: shard.name for shard in shards for name in shard.names[1:]}
    missing, unexpected = tuple(found.missing), tuple(found.unexpected)
    return LoadedWeights(path, missing, unexpected, found.mismatched, tied, recreated)


def row_reader(path: str | Path) -> Callable[[str, range], torch.Tensor]:
    """Return a function that reads rows of a tensor of safetensors files, and no other bytes.

    It is for models that store something else than the files do, such as codes: each rank reads the
    rows that its shards are made of, in the dtype of the files. `path` is as in `load_safetensors`.
    """
    reader = SafetensorsReader(Path(path))

    def read(name: str, rows: range) -> torch.Tensor:
        if name not in reader.files:
            raise CheckpointError(f"{path} has no {name!r}; ask for a tensor that it has.")
        source = TensorSource.of_stored(reader, name)
        offsets = (rows.start, *(0 for _ in source.shape[1:]))
        box = Box(offsets, (len(rows), *source.shape[1:]))
        if rows.step != 1 or not box.is_within(source.shape):
            raise CheckpointError(f"{path}: {name!r} of shape {source.shape} has no {rows}.")
        return source.read(box)

    return read


def _differing_ties(
    files: Mapping[str, TensorFile],
    shards: Sequence[TensorShard],
    found: NameMatch,
    rename: Callable[[str], str],
) -> dict[str, str]:
    """Tied tensors of the model whose values in the files differ where this rank has a part."""

    def is_same(one: str, other: str, shard: TensorShard) -> bool:
        first, second = files[one], files[other]
        a, b = first.entries[one], second.entries[other]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and all(
            torch.equal(as_bytes(x.contiguous()), as_bytes(y.contiguous()))
            for part in shard.local_parts(shard.tensor)
            for (_, x), (_, y) in zip(
                first.views(one, part.box), second.views(other, part.box), strict=True
            )
        )

    return {
        name: f"its values are not those of {source!r}, to which it is tied in the model"
        for shard in shards
        if (source := found.sources.get(shard.name)) is not None
        for name in map(rename, shard.names)
        if name in files and name != source and not is_same(source, name, shard)
    }


def _misfit(file: TensorFile, name: str, shard: TensorShard) -> str:
    entry, dtype = file.entries[name], file.dtype(name)
    if entry.shape != tuple(shard.shape):
        return f"its shape is {list(shard.shape)}, but {list(entry.shape)} in the files"
    if dtype is None:
        return f"its dtype {entry.dtype} is none of torch's"
    if _kind(dtype) != _kind(shard.dtype):
        return f"its dtype is {shard.dtype}, but {dtype} in the files"
    return ""


def _kind(dtype: torch.dtype) -> str:
    """The kind of a dtype, within which values convert without a change of meaning."""
    if dtype is torch.bool:
        return "truth"
    return "real" if dtype.is_floating_point else "complex" if dtype.is_complex else "whole"
