"""`load`: each rank reads the blocks that its shards need, whichever rank wrote them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.errors import CheckpointError, ConfigError
from fullshard.state.checkpoint.folder import located
from fullshard.state.checkpoint.index import MODEL
from fullshard.state.checkpoint.load_optimizer import plan_optimizer
from fullshard.state.checkpoint.reader import StoredCheckpoint, open_checkpoint, verify
from fullshard.state.checkpoint.save import ranks_after_saves
from fullshard.state.matching import NameMatch
from fullshard.state.plain import RANDOM, restore_random_state
from fullshard.state.shards import LocalPart, TensorShard, tensor_shards


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load found: the step, what was saved besides tensors, and what did not fit.

    `missing` are names of the model that the checkpoint does not have, and `unexpected` are names
    of the checkpoint that the model does not have.
    """

    path: Path
    step: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


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
    """Load a checkpoint. All ranks call it, and each rank reads the blocks that its shards need.

    Everything is checked before anything is written: names that are missing, unexpected or of
    another shape are listed in one error, on all ranks.

    Args:
        path: The folder of a checkpoint that fullshard or `torch.distributed.checkpoint` wrote.
        model: The model, sharded in any way or not at all, on any number of ranks.
        optimizer: Receives the saved state by parameter name; groups may be in another order.
        strict: Whether names that only the model or only the checkpoint has are an error. What a
            partial checkpoint left out on purpose never is.
        extra: Objects with `load_state_dict` to restore, by the names that they were saved under.
        verified: Whether to compare all content with the manifest's checksums first; ranks share
            the work.
        random_state: Whether to restore random generators, on a world of the same size.
    """
    ranks = ranks_after_saves(wait=True)
    objects, subject = extra or {}, f"load {located(Path(path))}"
    wanted: dict[str, list[LocalPart]] = {}

    def planned() -> tuple[StoredCheckpoint, NameMatch, Callable[[], None] | None, dict[str, Any]]:
        stored = open_checkpoint(path, check_files=False)
        shards = tensor_shards(model)
        match = _match_model(stored, shards, strict)
        for shard in shards:
            if shard.name in match.sources:
                wanted[match.sources[shard.name]] = shard.local_parts(shard.tensor)
        install = None
        with stored.unchanged():
            if optimizer is not None:
                install = plan_optimizer(stored, shards, match, optimizer, strict, wanted)
            return stored, match, install, _restorable_state(stored, ranks.rank, objects)

    stored, match, install, own = ranks.run(subject, planned)
    manifest = stored.manifest
    if verified and manifest is not None:
        share = (ranks.rank, ranks.size)
        everyone = ranks.gather(subject, lambda: verify(stored.path, share=share))
        problems = dict.fromkeys(f"{p.subject}: {p.what}" for some in everyone for p in some)
        if problems:
            ranks.run_first(subject, stored.require_unchanged)
            raise CheckpointError(
                f"{subject}: its content is not what was saved; nothing was loaded: "
                f"{'; '.join(problems)}. Load an older checkpoint."
            )
    consequence = "the model may hold some of it: load again, or another checkpoint."

    def read() -> None:
        with stored.unchanged(), torch.no_grad():
            stored.read_into(wanted)

    ranks.run(subject, read, consequence)
    if install is not None:
        install()
    saved = own.get("extra", {})
    for name, value in objects.items():
        value.load_state_dict(saved[name])
    is_same_world = manifest is not None and manifest.num_ranks == ranks.size
    # An imported checkpoint has no random state.
    if random_state and is_same_world and RANDOM in own:
        restore_random_state(own[RANDOM])
    step = None if manifest is None else manifest.step
    return Loaded(stored.path, step, saved, tuple(match.missing), tuple(match.unexpected))


def _restorable_state(
    stored: StoredCheckpoint, rank: int, objects: Mapping[str, Any]
) -> dict[str, Any]:
    """A rank's own state, from which all `objects` can be restored."""
    own = stored.rank_state(rank)
    saved = own.get("extra", {})
    missing = sorted(set(objects) - set(saved))
    if missing:
        raise CheckpointError(
            f"extra: the checkpoint has no {missing}, only {sorted(saved)}; leave out what was "
            "not saved."
        )
    for name, value in objects.items():
        if not callable(getattr(value, "load_state_dict", None)):
            raise ConfigError(
                f"extra: {name!r} is a {type(value).__name__}, which has no load_state_dict "
                "method; read it from what load returns."
            )
    return own


def _match_model(
    stored: StoredCheckpoint, shards: Sequence[TensorShard], strict: bool
) -> NameMatch:
    def misfit(key: str, shard: TensorShard) -> str:
        if shard.tensor.is_meta:
            raise CheckpointError(
                f"{shard.name} is on meta and has no memory to be loaded into; call "
                "model.to_empty(device=...) first."
            )
        found, expected = list(stored.shape(key)), list(shard.shape)
        return "" if found == expected else f"its shape is {expected}, but {found} in the file"

    # Other programs nest their state dicts in various ways.
    names = [name for shard in shards for name in shard.names]
    prefix = max(_MODEL_PREFIXES, key=lambda p: sum(p + name in stored for name in names))
    keys = [k for k in stored.keys if k.startswith(prefix) and not k.startswith(_NOT_MODEL)]
    match = NameMatch(shards, keys, lambda name: prefix + name, misfit)
    match.unexpected = [key.removeprefix(prefix) for key in match.unexpected]
    is_partial = stored.manifest is not None and stored.manifest.selection != "all"
    match.require(
        f"load {stored.path}",
        "checkpoint",
        missing=strict and not is_partial,
        unexpected=strict,
        mismatched=True,
    )
    return match


_MODEL_PREFIXES = (MODEL, "", "app.model.", "state_dict.", "module.")
_NOT_MODEL = ("optimizer.", "optim.", "optimizers.")
