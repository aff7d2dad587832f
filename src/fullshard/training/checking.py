"""Whether a configuration can be run at all, before anything is started."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

from fullshard.errors import ConfigError
from fullshard.training.config import TrainConfig
from fullshard.training.keys import KEYS, value_of

_MESH = re.compile(r"([1-9]\d{0,8})x([1-9]\d{0,8})", re.ASCII)
_LAST_PORT = 65535

# What a key must be, in words and as a test; of a list, each of its entries.
_Rule = tuple[str, Callable[[Any], bool]]
_COUNT: _Rule = ("1 or more", lambda value: value >= 1)
_COUNT_OR_NONE: _Rule = ("0 or more", lambda value: value >= 0)
_POSITIVE: _Rule = ("a number above 0", lambda value: isfinite(value) and value > 0)
_AMOUNT: _Rule = ("a number of 0 or more", lambda value: isfinite(value) and value >= 0)
_FRACTION: _Rule = ("0 or more and below 1", lambda value: 0 <= value < 1)
_WORD: _Rule = ("some text", lambda value: bool(value.strip()))

_RULES: dict[tuple[str, str], _Rule] = {
    ("model", "name"): ("a built-in size or a folder", _WORD[1]),
    ("model", "sequence"): ("2 tokens or more", lambda value: value >= 2),
    ("model", "lora_rank"): _COUNT_OR_NONE,
    ("model", "lora_alpha"): _POSITIVE,
    ("model", "lora_targets"): ("the end of a module's name", _WORD[1]),
    ("data", "paths"): ("a file or a folder", _WORD[1]),
    ("data", "text_field"): _WORD,
    ("sharding", "mesh"): (
        "'auto' or replicas x shards, as in 2x4,",
        lambda value: value == "auto" or _MESH.fullmatch(value) is not None,
    ),
    ("sharding", "units"): ("the name of a class", _WORD[1]),
    ("optimizer", "steps"): _COUNT,
    ("optimizer", "batch"): _COUNT,
    ("optimizer", "accumulate"): _COUNT,
    ("optimizer", "lr"): _POSITIVE,
    ("optimizer", "lr_end"): ("0 to 1", lambda value: 0 <= value <= 1),
    ("optimizer", "warmup"): _COUNT_OR_NONE,
    ("optimizer", "weight_decay"): _AMOUNT,
    ("optimizer", "beta1"): _FRACTION,
    ("optimizer", "beta2"): _FRACTION,
    ("optimizer", "clip"): _AMOUNT,
    ("run", "ranks"): _COUNT_OR_NONE,
    ("run", "port"): (f"0 to {_LAST_PORT}", lambda value: 0 <= value <= _LAST_PORT),
    ("run", "max_restarts"): _COUNT_OR_NONE,
    ("run", "seed"): _COUNT_OR_NONE,
    ("run", "save_every"): _COUNT_OR_NONE,
    ("run", "keep"): _COUNT,
    ("run", "trace_step"): _COUNT_OR_NONE,
    ("run", "sample_tokens"): _COUNT_OR_NONE,
}


def require_sane(config: TrainConfig) -> None:
    """Refuse what no machine could run.

    Raises:
        ConfigError: In a sentence that names the key and the option.
    """
    for place, key in KEYS.items():
        value = value_of(config, key)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, str):
                _require_text(key.subject, each)
            words, is_met = _RULES.get(place, ("", lambda value: True))
            if not is_met(each):
                raise ConfigError(f"{key.subject}: {words} is expected, found {each!r}.")
    for problem in _contradictions(config):
        raise ConfigError(problem)


def mesh_of(text: str) -> tuple[int, int] | None:
    """Replicas and shards; None for "auto". Takes what `require_sane` has let through."""
    match = _MESH.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]))


def _require_text(subject: str, text: str) -> None:
    """What can be written to a file and handed to other processes."""
    is_text = "\0" not in text
    try:
        text.encode()
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise ConfigError(f"{subject}: text in UTF-8 without zeros is expected, found {text!r}.")


def _contradictions(config: TrainConfig) -> Iterator[str]:
    """Values that are right each by itself, and impossible together."""
    sharding, optimizer, run = config.sharding, config.optimizer, config.run

    def named(section: str, name: str) -> str:
        return KEYS[section, name].subject

    if sharding.precision == "fp16" and run.device == "cpu":
        yield (
            f"{named('sharding', 'precision')}: fp16 needs a GPU, found "
            f"{named('run', 'device')} 'cpu'; choose bf16 or float32."
        )
    if sharding.strategy == "none" and sharding.offload:
        yield (
            f"{named('sharding', 'offload')}: sharded parameters are expected, found "
            f"{named('sharding', 'strategy')} 'none'; choose full or grad-op, or leave them where "
            f"they are."
        )
    mesh = mesh_of(sharding.mesh)
    if mesh is not None and run.ranks and mesh[0] * mesh[1] % run.ranks:
        yield (
            f"{named('sharding', 'mesh')}: {mesh[0] * mesh[1]} ranks in {sharding.mesh} must be "
            f"those of whole machines, found {run.ranks} on each; change it or "
            f"{named('run', 'ranks')}."
        )
    if run.trace_step > optimizer.steps:
        yield (
            f"{named('run', 'trace_step')}: one of {optimizer.steps} steps is expected, found "
            f"{run.trace_step}."
        )
    if run.resume and not run.out:
        yield (
            f"{named('run', 'resume')}: the folder of a run to go on with is expected, found "
            f"none; name it with {named('run', 'out')}."
        )
