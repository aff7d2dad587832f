"""Loading a checkpoint, whoever wrote it, into a model that is sharded in any way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.optim import Optimizer

from fullshard.errors import CheckpointError
from fullshard.state.crew import Crew
from fullshard.state.dcp_format import HeldLoadPlanner, HeldTensor, read_index
from fullshard.state.extras import (
    rank_file,
    require_restorable,
    restore,
    restore_random_state,
    unpacked,
)
from fullshard.state.folder import located
from fullshard.state.manifest import Manifest, read_manifest
from fullshard.state.opened import Opened, is_ours
from fullshard.state.reading import SafeReader
from fullshard.state.restoring_optimizer import OptimizerLoad
from fullshard.state.saving import BACKGROUND
from fullshard.state.sites import Site, sites_of
from fullshard.state.verifying import verify

MODEL_PREFIXES = ("model.", "", "app.model.", "state_dict.", "module.")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load found: the step, what was saved beside tensors, and what did not fit.

    `missing` are names of the model that the checkpoint does not have, `unexpected` names of the
    checkpoint that the model does not have.
    """

    path: Path
    step: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass
class _Stored:
    """A checkpoint as it is on disk. Without a manifest it was written by torch itself."""

    path: Path
    index: Metadata
    manifest: Manifest | None

    @classmethod
    def of(cls, path: Path) -> _Stored:
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: the folder of a checkpoint is expected, found "
                f"{'a file' if path.exists() else 'nothing'}; `latest` finds the newest one."
            )
        manifest = read_manifest(path) if is_ours(path) else None
        return cls(path, read_index(path), manifest)

    @property
    def opened(self) -> Opened:
        return Opened(self.path, self.index, self.manifest)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        found = self.index.state_dict_metadata.items()
        return {key: md.size for key, md in found if isinstance(md, TensorStorageMetadata)}

    def dtype(self, key: str) -> torch.dtype:
        stored = self.index.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        return stored.properties.dtype

    def key_of(self, site: Site, prefix: str) -> str | None:
        """The key that a parameter is stored under, by one of its names."""
        shapes = self.shapes
        return next((prefix + name for name in site.names if prefix + name in shapes), None)

    def model_prefix(self, sites: list[Site]) -> str:
        """What model keys begin with: programs of others nest their state dicts as they like."""
        keys = self.shapes.keys()
        return max(
            MODEL_PREFIXES, key=lambda p: sum(p + name in keys for s in sites for name in s.names)
        )


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    extra: Mapping[str, Any] | None = None,
    verified: bool = True,
    random_state: bool = True,
) -> Loaded:
    """Load a checkpoint; all ranks call it. Each rank reads the blocks that it has.

    Nothing is written before everything is checked: what is missing, unexpected or of another
    shape is one error that names it, on all ranks.

    Args:
        path: The folder of a checkpoint of ours, or of `torch.distributed.checkpoint`.
        model: Sharded in any way, or not at all; on any number of ranks.
        optimizer: Takes over state by the names of parameters; groups may be in another order.
        strict: Whether names that only one side has are an error. What a partial checkpoint left
            out on purpose never is.
        extra: Objects with `load_state_dict` to restore, by the names that they were saved under.
        verified: Whether to compare all content with the manifest's checksums first; ranks share
            the work.
        random_state: Whether to restore random generators, on a world of the same size.
    """
    BACKGROUND.wait()
    path, crew = located(Path(path)), Crew()
    subject = f"load {path}"
    stored = crew.do(subject, lambda: _Stored.of(path))
    sites = crew.do(subject, lambda: sites_of(model))
    held, missing, unexpected = crew.do(subject, lambda: _matched(stored, sites, strict))
    state = None
    if optimizer is not None:
        given = optimizer
        state = crew.do(
            subject, lambda: OptimizerLoad.of(given, sites, stored.shapes, stored.opened, strict)
        )
        prefix = stored.model_prefix(sites)
        held.update(
            crew.do(subject, lambda: state.held(stored.dtype, lambda s: stored.key_of(s, prefix)))
        )
    own = crew.do(subject, lambda: _rank_file(stored, crew))
    crew.do(subject, lambda: require_restorable(extra or {}, own.get("extra", {})))
    if verified and stored.manifest is not None:
        _verify(path, crew, subject)
    _read(path, held, crew)
    if state is not None:
        state.install()
    restore(extra or {}, own.get("extra", {}))
    is_same_world = stored.manifest is not None and stored.manifest.num_ranks == crew.size
    # What was imported has none.
    if random_state and is_same_world and "random state" in own:
        restore_random_state(own["random state"])
    step = None if stored.manifest is None else stored.manifest.step
    return Loaded(path, step, own.get("extra", {}), tuple(missing), tuple(unexpected))


