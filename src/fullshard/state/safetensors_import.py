"""Loading safetensors files into a model: each rank reads what it has of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from fullshard.errors import CheckpointError
from fullshard.state.crew import Crew
from fullshard.state.materializing import LostBuffers, give_memory
from fullshard.state.safetensors_format import TensorFile, cut_out, open_tensors, pieces
from fullshard.state.saving import BACKGROUND
from fullshard.state.sites import Site, sites_of

# How much of a file is looked at before its memory is given back.
_PIECE_NUMEL = 2**20


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What a load found.

    `missing` are names of the model that the files do not have, `unexpected` names of the files
    that the model does not have, `mismatched` names of both that do not fit, and why. `tied` says
    for further names of tied parameters whose values they share. `recreated` are buffers that are
    not part of files.
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
    only. Everything is checked before anything is written: what does not fit is one error that
    names it, on all ranks.

    Args:
        path: A file, a folder with one, or a folder with an index of several.
        model: Sharded by either door, in part, or not at all; on meta, or not.
        strict: Whether names that are missing, unexpected or do not fit are an error. If not,
            they are reported, and what the model has stays as it is.
        init_buffers: Called with each module that has buffers on meta which are not part of
            files, to compute them in place. Without it, a module's `reset_non_persistent_buffers`
            or `reset_parameters`, or the `_init_weights` of a module around it, is called.
        rename: What a name of the model is in the files.
    """
    BACKGROUND.wait()
    path, crew = Path(path), Crew()
    subject = f"load {path}"
    files = crew.do(subject, lambda: _opened(path))
    sites = crew.do(subject, lambda: sites_of(model))
    found = _matched(files, sites, rename)
    for differing in crew.told(_differing_ties(files, found)):
        found.mismatched.update(differing)
    crew.do(subject, lambda: _require_fit(subject, found, strict))
    lost = LostBuffers(model, init_buffers)
    crew.do(subject, lost.recreate)
    if any(site.tensor.is_meta for site in sites):
        give_memory(model)
        sites = sites_of(model)
    with torch.no_grad():
        for site in sites:
            if site.name in found.sources:
                _read(files, found.sources[site.name], site)
    return LoadedWeights(
        path,
        tuple(found.missing),
        tuple(found.unexpected),
        found.mismatched,
        {name: site.name for site in sites for name in site.names[1:]},
        lost.names,
    )


@dataclass(slots=True)
class _Match:
    """Which tensor of the files each parameter and buffer is read from."""

    sites: Sequence[Site]
    rename: Callable[[str], str]
    sources: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)


def _opened(path: Path) -> dict[str, TensorFile]:
    try:
        return open_tensors(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from error


def _matched(
    files: Mapping[str, TensorFile], sites: Sequence[Site], rename: Callable[[str], str]
) -> _Match:
    found = _Match(sites, rename)
    known: set[str] = set()
    for site in sites:
        names = [rename(name) for name in site.names]
        known.update(names)
        name = next((name for name in names if name in files), None)
        if name is None:
            found.missing.append(site.name)
            continue
        reason = _misfit(files[name], name, site)
        if reason:
            found.mismatched[site.name] = reason
        else:
            found.sources[site.name] = name
    found.unexpected = [name for name in files if name not in known]
    return found


def _misfit(file: TensorFile, name: str, site: Site) -> str:
    entry, dtype = file.entries[name], file.dtype(name)
    if entry.shape != tuple(site.shape):
        return f"shape {list(site.shape)} is expected, found {list(entry.shape)}"
    if dtype is None:
        return f"a dtype that torch has is expected, found {entry.dtype}"
    if _kind(dtype) != _kind(site.dtype):
        return f"{site.dtype} is expected, found {dtype}"
    return ""


def _kind(dtype: torch.dtype) -> str:
    """What can be converted without a change of meaning."""
    if dtype is torch.bool:
        return "truth"
    return "real" if dtype.is_floating_point else "complex" if dtype.is_complex else "whole"


def _differing_ties(files: Mapping[str, TensorFile], found: _Match) -> dict[str, str]:
    """Tensors of the files that are one in the model, but have different values."""
    differing = {}
    for site in found.sites:
        source = found.sources.get(site.name)
        for name in map(found.rename, site.names):
            if source is None or name not in files or name == source:
                continue
            if not _is_same(files, source, name, site):
                differing[name] = (
                    f"the values of {source!r} are expected, to which it is tied in the model, "
                    "found others"
                )
    return differing


def _is_same(files: Mapping[str, TensorFile], one: str, other: str, site: Site) -> bool:
    """Whether two tensors of the files are equal, bit by bit, where this rank has a part."""
    a, b = files[one].entries[one], files[other].entries[other]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    for block in site.blocks(site.tensor):
        for where in pieces(block.where, _PIECE_NUMEL):
            values = [_bits(files[name].view(name, where)) for name in (one, other)]
            if not torch.equal(*values):
                return False
            for name in (one, other):
                files[name].forget(name, where)
    return True


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)


def _require_fit(subject: str, found: _Match, strict: bool) -> None:
    problems = []
    if strict and found.missing:
        problems.append(f"missing in the files: {found.missing}")
    if strict and found.unexpected:
        problems.append(f"not in the model: {found.unexpected}")
    if strict and found.mismatched:
        problems += [f"{name}: {reason}" for name, reason in found.mismatched.items()]
    if not strict:
        without = [s.name for s in found.sites if s.tensor.is_meta and s.name not in found.sources]
        if without:
            problems.append(f"on meta, and without values that fit: {without}")
    if found.sites and not found.sources:
        problems.append("nothing in the files fits a parameter of the model")
    if problems:
        remedy = (
            "Pass strict=False to load what fits."
            if strict
            else "Call model.to_empty(device=...) and initialise the model before it is loaded."
        )
        raise CheckpointError(
            f"{subject}: the model and the files must have the same parameters; nothing was "
            f"loaded: {'; '.join(problems)}. {remedy}"
        )


def _read(files: Mapping[str, TensorFile], name: str, site: Site) -> None:
    file = files[name]
    for block in site.blocks(site.tensor):
        for where in pieces(block.where, _PIECE_NUMEL):
            cut_out(block.values, block.where, where).copy_(file.view(name, where))
            file.forget(name, where)
