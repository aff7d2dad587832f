"""What all ranks of a run must have in common; compared before anything is trained.

Each host has its own command line, files and packages. With another learning rate on one of them,
its shards of the parameters would be updated with that, and the run would be wrong without a word.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard import __version__
from fullshard.errors import DisagreementError, OtherRankError
from fullshard.ranks import RankGroup
from fullshard_train.config import KEYS, TrainConfig, value_of
from fullshard_train.models.architecture import Architecture
from fullshard_train.models.tokenizers import Tokenizer, bpe_vocabulary, is_path
from fullshard_train.sharding import architecture_for
from fullshard_train.sources import Source, TextFile, fingerprint_of, sources_of
from fullshard_train.world import World

# Paths may differ where the contents are equal. The first rank names the folder of the run.
_OF_A_HOST = {f"data.{name}" for name in ("paths", "eval_paths", "tokenizer", "cache")}
_OF_A_HOST |= {"model.name"}
_OF_A_HOST |= {f"run.{name}" for name in ("out", "ranks", "device", "port", "max_restarts")}
_OF_A_HOST.add("run.rendezvous")
# Variables that change what is computed.
_VARIABLES = (
    *("FULLSHARD_OWN_BUCKET_MB", "FULLSHARD_OWN_SEGMENT_MB"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run reads: a model, its tokenizer unless it is yet to be trained, and text."""

    architecture: Architecture
    tokenizer_kind: str
    tokenizer: Tokenizer | None
    sources: tuple[Source, ...]
    eval_sources: tuple[Source, ...] | None

    @classmethod
    def of(cls, config: TrainConfig) -> Inputs:
        architecture, data = architecture_for(config.model, config.data.tokenizer), config.data
        sources = sources_of(data.paths, data.text_field)
        kind = architecture.tokenizer_kind(data.tokenizer)
        is_trained = bpe_vocabulary(kind) is not None
        held_out = sources if data.eval_share else None
        return cls(
            architecture,
            kind,
            None if is_trained else architecture.tokenizer(kind),
            sources,
            sources_of(data.eval_paths, data.text_field) if data.eval_paths else held_out,
        )


def facts_of(config: TrainConfig, inputs: Inputs, world: World) -> dict[str, str]:
    """Return everything that must be equal on all ranks, by the names that users know."""
    found = {
        key.subject: str(value_of(config, key))
        for place, key in KEYS.items()
        if ".".join(place) not in _OF_A_HOST
    }
    found["run.device (--device)"] = world.device.type
    found["model.name (--model)"] = _model(config.model.name)
    found["data.paths (--data)"] = _text(inputs.sources)
    if inputs.eval_sources is not None:
        found["data.eval_paths (--eval-data)"] = _text(inputs.eval_sources)
    found["data.tokenizer (--tokenizer)"] = inputs.tokenizer_kind
    if inputs.tokenizer is not None:
        is_at = " at a path" if is_path(inputs.tokenizer_kind) else ""
        named = f"a tokenizer{is_at} with fingerprint {inputs.tokenizer.fingerprint}"
        found["data.tokenizer (--tokenizer)"] = named
    found |= {"fullshard": __version__, "torch": torch.__version__}
    return found | {name: os.environ.get(name, "not set") for name in _VARIABLES}


def _text(sources: tuple[Source, ...]) -> str:
    size = sum(each.documents.num_bytes for each in sources)
    weights = [f"{each.name}={each.weight:g} " for each in sources if each.name]
    fingerprints = ", ".join(each.documents.fingerprint for each in sources)
    return f"{''.join(weights)}text of {size:,} bytes with fingerprint {fingerprints}"


def _model(name: str) -> str:
    """Describe a model by its name, or by the contents of its folder."""
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        return name
    files = [
        TextFile(path.name, path, path.stat().st_size)
        for path in sorted(folder.iterdir())
        if path.is_file()
    ]
    return f"a folder of {len(files)} files with fingerprint {fingerprint_of(files)}"


def require_same(ranks: RankGroup, own: Mapping[str, str], *, is_told: bool) -> None:
    """Raise on all ranks where a fact differs; those that are not told do not say it again."""
    if text := _differences(ranks.all_gather(dict(own)), ranks.named):
        raise (DisagreementError if is_told else OtherRankError)(text)


def require_same_as_first(store: Any, own: Mapping[str, str]) -> None:
    """Raise where a fact differs from that of the first replica that has written its own."""
    host = socket.gethostname()
    found = store.compare_set("facts", "", json.dumps([host, own]))
    first_host, first = json.loads(found)
    hosts = [f"this run ({first_host})", f"this replica ({host})"]
    if text := _differences([first, own], lambda which: hosts[which[0]]):
        raise DisagreementError(text)


def _differences(
    everyone: Sequence[Mapping[str, str]], named: Callable[[Sequence[int]], str]
) -> str:
    """What differs, as a message; empty if nothing does."""
    lines = []
    for fact in dict.fromkeys(name for each in everyone for name in each):
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(everyone):
            by_value.setdefault(each.get(fact, "none"), []).append(rank)
        if len(by_value) > 1:
            found = (f"{value} on {named(which)}" for value, which in by_value.items())
            lines.append(f"  {fact}: {'; '.join(found)}")
    text = "\n".join(lines)
    return text and (
        f"train: all ranks must do the same run. Nothing was trained, because these differ:\n"
        f"{text}\nUse the same configuration, files and packages on every host."
    )
