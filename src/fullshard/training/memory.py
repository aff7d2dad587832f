"""Predicts whether a run fits into memory, and which changes would make it fit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.errors import ConfigError
from fullshard.models.architecture import Architecture
from fullshard.plan import (
    MemoryPlan,
    Sharding,
    Work,
    plan_memory,
    readable,
    saved_activation_bytes,
)
from fullshard.training.config import TrainConfig, mesh_shape
from fullshard.training.machine import meminfo
from fullshard.training.sharding import (
    STRATEGIES,
    Dtypes,
    prepare_blocks,
    unit_classes,
)
from fullshard.wrap import ModuleWrapPolicy, choose

CONTROL_GROUP = Path("/sys/fs/cgroup")

# The largest world that is suggested.
_MOST_RANKS = 4096
# In addition to the logits, the loss needs log-probabilities and two gradients, in float32.
_LOSS_BYTES = 3 * 4
# Changes that reduce the memory of a rank, as options and as changes of the configuration.
_OFFLOAD = "--offload"
_CHANGES: Mapping[str, tuple[str, dict[str, Any]]] = {
    _OFFLOAD: ("sharding", {"offload": True}),
    "--activation-checkpointing": ("sharding", {"activation_checkpointing": True}),
    "--batch 1": ("optimizer", {"batch": 1}),
}


def predict_memory(
    config: TrainConfig, architecture: Architecture, num_ranks: int, device: torch.device
) -> MemoryPlan:
    """Return the memory that each rank will need, with the model on the meta device."""
    return plan_memory(
        _units(config, architecture),
        _sharding(config, num_ranks, device),
        _work(config, architecture, device),
    )


def require_fit(
    config: TrainConfig,
    architecture: Architecture,
    num_ranks: int,
    device: torch.device,
    capacity_bytes: int,
) -> MemoryPlan:
    """Return the memory that each rank will need if it has that much.

    Raises:
        ConfigError: If it does not; the message lists changes that would make the run fit.
    """
    plan = predict_memory(config, architecture, num_ranks, device)
    if plan.device_bytes <= capacity_bytes:
        return plan
    offers = [
        f"{words} would need {_amount(other)}"
        for words, other in _remedies(config, architecture, plan, capacity_bytes)
    ]
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    raise ConfigError(
        f"{architecture.name}: training on {ranks} needs {readable(plan.device_bytes)} on each, "
        f"found {readable(capacity_bytes)}; "
        f"{', '.join(offers) or 'choose a smaller model or a shorter --sequence'}."
    )


def capacity_of(device: torch.device, num_local_ranks: int) -> int:
    """Return the memory of a rank's GPU, or its share of the available host memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    available = meminfo().get("MemAvailable")
    if available is None:
        raise ConfigError("/proc/meminfo: a line MemAvailable is expected, found none.")
    return min(available, _allowed_bytes()) // num_local_ranks


# The prediction


def _units(config: TrainConfig, architecture: Architecture) -> list[list[nn.Parameter]]:
    model = architecture.build()
    classes = unit_classes(model, architecture, config.sharding)
    choice = choose(model, ModuleWrapPolicy(classes), needs_forward=True)
    return [[param for _, param in chosen.params] for chosen in choice]


def _sharding(config: TrainConfig, num_ranks: int, device: torch.device) -> Sharding:
    section = config.sharding
    num_replicas, num_shards = mesh_shape(section, num_ranks)
    dtypes = Dtypes.of(section.precision, device)
    return Sharding(
        num_shards=num_shards,
        num_replicas=num_replicas,
        strategy=STRATEGIES[section.strategy][0],
        is_flat=section.api == "wrapper",
        is_offloaded=section.offload,
        device_type=device.type,
        param_dtype=dtypes.param,
        reduce_dtype=dtypes.reduce,
    )


def _work(config: TrainConfig, architecture: Architecture, device: torch.device) -> Work:
    """Measure activations and logits of a micro-batch in a forward on the meta device."""
    model = architecture.build()
    computed = Dtypes.of(config.sharding.precision, device).param
    for param in model.parameters():
        if computed is not None and param.dtype.is_floating_point:
            param.data = param.data.to(computed)
    recomputed = _record_block_calls(model, architecture)
    # Compiled blocks save no more activations than others.
    section = replace(config.sharding, compile=False)
    prepare_blocks(model, architecture, section)
    shape = (config.optimizer.batch, config.model.sequence)
    tokens = torch.zeros(shape, dtype=torch.int64, device="meta")
    logits: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        logits.append(architecture.logits(model, tokens))
        return logits[0]

    activation_bytes = saved_activation_bytes(run)
    if section.activation_checkpointing:
        activation_bytes += max(map(saved_activation_bytes, recomputed), default=0)
    return Work(
        activation_bytes=activation_bytes,
        logits_bytes=logits[0].numel() * (logits[0].element_size() + _LOSS_BYTES),
        accumulates=config.optimizer.accumulate > 1,
    )