def _matched(
    stored: _Stored, sites: list[Site], strict: bool
) -> tuple[dict[str, HeldTensor], list[str], list[str]]:
    """The blocks to read into, by key; what only one side has. Raises what does not fit."""
    prefix = stored.model_prefix(sites)
    shapes = stored.shapes
    manifest = stored.manifest
    held: dict[str, HeldTensor] = {}
    missing: list[str] = []
    misshapen: list[str] = []
    known: set[str] = set()
    for site in sites:
        if site.tensor.is_meta:
            raise CheckpointError(
                f"{site.name}: parameters must have memory to be loaded into, found it on meta; "
                "call model.to_empty(device=...) first."
            )
        known.update(prefix + name for name in site.names)
        key = stored.key_of(site, prefix)
        if key is None:
            missing.append(site.name)
        elif shapes[key] != site.shape:
            misshapen.append(f"{site.name}: {list(site.shape)} is expected, found {shapes[key]}")
        else:
            held[key] = HeldTensor(site.shape, site.dtype, site.blocks(site.tensor))
    unexpected = [k.removeprefix(prefix) for k in _model_keys(shapes, prefix) if k not in known]
    is_partial = manifest is not None and manifest.selection != "all"
    problems = list(misshapen)
    if strict and missing and not is_partial:
        problems.append(f"missing in the checkpoint: {missing}")
    if strict and unexpected:
        problems.append(f"not in the model: {unexpected}")
    if not held:
        problems.append("nothing in the checkpoint has the name of a parameter of the model")
    if problems:
        raise CheckpointError(
            f"load {stored.path}: the model and the checkpoint must have the same parameters; "
            f"nothing was loaded: {'; '.join(problems)}. Pass strict=False to load what fits."
        )
    return held, missing, unexpected


def _model_keys(shapes: Mapping[str, torch.Size], prefix: str) -> list[str]:
    others = ("optimizer.", "optim.", "optimizers.")
    return [key for key in shapes if key.startswith(prefix) and not key.startswith(others)]


def _rank_file(stored: _Stored, crew: Crew) -> dict[str, Any]:
    """This rank's file; on a larger world, ranks beyond the end begin again with the first."""
    manifest = stored.manifest
    if manifest is None:
        return {}
    return unpacked(stored.path / rank_file(crew.rank % manifest.num_ranks), manifest.id)


def _verify(path: Path, crew: Crew, subject: str) -> None:
    problems = crew.do(subject, lambda: verify(path, share=(crew.rank, crew.size)))
    everyone = [problem for some in crew.told(problems) for problem in some]
    if everyone:
        found = "; ".join(dict.fromkeys(f"{each.subject}: {each.what}" for each in everyone))
        raise CheckpointError(
            f"{subject}: its content must be what was saved, found otherwise; nothing was loaded: "
            f"{found}. Load an older checkpoint (`latest` finds whole ones)."
        )


def _read(path: Path, held: dict[str, HeldTensor], crew: Crew) -> None:
    consequence = "the model may hold some of it: load again, or another checkpoint."
    with torch.no_grad(), crew.at_work(f"load {path}", consequence):
        dcp_load(
            held,
            storage_reader=SafeReader(path),
            planner=HeldLoadPlanner(),
            process_group=crew.group,
            no_dist=crew.size == 1,
        )