def _record_block_calls(model: nn.Module, architecture: Architecture) -> list[Callable[[], Any]]:
    """Record, during the next forward, the call of the first block of each class."""
    seen: set[type] = set()
    calls: list[Callable[[], Any]] = []

    def note(forward: Callable[..., Any], block: nn.Module, args: Any, kwargs: Any) -> None:
        if type(block) not in seen:
            seen.add(type(block))
            calls.append(partial(forward, *args, **kwargs))

    for module in model.modules():
        if isinstance(module, architecture.block_classes()):
            module.register_forward_pre_hook(partial(note, module.forward), with_kwargs=True)
    return calls


# Suggestions


def _remedies(
    config: TrainConfig, architecture: Architecture, plan: MemoryPlan, capacity_bytes: int
) -> Iterator[tuple[str, MemoryPlan]]:
    """Yield the smallest changes that make a run fit, and the memory it would need then."""
    units = _units(config, architecture)
    sharding, num_ranks = plan.sharding, plan.sharding.num_ranks
    device = torch.device(sharding.device_type)

    works = {_work_key(config): plan.work}

    def planned(changed: TrainConfig) -> MemoryPlan:
        key = _work_key(changed)
        if key not in works:
            works[key] = _work(changed, architecture, device)
        return plan_memory(units, _sharding(changed, num_ranks, device), works[key])

    helpful = [words for words in _CHANGES if _is_possible(words, config, device)]
    for size in range(1, len(helpful) + 1):
        plans = {words: planned(_changed(config, words)) for words in combinations(helpful, size)}
        fitting = {words: p for words, p in plans.items() if p.device_bytes <= capacity_bytes}
        yield from ((" ".join(words), other) for words, other in fitting.items())
        if fitting:
            break
    if sharding.is_whole or device.type == "cpu":
        return  # more ranks would need the same memory each, or share the same memory
    by_work = [words for words in helpful if words != _OFFLOAD]
    for words in ((), tuple(by_work)):
        work = planned(_changed(config, words)).work
        for wider in _wider(sharding):
            other = plan_memory(units, wider, work)
            if other.device_bytes <= capacity_bytes:
                also = f" with {' '.join(words)}" if words else ""
                yield f"{wider.num_ranks} ranks{also}", other
                return


def suggestions(
    config: TrainConfig, architecture: Architecture, num_ranks: int, device: torch.device
) -> str:
    """Return the smallest changes that reduce the memory of a run, in words."""
    plan = predict_memory(config, architecture, num_ranks, device)
    found = _remedies(config, architecture, plan, plan.device_bytes - 1)
    offers = "".join(f", with {words} {_amount(other)}" for words, other in found)
    return f"This run was predicted to need {_amount(plan)}{offers}."


def _work_key(config: TrainConfig) -> tuple[bool, int]:
    """Return the settings in `_CHANGES` that affect activations."""
    return config.sharding.activation_checkpointing, config.optimizer.batch


def _wider(sharding: Sharding) -> Iterator[Sharding]:
    """Yield the same sharding over more ranks, by powers of two."""
    while sharding.num_ranks < _MOST_RANKS:
        num_shards = 2 ** sharding.num_shards.bit_length()
        sharding = replace(sharding, num_shards=num_shards)
        yield sharding


def _changed(config: TrainConfig, words: Iterable[str]) -> TrainConfig:
    for each in words:
        section, values = _CHANGES[each]
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    return config


def _is_possible(words: str, config: TrainConfig, device: torch.device) -> bool:
    """Return whether the change changes something that device and strategy allow to change."""
    can_offload = device.type != "cpu" and config.sharding.strategy != "none"
    return _changed(config, [words]) != config and (can_offload or words != _OFFLOAD)


def _amount(plan: MemoryPlan) -> str:
    host = f" and {readable(plan.host_bytes)} of host memory" if plan.host_bytes else ""
    return readable(plan.device_bytes) + host


# Host memory


def _allowed_bytes() -> int:
    """Return what the control group, such as a container's, still allows this process."""
    try:
        limit = (CONTROL_GROUP / "memory.max").read_text().strip()
        if limit == "max":
            return sys.maxsize
        stat = dict(
            line.split() for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines()
        )
        # The page cache of files that are not in use is reclaimed on demand.
        used = int((CONTROL_GROUP / "memory.current").read_text()) - int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return sys.maxsize  # there is no known limit
    return max(0, int(limit) - used)
